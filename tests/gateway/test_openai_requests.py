"""From an OpenAI chat completion request to one of the gateway's own, and what is refused on the way."""

import json
from typing import Any

import numpy as np
import pytest
from openai.types import completion_create_params as text_params
from openai.types import embedding_create_params as embedding_params
from openai.types.chat import chat_completion_content_part_text_param as part_params
from openai.types.chat import chat_completion_stream_options_param as stream_params
from openai.types.chat import completion_create_params as chat_params

from fusionkv.gateway.http import replies, requests
from fusionkv.gateway.http.server import parse
from fusionkv.protos.fusion.v1.fusion_pb2 import Sampling
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
        ({"model": "fusionkvnotes", "fusionkv": {"corpus": ""}}, "model", "name one, or fusionkv for passages"),
        ({"model": "", "passages": None}, "model", "model names no corpus: name one, or fusionkv for passages"),
        ({"stream": "yes"}, "stream", "wrong type"),
        ({"max_tokens": 0}, "max_tokens", "must be at least 1"),
        ({"max_tokens": 1.5}, "max_tokens", "wrong type"),
        ({"max_tokens": 10**30}, None, "invalid option"),
        ({"temperature": 10**400}, None, "invalid option"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"seed": -2}, None, "invalid option: seed: "),
        ({"n": 2}, "n", "not supported"),
        ({"tools": [{"type": "function"}]}, "tools", "not supported"),
        ({"tool_choice": "auto", "tools": [{"type": "function"}]}, "tools", "not supported"),
        ({"function_call": "auto", "functions": [{"name": "f"}]}, "functions", "not supported"),
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
        sampling=Sampling(max_tokens=5, temperature=1, top_p=0.5, top_k=9, seed=3, stop=["end"]),
    )  # fmt: skip
    assert requests.completion(body) == requests.CompletionRequest(
        wanted, "notes:prophetkv@0.3", stream=True, usage=True
    )


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
    assert made == pb.GenerateRequest(messages=said, sampling=Sampling(max_tokens=1), **wanted)


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
        {"id": 7, "content": "Lake.", "title": "Lakes", "page": 3, "tags": ["ä"], "metadata": {"url": "u"}},
    ]
    made = requests.completion(
        {"model": "fusionkv@0.5", "messages": messages, "documents": documents, "seed": 0}
    ).request
    roles = (pb.ROLE_SYSTEM, pb.ROLE_USER, pb.ROLE_ASSISTANT, pb.ROLE_USER)
    assert made == pb.GenerateRequest(
        passages=[
            pb.Passage(text="Text."),
            pb.Passage(id="7", text="Lake.", title="Lakes", metadata={"url": "u", "page": "3", "tags": '["ä"]'}),
        ],
        messages=[pb.Message(role=role, text=text) for role, text in zip(roles, texts, strict=True)],
        ratio=0.5,
        sampling=Sampling(seed=0),
    )
    assert requests.completion({**GOOD, "passages": documents}).request.passages == made.passages
    # null is no value, wherever it stands: as of the metadata of JSON lines.
    absent = [{"text": "Text.", "metadata": None, "page": None}, {"text": "a", "metadata": {"page": None}}]
    bare = [pb.Passage(text="Text."), pb.Passage(text="a")]
    assert list(requests.completion({**GOOD, "passages": absent}).request.passages) == bare


@pytest.mark.parametrize(
    "more", [{}, {"passages": []}, {"documents": []}, {"passages": None}, {"model": "", "passages": []}], ids=str
)
def test_no_passages_are_plain_generation(more: dict[str, Any]) -> None:
    said = [pb.Message(role=pb.ROLE_USER, text="Which colour?")]
    made = requests.completion({**GOOD, "model": "fusionkv", **more}).request
    assert made == pb.GenerateRequest(messages=said, sampling=Sampling(max_tokens=1), no_passages=True)
    own = requests.completion({**GOOD, "model": "fusionkv", "fusionkv": {"corpus": "notes"}}).request
    assert (own.corpus, own.no_passages) == ("notes", False)


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


