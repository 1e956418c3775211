"""What a request says of the prompt that a fusion worker prefilled for it, and whether this engine can use it."""

import hashlib
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

PARAMETER = "fusionkv"
"""Key of `kv_transfer_params` that holds a `FusedPrompt`."""
# A worker's file for processes of the same user; nothing else is opened, whoever asks.
_PATH = re.compile(r"/proc/\d+/fd/\d+")


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The KV of one token in this engine, the heads of all ranks together."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str


@dataclass(frozen=True, slots=True)
class FusedPrompt:
    """fusion.v1.PrefilledKV as JSON has it; bytes are hexadecimal. worker: the address to fetch it from."""

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
        """None if a request names no such prompt.

        Raises:
            ValueError: what it says can't be.
        """
        said = (params or {}).get(PARAMETER)
        if said is None:
            return None
        names = {field.name: field.type for field in fields(cls)}
        if not isinstance(said, Mapping) or set(said) != set(names):
            raise ValueError(f"kv_transfer_params.{PARAMETER} has to have the fields {', '.join(names)}")
        if wrong := [name for name, kind in names.items() if type(said[name]) is not kind]:
            raise ValueError(f"kv_transfer_params.{PARAMETER}.{wrong[0]} is of another type")
        for name in ("handle", "checksum"):
            bytes.fromhex(said[name])
        if said["path"] and not _PATH.fullmatch(said["path"]):
            raise ValueError(f"kv_transfer_params.{PARAMETER}.path is no open file of a process")
        return cls(**said)

    def mismatch(self, layout: KVLayout, fingerprint: str, prompt: Sequence[int]) -> str:
        """Why its KV is not that of this engine's request; empty if it is."""
        theirs = KVLayout(self.layers, self.kv_heads, self.head_dim, self.dtype)
        if theirs != layout:
            return f"the KV is {theirs}, vLLM's is {layout}"
        if self.model_fingerprint != fingerprint:
            return f"the KV is of model {self.model_fingerprint[:16]}, vLLM runs {fingerprint[:16]}"
        if not 0 < self.tokens < len(prompt):
            return f"the KV is of {self.tokens} tokens, the prompt has {len(prompt)}"
        if self.prompt_digest != digest(prompt[: self.tokens]):
            return "the KV is of another prompt"
        return ""


def digest(tokens: Sequence[int]) -> str:
    """SHA-256 over token ids, each as 4 bytes, little-endian."""
    return hashlib.sha256(struct.pack(f"<{len(tokens)}I", *tokens)).hexdigest()
