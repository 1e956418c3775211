"""Rotates vectors that carry RoPE for one position so that they carry another position."""

from functools import lru_cache

import torch


class Rotation:
    """The rotary embedding of one model, applied to vectors that carry RoPE already.

    RoPE is additive: a key written for position b is valid at position c after a rotation by c - b (FusionRAG A.1).
    Only the first `2 * len(inv_freq)` channels are rotary; the others are copied. Computed in float32 for every
    dtype, so that a rotation rounds once.

    inv_freq: float32 [rotary_dim / 2], after the model's own scaling (linear, llama3, yarn).
    interleaved: pairs are (0, 1), (2, 3), ... as in GLM; otherwise (i, i + rotary_dim / 2) as in Llama.
    """

    def __init__(self, inv_freq: torch.Tensor, interleaved: bool) -> None:
        self.inv_freq = inv_freq.detach().float().cpu()
        self.interleaved = interleaved
        self.rotary_dim = 2 * len(inv_freq)
        self._factors = lru_cache(maxsize=4096)(self._compute_factors)

    def _compute_factors(self, shift: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        # float64: at shift 1e5 and the highest frequency, float32 angles are off by 4e-3.
        angle = self.inv_freq.double() * shift
        return angle.cos().float().to(device), angle.sin().float().to(device)

    def turn(self, x: torch.Tensor, shift: int) -> torch.Tensor:
        """Rotates `x` `[..., head_dim]` by `shift` positions, in its dtype; returns `x` itself if shift is 0."""
        return x if shift == 0 else self.apply(x, *self._factors(shift, x.device))

    def factors(self, shifts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, float32 [tokens, rotary_dim / 2] each, that rotate tokens by int64 [tokens] shifts."""
        different, which = shifts.unique(return_inverse=True)
        angle = different[:, None] * self.inv_freq.to(shifts.device).double()
        return angle.cos().float()[which], angle.sin().float()[which]

    def apply(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Rotates `x` `[..., head_dim]`; `cos` and `sin` broadcast to `[..., rotary_dim / 2]`.

        out: the tensor to write, of any dtype; None allocates one like `x`.
        """
        half = self.rotary_dim // 2
        split = (slice(0, None, 2), slice(1, None, 2)), (slice(half), slice(half, None))
        first, second = split[0] if self.interleaved else split[1]
        a, b = (x[..., : self.rotary_dim][..., part].float() for part in (first, second))
        turned = torch.empty_like(x) if out is None else out
        turned[..., : self.rotary_dim][..., first] = (a * cos).addcmul_(b, sin, value=-1)
        turned[..., : self.rotary_dim][..., second] = (b * cos).addcmul_(a, sin)
        turned[..., self.rotary_dim :] = x[..., self.rotary_dim :]
        return turned
