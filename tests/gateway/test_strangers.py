"""What the three services print: nothing that strangers send, no secret and no document, and not line after line."""

import base64
import hashlib
import hmac
import itertools
import re
import secrets
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from fusionkv.gateway.client.client import Client
from fusionkv.protos.runtime import rpc
from fusionkv.protos.runtime.errors import ServiceError
from fusionkv.protos.runtime.tls import ClientTLS
from tests.commands import fusionkv
from tests.gateway.strangers import MARK, call, malformed, mark, reset, send
from tests.gateway.test_jwt import part
from tests.services import Launch, start_cache, start_gateway, start_worker, token_entry, token_flags
from tests.system.otlp import Receiver, receiving

pytestmark = [pytest.mark.system, pytest.mark.slow]
HTTP = "fusionkv-gateway-http"
# Of a line: a time, a level, a service, a logger and what is said.
_LINE = re.compile(r"\S+ \S+ ([A-Z]+) \S+ (\S+): (.*)")
_CALL = re.compile(r"(Generate|Ingest|List|Retrieve|Stats|Precompute|Delete|Move|Embed) [A-Z_]+ after ")
_OWN = {name.lower(): f"{name.lower()}.v1.{name}Service" for name in ("Gateway", "Fusion", "KVCache")}


class Running:
    """The three services, each with all of its ports; an app and an operator have tokens that hold the mark."""

    def __init__(self, launch: Launch, folder: Path, model: Path, **more: Any) -> None:
        self.app, self.operator = (f"{mark(role)}.{secrets.token_urlsafe(32)}" for role in ("app", "operator"))
        folder.mkdir(exist_ok=True)
        tokens = token_flags(folder, token_entry(self.app, "app"), token_entry(self.operator))
        (folder / "jwks").write_text('{"keys": [{"kty": "oct", "kid": "x", "k": "AAAA"}]}')
        scraped = ("--metrics-listen", "127.0.0.1:0")
        cache = start_cache(launch, folder, *scraped, **more)
        worker = start_worker(launch, model, *scraped, cache=cache, **more)
        ports = (*scraped, "--http-listen", "127.0.0.1:0", "--chunk-tokens", "64")
        auth = (*tokens, "--auth-jwks", str(folder / "jwks"))
        auth = (*auth, "--auth-issuer", "https://issuer", "--auth-audience", "fusionkv")
        soon = ("--http-head-seconds", "1", "--http-body-seconds", "1", "--http-idle-seconds", "1")
        front = start_gateway(launch, folder, worker, *ports, *auth, *soon, services=2, **more)
        self.services = {"gateway": front, "fusion": worker, "kvcache": cache}
        self.http = front.addresses[HTTP][0]
        found = {name: re.search(r"metrics at http://(\S+)/metrics", s.log) for name, s in self.services.items()}
        self.metrics = {name: match[1] for name, match in found.items() if match}

    def scraped(self, service: str, kind: str) -> float:
        """How much of that kind the service says that it refused."""
        text = httpx2.get(f"http://{self.metrics[service]}/metrics", timeout=20).text
        (value,) = re.findall(rf'^fusionkv_rejected_total{{fusionkv_kind="{kind}"[^}}]*}} (\S+)', text, re.M) or [0]
        return float(value)


