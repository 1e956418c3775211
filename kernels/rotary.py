"""Another RoPE in the attention modules of one instance of a model of transformers, where it computes the same."""

from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch

# Queries and keys [1, heads, rows, head_dim], cosines and sines [1, rows, rotary_dim / 2 or more], those of the pairs
# of channels first; gives queries and keys with RoPE.
Rotate = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
# What the attention modules of most families call, a global of their file.
_NAME = "apply_rotary_pos_emb"


def install(attention: Any, ours: Rotate, embeddings: Any) -> None:
    """Makes an attention module rotate by `ours`, if that computes the same as transformers' function.

    The module gets its class's own code, with other globals: other modules of the process keep theirs.

    embeddings: what the model's rotary embedding gives for some positions, near and far.
    """
    own = type(attention).forward
    while getattr(own, "__globals__", {}).get("__name__") == "transformers.utils.deprecation":
        own = own.__wrapped__  # it renames an argument of old callers
    if not isinstance(own, FunctionType) or _NAME not in own.__code__.co_names or "forward" in vars(attention):
        return
    if _same(own.__globals__[_NAME], ours, attention.head_dim, *embeddings):
        globals_ = {**own.__globals__, _NAME: ours}
        forward = FunctionType(own.__code__, globals_, own.__name__, own.__defaults__, own.__closure__)
        forward.__kwdefaults__ = own.__kwdefaults__
        attention.forward = MethodType(forward, attention)


@torch.inference_mode()
def _same(theirs: Rotate, ours: Rotate, head_dim: int, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Whether two functions rotate random queries and keys alike."""
    random = torch.randn(1, 3, cos.shape[1], head_dim, generator=torch.Generator().manual_seed(0)).to(cos)
    # transformers rounds both products and their sum.
    bound = 4 * torch.finfo(cos.dtype).eps * float(random.abs().max() * cos.abs().max())
    given = random[:, :2], random[:, 2:], cos, sin
    pairs = zip(theirs(*given), ours(*given), strict=True)
    return all(torch.allclose(one, other, rtol=0.0, atol=bound) for one, other in pairs)
