"""Linear layers of a model on a CPU: packed against plain."""

from collections.abc import Sequence
from functools import partial

import torch

from fusionkv.bench.kernels.pairs import Pairs, Way
from fusionkv.fusion_worker.compute.packed_linear import PackedLinear

_LAYERS = 4  # so that the weights of Qwen2.5-0.5B's shape (119 MB) don't stay in a cache


def measure(pairs: Pairs, hidden: int, kv_width: int, intermediate: int, rows: tuple[int, ...]) -> None:
    """Measures four layers of a Qwen2 model, with seven products each, in bfloat16."""
    shapes = [(hidden, hidden), (hidden, kv_width), (hidden, kv_width), (hidden, hidden)]
    shapes += [(hidden, intermediate), (hidden, intermediate), (intermediate, hidden)]
    plain = [torch.nn.Linear(*shape, bias=False, dtype=torch.bfloat16) for shape in _LAYERS * shapes]
    packed = [PackedLinear(linear) for linear in plain]
    for count in rows:
        inputs = {size: torch.randn(count, size, dtype=torch.bfloat16) for size in (hidden, intermediate)}
        wide = [inputs[linear.in_features] for linear in plain]

        def run(layers: Sequence[torch.nn.Module], wide: list[torch.Tensor] = wide) -> torch.Tensor:
            with torch.inference_mode():
                return [layer(x) for layer, x in zip(layers, wide, strict=True)][-1]

        what = f"linear layers, {count} row{'s' * (count > 1)}"
        pairs.add(what, Way("plain", partial(run, plain)), Way("packed", partial(run, packed)))
