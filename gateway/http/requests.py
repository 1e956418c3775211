"""Reads OpenAI's requests for completions and embeddings; unsupported fields are refused."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fusionkv.gateway.client import requests
from fusionkv.gateway.client.results import Passage
from fusionkv.gateway.ingest.document import strings_of
from fusionkv.gateway.plan import MAX_MESSAGES, MAX_NOTES, Conversation
from fusionkv.protos.contract.template import template_values
from fusionkv.protos.gateway.v1 import gateway_pb2 as pb
from fusionkv.protos.runtime.errors import InvalidArgument

# Fields of `fusionkv` in the body, passed to `fusionkv.gateway.client.requests.generate`.
_RETRIEVAL = ("corpus", "query", "top_k", "order", "filter")
EXTENSION = frozenset([*_RETRIEVAL, "recipe", "ratio", "sample_top_k", "system", "prompt_template"])
# Model name of requests that bring their own passages or none; `passages` and `documents` are synonyms.
NO_CORPUS = "fusionkv"
_PASSAGES = ("passages", "documents")
_SAMPLING = ("max_tokens", "max_completion_tokens", "temperature", "top_p", "seed", "stop")
_TEMPLATE = "chat_template_kwargs"
_SUPPORTED = frozenset(["model", "stream", "stream_options", "fusionkv", _TEMPLATE, *_PASSAGES, *_SAMPLING])
# Accepted and ignored.
_CACHE_HINTS = ("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention")
_IGNORED = frozenset(["user", "metadata", "store", "service_tier", "safety_identifier", *_CACHE_HINTS])
# Accepted with these values, which have no effect; only vLLM can follow others (docs/openai.md lists them).
_PASSED: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True, False),
    "reasoning_effort": ("none",),
    # Of vLLM.
    "structured_outputs": (),
    "min_p": (0,),
    "min_tokens": (0,),
    "repetition_penalty": (1,),
    "stop_token_ids": ([],),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
}
# Of these, the fields whose values have an effect beside others, such as `tools`.
_BESIDE = frozenset(["tool_choice", "parallel_tool_calls", "spaces_between_special_tokens"])
# Accepted only with these values, which have no effect.
_ONLY: Mapping[str, tuple[Any, ...]] = {
    **_PASSED,
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("none",),
    "verbosity": ("medium",),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    **dict.fromkeys(("audio", "moderation", "prediction", "web_search_options"), ()),
    # Of vLLM.
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
# Field of `fusionkv` that names a model or a LoRA adapter that vLLM serves.
_VLLM_MODEL = "vllm_model"
# As `_ONLY`, in `stream_options`.
_STREAM_ONLY: Mapping[str, tuple[Any, ...]] = {"include_obfuscation": (False,), "continuous_usage_stats": (False,)}
# Of a message: names and an earlier answer's reasoning are not part of the prompt. Then as `_ONLY`.
_OF_MESSAGE = frozenset(["role", "content", "name", "reasoning", "reasoning_content"])
_MESSAGE_ONLY: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("tool_calls", "annotations"), ([],)),
    **dict.fromkeys(("audio", "function_call", "refusal", "tool_call_id"), ()),
}
# Of a part of a message's content: marks for a prompt cache are ignored. Then as `_ONLY`.
_OF_PART = frozenset(["type", "text", "cache_control", "prompt_cache_breakpoint"])
_PART_ONLY: Mapping[str, tuple[Any, ...]] = {"annotations": ([],)}
# Texts of one request for embeddings, and characters of each.
_MAX_TEXTS, _MAX_CHARACTERS = 2048, 1 << 15
_FORMATS = ("float", "base64")
# Clients make the ids with a tokenizer of OpenAI's, not with the embedder's: they would mean other text, or none.
_NO_IDS = (
    "input must be text: token ids mean text only to the tokenizer that made them, which the request does not name. "
    "LangChain's OpenAIEmbeddings sends text with check_embedding_ctx_length=False"
)
_OF_EMBEDDINGS = frozenset(["input", "model", "encoding_format", "dimensions"])
_KINDS: Mapping[Any, str] = {
    str: "a string",
    bool: "true or false",
    int: "an integer",
    (int, float): "a number",
    list: "a list",
    dict: "an object",
}


class BadRequest(InvalidArgument):
    """An invalid or unsupported request; `param` is the field at fault."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A request to the gateway, and the form of its reply.

    Attributes:
        model: the model name in the request, unchanged.
        usage: whether a stream ends with a usage chunk.
        text: whether this is a text completion of one prompt, not a chat.
        passed: fields that only vLLM can follow, with the messages; empty if the gateway answers.
    """

    request: pb.GenerateRequest
    model: str
    stream: bool = False
    usage: bool = False
    text: bool = False
    passed: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """A request for embeddings; `dimensions` is 0 if the request does not set it."""

    texts: tuple[str, ...]
    model: str
    base64: bool
    dimensions: int


def completion(
    body: Any, text: bool = False, max_passages: int = sys.maxsize, vllm: bool = False
) -> CompletionRequest:
    """Reads the JSON body of a chat completion, or of a text completion.

    Checks lengths of lists first: it blocks, and a body has room for 500,000 passages.

    vllm: whether there is a vLLM, to which chats are passed that only it can answer.
    Raises InvalidArgument if the body is invalid, or requests something unsupported.
    """
    asked = "prompt" if text else "messages"
    fields = _fields(body, _IGNORED)
    extension = {name: value for name, value in _typed(fields, "fusionkv", dict, {}).items() if value is not None}
    to_vllm = _passed(fields, extension) if vllm and not text else {}
    # In this order, `tools` comes before `tool_choice`, which clients add to it.
    for name in sorted(fields.keys() - _SUPPORTED - {asked}, reverse=True):
        _check_effect(fields, name, _ONLY)
    model = _typed(fields, "model", str, "")
    if unknown := extension.keys() - EXTENSION:
        raise BadRequest(f"unknown field {min(unknown)[:80]!r}; known: {', '.join(sorted(EXTENSION))}", "fusionkv")
    stream = _typed(fields, "stream", bool, False)
    usage = _usage(fields, stream)
    conversation = {"question": _prompt(fields)} if text else {"messages": _messages(fields, bool(to_vllm))}
    _typed(extension, "order", str, "")
    values = {name: value for name, value in _typed(fields, _TEMPLATE, dict, {}).items() if value is not None}
    options = {**_of_model(model), "passages": _passages(fields, max_passages), **conversation, **extension}
    if not options["corpus"] and options["passages"] is None:
        if model.partition("@")[0].partition(":")[0] != NO_CORPUS:
            raise BadRequest(f"model names no corpus: name one, or {NO_CORPUS} for passages of your own", "model")
        options["passages"] = []
    request = requests.generate(**options, chat_template_kwargs=values, **_sampling(fields))
    for checked, check in ((asked, Conversation.of), (_TEMPLATE, lambda r: template_values(r.chat_template_kwargs))):
        try:
            check(request)
        except InvalidArgument as error:
            raise BadRequest(str(error), checked) from error
    return CompletionRequest(request, model, stream, usage, text, to_vllm)


def embeddings(body: Any) -> EmbeddingRequest:
    """Reads the JSON body of a request. Raises InvalidArgument if it is invalid, or requests what is unsupported."""
    fields = _fields(body, frozenset(["user"]))
    if unknown := fields.keys() - _OF_EMBEDDINGS:
        raise BadRequest(f"unknown field {min(unknown)[:80]!r}", min(unknown)[:80])
    texts = fields.get("input")
    texts = [texts] if isinstance(texts, str) else texts
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        raise BadRequest(
            _NO_IDS if _has_ids(texts) else "input must be a string or a list of strings with text", "input"
        )
    if len(texts) > _MAX_TEXTS or any(len(text) > _MAX_CHARACTERS for text in texts):
        raise BadRequest(f"input takes at most {_MAX_TEXTS} texts of at most {_MAX_CHARACTERS} characters", "input")
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        raise BadRequest("input contains half of a surrogate pair", "input") from None
    model, dimensions = _typed(fields, "model", str, ""), _typed(fields, "dimensions", int, 0)
    if "dimensions" in fields and dimensions < 1:
        raise BadRequest(f"dimensions is {dimensions}: it must be at least 1", "dimensions")
    if (form := fields.get("encoding_format", "float")) not in _FORMATS:
        raise BadRequest(f"encoding_format must be one of {', '.join(_FORMATS)}", "encoding_format")
    return EmbeddingRequest(tuple(texts), model, form == "base64", dimensions)


def _has_ids(texts: Any) -> bool:
    """Whether some input is token ids: a list of integers, or of lists of them."""
    return isinstance(texts, list) and any(type(text) in (int, list) for text in texts)


def _fields(body: Any, ignored: frozenset[str]) -> dict[str, Any]:
    """The fields of a body that are neither null nor ignored."""
    if not isinstance(body, dict):
        raise InvalidArgument("the body is not a JSON object")
    return {name: value for name, value in body.items() if value is not None and name not in ignored}


def _check_fields(
    fields: Mapping[str, Any], read: frozenset[str], only: Mapping[str, tuple[Any, ...]], where: str
) -> None:
    """Raises BadRequest unless each field is null, read, or has a value of `only`."""
    for name in sorted(name for name, value in fields.items() if value is not None and name not in read):
        _check_effect(fields, name, only, f"{where}.")


def _check_effect(fields: Mapping[str, Any], name: str, only: Mapping[str, tuple[Any, ...]], where: str = "") -> None:
    """Raises BadRequest unless `only` has the field with its value, which has no effect."""
    if name not in only:
        raise BadRequest(f"unknown field {where + name[:80]!r}", where + name[:80])
    if not _among(fields[name], only[name]):
        raise BadRequest(f"{where}{name} is not supported: omit it", where + name)


def _among(value: Any, accepted: tuple[Any, ...]) -> bool:
    # In Python False equals 0, but `logprobs: 0` of a text completion requests log probabilities.
    return any(value == each and _is_bool(value) == _is_bool(each) for each in accepted)


def _passed(fields: dict[str, Any], extension: dict[str, Any]) -> dict[str, Any]:
    """Moves what only vLLM can follow out of a chat's fields; with all messages, or empty if there is nothing."""
    names = [name for name in _PASSED.keys() & fields.keys() if not _among(fields[name], _PASSED[name])]
    to_vllm = {name: fields.pop(name) for name in names}
    if _VLLM_MODEL in extension:
        to_vllm["model"] = _typed(extension, _VLLM_MODEL, str, "")
        del extension[_VLLM_MODEL]
    messages = _list(fields, "messages", MAX_MESSAGES)
    if not to_vllm and not any(map(_is_about_tools, messages)):
        return {}
    if extension.get("prompt_template") or extension.get("system"):
        raise BadRequest(
            "system and prompt_template can't be combined with fields that only vLLM follows", "fusionkv"
        )
    return {**{name: fields[name] for name in _BESIDE & fields.keys()}, **to_vllm, "messages": messages}


