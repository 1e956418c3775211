"""The OpenAI-compatible endpoint, by OpenAI's own client and by plain HTTP, over real services."""

import functools
import http.client
import json
import secrets
import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from fusionkv.gateway.client.client import Client
from fusionkv.gateway.config import GatewayConfig
from fusionkv.protos.runtime.tls import ClientTLS
from tests.gateway import sentence_models
from tests.gateway.conftest import Serve, Start, succeeds
from tests.processes import descendants
from tests.services import Launch, start_cache, start_gateway, start_worker, token_entry, token_flags
from tests.waiting import wait_until

pytestmark = pytest.mark.system
HTTP = "fusionkv-gateway-http"
AT_ONCE = 4
JSON = {"Content-Type": "application/json"}
BOTH = ("--http-listen", "127.0.0.1:0")  # protocols
ASKED = [{"role": "user", "content": "Which colour has the lake?"}]
PAGE = "https://app.example:8443"
# What a browser asks before a page's OpenAI client may call.
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
}


def url(gateway: Any, scheme: str = "http") -> str:
    return f"{scheme}://{gateway.addresses[HTTP][0]}/v1"


def client_of(gateway: Any, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=url(gateway), api_key=key, max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def worker(launch_module: Launch, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """With a cache service; it answers four at once and lets none wait."""
    limits = ("--max-requests", str(AT_ONCE), "--max-queue", "0")
    cache = start_cache(launch_module, tmp_path_factory.mktemp("worker"))
    return start_worker(launch_module, tiny_model, *limits, cache=cache)


@pytest.fixture(scope="module")
def gateway(worker: Any, launch_module: Launch, tmp_path_factory: pytest.TempPathFactory) -> Any:
    flags = (*BOTH, "--chunk-tokens", "64", "--http-allowed-origins", f"{PAGE},chrome-extension://abc")
    started = start_gateway(launch_module, tmp_path_factory.mktemp("gateway"), worker, *flags, services=2)
    with Client(started.address, timeout=60) as client:
        client.ingest("notes", "lake.txt", "The lake is blue and deep. " * 4)
        client.ingest("notes", "hill.txt", "The hill is green and high. " * 4)
    return started


@pytest.fixture
def client(gateway: Any) -> Iterator[openai.OpenAI]:
    with client_of(gateway) as made:
        yield made


def test_an_answer_is_that_of_grpc(gateway: Any, client: openai.OpenAI) -> None:
    own = {"fusionkv": {"recipe": "full_attention"}}
    chat = client.chat.completions.create(model="notes", messages=ASKED, max_tokens=8, extra_body=own)
    with Client(gateway.address, timeout=60) as grpc:
        answer = grpc.ask("notes", ASKED[0]["content"], max_tokens=8, recipe="full_attention")
    (choice,) = chat.choices
    assert (choice.message.content, choice.message.role) == (answer.text, "assistant")
    assert (choice.finish_reason, chat.object, chat.model) == ("length", "chat.completion", "notes")
    usage, prompt = chat.usage, answer.summary.prompt_tokens
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (prompt, 8, prompt + 8)
    own = chat.fusionkv  # type: ignore[attr-defined]  # the client keeps what it does not know
    assert own["summary"]["recipe"] == "full_attention"
    assert own["summary"]["seconds"]["ttft"] > 0
    assert [s["text"] for s in own["sources"]] == [s.text for s in answer.sources]


def test_a_stream_holds_the_same(gateway: Any, client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "notes:full_reuse", "messages": ASKED, "max_completion_tokens": 8}
    whole = client.chat.completions.create(**asked)
    stream = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    assert stream.response.headers["X-Accel-Buffering"] == "no"
    first, *middle, last, usage = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in middle) == whole.choices[0].message.content
    assert first.choices[0].delta.role == "assistant"
    assert len(first.fusionkv["sources"]) > 0
    assert last.choices[0].finish_reason == "length"
    assert last.fusionkv["summary"]["recipe"] == "full_reuse"
    # It was asked before: what was encoded then is read now.
    assert last.fusionkv["summary"]["tokens_reused"] + last.fusionkv["summary"]["tokens_lossless"] > 0
    assert usage.usage == usage.usage.model_copy(update={"completion_tokens": 8})
    assert usage.usage.prompt_tokens_details.cached_tokens > 0
    assert usage.choices == []
    assert all("usage" in chunk.model_fields_set and chunk.usage is None for chunk in (first, *middle, last))
    assert {chunk.id for chunk in (first, *middle, last, usage)} == {first.id}
    before = len(gateway.log)
    without = list(client.chat.completions.create(**asked, stream=True))
    assert not any("usage" in chunk.model_fields_set for chunk in without), "as was not asked for"
    # Read to its end, it was not cancelled.
    wait_until(lambda: "Generate OK after" in gateway.log[before:])


def test_a_stream_over_http_1_0_ends_with_its_connection(gateway: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy that passes its client's `Connection: keep-alive` on waits for the end of the stream otherwise."""
    monkeypatch.setattr(http.client.HTTPConnection, "_http_vsn_str", "HTTP/1.0")
    body = json.dumps({"model": "notes", "messages": ASKED, "max_tokens": 2, "stream": True})
    connection = http.client.HTTPConnection(gateway.addresses[HTTP][0], timeout=30)
    connection.request("POST", "/v1/chat/completions", body, {**JSON, "Connection": "keep-alive"})
    assert connection.getresponse().read().endswith(b"data: [DONE]\n\n")


def test_a_text_completion_is_the_answer_to_its_prompt(client: openai.OpenAI) -> None:
    question = ASKED[0]["content"]
    chat = client.chat.completions.create(model="notes", messages=ASKED, max_tokens=8)
    whole = client.completions.create(model="notes", prompt=question, max_tokens=8, stop=[], echo=False, best_of=1)
    assert (whole.object, whole.choices[0].finish_reason) == ("text_completion", "length")
    assert whole.choices[0].text == chat.choices[0].message.content
    assert whole.usage == chat.usage
    parts = list(client.completions.create(model="notes", prompt=[question], max_tokens=8, stream=True))
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    assert len(parts[0].fusionkv["sources"]) == 1  # two chunks of one text
    for prompt in (["a", "b"], [1, 2], " "):
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model="notes", prompt=prompt)
        assert refused.value.param == "prompt"
    with pytest.raises(openai.BadRequestError, match="suffix is not supported"):
        client.completions.create(model="notes", prompt="a", suffix="b")


def test_passages_of_the_request_take_the_corpus_place(client: openai.OpenAI) -> None:
    documents = [
        {"title": "Lakes", "text": "The lake is blue.", "id": "a-1", "url": "https://lakes"},
        {"content": "The hill is green."},
    ]
    asked: dict[str, Any] = {"model": "fusionkv:full_reuse", "messages": ASKED, "max_tokens": 4}
    chat = client.chat.completions.create(extra_body={"documents": documents}, **asked)
    own = chat.fusionkv  # type: ignore[attr-defined]
    assert (own["summary"]["recipe"], own["summary"]["chunks_retrieved"]) == ("full_reuse", 2)
    first, second = own["sources"]
    assert {"id": "a-1", "title": "Lakes", "metadata": {"url": "https://lakes"}}.items() <= first.items()
    assert (second["text"], second["position"]) == ("The hill is green.", 1)
    # Sources are passages, and the same ones are in the cache.
    again = client.chat.completions.create(extra_body={"passages": own["sources"]}, **asked)
    assert again.choices == chat.choices
    assert again.fusionkv["summary"]["chunks_missed"] == 0  # type: ignore[attr-defined]
    for passages in ([], ["x"]):
        with pytest.raises(openai.BadRequestError, match=r"a corpus and (no_)?passages are given"):
            client.chat.completions.create(model="notes", messages=ASKED, extra_body={"passages": passages})


def test_a_request_without_passages_is_answered_without_any(client: openai.OpenAI) -> None:
    """As clients that know nothing of passages send it."""
    asked: dict[str, Any] = {"messages": ASKED, "max_tokens": 4}
    plain = client.chat.completions.create(model="fusionkv", **asked)
    own = plain.fusionkv  # type: ignore[attr-defined]
    assert (own["sources"], own["summary"]["context_tokens"]) == ([], 0)
    for model, extra in (("fusionkv:full_attention", {}), ("fusionkv:a3@0.5", {"documents": []})):
        same = client.chat.completions.create(model=model, extra_body=extra, **asked)
        assert same.choices == plain.choices
    text = client.completions.create(model="fusionkv", prompt=ASKED[0]["content"], max_tokens=4)
    assert text.choices[0].text == plain.choices[0].message.content


def test_corpora_are_models(client: openai.OpenAI) -> None:
    none, found = client.models.list().data
    assert client.models.retrieve(none.id).id == "fusionkv"
    assert (found.id, found.object, found.owned_by) == ("notes", "model", "fusionkv")
    assert found.fusionkv["documents"] == 2  # type: ignore[attr-defined]
    assert client.models.retrieve("notes") == found
    with pytest.raises(openai.NotFoundError, match="no corpus 'other': list the corpora"):
        client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=ASKED)
    assert missing.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        (b"{", None, "not valid JSON"),
        (b'{"temperature": NaN}', None, "not valid JSON"),
        (b'{"temperature": 1e400}', None, "number of more than 1.7e308"),
        pytest.param(b"[" * 65_537, None, "more than 65536 brackets", id="lists"),
        pytest.param(b'{"":{},' * 40_000, None, "more than 65536 brackets", id="objects"),
        pytest.param(b"[" * 65_536, None, "not valid JSON", id="nested"),
        ({"model": "notes@7"}, None, "ratio is 7"),
        ({"model": None}, "model", "model names no corpus"),
    ],
    ids=str,
)
def test_what_cannot_be_followed_is_refused(gateway: Any, body: Any, param: str | None, said: str) -> None:
    good = {"model": "notes", "messages": ASKED, "max_tokens": 1}
    content = body if isinstance(body, bytes) else json.dumps({**good, **body})
    reply = httpx2.post(f"{url(gateway)}/chat/completions", content=content, headers=JSON, timeout=60)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert said in error.pop("message")
    assert error == {"type": "invalid_request_error", "param": param, "code": None}


