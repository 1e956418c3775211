"""Linear layers with weights packed in the layout of the CPU's bfloat16 matrix product."""

from typing import Any

import torch

from fusionkv.kernels.cpu.compute_dtype import compute_dtype

# Where float32 is the faster dtype, unpacking the weights for it pays from about 128 rows on. 357 rows of SmolLM2's
# layers then take 0.7 times as long (two Emerald Rapids cores without AMX).
_UNPACKED_ROWS = 160


class PackedLinear(torch.nn.Module):
    """A linear layer whose weights are reordered once, not at every call. Its results are those of `linear`.

    Layers of Qwen2.5-0.5B: 1.3 times faster at 1 and at 32 rows, 1.1 times at 1,261.
    """

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.bias = linear.bias
        # Not a parameter: the tensor is opaque and has no storage for a state dict.
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = compute_dtype(x.dtype)
        # The packed product has no gradient.
        if x.requires_grad or (dtype != x.dtype and x.shape[:-1].numel() >= _UNPACKED_ROWS):
            bias = None if self.bias is None else self.bias.to(dtype)
            product: torch.Tensor = _Unpacked.apply(x.to(dtype), self.packed, bias)
            return product.to(x.dtype)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


class _Unpacked(torch.autograd.Function):
    """The product with unpacked weights, which are unpacked again for the gradient rather than kept until then."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.packed = packed
        return torch.nn.functional.linear(x, packed.to_dense(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = gradients
        return gradient @ ctx.packed.to_dense(gradient.dtype), None, None


def pack(network: torch.nn.Module) -> None:
    """Replaces every linear layer below the head by a PackedLinear, if the CPU computes in bfloat16.

    The head is not replaced: it often shares weights with the embedding, and packing would duplicate them. Nor are
    layers with a `forward` set by transformers, which all-reduces over ranks.
    """
    layers: Any = network.model
    first = next(layers.parameters())
    if first.device.type != "cpu" or first.dtype != torch.bfloat16 or not computes(torch.bfloat16):
        return
    for parent in list(layers.modules()):
        for name, child in parent.named_children():
            if type(child) is torch.nn.Linear and "forward" not in vars(child):
                setattr(parent, name, PackedLinear(child))
    # Copy the remaining tensors: as views, they would keep the mapped file of all weights in memory.
    for tensor in (*network.parameters(), *network.buffers()):
        tensor.data = tensor.data.clone()


def computes(dtype: torch.dtype) -> bool:
    """Whether this CPU has instructions for a dtype, and torch uses them."""
    if dtype not in (torch.bfloat16, torch.float16):
        return True
    name = "bf16" if dtype == torch.bfloat16 else "fp16"
    try:
        return bool(getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported")())
    except (AttributeError, RuntimeError):  # a torch without oneDNN
        return False
