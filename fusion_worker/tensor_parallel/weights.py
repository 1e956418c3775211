"""The part of a model's weights that one rank computes with, read from safetensors without reading the rest.

A layer's attention and its MLP are cut alike (Megatron-LM, 3): the first matrices by rows, so that each rank has
whole heads and whole channels of its own, and the last by columns, so that each rank has a summand of every output.
One sum over the ranks ends each of the two. Norms, embedding and head are whole on every rank.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, GenerationConfig

from fusionkv.fusion_worker.tensor_parallel.ranks import Ranks
from fusionkv.protos.runtime.errors import FailedPrecondition

_BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_BY_ROWS_IN_HALVES = ("gate_up_proj",)  # GLM-4: gate above up
_BY_COLUMNS = ("o_proj", "down_proj")


class SummedLinear(torch.nn.Module):
    """A linear layer of which each rank has some columns."""

    def __init__(self, part: torch.nn.Linear, ranks: Ranks) -> None:
        super().__init__()
        # Added once, behind the sum.
        self.bias = part.bias
        part.register_parameter("bias", None)
        self.part = part
        self._ranks = ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self._ranks.total(self.part(x))
        return y if self.bias is None else y + self.bias


def check_shareable(name: str, config: Any, count: int) -> None:
    """Raises FailedPrecondition when `count` ranks can't have equal parts of the model."""
    heads = config.num_attention_heads
    sizes = {"KV heads": getattr(config, "num_key_value_heads", None) or heads, "attention heads": heads}
    for what, size in (sizes | {"MLP channels": config.intermediate_size}).items():
        if size % count:
            raise FailedPrecondition(
                f"{name} has {size} {what}, which {count} ranks can't share evenly: "
                f"set tensor_parallel to a divisor of {size}"
            )


def load_part(directory: Path, config: Any, dtype: torch.dtype, device: torch.device, ranks: Ranks) -> Any:
    """The network of one rank, with its part of the weights in `directory`.

    Raises:
        FailedPrecondition: weights are missing or of another shape.
        SafetensorError, OSError: a file can't be read.
    """
    with torch.device("meta"):
        network: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    # Its tables are no weights: they are computed where the rest is only named.
    network.model.rotary_emb = type(network.model.rotary_emb)(config=config).to(device)
    if (directory / "generation_config.json").is_file():
        network.generation_config = GenerationConfig.from_pretrained(directory)
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(f, framework="pt")) for f in sorted(directory.glob("*.safetensors"))]
        where = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - no dictionary
        wanted = dict(network.named_parameters())
        if missing := sorted(wanted.keys() - where.keys()):
            raise FailedPrecondition(f"the weights in {directory} lack {len(missing)} tensors: {missing[0]}, ...")
        for name, expected in wanted.items():
            whole = where[name].get_slice(name)
            if whole.get_shape() != list(expected.shape):
                raise FailedPrecondition(
                    f"{name} in {directory} is {whole.get_shape()} and should be {list(expected.shape)}"
                )
            _set(network, name, _part(name, whole, ranks).to(device, dtype, copy=True))
    network.tie_weights()
    for parent in list(network.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, torch.nn.Linear):
                child.out_features, child.in_features = child.weight.shape
            if name in _BY_COLUMNS:
                setattr(parent, name, SummedLinear(child, ranks))
    return network.eval()


def _part(name: str, whole: Any, ranks: Ranks) -> torch.Tensor:
    """A rank's part of a tensor in a file."""
    shape, layer = whole.get_shape(), name.split(".")[-2]
    if layer in _BY_ROWS:
        return whole[ranks.part(shape[0])]
    if layer in _BY_ROWS_IN_HALVES:
        half = shape[0] // 2
        mine = ranks.part(half)
        return torch.cat([whole[mine], whole[mine.start + half : mine.stop + half]])
    if layer in _BY_COLUMNS and len(shape) == 2:
        return whole[:, ranks.part(shape[1])]
    return whole[:]


def _set(network: torch.nn.Module, name: str, value: torch.Tensor) -> None:
    module, _, leaf = name.rpartition(".")
    setattr(network.get_submodule(module), leaf, torch.nn.Parameter(value, requires_grad=False))
