"""The deviation of reused KV from that of full attention, by layer."""

from collections.abc import Sequence

import torch

from fusionkv.fusion_worker.compute.forward_job import slots_of
from fusionkv.fusion_worker.load.placement import PromptLayout
from fusionkv.kernels.rope import Rotation


def deviation(
    kv: torch.Tensor, rotations: Sequence[Rotation], reused: PromptLayout, full: torch.Tensor
) -> dict[str, float]:
    """Relative L2 error of the reused chunks' keys and values, by layer: |reused - full| / |full| over all chunks.

    Args:
        kv: the pool, [layers, 2, slots, kv_heads, head_dim].
        rotations: the RoPE of each layer.
        reused: a prompt's parts.
        full: int64, slots of full attention's KV of the same prompt, in prompt order, with keys at their positions.
    """
    away = torch.zeros(len(kv), dtype=torch.float64)
    size = torch.zeros(len(kv), dtype=torch.float64)
    for part in reused.parts:
        if part.wanted.is_system:
            continue
        start = part.wanted.position
        there = _take(kv, full[start : start + len(part.wanted.chunk)])
        here = _take(kv, slots_of(part.resident.runs)[: len(part.wanted.chunk)])
        for layer, rotation in zip(here, rotations, strict=True):
            # Rotates keys from their base to their position in the prompt.
            layer[0] = rotation.turn(layer[0], part.wanted.position - part.resident.base)
        away += (here - there).square().sum((1, 2, 3, 4)).cpu()
        size += there.square().sum((1, 2, 3, 4)).cpu()
    relative = (away / size).sqrt().tolist()
    return {f"kv_deviation_layer_{layer}": value for layer, value in enumerate(relative)}


def _take(kv: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return kv[:, :, slots.to(kv.device)].double()