HONOURED = {
    "max_completion_tokens", "max_tokens", "messages", "model", "prompt", "seed", "stop", "stream_options",
    "temperature", "top_p",
}  # fmt: skip
IGNORED = {
    "metadata": {}, "prompt_cache_key": "x", "prompt_cache_options": {}, "prompt_cache_retention": "24h",
    "safety_identifier": "x", "service_tier": "auto", "store": True, "user": "x",
}  # fmt: skip
# Values without effect, and values with one.
WITHOUT_EFFECT: dict[str, tuple[list[Any], list[Any]]] = {
    "best_of": ([1], [2, True]),
    "echo": ([False], [True]),
    "frequency_penalty": ([0, 0.0], [0.5, False]),
    "function_call": (["none"], ["auto", {"name": "f"}]),
    "functions": ([[]], [[{"name": "f"}]]),
    "logit_bias": ([{}], [{"5": 1}]),
    "logprobs": ([False], [True, 0, 5]),
    "modalities": ([["text"]], [["text", "audio"]]),
    "n": ([1], [2, True]),
    "parallel_tool_calls": ([True, False], [0, "yes"]),
    "presence_penalty": ([0], [-1]),
    "reasoning_effort": (["none"], ["high"]),
    "response_format": ([{"type": "text"}], [{"type": "json_object"}]),
    "suffix": ([""], ["x"]),
    "tool_choice": (["none"], ["auto", "required"]),
    "tools": ([[]], [[{"type": "function"}]]),
    "top_logprobs": ([0], [3, False]),
    "verbosity": (["medium"], ["low"]),
}
OF_VLLM: dict[str, tuple[list[Any], list[Any]]] = {
    "add_generation_prompt": ([True], [False, 1]),
    "continue_final_message": ([False], [True]),
    "ignore_eos": ([False], [True]),
    "include_stop_str_in_output": ([False], [True]),
    "length_penalty": ([1, 1.0], [2, True]),
    "min_p": ([0, 0.0], [0.1]),
    "min_tokens": ([0], [5]),
    "repetition_penalty": ([1, 1.0], [1.2]),
    "skip_special_tokens": ([True], [False]),
    "spaces_between_special_tokens": ([True, False], [1]),
    "stop_token_ids": ([[]], [[5]]),
    "use_beam_search": ([False], [True]),
}
# Of a part of a message's content: they mark where a prompt cache ends.
MARKS = {"cache_control": {"type": "ephemeral"}, "prompt_cache_breakpoint": {"mode": "explicit"}}
REFUSED = {"audio", "moderation", "prediction", "web_search_options"}


def test_every_field_of_the_openai_client_is_accounted_for() -> None:
    chat = set(chat_params.CompletionCreateParamsBase.__annotations__)
    text = set(text_params.CompletionCreateParamsBase.__annotations__)
    assert chat | text == HONOURED | IGNORED.keys() | WITHOUT_EFFECT.keys() | REFUSED
    embedding = set(embedding_params.EmbeddingCreateParams.__annotations__)
    assert embedding == OF_EMBEDDINGS.keys()
    streamed = set(stream_params.ChatCompletionStreamOptionsParam.__annotations__)
    assert streamed == {"include_usage", "include_obfuscation"}


@pytest.mark.parametrize("field", sorted(IGNORED.keys() | WITHOUT_EFFECT.keys() | OF_VLLM.keys() | REFUSED))
def test_a_field_is_accepted_where_it_has_no_effect_and_else_refused_by_name(field: str) -> None:
    plain = requests.completion(GOOD)
    with_values = WITHOUT_EFFECT | OF_VLLM
    accepted, refused = with_values.get(field, ([IGNORED[field]] if field in IGNORED else [], []))
    for value in [None, *accepted]:
        assert requests.completion({**GOOD, field: value}) == plain
    for value in [*refused, *([{}] if field in REFUSED else [])]:
        with pytest.raises(requests.BadRequest, match=f"{field} is not supported") as error:
            requests.completion({**GOOD, field: value})
        assert error.value.param == field


TOOLS = [{"type": "function", "function": {"name": "look_up"}}]
CALLED = [
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f"}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "5"},
]


