"""A correction of reused KV: what standing behind other text changes in a chunk's keys and values, on average.

A chunk that is encoded alone has not seen the text that stands before it in a prompt. Much of what it misses is the
same for all chunks of a corpus: for each layer and KV head, a linear map of the token's own key and value and of its
place in the chunk predicts it, times n / (n + 100) behind n tokens of context. It costs 2 head_dim multiplications a
number, a hundredth of a prefill.
"""

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from fusionkv.kernels.correction import correct
from fusionkv.kernels.cpu.compute_dtype import compute_dtype
from fusionkv.kernels.segments import Rotation

# Of the mean square of the inputs: what keeps a map fitted to a few thousand tokens from following their noise.
RIDGE = 1e-1
# Of the change that the map predicts. All of it is too much in short contexts and lowers the likelihood of right
# answers (SmolLM2: 2WikiMultihopQA).
STRENGTH = 0.8
# Behind so many tokens of context a chunk changes by half of what it changes by behind many.
_HALF = 100
# Shares of the change that are told apart, so that a corrected chunk in the pool serves a range of places.
_STEPS = 8
# A chunk's first tokens have missed the most: 4 of them have a constant of their own, and three decays in tokens tell
# the others' places.
_FIRST, _DECAYS = 4, (4.0, 16.0, 64.0)
PLACES = 1 + _FIRST + len(_DECAYS)
# Of weights. Those of a fit are at most about as large as the keys and values themselves; 1e38 overflows their dtype.
_MOST_WEIGHT = 1e4
# Tables of places and of rotations are made for chunks of up to a multiple of so many tokens, and kept.
_TABLE_TOKENS = 512
# Few are in use: one for each RoPE of a model and length of a system prompt. A chunk of 32k tokens has one of 16 MB.
# Learning uses one for each chunk, which displaces others for a while.
_TABLES = 8
# What a fit depends on.
MADE = repr((RIDGE, STRENGTH, _HALF, _FIRST, _DECAYS)).encode()


def change_share(before: int) -> float:
    """How much of the largest change a chunk has behind `before` tokens of context, between 0 and 1."""
    return before / (before + _HALF)


