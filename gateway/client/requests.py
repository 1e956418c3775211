"""What the clients send, from plain values."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from fusionkv.gateway.client.results import Passage
from fusionkv.protos.gateway.v1 import gateway_pb2 as pb
from fusionkv.protos.runtime import errors

ORDERS = {"document": pb.ORDER_DOCUMENT, "rank": pb.ORDER_RANK, "rank_reversed": pb.ORDER_RANK_REVERSED}

NO_FILTER: Mapping[str, str] = {}
ROLES = {"system": pb.ROLE_SYSTEM, "user": pb.ROLE_USER, "assistant": pb.ROLE_ASSISTANT}


def generate(
    corpus: str = "",
    question: str = "",
    *,
    passages: Sequence[str | Passage] = (),
    messages: Sequence[Mapping[str, str]] = (),
    system: str = "",
    recipe: str = "",
    ratio: float | None = None,
    top_k: int = 0,
    order: str = "document",
    max_tokens: int = 0,
    temperature: float = 0.0,
    top_p: float = 0.0,
    sample_top_k: int = 0,
    seed: int | None = None,
    stop: Sequence[str] = (),
    query: str = "",
    filter: Mapping[str, str] = NO_FILTER,
    explain: bool = False,
) -> pb.GenerateRequest:
    """A question over a corpus, or over passages of one's own; what is left out takes the default of the gateway or
    the worker.

    `messages` are a conversation in place of the question: each has a `role` (system, user or assistant) and
    `content`, and the last one is the question. `system` is the system prompt.
    `ratio` is the share of context tokens to recompute (0..1); `top_k` the number of chunks, `sample_top_k` the
    number of tokens that sampling keeps; `temperature` 0 is greedy; the answer ends before the first of `stop`;
    chunks are searched for by `query` where that is not the question, in documents that have all the metadata of
    `filter`; `explain` asks for an Explanation.

    Raises:
        InvalidArgument: a value that can't be sent.
    """
    try:
        sampling = pb.Sampling(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=sample_top_k,
            seed=seed,
            stop=stop,
        )
        return pb.GenerateRequest(
            corpus=corpus,
            question=question,
            passages=[pb.Passage(**({"text": p} if isinstance(p, str) else asdict(p))) for p in passages],
            messages=[_message(message) for message in messages],
            system=system,
            recipe=recipe,
            ratio=ratio,
            top_k=top_k,
            order=order_of(order),
            sampling=sampling,
            query=query,
            filter=filter,
            explain=explain,
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise errors.InvalidArgument(f"bad option: {error}") from error


def _message(message: Mapping[str, str]) -> pb.Message:
    role = message.get("role", "")
    if role not in ROLES:
        raise ValueError(f"a message has the role {role!r}; known: {', '.join(ROLES)}")
    return pb.Message(role=ROLES[role], text=message.get("content"))


def order_of(name: str) -> pb.Order:
    if name not in ORDERS:
        raise errors.InvalidArgument(f"unknown order {name!r}; known: {', '.join(ORDERS)}")
    return ORDERS[name]


def retrieve(
    corpus: str, question: str, top_k: int = 0, order: str = "rank", filter: Mapping[str, str] = NO_FILTER
) -> pb.RetrieveRequest:
    """Raises InvalidArgument: a value that can't be sent."""
    try:
        return pb.RetrieveRequest(corpus=corpus, question=question, top_k=top_k, order=order_of(order), filter=filter)
    except (TypeError, ValueError, OverflowError) as error:
        raise errors.InvalidArgument(f"bad option: {error}") from error


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
    """A document, or JSON lines. `content` is its bytes, its text or the path of a file, which is then its source.

    An empty media type is guessed from the name's ending. `metadata` is what a filter may ask for. What comes from a
    `source` replaces a document of its name from another one only with `replace`; an empty one replaces all.
    `prefix` stands before the names of all documents, and `first_line` is the number of the first of JSON lines that
    are sent in parts.

    Raises:
        InvalidArgument: a value that can't be sent.
        OSError: the file can't be read.
    """
    if isinstance(content, os.PathLike):
        source = source or str(Path(content).resolve())
        content = Path(content).read_bytes()
    raw = content.encode() if isinstance(content, str) else content
    try:
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
    except (TypeError, ValueError, OverflowError) as error:
        raise errors.InvalidArgument(f"bad option: {error}") from error