def _is_about_tools(message: Any) -> bool:
    """Whether a message is an assistant's that calls tools, or the result of one."""
    role = message.get("role") if isinstance(message, dict) else None
    return role == "tool" or (role == "assistant" and bool(message.get("tool_calls")))


def _usage(fields: Mapping[str, Any], stream: bool) -> bool:
    field = "stream_options"
    options = {name: value for name, value in _typed(fields, field, dict, {}).items() if value is not None}
    if options and not stream:
        raise BadRequest(f"{field} needs stream: set stream to true, or omit {field}", field)
    _check_fields(options, frozenset(["include_usage"]), _STREAM_ONLY, field)
    return _typed(options, "include_usage", bool, False)


def _of_model(model: str) -> dict[str, Any]:
    """Corpus, recipe and ratio of a model name CORPUS, CORPUS:RECIPE, CORPUS@RATIO or CORPUS:RECIPE@RATIO.

    The corpus NO_CORPUS means none.
    """
    target, _, ratio = model.partition("@")
    corpus, _, recipe = target.partition(":")
    options: dict[str, Any] = {"corpus": "" if corpus == NO_CORPUS else corpus, "recipe": recipe}
    if ratio:
        try:
            options["ratio"] = float(ratio)
        except ValueError:
            message = f"invalid ratio {ratio[:80]!r} in the model: expected a name such as CORPUS:RECIPE@0.15"
            raise BadRequest(message, "model") from None
    return options