@pytest.mark.parametrize(
    ("headers", "status", "said"),
    [
        ({"Content-Type": "text/plain"}, 415, "must have Content-Type: application/json"),
        ({}, 415, "must have Content-Type: application/json"),
        ({**JSON, "Content-Encoding": "gzip"}, 415, "omit Content-Encoding"),
        ({**JSON, "Host": "rebound.example"}, 403, "localhost only"),
        ({**JSON, "Host": "localhost.rebound.example:80"}, 403, "localhost only"),
        ({**JSON, "Origin": "https://page.example"}, 403, "localhost only"),
        ({**JSON, "Host": "LOCALHOST:7", "Origin": "http://[::1]:3000"}, 400, "not valid JSON"),
        ({**JSON, "Content-Encoding": "identity", "Host": "app.localhost"}, 400, "not valid JSON"),
    ],
    ids=str,
)
def test_what_a_page_of_another_site_may_send_is_refused(
    gateway: Any, headers: Mapping[str, str], status: int, said: str
) -> None:
    """Browsers send text/plain without asking, and a name of another site may lead to this machine."""
    for path in ("chat/completions", "completions", "embeddings"):
        reply = httpx2.post(f"{url(gateway)}/{path}", content=b"{", headers=headers, timeout=60)
        assert (reply.status_code, said in reply.json()["error"]["message"]) == (status, True), reply.text
    if status == 403:
        assert httpx2.get(f"{url(gateway)}/models", headers=headers, timeout=60).status_code == 403


