"""Builds the clients' requests from plain Python values."""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack

from google.protobuf.message import Message

from fusionkv.gateway.client.defaults import ORDER_NAMES
from fusionkv.gateway.client.results import Passage
from fusionkv.protos.gateway.v1 import gateway_pb2 as pb
from fusionkv.protos.runtime import errors

ORDERS = dict(zip(ORDER_NAMES, (pb.ORDER_DOCUMENT, pb.ORDER_RANK, pb.ORDER_RANK_REVERSED), strict=True))

NO_FILTER: Mapping[str, str] = {}
M = TypeVar("M", bound=Message)
ROLES = {"system": pb.ROLE_SYSTEM, "user": pb.ROLE_USER, "assistant": pb.ROLE_ASSISTANT}


class Options(TypedDict, total=False):
    """Options of a question; those left out use the gateway's or the worker's defaults.

    Attributes:
        passages: texts to answer over instead of a corpus.
        messages: a conversation instead of a question, each message with a `role` (system, user or assistant) and
            `content`; the last one is the question.
        system: the system prompt.
        recipe: the recipe that fuses cached chunks.
        ratio: share of context tokens to recompute, 0 to 1.
        top_k: number of chunks to retrieve.
        order: order of the chunks in the prompt: rank (default, best first), document or rank_reversed.
        max_tokens: maximum length of the answer.
        temperature: sampling temperature; 0 is greedy.
        top_p: sample from the most likely tokens of this total probability.
        sample_top_k: sample from at most this many tokens.
        seed: seed for reproducible sampling.
        stop: strings that end the answer.
        query: text to retrieve by instead of the question.
        filter: metadata that a document must have.
        explain: whether to return an Explanation.
    """

    passages: Sequence[str | Passage]
    messages: Sequence[Mapping[str, str]]
    system: str
    recipe: str
    ratio: float | None
    top_k: int
    order: str
    max_tokens: int
    temperature: float
    top_p: float
    sample_top_k: int
    seed: int | None
    stop: Sequence[str]
    query: str
    filter: Mapping[str, str]
    explain: bool


_SAMPLING = ("max_tokens", "temperature", "top_p", "seed", "stop")


def generate(corpus: str = "", question: str = "", **options: Unpack[Options]) -> pb.GenerateRequest:
    """The request of a question over a corpus or over given passages.

    Raises:
        InvalidArgument: an unknown option, or an invalid value.
    """
    if unknown := sorted(options.keys() - Options.__annotations__.keys()):
        raise errors.InvalidArgument(f"unknown option {unknown[0]!r}; known: {', '.join(Options.__annotations__)}")
    with _valid():
        given: dict[str, Any] = dict(options)
        sampling = {name: given.pop(name) for name in _SAMPLING if name in given}
        passages, messages = given.pop("passages", ()), given.pop("messages", ())
        return pb.GenerateRequest(
            corpus=corpus,
            question=question,
            passages=[pb.Passage(**({"text": p} if isinstance(p, str) else asdict(p))) for p in passages],
            messages=[_message(message) for message in messages],
            order=order_of(given.pop("order", "rank")),
            sampling=pb.Sampling(**sampling, top_k=given.pop("sample_top_k", 0)),
            **given,
        )


def _message(message: Mapping[str, str]) -> pb.Message:
    role = message.get("role", "")
    if role not in ROLES:
        raise ValueError(f"unknown role {role!r} of a message; known: {', '.join(ROLES)}")
    return pb.Message(role=ROLES[role], text=message.get("content"))


def order_of(name: str) -> pb.Order:
    if name not in ORDERS:
        raise errors.InvalidArgument(f"unknown order {name!r}; known: {', '.join(ORDERS)}")
    return ORDERS[name]


def of(kind: type[M], **values: Any) -> M:
    """A request with these values. Raises InvalidArgument for an invalid value."""
    with _valid():
        return kind(**values)


def retrieve(
    corpus: str, question: str, top_k: int = 0, order: str = "rank", filter: Mapping[str, str] = NO_FILTER
) -> pb.RetrieveRequest:
    """Raises InvalidArgument for an invalid value."""
    with _valid():
        return pb.RetrieveRequest(corpus=corpus, question=question, top_k=top_k, order=order_of(order), filter=filter)


def ingest(
    corpus: str,
    name: str,
    content: bytes | str | os.PathLike[str],
    *,
    media_type: str = "",
    metadata: Mapping[str, str] = NO_FILTER,
    source: str = "",
    replace: bool = False,
    first_line: int = 0,
    prefix: str = "",
) -> pb.IngestRequest:
    """The request that stores a document, or JSON lines with one document each.

    Args:
        content: the bytes, the text or the path of a file; a path is also the default source.
        media_type: empty derives it from the ending of the name.
        metadata: pairs that filters can match.
        source: where the document comes from. A document of the same name from another source is replaced only with
            `replace`, or if `source` is empty.
        first_line: number of the first line, for JSON lines sent in parts.
        prefix: prefix of all documents' names.

    Raises:
        InvalidArgument: an invalid value.
        OSError: the file can't be read.
    """
    if isinstance(content, os.PathLike):
        source = source or str(Path(content).resolve())
        content = Path(content).read_bytes()
    raw = content.encode() if isinstance(content, str) else content
    with _valid():
        return pb.IngestRequest(
            corpus=corpus,
            name=name,
            media_type=media_type,
            content=raw,
            metadata=metadata,
            source=source,
            replace=replace,
            first_line=first_line,
            prefix=prefix,
        )


@contextlib.contextmanager
def _valid() -> Iterator[None]:
    """Raises InvalidArgument for a value that protobuf refuses."""
    try:
        yield
    except (TypeError, ValueError, OverflowError) as error:
        raise errors.InvalidArgument(f"invalid option: {error}") from error