@pytest.mark.parametrize(
    "more",
    [
        {"tools": TOOLS, "tool_choice": "auto"}, {"tools": TOOLS, "tool_choice": "none"},
        {"tools": TOOLS, "parallel_tool_calls": False},
        {"skip_special_tokens": False, "spaces_between_special_tokens": False},
        {"response_format": {"type": "json_object"}}, {"n": 2},
        {"logprobs": True, "top_logprobs": 3}, {"structured_outputs": {"choice": ["a", "b"]}},
        {"presence_penalty": 0.5, "min_p": 0.1},
    ],
)  # fmt: skip
def test_what_only_vllm_can_follow_is_passed_on_with_the_messages(more: dict[str, Any]) -> None:
    made = requests.completion({**GOOD, **more}, vllm=True)
    assert made.passed == {**more, "messages": ASKED}
    assert made.request == requests.completion(GOOD).request
    with pytest.raises(requests.BadRequest, match=r"is not supported|unknown field"):
        requests.completion({**GOOD, **more})


def test_messages_about_tools_are_not_part_of_the_question() -> None:
    made = requests.completion({**GOOD, "messages": [*ASKED, *CALLED]}, vllm=True)
    assert made.passed == {"messages": [*ASKED, *CALLED]}
    assert made.request == requests.completion(GOOD).request


def test_another_model_of_vllm_is_named_in_our_field() -> None:
    made = requests.completion({**GOOD, "fusionkv": {"vllm_model": "lora", "top_k": 3}}, vllm=True)
    assert made.passed == {"model": "lora", "messages": ASKED}
    assert made.request.top_k == 3
    with pytest.raises(requests.BadRequest, match="unknown field 'vllm_model'"):
        requests.completion({**GOOD, "fusionkv": {"vllm_model": "lora"}})


