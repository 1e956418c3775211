"""One rank's part of a model, as transformers cuts it by the family's own `tp_plan`, with its sums over the ranks."""

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers.distributed import DistributedConfig

# Rank 0 alone draws tokens, so embedding and head are whole on every rank.
_WHOLE = {"model.embed_tokens": "replicate", "lm_head": "replicate"}
# GLM-4's plan has every rank gather gate and up of all ranks; cut like this, it needs its own channels alone.
_GLM4 = {"model.layers.*.mlp.gate_up_proj": "packed_colwise", "model.layers.*.mlp.down_proj": "rowwise"}


def part_of(config: Any, count: int) -> "DistributedConfig":
    """How transformers is to load a model for each of `count` ranks."""
    from transformers.distributed import DistributedConfig

    return DistributedConfig(tp_size=count, tp_plan=_WHOLE | (_GLM4 if config.model_type == "glm4" else {}))


def settle(network: Any) -> None:
    """Makes a loaded part ordinary tensors. Layers cut by columns keep transformers' forward, which adds them up."""
    # Not before there is a part: it loads SymPy, among others.
    from torch.distributed.tensor import DTensor

    for module in network.modules():
        for name, value in list(module.named_parameters(recurse=False)):
            if isinstance(value, DTensor):
                setattr(module, name, torch.nn.Parameter(value.to_local(), requires_grad=False))
                if name == "weight" and not value.placements[0].is_shard(1):
                    del module.forward  # Cut by rows, it has work for training alone.
