"""RoPE as a difference: turning vectors that carry one position so that they carry another."""

from functools import lru_cache

import torch


class Rotation:
    """The rotary embedding of one model, applied to vectors that carry RoPE already.

    RoPE is additive: a key written for position b serves at position c after a rotation by c - b (FusionRAG A.1).
    Only the first `2 * len(inv_freq)` channels are rotary; the rest pass through. Computed in float32 whatever the
    dtype, so that one rounding is all it costs.

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
        """`x` `[..., head_dim]` rotated on by `shift` positions, in its own dtype; `x` itself when shift is 0."""
        if shift == 0:
            return x
        cos, sin = self._factors(shift, x.device)
        rotary = x[..., : self.rotary_dim].float()
        if self.interleaved:
            a, b = rotary[..., 0::2], rotary[..., 1::2]
            turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        else:
            a, b = rotary.chunk(2, dim=-1)
            turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        turned = turned.to(x.dtype)
        if self.rotary_dim == x.shape[-1]:
            return turned
        return torch.cat((turned, x[..., self.rotary_dim :]), dim=-1)
