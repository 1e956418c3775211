"""All that services, a client and a collector see of a run with debug logs: no secret is in it, and no document."""

import base64
import hashlib
import hmac
import re
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from fusionkv.gateway.client.client import Client
from fusionkv.protos.runtime.errors import ServiceError
from fusionkv.protos.runtime.tls import ClientTLS
from tests.commands import fusionkv
from tests.services import Launch, start_cache, start_gateway, start_worker, token_entry, token_flags

pytestmark = [pytest.mark.system, pytest.mark.slow]


class Recorder(grpc.GenericRpcHandler):
    """Keeps the bytes of whatever is exported, unparsed."""

    def __init__(self) -> None:
        self.seen: list[bytes] = []
        self.server = grpc.server(ThreadPoolExecutor(4), handlers=[self])
        self.url = f"http://127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return grpc.unary_unary_rpc_method_handler(lambda request, _: self.seen.append(request) or b"")


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    made = Recorder()
    yield made
    made.server.stop(None)


def test_no_secret_is_in_a_log_a_trace_or_an_error(
    launch: Launch, authority: Any, recorder: Recorder, tiny_model: Path, tmp_path: Path
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
    env = {"FUSIONKV_LOG": "DEBUG", "OTEL_EXPORTER_OTLP_ENDPOINT": recorder.url}
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
    exported = b"".join(recorder.seen)
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