def test_other_errors_of_http_are_json_too(gateway: Any) -> None:
    for method, path, code in (("GET", "/nothing", 404), ("GET", "/chat/completions", 405)):
        reply = httpx2.request(method, url(gateway) + path)
        assert (reply.status_code, reply.json()["error"]["type"]) == (code, "invalid_request_error")
        assert code == 405 or "/readyz, /v1/chat/completions, /v1/completions" in reply.json()["error"]["message"]
    long = httpx2.post(f"{url(gateway)}/chat/completions", content=b" " * (5 << 20), headers=JSON)
    assert (long.status_code, long.json()["error"]["message"]) == (413, "the body has more than 4194304 bytes")


def allowed(reply: httpx2.Response) -> str | None:
    return reply.headers.get("Access-Control-Allow-Origin")


def test_pages_of_allowed_origins_may_call(gateway: Any) -> None:
    chat = f"{url(gateway)}/chat/completions"
    for origin in (PAGE, "chrome-extension://abc"):
        asked = httpx2.options(chat, headers={"Origin": origin, **PREFLIGHT})
        assert (asked.status_code, asked.content, allowed(asked)) == (204, b"", origin)
        assert asked.headers["Access-Control-Allow-Methods"] == "POST"
        assert asked.headers["Access-Control-Allow-Headers"] == "Authorization, Content-Type, *"
        assert "Access-Control-Allow-Credentials" not in asked.headers
        assert asked.headers["Vary"] == "Origin"
    found = httpx2.get(f"{url(gateway)}/models", headers={"Origin": PAGE})
    assert (found.status_code, allowed(found)) == (200, PAGE)
    refused = httpx2.post(chat, content=b"{", headers={"Origin": PAGE, "Content-Type": "application/json"})
    assert (refused.status_code, allowed(refused)) == (400, PAGE)
    assert "Retry-After" in refused.headers["Access-Control-Expose-Headers"]
    body = {"model": "notes", "messages": ASKED, "max_tokens": 1, "stream": True}
    streamed = httpx2.post(chat, json=body, headers={"Origin": PAGE}, timeout=60)
    assert (streamed.status_code, allowed(streamed)) == (200, PAGE)
    nothing = httpx2.options(f"{url(gateway)}/nothing", headers={"Origin": PAGE, **PREFLIGHT})
    no_preflight = httpx2.options(f"{url(gateway)}/models", headers={"Origin": PAGE})
    assert (nothing.status_code, no_preflight.status_code) == (404, 405)