def test_nothing_is_passed_on_that_the_gateway_can_answer() -> None:
    nothing = {"n": 1, "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "logprobs": False}
    assert requests.completion({**GOOD, **nothing}, vllm=True) == requests.completion(GOOD)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"functions": [{"name": "f"}]}, "functions is not supported"),
        ({"n": 2, "cache_salt": "x"}, "unknown field 'cache_salt'"),
        ({"n": 2, "kv_transfer_params": {}}, "unknown field 'kv_transfer_params'"),
        ({"n": 2, "fusionkv": {"prompt_template": "{passages}{question}"}}, "can't be combined"),
        ({"n": 2, "messages": CALLED}, "messages is empty"),
        ({"n": 2, "messages": "x"}, "wrong type"),
        ({"messages": [{"tool_calls": [1]}, *ASKED]}, r"messages\[0\].* is not supported"),
        ({"n": 2, "messages": [{"role": "user", "content": 5, "tool_calls": [1]}, *ASKED]}, "is not supported"),
        ({"n": 2, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "not text"),
        ({"messages": [*ASKED, *CALLED, {"role": "user", "content": [{"type": "x"}]}]}, r"messages\[3\] .* not text"),
        ({"fusionkv": {"vllm_model": 5}}, "wrong type"),
    ],
)
def test_what_vllm_is_not_told(body: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        requests.completion({**GOOD, **body}, vllm=True)


@pytest.mark.parametrize(
    ("stream", "options", "usage"),
    [
        (False, {}, False),
        (False, {"include_usage": None}, False),
        (True, {}, False),
        (True, {"include_usage": False, "include_obfuscation": None}, False),
        (True, {"include_usage": True, "include_obfuscation": False, "continuous_usage_stats": False}, True),
    ],
)
def test_options_of_a_stream(stream: bool, options: dict[str, Any], usage: bool) -> None:
    made = requests.completion({**GOOD, "stream": stream, "stream_options": options})
    assert (made.stream, made.usage) == (stream, usage)


@pytest.mark.parametrize(
    ("change", "param", "said"),
    [
        ({"stream_options": {"include_usage": True}}, "stream_options", "set stream to true"),
        ({"stream": False, "stream_options": {"include_usage": False}}, "stream_options", "set stream to true"),
        (
            {"stream": True, "stream_options": {"include_usages": True}},
            "stream_options.include_usages",
            "unknown field",
        ),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "include_usage", "true or false"),
        ({"stream": True, "stream_options": True}, "stream_options", "an object"),
        *(
            ({"stream": True, "stream_options": {name: True}}, f"stream_options.{name}", "not supported")
            for name in ("include_obfuscation", "continuous_usage_stats")
        ),
    ],
    ids=str,
)
def test_options_of_a_stream_that_are_refused(change: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(requests.BadRequest, match=said) as error:
        requests.completion({**GOOD, **change})
    assert error.value.param == param


# Values that are accepted, and values that are refused with what is said.
OF_EMBEDDINGS: dict[str, tuple[list[Any], list[tuple[Any, str]]]] = {
    "input": (
        ["x", ["x", "y"], ["x"] * 2048],
        [
            *((ids, "check_embedding_ctx_length=False") for ids in ([1, 2], [[1, 2]], [[1], [2]], ["x", [1]], [[]])),
            *((none, "must be a string or a list of strings") for none in ("", " ", [], [""], {}, 5, True, None)),
            (["x"] * 2049, "at most 2048 texts"),
            ("x" * 32769, "at most 2048 texts of at most 32768 characters"),
        ],
    ),
    "model": (["tiny", None], [(5, "wrong type")]),
    "encoding_format": (["float", "base64", None], [("int8", "must be one of"), (5, "must be one of")]),
    "dimensions": ([16, None], [(0, "at least 1"), (-1, "at least 1"), (1.5, "wrong type"), (True, "wrong type")]),
    "user": (["x", None], []),
}


@pytest.mark.parametrize("field", sorted(OF_EMBEDDINGS))
def test_values_of_embeddings(field: str) -> None:
    accepted, refused = OF_EMBEDDINGS[field]
    for value in accepted:
        requests.embeddings({"input": "x", field: value})
    for value, said in refused:
        with pytest.raises(requests.BadRequest, match=said) as error:
            requests.embeddings({"input": "x", field: value})
        assert error.value.param == field


def test_what_an_earlier_answer_holds_is_accepted_where_it_has_no_effect() -> None:
    """As clients send a reply's message back."""
    before = {"role": "assistant", "content": "Blue."}
    empty = dict.fromkeys(("refusal", "audio", "function_call", "tool_calls", "annotations"))
    plain = requests.completion({**GOOD, "messages": [*ASKED, before, *ASKED]})
    for more in (
        empty,
        {"tool_calls": [], "annotations": []},
        {"name": "x", "reasoning_content": "x", "reasoning": "x"},
    ):
        assert requests.completion({**GOOD, "messages": [*ASKED, {**before, **more}, *ASKED]}) == plain
    for name, value, said in (
        ("tool_calls", [{"id": "1", "type": "function"}], "not supported"),
        ("function_call", {"name": "f"}, "not supported"),
        ("refusal", "No.", "not supported"),
        ("audio", {"id": "1"}, "not supported"),
        ("tool_call_id", "1", "not supported"),
        ("contents", "x", "unknown field"),
    ):
        with pytest.raises(requests.BadRequest, match=said) as error:
            requests.completion({**GOOD, "messages": [*ASKED, {**before, name: value}, *ASKED]})
        assert error.value.param == f"messages[1].{name}"


def test_keys_of_a_part_are_accepted_where_they_have_no_effect_and_else_refused_by_name() -> None:
    part = {"type": "text", "text": "Which colour?"}
    assert part.keys() <= set(part_params.ChatCompletionContentPartTextParam.__annotations__) <= {*part, *MARKS}
    plain = requests.completion(GOOD)
    for more in (MARKS, {"annotations": []}, dict.fromkeys(("citations", "annotations", *MARKS))):
        asked = [{"role": "user", "content": [{**part, **more}]}]
        assert requests.completion({**GOOD, "messages": asked}) == plain
    for name, value, said in (
        ("annotations", [{"type": "url_citation"}], "not supported"),
        ("image_url", {"url": "x"}, "unknown field"),
        ("extra", 1, "unknown field"),
    ):
        asked = [{"role": "user", "content": [part, {**part, name: value}]}]
        with pytest.raises(requests.BadRequest, match=said) as error:
            requests.completion({**GOOD, "messages": asked})
        assert error.value.param == f"messages[0].content[1].{name}"


def test_a_seed_of_minus_one_is_none() -> None:
    assert requests.completion({**GOOD, "seed": -1}) == requests.completion(GOOD)


def test_a_byte_order_mark_before_the_body_is_no_error() -> None:
    assert parse(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}