def _sampling(fields: Mapping[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    stop = fields.get("stop", [])
    options["stop"] = [stop] if isinstance(stop, str) else _typed(fields, "stop", list, [])
    for name in ("max_completion_tokens", "max_tokens"):
        if (limit := _typed(fields, name, int, 1)) < 1:
            raise BadRequest(f"{name} is {limit}: it must be at least 1", name)
        if name in fields:
            options.setdefault("max_tokens", limit)
    for name in ("temperature", "top_p"):
        if name in fields:
            options[name] = _typed(fields, name, (int, float), 0.0)
    if options.get("top_p") == 0:
        # In gateway.proto, 0 disables top_p; in OpenAI's API it keeps only the most likely token.
        raise BadRequest("top_p is 0: it must be greater than 0; for greedy decoding use temperature 0", "top_p")
    if fields.get("seed", -1) != -1:  # Many clients send -1 for "no seed".
        options["seed"] = _typed(fields, "seed", int, 0)
    return options


def _passages(fields: Mapping[str, Any], limit: int) -> list[Passage] | None:
    """The passages of a body; None if it has no list of them."""
    names = [name for name in _PASSAGES if name in fields]
    if not names:
        return None
    name, *more = names
    if more:
        raise BadRequest("passages and documents are the same field: use only one of them", "documents")
    return [_passage(passage, f"{name}[{i}]") for i, passage in enumerate(_list(fields, name, limit))]


def _passage(passage: Any, where: str) -> Passage:
    """A passage from a text or an object with Passage's fields. `content` means `text`; other keys are metadata."""
    if isinstance(passage, str):
        return Passage(text=passage)
    if not isinstance(passage, dict):
        raise BadRequest(f"{where} must be a string or an object", where)
    nested: dict[str, Any] = {} if passage.get("metadata") is None else _typed(passage, "metadata", dict, {})
    known_names = Passage.__dataclass_fields__.keys()
    # Before anything is copied: a body has room for 500,000 fields.
    if (count := len(passage) + len(nested) - sum(name in passage for name in (*known_names, "content"))) > MAX_NOTES:
        raise BadRequest(
            f"{where} has {count} fields of metadata, of which {MAX_NOTES} characters are allowed in all", where
        )
    values = {name: value for name, value in passage.items() if value is not None}
    values.setdefault("text", values.pop("content", ""))
    if not isinstance(values["text"], str):
        raise BadRequest(f"{where} has a text that is not a string", where)
    if type(values.get("id")) is int:
        values["id"] = str(values["id"])
    known = {name: values.pop(name) for name in known_names & values}
    return Passage(**{**known, "metadata": strings_of(nested | values)})


def _prompt(fields: Mapping[str, Any]) -> str:
    prompt = fields.get("prompt", "")
    prompt = prompt[0] if isinstance(prompt, list) and len(prompt) == 1 else prompt
    if not isinstance(prompt, str):
        raise BadRequest("prompt must be one string: token ids and several prompts are not supported", "prompt")
    return prompt


def _messages(fields: Mapping[str, Any], tools: bool) -> list[dict[str, str]]:
    """The messages that FusionKV reads; tools: whether there may be others, which are about tools."""
    given = enumerate(_list(fields, "messages", MAX_MESSAGES))
    messages = [_message(m, f"messages[{i}]") for i, m in given if not (tools and _is_about_tools(m))]
    if not messages:
        raise BadRequest("messages is empty", "messages")
    return messages


def _message(message: Any, where: str) -> dict[str, str]:
    """A message in the client's format."""
    if not isinstance(message, dict):
        raise BadRequest(f"{where} must be an object", where)
    _check_fields(message, _OF_MESSAGE, _MESSAGE_ONLY, where)
    role = message.get("role")
    if role not in [*requests.ROLES]:
        known = ", ".join(requests.ROLES)
        raise BadRequest(f"{where} has the unknown role {str(role)[:80]!r}; known: {known}", where)
    content = message.get("content")
    if isinstance(content, str):
        return {"role": role, "content": content}
    parts = _list(message, "content", MAX_MESSAGES) if isinstance(content, list) else [None]
    texts = [p.get("text") if isinstance(p, dict) and p.get("type") == "text" else None for p in parts]
    if not all(isinstance(text, str) for text in texts):
        raise BadRequest(f"{where} has content that is not text", where)
    for i, part in enumerate(parts):
        _check_fields(part, _OF_PART, _PART_ONLY, f"{where}.content[{i}]")
    return {"role": role, "content": "".join(map(str, texts))}


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _list(fields: Mapping[str, Any], name: str, limit: int) -> list[Any]:
    items: list[Any] = _typed(fields, name, list, [])
    if len(items) > limit:
        raise BadRequest(f"{name} has {len(items)} items; the maximum is {limit}", name)
    return items


def _typed(fields: Mapping[str, Any], name: str, kind: Any, default: Any) -> Any:
    """A field of a body. Raises BadRequest if it has another type."""
    value = fields.get(name, default)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise BadRequest(f"{name} has the wrong type: it must be {_KINDS[kind]}", name)
    return value
