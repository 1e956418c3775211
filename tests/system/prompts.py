"""Prompts as a gateway sends them to a worker."""

from collections.abc import Iterable, Sequence
from typing import Any

from fusionkv.gateway.ingest.document import Document
from fusionkv.gateway.tokens import Vocabulary
from fusionkv.protos.fusion.v1 import fusion_pb2 as pb


def request(
    system: Sequence[int], chunks: Iterable[Sequence[int]], question: Sequence[int], max_tokens: int, **more: Any
) -> pb.GenerateRequest:
    """By token ids; `more`: recipe, ratio, tenant."""
    parts = {"system": pb.Tokens(ids=system), "question": pb.Tokens(ids=question)}
    sampling = pb.Sampling(max_tokens=max_tokens)
    return pb.GenerateRequest(**parts, chunks=[pb.Chunk(ids=ids) for ids in chunks], sampling=sampling, **more)


def asked(
    vocabulary: Vocabulary, texts: Iterable[str], question: str, max_tokens: int, **more: Any
) -> pb.GenerateRequest:
    """Of texts, in chunks of 256 tokens."""
    chunks = [ids for text in texts for _, ids in vocabulary.chunks(Document(text), 256, 0)]
    return request(vocabulary.system(), chunks, vocabulary.question(question), max_tokens, **more)
