"""The request parameters that describe a prompt prefilled by a fusion worker, and checks that its KV fits."""

import hashlib
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

PARAMETER = "fusionkv"
"""Key of `kv_transfer_params` that holds a `FusedPrompt`."""
# The only paths that are opened, whoever sends them: a worker's file for processes of the same user.
_PATH = re.compile(r"/proc/\d+/fd/\d+")


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The KV layout of this engine's model, with the heads of all ranks."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str


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
        """Parses the parameters of a request; None if they name no prefilled prompt.

        Raises:
            ValueError: the parameters are invalid.
        """
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


def digest(tokens: Sequence[int]) -> str:
    """SHA-256 of token ids, each as 4 bytes, little-endian."""
    return hashlib.sha256(struct.pack(f"<{len(tokens)}I", *tokens)).hexdigest()
