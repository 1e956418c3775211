"""From an OpenAI chat completion request to one of the gateway's own, and what is refused on the way."""

import json
from typing import Any

import numpy as np
import pytest

from fusionkv.gateway.http import replies, requests
from fusionkv.protos.gateway.v1 import gateway_pb2 as pb
from fusionkv.protos.runtime import errors
from fusionkv.protos.runtime.errors import InvalidArgument
from tests.stopwatch import Stopwatch

ASKED = [{"role": "user", "content": "Which colour?"}]
GOOD = {"model": "notes", "messages": ASKED, "max_tokens": 1}


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ([], None, "not a JSON object"),
        ({"mesages": []}, "mesages", "unknown field"),
        ({"messages": []}, "messages", "empty"),
        ({"messages": [5]}, "messages[0]", "must be an object"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]", "unknown role 'tool'"),
        ({"messages": [*ASKED, {"role": "assistant", "content": "x"}]}, "messages", "last message"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0]", "not text"),
        ({"messages": "hello"}, "messages", "wrong type: it must be a list"),
        ({"model": "notes@much"}, "model", "invalid ratio 'much'"),
        ({"model": "fusionkv"}, "model", "name a corpus, or send passages"),
        ({"model": "fusionkv:a3", "documents": []}, "model", "name a corpus, or send passages"),
        ({"model": ""}, "model", "name a corpus, or send passages"),
        ({"stream": "yes"}, "stream", "wrong type"),
        ({"max_tokens": 0}, "max_tokens", "must be at least 1"),
        ({"max_tokens": 1.5}, "max_tokens", "wrong type"),
        ({"max_tokens": 10**30}, None, "invalid option"),
        ({"temperature": 10**400}, None, "invalid option"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"seed": -1}, None, "invalid option: seed: "),
        ({"n": 2}, "n", "not supported"),
        ({"tools": [{"type": "function"}]}, "tools", "not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        ({"fusionkv": {"rato": 1}}, "fusionkv", "unknown field 'rato'"),
        ({"messages": [{"role": "assistant", "content": "x"}, *ASKED]}, "messages", "first turn must be the user's"),
        ({"messages": [{"role": "user", "content": " "}]}, "messages", "last message is empty"),
        ({"documents": "text"}, "documents", "wrong type"),
        ({"documents": [["text"]]}, "documents[0]", "must be a string or an object"),
        ({"passages": ["a", {"text": 5}]}, "passages[1]", "text that is not a string"),
        ({"passages": [{"text": "a", "metadata": "x"}]}, "metadata", "wrong type"),
        ({"passages": [], "documents": []}, "documents", "the same field"),
        ({"fusionkv": {"order": []}}, "order", "wrong type"),
        ({"fusionkv": {"order": "best"}}, None, "unknown order"),
        ({"fusionkv": {"filter": "year"}}, None, "filter must be a mapping of strings to strings"),
        ({"fusionkv": {"recipe": "\ud800"}}, None, "invalid option"),
    ],
    ids=str,
)
def test_what_cannot_be_followed_is_refused(body: Any, param: str | None, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said) as refused:
        requests.completion({**GOOD, **body} if isinstance(body, dict) else body)
    assert replies.status(refused.value) == 400
    made = replies.error_body(refused.value)["error"]
    assert (made["type"], made["param"], made["code"]) == ("invalid_request_error", param, None)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"passages": ["x"] * 200_000}, "passages has 200000 items; the maximum is 128"),
        ({"passages": [{"text": "x", **{str(i): i for i in range(200_000)}}]}, "200000 fields of metadata"),
        ({"messages": ASKED * 100_000}, "messages has 100000 items; the maximum is 1024"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 100_000}]},
            "content has 100000",
        ),
    ],
    ids=["passages", "fields", "messages", "parts"],
)
def test_long_lists_are_refused_before_they_are_read(body: dict[str, Any], said: str) -> None:
    watch = Stopwatch()
    with pytest.raises(InvalidArgument, match=said):
        requests.completion({**GOOD, **body}, False, 128)
    assert watch.seconds() < 0.2


