"""OpenAI's requests for completions to requests of the gateway's own; what can't be followed is refused."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fusionkv.gateway.client import requests
from fusionkv.gateway.client.results import Passage
from fusionkv.gateway.conversation import Conversation
from fusionkv.protos.gateway.v1 import gateway_pb2 as pb
from fusionkv.protos.runtime.errors import InvalidArgument

# Of `fusionkv` in the body: as `fusionkv.gateway.client.requests.generate` takes them.
OWN = frozenset(["corpus", "recipe", "ratio", "top_k", "order", "sample_top_k", "query", "system", "filter"])
# The model of requests that bring their passages, under either name.
NO_CORPUS = "fusionkv"
_PASSAGES = ("passages", "documents")
_SAMPLING = ("max_tokens", "max_completion_tokens", "temperature", "top_p", "seed", "stop")
_TAKEN = frozenset(["model", "stream", "stream_options", "fusionkv", *_PASSAGES, *_SAMPLING])
# They change nothing about an answer.
_WITHOUT_EFFECT = frozenset(["user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"])
# Taken with these values alone, which ask for nothing.
_ONLY: Mapping[str, Any] = {
    "n": 1,
    "logprobs": False,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {},
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "tools": [],
    "best_of": 1,
    "echo": False,
    "suffix": "",
}
_SYSTEM = ("system", "developer")


class BadRequest(InvalidArgument):
    """A request that can't be followed; `param` names the field."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class Chat:
    """What is asked of the gateway, and how the caller wants the reply.

    model: as the caller wrote it. text: a text completion, of one prompt, in place of a chat's.
    """

    request: pb.GenerateRequest
    model: str
    stream: bool = False
    usage: bool = False
    text: bool = False


def read(body: Any, text: bool = False) -> Chat:
    """The request that a JSON body describes: for a chat completion, or a text completion.

    Raises:
        InvalidArgument: it is no such request, or asks for what can't be given.
    """
    asked = "prompt" if text else "messages"
    if not isinstance(body, dict):
        raise InvalidArgument("the body is no JSON object")
    given = {name: value for name, value in body.items() if value is not None and name not in _WITHOUT_EFFECT}
    for name in given.keys() - _TAKEN - {asked}:
        if name not in _ONLY:
            raise BadRequest(f"unknown field {name[:80]!r}", name[:80])
        if given[name] != _ONLY[name]:
            raise BadRequest(f"{name} is not supported: leave it out", name)
    model = _typed(given, "model", str, "")
    own = {name: value for name, value in _typed(given, "fusionkv", dict, {}).items() if value is not None}
    if unknown := own.keys() - OWN:
        raise BadRequest(f"unknown field {min(unknown)[:80]!r}; known: {', '.join(sorted(OWN))}", "fusionkv")
    stream = _typed(given, "stream", bool, False)
    usage = _typed(_typed(given, "stream_options", dict, {}), "include_usage", bool, False)
    said = {"question": _prompt(given)} if text else {"messages": _messages(given)}
    _typed(own, "order", str, "")
    options = {**_of_model(model), "passages": _passages(given), **said, **own}
    made = requests.generate(**options, **_sampling(given))
    try:
        Conversation.of(made)
    except InvalidArgument as error:
        raise BadRequest(str(error), asked) from error
    return Chat(made, model, stream, usage, text)


def _of_model(model: str) -> dict[str, Any]:
    """Corpus, recipe and ratio of a name CORPUS, CORPUS:RECIPE, CORPUS@RATIO or CORPUS:RECIPE@RATIO.

    With NO_CORPUS for the corpus there is none.
    """
    named, _, ratio = model.partition("@")
    corpus, _, recipe = named.partition(":")
    found: dict[str, Any] = {"corpus": "" if corpus == NO_CORPUS else corpus, "recipe": recipe}
    if ratio:
        try:
            found["ratio"] = float(ratio)
        except ValueError:
            raise BadRequest(f"bad ratio {ratio[:80]!r} in the model: CORPUS:RECIPE@0.15, say", "model") from None
    return found


def _sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    stop = given.get("stop", [])
    made["stop"] = [stop] if isinstance(stop, str) else _typed(given, "stop", list, [])
    for name in ("max_completion_tokens", "max_tokens"):
        if (most := _typed(given, name, int, 1)) < 1:
            raise BadRequest(f"{name} is {most}: an answer has one token at least", name)
        if name in given:
            made.setdefault("max_tokens", most)
    for name in ("temperature", "top_p"):
        if name in given:
            made[name] = _typed(given, name, (int, float), 0.0)
    if made.get("top_p") == 0:
        # The protocol's 0 keeps everything; OpenAI's keeps next to nothing.
        raise BadRequest("top_p is 0: it must be above 0; for the likeliest token take temperature 0", "top_p")
    if "seed" in given:
        made["seed"] = _typed(given, "seed", int, 0)
    return made


def _passages(given: Mapping[str, Any]) -> list[Passage]:
    name, *more = [name for name in _PASSAGES if name in given] or ["passages"]
    if more:
        raise BadRequest("passages and documents are two names of one field: give one of them", "documents")
    return [_passage(passage, f"{name}[{i}]") for i, passage in enumerate(_typed(given, name, list, []))]


def _passage(given: Any, where: str) -> Passage:
    """A passage: its text, or an object with Passage's fields; `content` is text as well, the rest is metadata."""
    if isinstance(given, str):
        return Passage(text=given)
    if not isinstance(given, dict):
        raise BadRequest(f"{where} is neither a text nor an object", where)
    known = {name: value for name, value in given.items() if value is not None}
    known.setdefault("text", known.pop("content", ""))
    if not isinstance(known["text"], str):
        raise BadRequest(f"{where} has a text that is none", where)
    fields = {name: known.pop(name) for name in Passage.__dataclass_fields__.keys() & known}
    notes = _typed(fields, "metadata", dict, {}) | known
    told = {name: value if isinstance(value, str) else json.dumps(value) for name, value in notes.items()}
    return Passage(**{**fields, "metadata": told})


def _prompt(given: Mapping[str, Any]) -> str:
    prompt = given.get("prompt", "")
    prompt = prompt[0] if isinstance(prompt, list) and len(prompt) == 1 else prompt
    if not isinstance(prompt, str):
        raise BadRequest("prompt must be one text: token ids and several prompts are not taken", "prompt")
    return prompt


def _messages(given: Mapping[str, Any]) -> list[dict[str, str]]:
    messages = [_message(m, f"messages[{i}]") for i, m in enumerate(_typed(given, "messages", list, []))]
    if not messages:
        raise BadRequest("messages is empty", "messages")
    return messages


def _message(message: Any, where: str) -> dict[str, str]:
    """A message as the client takes it."""
    if not isinstance(message, dict):
        raise BadRequest(f"{where} is no object", where)
    role = message.get("role")
    if role not in (*_SYSTEM, "user", "assistant"):
        raise BadRequest(f"{where} has the role {str(role)[:80]!r}: system, developer, user or assistant", where)
    role = "system" if role in _SYSTEM else role
    content = message.get("content")
    if isinstance(content, str):
        return {"role": role, "content": content}
    parts = content if isinstance(content, list) else [None]
    texts = [p.get("text") if isinstance(p, dict) and p.get("type") == "text" else None for p in parts]
    if not all(isinstance(text, str) for text in texts):
        raise BadRequest(f"{where} has content that is no text", where)
    return {"role": role, "content": "".join(map(str, texts))}


def _typed(given: Mapping[str, Any], name: str, kind: Any, default: Any) -> Any:
    value = given.get(name, default)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise BadRequest(f"{name} is of the wrong type", name)
    return value