@pytest.mark.parametrize("origin", ["http://app.example:8443", f"{PAGE}.evil.example", "null", ""])
def test_pages_of_other_origins_may_not(gateway: Any, origin: str) -> None:
    asked = httpx2.options(f"{url(gateway)}/chat/completions", headers={"Origin": origin, **PREFLIGHT})
    assert (asked.status_code, allowed(asked)) == (405, None)
    found = httpx2.get(f"{url(gateway)}/models", headers={"Origin": origin})
    assert (allowed(found), found.headers["Vary"]) == (None, "Origin")


def test_by_default_no_page_may_call(embedding: Any) -> None:
    asked = httpx2.options(f"{url(embedding)}/embeddings", headers={"Origin": PAGE, **PREFLIGHT})
    assert (asked.status_code, allowed(asked), asked.headers.get("Vary")) == (405, None, None)


@pytest.mark.parametrize("origin", ["app.example", "https://app.example/", "null"])
def test_what_is_no_origin_is_refused_at_the_start(origin: str) -> None:
    with pytest.raises(ValueError, match=r"http_allowed_origins: .* is not an origin"):
        GatewayConfig(http_allowed_origins=(origin,))
    assert GatewayConfig(http_allowed_origins=("*",)).http_allowed_origins == ("*",)


def test_tokens_tenants_and_quotas(worker: Any, serve: Serve, tmp_path: Path) -> None:
    one, other, job = tokens = [secrets.token_urlsafe(32) for _ in range(3)]
    entries = map(token_entry, tokens, ("app", "app", "worker"), ("one", "other", "one"))
    (tmp_path / "quotas").write_text("[tenants.other]\nrequests_per_minute = 1\n")
    files = (*token_flags(tmp_path, *entries), "--quotas", str(tmp_path / "quotas"))
    grpc, gateway = serve(worker, *BOTH, *files, token=one, services=2)
    grpc.ingest("mine", "a.txt", "A text of the first tenant.")
    assert [m.id for m in client_of(gateway, one).models.list()] == ["fusionkv", "mine"]
    assert client_of(gateway, one).chat.completions.create(model="mine", messages=ASKED, max_tokens=1).choices
    with pytest.raises(openai.AuthenticationError, match="the token is not valid"):
        client_of(gateway, "wrong").models.list()
    with pytest.raises(openai.PermissionDeniedError, match="the role worker may not call Generate"):
        client_of(gateway, job).chat.completions.create(model="mine", messages=ASKED)
    assert httpx2.get(url(gateway).removesuffix("v1") + "health").json() == {"status": "ok"}
    # A body that is none: it is not read before the token is.
    refused = httpx2.post(f"{url(gateway)}/chat/completions", content=b"{")
    assert (refused.status_code, refused.headers["WWW-Authenticate"]) == (401, "Bearer")
    with pytest.raises(openai.NotFoundError):
        client_of(gateway, other).chat.completions.create(model="mine", messages=ASKED)
    with pytest.raises(openai.RateLimitError, match="quota of 1 requests") as limited:
        client_of(gateway, other).models.list()
    headers = limited.value.response.headers
    assert 0 < int(headers["Retry-After"]) <= 60
    assert int(headers["Retry-After"]) - 1 <= int(headers["Retry-After-Ms"]) / 1000 <= int(headers["Retry-After"])