def test_everything_that_can_be_asked() -> None:
    body = {
        "model": "notes:prophetkv@0.3", "messages": ASKED, "max_completion_tokens": 5, "max_tokens": 7,
        "temperature": 1, "top_p": 0.5, "seed": 3, "stop": "end", "stream": True,
        "stream_options": {"include_usage": True}, "user": "ignored",
        "fusionkv": {"top_k": 4, "order": "rank", "sample_top_k": 9, "query": "colour", "recipe": None},
    }  # fmt: skip
    wanted = pb.GenerateRequest(
        corpus="notes", messages=[pb.Message(role=pb.ROLE_USER, text="Which colour?")], recipe="prophetkv",
        ratio=0.3, top_k=4, order=pb.ORDER_RANK, query="colour",
        sampling=pb.Sampling(max_tokens=5, temperature=1, top_p=0.5, top_k=9, seed=3, stop=["end"]),
    )  # fmt: skip
    assert requests.completion(body) == requests.Chat(wanted, "notes:prophetkv@0.3", stream=True, usage=True)


@pytest.mark.parametrize(
    ("model", "own", "more"),
    [
        ("notes:prophetkv@0.25", {}, {"recipe": "prophetkv", "ratio": 0.25}),
        ("notes@1", {"recipe": "a3", "ratio": 0, "top_k": 1}, {}),
        ("", {"corpus": "notes", "recipe": "a3", "order": "rank"}, {"order": pb.ORDER_RANK}),
    ],
)
def test_the_model_and_our_own_fields(model: str, own: dict[str, Any], more: dict[str, Any]) -> None:
    nothing = {"n": 1, "user": "u", "metadata": {}, "tools": [], "presence_penalty": 0.0, "seed": None}
    made = requests.completion({**GOOD, **nothing, "model": model, "fusionkv": own}).request
    wanted = {"corpus": "notes", **own, **more}
    said = [pb.Message(role=pb.ROLE_USER, text="Which colour?")]
    assert made == pb.GenerateRequest(messages=said, sampling=pb.Sampling(max_tokens=1), **wanted)


def test_passages_and_roles() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Who?"}]},
        {"role": "assistant", "content": "He."},
        *ASKED,
    ]
    texts = ("Be brief.", "Who?", "He.", "Which colour?")
    documents = [
        "Text.",
        {"id": 7, "content": "Lake.", "title": "Lakes", "page": 3, "tags": ["a"], "metadata": {"url": "u"}},
    ]
    made = requests.completion(
        {"model": "fusionkv@0.5", "messages": messages, "documents": documents, "seed": 0}
    ).request
    roles = (pb.ROLE_SYSTEM, pb.ROLE_USER, pb.ROLE_ASSISTANT, pb.ROLE_USER)
    assert made == pb.GenerateRequest(
        passages=[
            pb.Passage(text="Text."),
            pb.Passage(id="7", text="Lake.", title="Lakes", metadata={"url": "u", "page": "3", "tags": '["a"]'}),
        ],
        messages=[pb.Message(role=role, text=text) for role, text in zip(roles, texts, strict=True)],
        ratio=0.5,
        sampling=pb.Sampling(seed=0),
    )
    assert requests.completion({**GOOD, "passages": documents}).request.passages == made.passages


def test_embeddings_are_written_as_json_where_they_are_converted() -> None:
    request = requests.embeddings({"input": ["a", "b"]})
    body = json.loads(replies.embeddings(request, np.array([[1, 0], [0, 0.5]], np.float32), "m", 2))
    assert [row["embedding"] for row in body["data"]] == [[1, 0], [0, 0.5]]
    assert body["usage"] == {"prompt_tokens": 2, "total_tokens": 2}


def test_every_error_has_its_status() -> None:
    """A new kind of error would otherwise be told as the gateway's own fault."""
    codes = {kind: replies.status(kind("said")) for kind in errors.ServiceError.__subclasses__()}
    assert codes.pop(errors.DataLoss) == 500
    assert {replies.status(RuntimeError("secret")), *codes.values()} == {400, 401, 403, 404, 429, 500, 503, 504}
    assert "secret" not in str(replies.error_body(RuntimeError("secret")))
    busy = errors.ResourceExhausted("busy", retry_after=0.2)
    assert replies.headers(busy) == {"Retry-After": "1", "Retry-After-Ms": "200"}
