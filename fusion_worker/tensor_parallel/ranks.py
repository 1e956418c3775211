"""A process's rank among the tensor-parallel ranks of a model, its all-reduce, and its part of the weights.

transformers splits the weights by the family's `tp_plan`, including the plan's all-reduces.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from transformers.distributed import DistributedConfig

# Embedding and head are replicated, because rank 0 samples tokens alone.
_WHOLE = {"model.embed_tokens": "replicate", "lm_head": "replicate"}
# GLM-4's own plan makes every rank gather the gate and up projections of all ranks; split like this, a rank needs
# only its own channels.
_GLM4 = {"model.layers.*.mlp.gate_up_proj": "packed_colwise", "model.layers.*.mlp.down_proj": "rowwise"}


@dataclass(frozen=True, slots=True)
class Ranks:
    """Process `rank` of `count`. Each has an equal share of the model's heads.

    All ranks must call `total` in the same order. It raises RuntimeError when another rank ended, or did not answer
    within the timeout of torch.distributed's default group, which transformers' split layers use as well.
    """

    rank: int = 0
    count: int = 1

    def total(self, partial: torch.Tensor) -> torch.Tensor:
        """All-reduces a tensor in place: the sum over all ranks."""
        if self.count > 1:
            dist.all_reduce(partial)
        return partial


ALONE = Ranks()


def part_of(config: Any, count: int) -> "DistributedConfig":
    """The configuration by which transformers loads one of `count` ranks' parts of a model."""
    from transformers.distributed import DistributedConfig

    return DistributedConfig(tp_size=count, tp_plan=_WHOLE | (_GLM4 if config.model_type == "glm4" else {}))


def settle(network: Any) -> None:
    """Replaces DTensors by plain tensors. Layers split by columns keep transformers' forward, which all-reduces."""
    # Imported late: it loads SymPy, among others.
    from torch.distributed.tensor import DTensor

    for module in network.modules():
        for name, value in list(module.named_parameters(recurse=False)):
            if isinstance(value, DTensor):
                setattr(module, name, torch.nn.Parameter(value.to_local(), requires_grad=False))
                if name == "weight" and not value.placements[0].is_shard(1):
                    del module.forward  # Split by rows, its forward does extra work only for training.