def test_an_error_behind_the_first_token_counts_as_one_and_says_no_address(
    start: Start, serve: Serve, tmp_path: Path
) -> None:
    """As over gRPC: it is the last event of a stream whose status was 200."""
    app, operator = (secrets.token_urlsafe(32) for _ in range(2))
    tokens = token_flags(tmp_path, token_entry(app, "app"), token_entry(operator))
    worker = start()
    grpc, gateway = serve(worker, *BOTH, *tokens, token=operator, services=2)
    stream = client_of(gateway, app).chat.completions.create(
        model="fusionkv", messages=ASKED, max_tokens=1500, stream=True
    )
    next(iter(stream))
    worker.kill9()
    with pytest.raises(openai.APIError, match=r"fusion worker \[address\]") as told:
        list(stream)
    assert worker.address not in told.value.message
    assert (told.value.type, told.value.code) == ("server_error", "unavailable")
    assert grpc.stats().requests_failed == 1
    assert "Generate UNAVAILABLE after" in gateway.log


def test_tls_takes_new_certificates(worker: Any, serve: Serve, authority: Any, tmp_path: Path) -> None:
    inner, outer = authority("inner"), authority("outer")
    cert, key = outer.issue("gateway")
    tls = ("--tls-cert", str(cert), "--tls-key", str(key), "--tls-client-ca", str(inner.ca))
    _, gateway = serve(worker, *BOTH, *tls, services=2)

    def trusting(known: Any) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(known.ca))

    shown = trusting(outer)
    shown.load_cert_chain(*inner.issue("app"))
    models = f"{url(gateway, 'https')}/models"
    assert httpx2.get(models, verify=shown, timeout=60).json()["data"][1:] == []
    with pytest.raises(httpx2.TransportError):
        httpx2.get(models, verify=trusting(outer))
    with pytest.raises(httpx2.TransportError):
        httpx2.get(url(gateway) + "/models")
    # A certificate of another authority takes the old one's place, without a restart.
    renewed = authority("renewed")
    made = renewed.issue("again")
    for old, new in zip((cert, key), made, strict=True):
        old.write_bytes(new.read_bytes())
    again, own = trusting(renewed), (tmp_path / "app.pem", tmp_path / "app.key")
    again.load_cert_chain(*own)
    call = functools.partial(httpx2.get, models, verify=again, timeout=60)
    wait_until(lambda: succeeds(call, httpx2.TransportError))
    assert call().status_code == 200
    with Client(gateway.address, tls=ClientTLS(renewed.ca, *own), timeout=20) as grpc:
        assert grpc.list() == []


