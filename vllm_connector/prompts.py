"""Sources of a prompt's KV outside of vLLM: a fusion worker that prefilled it, or a cache service; and transfers."""

import hashlib
import json
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fusionkv.kvcache_service import keys
from fusionkv.kvcache_service.client import HitKind, Lookup
from fusionkv.vllm_connector.spans import PARAMETER, SpannedPrompt

# The only paths that are opened, whoever sends them: a worker's file for processes of the same user.
_PATH = re.compile(r"/proc/\d+/fd/\d+")
_NO_SYSTEM = keys.chunk_digest(())
# With the empty system prompt, as many as a cache service takes by default (its setting max_path).
_MAX_CHUNKS = 255


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The KV layout of this engine's model, with the heads of all ranks."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str


def alterations(config: Any) -> dict[str, str]:
    """What vLLM's flags change of the KV that its model's files make; empty without such flags.

    config: vLLM's ModelConfig. Raises ValueError for a function in hf_overrides, which no key can name.
    """
    if callable(config.hf_overrides):
        raise ValueError("FusionKV can't tell what hf_overrides change if they are a function: give a dict")
    revision = config.revision if config.revision != "main" and not Path(config.model).is_dir() else ""
    changes = {
        "quantization": str(config.quantization or ""),
        "hf_overrides": json.dumps(config.hf_overrides, sort_keys=True, default=str) if config.hf_overrides else "",
        "hf_config_path": str(config.hf_config_path or ""),
        "revision": revision or "",
    }
    return {name: value for name, value in changes.items() if value}


@dataclass(frozen=True, slots=True)
class FusedPrompt:
    """fusion.v1.PrefilledKV as JSON, with bytes in hexadecimal; `worker` is the address to fetch it from."""

    worker: str
    handle: str
    tokens: int
    prompt_digest: str
    model_fingerprint: str
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    checksum: str
    path: str

    @classmethod
    def of(cls, params: Mapping[str, Any] | None) -> "FusedPrompt | None":
        """Parses the parameters of a request; None if they name no prefilled prompt. Raises ValueError."""
        values = (params or {}).get(PARAMETER)
        if values is None:
            return None
        names = {field.name: field.type for field in fields(cls)}
        if not isinstance(values, Mapping) or set(values) != set(names):
            raise ValueError(f"kv_transfer_params.{PARAMETER} must have the fields {', '.join(names)}")
        if wrong := [name for name, kind in names.items() if type(values[name]) is not kind]:
            raise ValueError(f"kv_transfer_params.{PARAMETER}.{wrong[0]} has the wrong type")
        for name in ("handle", "checksum"):
            bytes.fromhex(values[name])
        if values["path"] and not _PATH.fullmatch(values["path"]):
            raise ValueError(f"kv_transfer_params.{PARAMETER}.path is not an open file of a process")
        return cls(**values)

    def mismatch(self, layout: KVLayout, fingerprint: str, prompt: Sequence[int]) -> str:
        """Why the KV does not fit this engine's request; empty if it does."""
        theirs = KVLayout(self.layers, self.kv_heads, self.head_dim, self.dtype)
        if theirs != layout:
            return f"the KV's layout is {theirs}, but vLLM's is {layout}"
        if self.model_fingerprint != fingerprint:
            return f"the KV is of model {self.model_fingerprint[:16]}, but vLLM runs {fingerprint[:16]}"
        if not 0 < self.tokens < len(prompt):
            return f"the KV has {self.tokens} tokens, but the prompt has {len(prompt)}"
        if self.prompt_digest != digest(prompt[: self.tokens]):
            return "the KV is of another prompt"
        return ""


def degraded(why: str) -> dict[str, Any]:
    """The figures of a prompt that vLLM computes itself, as answer.v1.Summary in JSON."""
    return {"degraded": True, "degraded_reason": why}


def digest(tokens: Sequence[int]) -> str:
    """SHA-256 of token ids, each as 4 bytes, little-endian."""
    return hashlib.sha256(struct.pack(f"<{len(tokens)}I", *tokens)).hexdigest()


@dataclass(frozen=True, slots=True)
class Prefix:
    """The chunks of a prompt that vLLM computes, each an entry of a cache service, found by its exact path.

    Attributes: tenant: vLLM's cache_salt; only requests with the same one share the prefix. digests: those of the
    complete chunks of `tokens` tokens, at most the first 255: the cache service takes no longer path.
    """

    tenant: str
    digests: tuple[bytes, ...]
    tokens: int

    @classmethod
    def of(cls, prompt: Sequence[int], salt: str, tokens: int) -> "Prefix":
        """The prefix of all tokens but the last, which is always computed."""
        starts = range(0, len(prompt) - tokens, tokens)[:_MAX_CHUNKS]
        return cls(salt, tuple(keys.chunk_digest(prompt[at : at + tokens]) for at in starts), tokens)

    def path(self, chunks: int) -> list[bytes]:
        """Path of the first `chunks` chunks in the cache service, beginning with the empty system prompt."""
        return [_NO_SYSTEM, *self.digests[:chunks]]

    def exact_chunks(self, lookup: Lookup) -> int:
        """Number of consecutive chunks, from the first, with an exact hit."""
        for count, hit in enumerate(lookup.hits[1:]):
            if hit.kind is not HitKind.EXACT or hit.entry is None or hit.entry.tokens != self.tokens:
                return count
        return len(lookup.hits) - 1


@dataclass(frozen=True, slots=True)
class KVLoad:
    """Fills the pages of a request's tokens `[start, stop)` from a fusion worker or the cache service, or by fusing.

    A prefix has a namespace of the cache service for each tensor-parallel rank.
    """

    request: str
    pages: tuple[int, ...]
    start: int
    stop: int
    source: FusedPrompt | Prefix | SpannedPrompt
    namespaces: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class KVSave:
    """Saves the chunks of a request from `first` on, from its pages to the cache service."""

    request: str
    pages: tuple[int, ...]
    first: int
    prefix: Prefix
    namespaces: tuple[bytes, ...]