@pytest.fixture(scope="module")
def running(launch_module: Launch, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Running:
    return Running(launch_module, tmp_path_factory.mktemp("strangers"), tiny_model)


def used(running: Running) -> None:
    """By callers who may: documents, questions and names that hold the mark, answered and refused."""
    corpus = mark("corpus")
    with Client(running.services["gateway"].address, token=running.app, timeout=60) as client:
        client.ingest(corpus, mark("document.txt"), f"The lake is blue. {mark('text')} " * 20)
        client.ask(corpus, f"Which lake? {mark('question')}", max_tokens=2)
        list(client.stream(corpus, mark("question"), max_tokens=2, explain=True))
        for refused in (
            lambda: client.ask(mark("no-corpus"), mark("question")),
            lambda: client.ask(corpus, mark("question"), recipe=mark("recipe")),
            lambda: client.ask(corpus, mark("question") * 20_000),
            lambda: client.ingest(corpus, mark("bad.pdf"), b"%PDF-1.4 " + mark("pdf").encode() * 9),
            lambda: client.ingest(corpus, mark("bad.docx"), b"PK\3\4" + mark("docx").encode() * 9),
            lambda: client.ingest(corpus, mark("bad.html"), b"\xff\xfe<" + mark("html").encode()),
            lambda: client.ingest("../" + mark("path"), mark("x.txt"), "x"),
        ):
            with pytest.raises(ServiceError):
                refused()
    asked = {"model": corpus, "messages": [{"role": "user", "content": mark("question")}], "max_tokens": 2}
    headers = {"Authorization": f"Bearer {running.app}"}
    wrong: list[dict[str, Any]] = [{"temperature": mark("x")}, {"model": mark("none")}, {"stop": [mark("x")] * 99}]
    for more in ({}, {"stream": True}, *wrong):
        httpx2.post(f"http://{running.http}/v1/chat/completions", json={**asked, **more}, headers=headers, timeout=60)


def tokens() -> Iterator[str]:
    """That are not valid: of no kind, and of an OIDC provider's form."""
    secret = mark("token")
    yield from (secret, f"{secret}.{secret}.{secret}", "." * 20 + secret, secret * 100)
    heads = (
        {"alg": "RS256", "kid": "x"},
        {"alg": "none"},
        {"alg": secret},
        {"alg": "HS256", "kid": secret},
        [secret],
    )
    claims = ({"iss": "https://issuer", "aud": "fusionkv", "exp": 9e99, "sub": secret}, secret, [secret])
    for head, said in itertools.product(heads, claims):
        yield f"{part(head)}.{part(said)}.{secret}"


def strange_calls(address: str, service: str, bearer: str) -> None:
    """gRPC that is none: messages, methods, metadata and tokens."""
    secret = mark("grpc").encode()
    garbage = [b"\xff" + secret, b"\x0a\xff\xff\xff\xff\x7f" + secret, b"\x0a" + bytes([len(secret)]) + secret]
    own = ("List", "Generate", "Ingest", "Put", "Fetch", "Lookup", "Encode", mark("method"))
    methods = (
        *(f"/{_OWN[service]}/{name}" for name in own),
        *(f"/grpc.health.v1.Health/{name}" for name in ("Check", "List", mark("method"))),
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        f"/{mark('service')}/{mark('method')}",
    )
    bearers = ((), *((("authorization", f"Bearer {token}"),) for token in (bearer, mark("bearer"))))
    with rpc.dial_sync(address) as channel:
        for method, sent, given in itertools.product(methods, garbage, bearers):
            call(channel, method, [sent], *given)
        trace = (("traceparent", mark("trace")), ("tracestate", mark("state") + "=="), ("baggage", mark("baggage")))
        call(channel, f"/{_OWN[service]}/Stats", [b""], *trace)
        call(channel, f"/{_OWN[service]}/Stats", [b""], ("x-bin", secret), ("x-any", "x" * 6000 + mark("metadata")))
        call(channel, f"/{_OWN[service]}/Stats", [b""], ("x-any", mark("metadata") * 2000))
        call(channel, f"/{_OWN[service]}/Ingest", [secret * (65 << 20 >> 4)])
        for token in tokens():
            call(channel, f"/{_OWN[service]}/List", [b""], ("authorization", f"Bearer {token}"))
    for before in (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET /", b"\x16\x03\x01"):
        send(address, before + secret + b" HTTP/1.1\r\n\r\n")


def attacked(running: Running) -> None:
    """Everything, by strangers and by callers whose client is broken."""
    http = [(running.http, data) for data in [*malformed(running.app.encode()).values(), *malformed().values()]]
    scraped = [(address, data, 0.2) for address in running.metrics.values() for data in malformed().values()]
    with ThreadPoolExecutor(16) as threads:
        list(threads.map(lambda one: send(*one), http))
        list(threads.map(lambda one: send(*one), scraped))
        called = [(service.address, name, running.operator) for name, service in running.services.items()]
        list(threads.map(lambda one: strange_calls(*one), called))
        ports = [running.http, *running.metrics.values(), *(at for at, _, _ in called)]
        parts = [malformed()["bare LF"], b"GET /" + mark("part").encode(), b"", malformed()["body that ends early"]]
        list(threads.map(lambda one: reset(*one), [(port, part) for port in ports for part in parts]))
    for token in tokens():
        reply = httpx2.get(f"http://{running.http}/v1/models", headers={"Authorization": f"Bearer {token}"})
        assert reply.status_code == 401


@pytest.mark.long
def test_nothing_that_strangers_send_is_printed(running: Running) -> None:
    used(running)
    attacked(running)
    used(running)
    assert running.scraped("gateway", "http_head") >= 50
    for name in running.services:
        assert running.scraped(name, "grpc_message") >= 1
    kinds: Counter[tuple[str, str]] = Counter()
    for name, service in running.services.items():
        assert service.process.poll() is None, service.log[-5000:]
        assert service.stop() == 0
        for line in service.log.splitlines():
            assert MARK not in line, line[:400]
            assert "Traceback" not in line, service.log[:5000]
            told = _LINE.fullmatch(line)
            if told is None:
                assert re.fullmatch(r"\S+ (serving on .*|stopped)", line) or line.startswith("["), line[:400]
            elif not _CALL.match(told[3]):
                # Without its numbers: what differs by them is one kind.
                kinds[name, re.sub(r"\d+", "#", told[3])[:60]] += 1
    # Dozens of each kind, and a line a minute.
    assert max(kinds.values()) <= 3, kinds


@pytest.fixture
def received() -> Iterator[Receiver]:
    with receiving() as made:
        yield made


@pytest.mark.long
def test_no_secret_is_in_a_log_a_trace_or_an_error(
    launch: Launch, authority: Any, received: Receiver, tiny_model: Path, tmp_path: Path
) -> None:
    ours = authority("ours")
    token, wrong = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
    salt = secrets.token_bytes(32)
    document, question = "Report Velnora. The code of Bervek is 535.", "Which code has Bervek?"
    digest = hashlib.sha256(token.encode()).hexdigest()
    tokens = token_flags(tmp_path, token_entry(token))
    (tmp_path / "token").write_text(token)
    (tmp_path / "tenant.key").write_bytes(salt)
    signing = secrets.token_bytes(32)
    (tmp_path / "signing.keys").write_text(signing.hex())
    env = {"FUSIONKV_LOG": "DEBUG", "OTEL_EXPORTER_OTLP_ENDPOINT": received.endpoint}
    env |= {"OTEL_METRIC_EXPORT_INTERVAL": "500", "OTEL_BSP_SCHEDULE_DELAY": "200"}
    identities = {name: ours.issue(name) for name in ("cache", "worker", "gateway", "caller")}

    def secured(name: str) -> tuple[str, ...]:
        cert, key = identities[name]
        flags = ("--tls-cert", str(cert), "--tls-key", str(key), "--tls-client-ca", str(ours.ca))
        return flags if name == "cache" else (*flags, "--tls-ca", str(ours.ca))

    cache = start_cache(launch, tmp_path, *secured("cache"), env=env)
    signed = ("--signing-keys", str(tmp_path / "signing.keys"))
    worker = start_worker(launch, tiny_model, *signed, *secured("worker"), cache=cache, env=env)
    auth = (*tokens, "--tenant-key", str(tmp_path / "tenant.key"))
    gateway = start_gateway(launch, tmp_path, worker, *auth, *secured("gateway"), env=env)

    printed, caller = [], identities["caller"]
    tls = ClientTLS(ours.ca, *caller)
    with Client(gateway.address, token=tmp_path / "token", tls=tls) as client:
        client.ingest("c", "a.txt", document)
        answer = client.ask("c", question, max_tokens=3)
        assert not answer.summary.degraded, answer.summary.degraded_reason
        list(client.precompute("c", "fusionrag"))
        for request in (
            lambda: client.ask("none", "?"),
            lambda: client.ask("c", "?", recipe="nonsense"),
            lambda: client.ingest("c", "a.pdf", b"%PDF-" + bytes(range(100))),
        ):
            with pytest.raises(ServiceError) as raised:
                request()
            printed.append(str(raised.value))
    with Client(gateway.address, token=wrong, tls=tls) as client, pytest.raises(ServiceError) as raised:
        client.list()
    printed.append(str(raised.value))
    flags = ("--tls-ca", ours.ca, "--tls-cert", caller[0], "--tls-key", caller[1])

    def cli(command: str, *more: object, **env: Any) -> str:
        """Everything that a command prints."""
        done = fusionkv(command, "--gateway", gateway.address, *flags, *more, status=None, **env)
        printed.append(done.stdout + done.stderr)
        return printed[-1]

    for given in ({"FUSIONKV_TOKEN": token}, {"FUSIONKV_TOKEN_FILE": str(tmp_path / "token")}):
        assert re.search(r"c +1 +1 ", cli("list", env=given)), printed[-1]
    for wrong_one in (wrong, "two words"):
        cli("list", "--token", wrong_one)
    said = cli("stats", "--token-file", tmp_path / "token", "--cache", cache.address)
    assert '"error"' not in said
    assert re.search(r"puts +\d", said)

    for service in (gateway, worker, cache):
        assert service.stop() == 0
        assert " DEBUG " in service.log
        printed.append(service.log)
    exported = b"".join(received.raw)
    assert b"gateway.retrieve" in exported
    assert b"fusionkv.gateway.refused" in exported
    everything = "\n".join(printed).encode() + exported
    salted = hmac.new(salt, b"acme", hashlib.sha256).hexdigest()
    hidden = [token, wrong, digest, salted, document, question]
    for raw in (salt, signing):
        hidden += [raw, raw.hex(), base64.b64encode(raw).decode()]
    for _, key in identities.values():
        hidden += [line for line in key.read_text().splitlines() if "-----" not in line]
    for secret in hidden:
        raw = secret if isinstance(secret, bytes) else secret.encode()
        assert raw not in everything, everything[max(0, everything.find(raw) - 200) :][:400]