def test_a_caller_that_leaves_frees_the_worker(worker: Any, serve: Serve) -> None:
    grpc, gateway = serve(worker, *BOTH, services=2)
    grpc.ingest("c", "a.txt", "Some text.")
    long: dict[str, Any] = {"model": "c", "messages": ASKED, "max_tokens": 1500}
    with client_of(gateway) as client:
        streams = [client.chat.completions.create(**long, stream=True) for _ in range(AT_ONCE)]
        for stream in streams:
            next(iter(stream))
        call = functools.partial(client.chat.completions.create, model="c", messages=ASKED, max_tokens=1)
        with pytest.raises(openai.RateLimitError) as busy:
            call()
        assert busy.value.code == "rate_limit_exceeded"
        assert float(busy.value.response.headers["Retry-After"]) > 0
        for stream in streams:
            stream.response.close()
        wait_until(lambda: succeeds(call, openai.RateLimitError))
        # The same without a stream: the caller gives up while it waits for the whole.
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.3).chat.completions.create(**long)
        # A gateway that is told to stop ends what it has begun.
        ending = iter(client.chat.completions.create(**{**long, "max_tokens": 200}, stream=True))
        next(ending)
        gateway.process.terminate()
        assert [chunk.choices[0].finish_reason for chunk in ending][-1] == "length"
    assert gateway.stop() == 0, gateway.log


@pytest.fixture(scope="module")
def embedding(worker: Any, launch_module: Launch, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("embedding")
    directory = sentence_models.write(folder / "tiny")
    flags = (*BOTH, "--embedder", str(directory), "--embedder-threads", "1")
    started = start_gateway(launch_module, folder, worker, *flags, services=2)
    with Client(started.address, timeout=60) as client:
        client.ingest("notes", "lake.txt", "The lake is blue and deep.")
        client.ingest("notes", "hill.txt", "The hill is green and high.")
    return started


def test_embeddings_are_those_of_retrieval(embedding: Any) -> None:
    texts = ["The lake is blue and deep.", "x"]
    with client_of(embedding) as client:
        found = client.embeddings.create(model="tiny", input=texts)  # the client asks for base64
        plain = client.embeddings.create(model="tiny", input=texts[0], encoding_format="float")
        assert [len(row.embedding) for row in found.data] == [sentence_models.WIDTH] * 2
        assert plain.data[0].embedding == pytest.approx(found.data[0].embedding)
        assert sum(x * x for x in plain.data[0].embedding) == pytest.approx(1, abs=1e-5)
        assert (found.model.partition("@")[0], found.usage.prompt_tokens) == ("tiny", 8)
        for change, message in (
            ({"model": "ada"}, "unknown embedding model 'ada'; known: tiny@"),
            ({"input": []}, "input must be a string"),
            ({"input": [[1, 2]]}, "check_embedding_ctx_length=False"),
            ({"dimensions": 3}, "supports only 16 dimensions"),
            ({"encoding_format": "x"}, "encoding_format must be"),
            ({"extra_body": {"more": 1}}, "unknown field 'more'"),
        ):
            with pytest.raises((openai.BadRequestError, openai.NotFoundError), match=message) as refused:
                client.embeddings.create(**{"model": "tiny", "input": "x", **change})
            assert "dimensions" not in change or refused.value.param == "dimensions"
    half = httpx2.post(f"{url(embedding)}/embeddings", content=b'{"input": ["x", "\\ud800"]}', headers=JSON)
    assert (half.status_code, half.json()["error"]["param"]) == (400, "input")
    with Client(embedding.address, timeout=60) as own:
        assert [item.embedder.partition("@")[0] for item in own.list()] == ["tiny"]
        # By meaning all are found, whatever their words.
        assert len(own.retrieve("notes", "zzz")) == 2


def test_without_an_embedder_there_are_no_embeddings(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="this gateway has no embedder"):
        client.embeddings.create(model="tiny", input="x")


def test_the_gateway_itself_loads_no_model(embedding: Any) -> None:
    pid = embedding.process.pid
    assert descendants(pid, "fusionkv.gateway.embed.local")
    assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()