@dataclass(frozen=True, eq=False)
class Correction:
    """From a token's key, value and place to what is added to its key and value.

    Attributes:
        weights: float32 [layers, kv_heads, 2 * head_dim + PLACES, 2 * head_dim]; empty if it was refused.
        trained: whether it was trained after the fit, and there is no more to learn.
        validated: whether answers may use it, or it was refused; None before a validation.
        why: the figures of the validation, as a sentence.
    """

    weights: torch.Tensor
    trained: bool = False
    validated: bool | None = None
    why: str = ""
    _used: torch.Tensor | None = field(default=None, init=False, repr=False)

    @cached_property
    def name(self) -> bytes:
        """Tells corrections apart."""
        return blake2b(self.weights.cpu().numpy().tobytes(), digest_size=16).digest()

    def behind(self, before: int) -> "PlacedCorrection":
        """The correction of a chunk that stands behind `before` tokens of context."""
        return PlacedCorrection(self, max(1, round(_STEPS * change_share(before))))

    def weights_as(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The map in the dtype that it is applied in, made once."""
        if self._used is None or (self._used.dtype, self._used.device) != (dtype, device):
            object.__setattr__(self, "_used", self.weights.to(device, dtype))
        assert self._used is not None
        return self._used

    def on(self, device: torch.device) -> "Correction":
        """The same on a device, where it is applied without being copied first."""
        return replace(self, weights=self.weights.to(device))

    def save(self, path: Path) -> None:
        """Puts it into a file, in one step. Raises OSError or SafetensorError."""
        partial = path.with_suffix(f".{uuid.uuid4().hex}.partial")  # other machines may share the folder
        try:
            # A verdict names the weights that it is about: others in the same file were not validated.
            about = {"trained": str(self.trained), "why": self.why}
            if self.validated is not None:
                about["validated" if self.validated else "refused"] = self.name.hex()
            save_file({"weights": self.weights.cpu()}, partial, about)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path, shape: torch.Size) -> "Correction":
        """Raises OSError, SafetensorError or ValueError when it is no correction of this shape, or out of bounds."""
        with safe_open(path, "pt") as file:
            weights, about = file.get_tensor("weights"), file.metadata() or {}
        made = cls(weights, about.get("trained") == "True", why=about.get("why", ""))
        if "refused" in about and not len(weights):
            return replace(made, validated=False)
        if weights.shape != shape or weights.dtype != torch.float32 or not weights.isfinite().all():
            raise ValueError(f"it holds {weights.dtype} {[*weights.shape]}, not finite float32 {[*shape]}")
        if not (largest := float(weights.abs().max())) <= _MOST_WEIGHT:
            raise ValueError(f"it holds a weight of {largest:.3g}; they are at most {_MOST_WEIGHT:g}")
        valid = about.get("validated") == made.name.hex()
        return replace(made, validated=True) if valid else replace(made, why="")


def verdict(path: Path) -> tuple[bool | None, str]:
    """`validated` and `why` of a file, without its weights, which are large. Raises OSError or SafetensorError."""
    with safe_open(path, "pt") as file:
        about = file.metadata() or {}
    return ("validated" in about if about.keys() & {"validated", "refused"} else None), about.get("why", "")


class PlacedCorrection(NamedTuple):
    """A correction for chunks behind about the same number of tokens. step: of `_STEPS`, how much of it they take."""

    correction: Correction
    step: int

    @property
    def name(self) -> bytes:
        """Tells corrections and steps apart."""
        return self.correction.name + bytes([self.step])

    @property
    def share(self) -> float:
        """How much of the change that the map predicts is applied."""
        return self.step / _STEPS

    def apply(self, kv: torch.Tensor, out: torch.Tensor, base: int, rotations: Sequence[Rotation]) -> None:
        """Corrects a chunk's KV.

        Args:
            kv: [layers, 2, tokens, kv_heads, head_dim].
            out: where the corrected KV goes, of the same shape and dtype; may be `kv`.
            base: the position for which the chunk's first key was written.
            rotations: of each layer.
        """
        tokens = kv.shape[2]
        weights = self.correction.weights_as(kv.dtype if kv.is_cuda else compute_dtype(kv.dtype), kv.device)
        place = places(tokens, kv.device).to(weights.dtype)
        for layers, rotation, cos, sin in _blocks(rotations, base, tokens, kv.device):
            correct(kv[layers], out[layers], weights[layers], place, rotation, cos, sin, self.share)


class Average(NamedTuple):
    """The mean with a second estimate of the same KV, whose errors are others, so that some of both cancel out.

    kv: [layers, 2, tokens, kv_heads, head_dim], with keys written for the position `base` on.
    """

    kv: torch.Tensor
    base: int

    @property
    def name(self) -> bytes:
        """Empty: the mean is what the pool and the cache service keep of the chunk."""
        return b""

    def apply(self, kv: torch.Tensor, out: torch.Tensor, base: int, rotations: Sequence[Rotation]) -> None:
        """As `PlacedCorrection.apply`."""
        other = self.kv.to(kv.device, torch.float32)
        for layer, rotation in enumerate(rotations):
            out[layer, 0] = (kv[layer, 0] + rotation.turn(other[layer, 0], base - self.base)) / 2
        out[:, 1] = (kv[:, 1] + other[:, 1]) / 2


def shape(layers: int, kv_heads: int, head_dim: int) -> torch.Size:
    """Of a correction's weights."""
    return torch.Size([layers, kv_heads, 2 * head_dim + PLACES, 2 * head_dim])


class Fit:
    """Fits a correction to chunks' KV as encoded alone and behind other text, by ridge regression.

    It takes four times the memory of the correction. tokens: how many there were so far.
    """

    def __init__(self, size: torch.Size) -> None:
        """size: as `shape` gives it."""
        layers, kv_heads, inputs, _ = size
        self.tokens = 0
        self._squares = torch.zeros(layers, kv_heads, inputs, inputs, dtype=torch.float64)
        self._products = torch.zeros(size, dtype=torch.float64)

    def add(
        self, alone: torch.Tensor, alone_base: int, behind: torch.Tensor, base: int, rotations: Sequence[Rotation]
    ) -> None:
        """One chunk twice, [layers, 2, tokens, kv_heads, head_dim], each written for positions of its own.

        alone_base: behind the system prompt. base: behind `base - alone_base` tokens of context more.
        """
        x, y = pairs(alone, alone_base, rotations), pairs(behind, base, rotations)
        where = places(x.shape[2], x.device).expand(*x.shape[:3], PLACES)
        inputs = torch.cat([x, where], -1).mul_(change_share(base - alone_base))
        self.tokens += x.shape[2]
        self._squares += (inputs.transpose(-1, -2) @ inputs).cpu()
        self._products += (inputs.transpose(-1, -2) @ (y - x)).cpu()

    def solve(self) -> Correction:
        """The correction of all that was added."""
        size = self._squares.shape[-1] - PLACES
        squares = self._squares.diagonal(dim1=-2, dim2=-1)
        # A constant that no token told apart stays 0.
        penalty = torch.full_like(squares, 1e-3)
        penalty[..., :size] += RIDGE * squares[..., :size].mean(-1, keepdim=True)
        # Positive definite. By LU the same failed once, on the same numbers that it solved another time.
        factor = torch.linalg.cholesky(self._squares + penalty.diag_embed())
        weights = torch.cholesky_solve(self._products, factor)
        return Correction((STRENGTH * weights).float().contiguous())


def places(tokens: int, device: torch.device) -> torch.Tensor:
    """float32 [tokens, PLACES]: where each token of a chunk stands, as inputs of the map."""
    return _all_places(-(-tokens // _TABLE_TOKENS) * _TABLE_TOKENS, device)[:tokens]


@lru_cache(maxsize=_TABLES)
def _all_places(tokens: int, device: torch.device) -> torch.Tensor:
    at = torch.arange(tokens, device=device)[:, None]
    first = (at == torch.arange(_FIRST, device=device)).float()
    decays = torch.exp(-at / torch.tensor(_DECAYS, device=device))
    return torch.cat([torch.ones_like(decays[:, :1]), first, decays], 1)


class _Block(NamedTuple):
    """Layers that share a rotation. cos, sin: its factors, float32 [tokens, rotary_dim / 2]."""

    layers: slice
    rotation: Rotation
    cos: torch.Tensor
    sin: torch.Tensor


def _blocks(rotations: Sequence[Rotation], base: int, tokens: int, device: torch.device) -> Iterator["_Block"]:
    """The layers by the rotation that they share."""
    table, start = -(-tokens // _TABLE_TOKENS) * _TABLE_TOKENS, 0
    for stop in range(1, len(rotations) + 1):
        if stop == len(rotations) or rotations[stop] is not rotations[start]:
            cos, sin = _factors(rotations[start], base, table, device)
            yield _Block(slice(start, stop), rotations[start], cos[:tokens], sin[:tokens])
            start = stop


@lru_cache(maxsize=_TABLES)
def _factors(rotation: Rotation, base: int, tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = rotation.factors(torch.arange(base, base + tokens))
    return cos.to(device), sin.to(device)


def pairs(kv: torch.Tensor, base: int, rotations: Sequence[Rotation]) -> torch.Tensor:
    """float32 [layers, kv_heads, tokens, 2 * head_dim]: a token's key, turned back to position 0, and its value."""
    out = torch.cat([kv[:, 0].transpose(1, 2).float(), kv[:, 1].transpose(1, 2).float()], -1)
    for layers, rotation, cos, sin in _blocks(rotations, base, kv.shape[2], kv.device):
        keys = out[layers, ..., : kv.shape[-1]].transpose(1, 2)
        keys[:] = rotation.apply(keys, cos[:, None], -sin[:, None])
    return out
