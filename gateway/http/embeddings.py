"""Converts OpenAI's embedding requests and replies."""

import base64
import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from fusionkv.gateway.http.chat import BadRequest, typed
from fusionkv.protos.runtime.errors import InvalidArgument

_MAX_TEXTS, _MAX_CHARACTERS = 2048, 1 << 15
_FORMATS = ("float", "base64")
_SUPPORTED = frozenset(["input", "model", "encoding_format", "dimensions"])
# Accepted and ignored.
_IGNORED = frozenset(["user"])


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """A request for embeddings; `dimensions` is 0 if the request does not set it."""

    texts: tuple[str, ...]
    model: str
    base64: bool
    dimensions: int


def read(body: Any) -> EmbeddingRequest:
    """Reads the JSON body of a request. Raises InvalidArgument if it is invalid, or requests what is unsupported."""
    if not isinstance(body, dict):
        raise InvalidArgument("the body is not a JSON object")
    given = {name: value for name, value in body.items() if value is not None and name not in _IGNORED}
    if unknown := given.keys() - _SUPPORTED:
        raise BadRequest(f"unknown field {min(unknown)[:80]!r}", min(unknown)[:80])
    texts = given.get("input")
    texts = [texts] if isinstance(texts, str) else texts
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        message = "input must be a string or a list of strings that are not empty: token ids are not supported"
        raise BadRequest(message, "input")
    if len(texts) > _MAX_TEXTS or any(len(text) > _MAX_CHARACTERS for text in texts):
        raise BadRequest(f"input takes at most {_MAX_TEXTS} texts of at most {_MAX_CHARACTERS} characters", "input")
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        raise BadRequest("input contains half of a surrogate pair", "input") from None
    model, dimensions = typed(given, "model", str, ""), typed(given, "dimensions", int, 0)
    if (form := given.get("encoding_format", "float")) not in _FORMATS:
        raise BadRequest(f"encoding_format must be one of {', '.join(_FORMATS)}", "encoding_format")
    return EmbeddingRequest(tuple(texts), model, form == "base64", dimensions)


def reply(request: EmbeddingRequest, vectors: np.ndarray, model: str, tokens: int) -> bytes:
    """The reply as JSON with `vectors`, float32 `[text, dim]`.

    Blocks, for 0.4 s with 2,048 vectors of 384 numbers: call it in a thread.
    """
    little = vectors.astype("<f4")
    rows = [base64.b64encode(row.tobytes()).decode() if request.base64 else row.tolist() for row in little]
    body = {
        "object": "list",
        "data": [{"object": "embedding", "index": i, "embedding": row} for i, row in enumerate(rows)],
        "model": model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    return json.dumps(body).encode()
