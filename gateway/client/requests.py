"""Builds the clients' requests from plain Python values."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message as ProtoMessage

from fusionkv.gateway.client import ORDER_NAMES
from fusionkv.gateway.client.results import Passage
from fusionkv.protos.fusion.v1.fusion_pb2 import Sampling
from fusionkv.protos.gateway.v1 import gateway_pb2 as pb
from fusionkv.protos.runtime import errors

_NUMBERS = (pb.ORDER_DOCUMENT, pb.ORDER_RANK, pb.ORDER_RANK_REVERSED, pb.ORDER_ENDS, pb.ORDER_PREFIX)
ORDERS = dict(zip(ORDER_NAMES, _NUMBERS, strict=True))

T = TypeVar("T", bound=ProtoMessage)
# The highest max_document_bytes.
MAX_CONTENT = 60 << 20
# A document with a larger content is sent in such pieces.
_PIECE = 1 << 20

NO_FILTER: Mapping[str, str] = {}
ROLES = {
    "system": pb.ROLE_SYSTEM,
    "developer": pb.ROLE_SYSTEM,
    "user": pb.ROLE_USER,
    "assistant": pb.ROLE_ASSISTANT,
}


class Message(TypedDict):
    """A turn of a conversation.

    Attributes:
        role: system (or developer, its new name at OpenAI), user or assistant.
    """

    role: str
    content: str


class Options(TypedDict, total=False):
    """Options of a question; those left out use the gateway's or the worker's defaults.

    Attributes:
        passages: texts to answer over instead of a corpus; an empty list for an answer without passages.
        messages: a conversation instead of a question; the last one is the question.
        system: the system prompt.
        prompt_template: the user message, with `{passages}` and behind it `{question}`.
        chat_template_kwargs: values for variables of the model's chat template, as `{"enable_thinking": False}`.
        recipe: the recipe that fuses cached chunks.
        ratio: share of context tokens to recompute, 0 to 1.
        top_k: number of chunks to retrieve.
        order: order of the chunks in the prompt: ends (best first, then from worst to second best; the default), rank
            (best first), rank_reversed, document, or prefix (as recent prompts begin, for the recipe prefix_cache).
            Passages count as ranked, best first: rank keeps their order.
        max_tokens: maximum length of the answer.
        temperature: sampling temperature; 0 is greedy.
        top_p: sample from the most likely tokens of this total probability.
        sample_top_k: sample from at most this many tokens.
        seed: seed for reproducible sampling.
        stop: strings that end the answer, or one string.
        query: text to retrieve by instead of the question.
        filter: metadata that a document must have.
        explain: whether to return an Explanation.
    """

    passages: Sequence[str | Passage] | None
    messages: Sequence[Message]
    system: str
    prompt_template: str
    chat_template_kwargs: Mapping[str, Any]
    recipe: str
    ratio: float | None
    top_k: int
    order: str
    max_tokens: int
    temperature: float
    top_p: float
    sample_top_k: int
    seed: int | None
    stop: str | Sequence[str]
    query: str
    filter: Mapping[str, str]
    explain: bool


_REFUSED = (TypeError, ValueError, OverflowError, AttributeError)
_MAPPING = "a mapping of strings to strings"
_WANTED = {
    FieldDescriptor.CPPTYPE_STRING: "a string",
    FieldDescriptor.CPPTYPE_BOOL: "true or false",
    FieldDescriptor.CPPTYPE_FLOAT: "a number",
    FieldDescriptor.CPPTYPE_DOUBLE: "a number",
}
_SAMPLING = ("max_tokens", "temperature", "top_p", "seed", "stop")
_PASSAGE = tuple(Passage.__dataclass_fields__)


def generate(corpus: str = "", question: str = "", **options: Unpack[Options]) -> pb.GenerateRequest:
    """The request of a question over a corpus, over given passages, or without any.

    Raises:
        InvalidArgument: an unknown option, or an invalid value.
    """
    fields = _known(Options, options)
    sampling = {name: fields.pop(name) for name in _SAMPLING if name in fields}
    if isinstance(stop := sampling.get("stop"), str):
        sampling["stop"] = [stop]
    # Apart, so that an error does not name the option top_k, which is another one.
    sampled = of(Sampling, " (sample_top_k)", top_k=fields.pop("sample_top_k", 0))
    given, messages = fields.pop("passages", None), listed("messages", fields.pop("messages", ()))
    passages = () if given is None else listed("passages", given)
    return of(
        pb.GenerateRequest,
        corpus=corpus,
        question=question,
        passages=[_passage(number, passage) for number, passage in enumerate(passages)],
        no_passages=given is not None and not passages,
        messages=[_message(number, message) for number, message in enumerate(messages)],
        order=order_of(fields.pop("order", None)),
        sampling=of(Sampling, **sampling, top_k=sampled.top_k),
        chat_template_kwargs=_as_json("chat_template_kwargs", fields.pop("chat_template_kwargs", {})),
        **fields,
    )


def _as_json(name: str, values: Mapping[str, Any]) -> dict[str, str]:
    try:
        return {key: json.dumps(value) for key, value in values.items()}
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise errors.InvalidArgument(f"invalid option: {name} must be a mapping of strings to JSON values") from error


def listed(name: str, values: Any) -> Sequence[Any]:
    """The values of an option that is a list. Raises InvalidArgument."""
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise errors.InvalidArgument(f"{name} must be a list, not {type(values).__name__}")
    return values


def _passage(number: int, passage: str | Passage) -> pb.Passage:
    if not isinstance(passage, str | Passage):
        kind = type(passage).__name__
        raise errors.InvalidArgument(f"passage {number} must be a string or a Passage, not {kind}")
    # Not asdict, which copies metadata, and can't copy every mapping.
    fields = {"text": passage} if isinstance(passage, str) else {name: getattr(passage, name) for name in _PASSAGE}
    return of(pb.Passage, f" of passage {number}", **fields)


def _message(number: int, message: Message) -> pb.Message:
    if not isinstance(message, Mapping):
        raise errors.InvalidArgument(f"message {number} must be a mapping with role and content")
    if unknown := sorted(map(str, message.keys() - {"role", "content"})):
        raise errors.InvalidArgument(f"message {number} has the unknown key {unknown[0]!r}; known: role, content")
    role = message.get("role", "")
    if role not in [*ROLES]:  # in a dict, looking up a list is a TypeError
        raise errors.InvalidArgument(f"message {number} has the unknown role {role!r}; known: {', '.join(ROLES)}")
    if not isinstance(content := message.get("content"), str):
        raise errors.InvalidArgument(f"content of message {number} must be a string")
    return of(pb.Message, f" of message {number}", role=ROLES[role], text=content)


def order_of(name: str | None) -> pb.Order:
    if name is None:
        return pb.ORDER_UNSPECIFIED
    if name not in ORDER_NAMES:
        raise errors.InvalidArgument(f"unknown order {name!r}; known: {', '.join(ORDERS)}")
    return ORDERS[name]


def retrieve(corpus: str, question: str, top_k: int, order: str, filter: Mapping[str, str]) -> pb.RetrieveRequest:
    """Raises InvalidArgument for an invalid value."""
    number = order_of(order)
    return of(pb.RetrieveRequest, corpus=corpus, question=question, top_k=top_k, order=number, filter=filter)


class IngestOptions(TypedDict, total=False):
    """Options of `ingest`.

    Attributes:
        media_type: empty derives it from the ending of the name.
        metadata: pairs that filters can match.
        source: where the document comes from; by default the path, if `content` is one. A document of the same name
            from another source is replaced only with `replace`, or if `source` is empty.
        replace: replaces a document of the same name from any source.
        first_line: number of the first line, for JSON lines sent in parts.
        prefix: prefix of all documents' names.
    """

    media_type: str
    metadata: Mapping[str, str]
    source: str
    replace: bool
    first_line: int
    prefix: str


def ingest(
    corpus: str, name: str, content: bytes | str | os.PathLike[str], **options: Unpack[IngestOptions]
) -> pb.IngestRequest:
    """The request that stores a document, or JSON lines with one document each.

    Args:
        content: the bytes, the text or the path of a file, which is also the default source.

    Raises:
        InvalidArgument: an unknown option, an invalid value, or a document larger than any gateway accepts.
        OSError: the file can't be read.
    """
    fields = _known(IngestOptions, options)
    if isinstance(content, os.PathLike):
        fields["source"] = fields.get("source") or source_of(content)
        with Path(content).open("rb") as file:
            content = file.read(MAX_CONTENT + 1)
    try:
        raw = content.encode() if isinstance(content, str) else content
    except UnicodeEncodeError as error:
        raise errors.InvalidArgument(f"invalid option: content: {error}") from error
    if isinstance(raw, bytes) and len(raw) > MAX_CONTENT:
        raise errors.InvalidArgument(f"the document has more than {MAX_CONTENT} bytes; gateways accept no more")
    return of(pb.IngestRequest, corpus=corpus, name=name, content=raw, **fields)


def source_of(path: str | os.PathLike[str], inside: str = "") -> str:
    """Where the document of a file comes from, which is the same wherever the files are copied to.

    path: a file, or the folder that has the file `inside` (a path with slashes). A relative path is kept; of an
    absolute one, only the last folder.
    """
    named = Path(os.path.normpath(path))
    if named.is_absolute():
        named = Path(*named.parts[-1 if inside else -2 :])
    parts = [part for part in (*named.parts, *inside.split("/")) if part and part != os.sep]
    # So that the sources of a folder's files all begin with the folder's.
    alone = len(parts) == 1 or named.parts in ((), (os.sep,))
    joined = "/".join([".", *parts] if alone else parts)
    return os.fsencode(joined).decode("utf-8", "backslashreplace")


def is_large(request: pb.IngestRequest) -> bool:
    """Whether a document is sent in pieces, with Upload instead of Ingest."""
    return len(request.content) > _PIECE


def pieces(request: pb.IngestRequest) -> Iterator[pb.UploadRequest]:
    """The messages of Upload that store the document of a request to Ingest. Takes the content out of the request."""
    content = request.content
    request.ClearField("content")
    yield pb.UploadRequest(document=request, size_bytes=len(content))
    for at in range(0, len(content), _PIECE):
        yield pb.UploadRequest(content=content[at : at + _PIECE])


def _known(kind: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are not None. Raises InvalidArgument if one is not of this TypedDict."""
    if unknown := sorted(options.keys() - kind.__annotations__.keys()):
        raise errors.InvalidArgument(f"unknown option {unknown[0]!r}; known: {', '.join(kind.__annotations__)}")
    return {name: value for name, value in options.items() if value is not None}


def of(kind: type[T], where: str = "", /, **values: Any) -> T:
    """A message with these fields. Raises InvalidArgument that names the field whose value protobuf refuses."""
    message = kind()
    for name, value in values.items():
        expected = _expected(kind, name)
        # protobuf takes anything empty for an empty map, which is a filter that lets everything through.
        no_mapping = expected == _MAPPING and value is not None and not isinstance(value, Mapping)
        try:
            if no_mapping or (expected == "a number" and isinstance(value, bool)):
                raise TypeError
            message.MergeFrom(kind(**{name: value}))
        except _REFUSED as error:
            wrong = isinstance(error, TypeError) or expected == _MAPPING
            reason = f" must be {expected}" if wrong else f": {error}"
            raise errors.InvalidArgument(f"invalid option: {name}{where}{reason}") from error
    return message


def _expected(kind: type[ProtoMessage], name: str) -> str:
    field = kind.DESCRIPTOR.fields_by_name[name]
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return _MAPPING
    if field.is_repeated:
        return "a list of strings"
    return _WANTED.get(field.cpp_type, "an integer")
