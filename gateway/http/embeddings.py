"""OpenAI's embeddings: a request's texts, and the gateway's vectors of them as a reply."""

import base64
from dataclasses import dataclass
from typing import Any

import numpy as np

from fusionkv.gateway.http.chat import BadRequest
from fusionkv.protos.runtime.errors import InvalidArgument

_MOST_TEXTS, _MOST_CHARACTERS = 2048, 1 << 15
_FORMATS = ("float", "base64")
_TAKEN = frozenset(["input", "model", "encoding_format", "dimensions"])
# They change nothing about a vector.
_WITHOUT_EFFECT = frozenset(["user"])


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked for. dimensions: 0 says nothing about them."""

    texts: tuple[str, ...]
    model: str
    base64: bool
    dimensions: int


def read(body: Any) -> Wanted:
    """The request that a JSON body describes.

    Raises:
        InvalidArgument: it is no request for embeddings, or asks for what can't be given.
    """
    if not isinstance(body, dict):
        raise InvalidArgument("the body is no JSON object")
    given = {name: value for name, value in body.items() if value is not None and name not in _WITHOUT_EFFECT}
    if unknown := given.keys() - _TAKEN:
        raise BadRequest(f"unknown field {min(unknown)[:80]!r}", min(unknown)[:80])
    texts = given.get("input")
    texts = [texts] if isinstance(texts, str) else texts
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        raise BadRequest("input must be a text or a list of texts, none of them empty", "input")
    if len(texts) > _MOST_TEXTS or any(len(text) > _MOST_CHARACTERS for text in texts):
        raise BadRequest(f"input has at most {_MOST_TEXTS} texts of {_MOST_CHARACTERS} characters", "input")
    model, dimensions = given.get("model", ""), given.get("dimensions", 0)
    if not isinstance(model, str):
        raise BadRequest("model is no string", "model")
    if type(dimensions) is not int:
        raise BadRequest("dimensions is no whole number", "dimensions")
    if (form := given.get("encoding_format", "float")) not in _FORMATS:
        raise BadRequest(f"encoding_format must be one of {', '.join(_FORMATS)}", "encoding_format")
    return Wanted(tuple(texts), model, form == "base64", dimensions)


def reply(wanted: Wanted, vectors: np.ndarray, model: str, tokens: int) -> dict[str, Any]:
    """vectors: float32 `[text, dim]`."""
    little = vectors.astype("<f4")
    rows = [base64.b64encode(row.tobytes()).decode() if wanted.base64 else row.tolist() for row in little]
    return {
        "object": "list",
        "data": [{"object": "embedding", "index": i, "embedding": row} for i, row in enumerate(rows)],
        "model": model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
