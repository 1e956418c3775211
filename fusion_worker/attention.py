"""The one place where a Hugging Face model meets the pool: an attention function and the forward that feeds it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface

from fusionkv.fusion_worker.models import Model
from fusionkv.kernels.attention_scores import attention_scores
from fusionkv.kernels.rope import Rotation
from fusionkv.kernels.segment_table import Spans
from fusionkv.kernels.segments import Segment, Span
from fusionkv.kernels.sparse_attention import sparse_attention
from fusionkv.protos.errors import FailedPrecondition

NAME = "fusionkv"
_FAR = 100  # positions, for the check of the rotation


@dataclass(slots=True)
class Probe:
    """Sums up the attention of one span's rows into each position, over the given layers.

    scores: float32 [last position + 1] when the forward is done.
    """

    span: Span
    layers: frozenset[int]
    scores: torch.Tensor | None = None


@dataclass(slots=True)
class Batch:
    """A ragged batch: token rows of several requests, one after another, and where their keys are and go.

    ids, positions, slots: int64 [rows]; row i stands at positions[i] and its KV is written to pool slot slots[i].
    pool: [layers, 2, slots, kv_heads, head_dim].
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    spans: Spans
    pool: torch.Tensor
    rotation: Rotation
    probes: Sequence[Probe] = field(default=())


def install(model: Model) -> None:
    """Makes the model attend through the pool. Once, at start: the choice is part of the model's configuration.

    Raises:
        FailedPrecondition: the model's keys don't turn with their position as `model.rotation` says.
    """
    AttentionInterface.register(NAME, _attend)
    # Not registered as a mask function as well, so transformers makes no mask: positions and spans say it all.
    model.network.config._attn_implementation = NAME
    near, far = (_first_layer_keys(model, start) for start in (0, _FAR))
    error = float((model.rotation.turn(near, _FAR) - far).float().norm() / far.float().norm())
    # Measured over the families: up to 6e-7 in float32, 5e-3 in bfloat16; a wrong pairing of channels gives about 1.
    if not error < max(1e-4, 16 * torch.finfo(far.dtype).eps):
        raise FailedPrecondition(f"the keys of {model.name} don't follow their rotary embedding (error {error:.1e})")


def _first_layer_keys(model: Model, start: int) -> torch.Tensor:
    """Keys [4, kv_heads, head_dim] of four tokens from `start` on: before any attention, told apart by RoPE alone."""
    device, shape = model.device, model.kv
    rows = torch.arange(4, device=device)
    pool = torch.zeros(shape.layers, 2, 4, shape.kv_heads, shape.head_dim, dtype=shape.dtype, device=device)
    spans = Spans([Span(0, 4, rows + start, (Segment(0, 4, start),))])
    forward(model, Batch(rows % model.vocabulary, rows + start, rows, spans, pool, model.rotation))
    return pool[0, 0]


@torch.inference_mode()
def forward(model: Model, batch: Batch) -> torch.Tensor:
    """Runs all layers over the rows; writes their KV to the pool. Returns the last hidden states [rows, hidden]."""
    out = model.network.model(
        input_ids=batch.ids[None], position_ids=batch.positions[None], use_cache=False, fusionkv_batch=batch
    )
    return out.last_hidden_state[0]


@torch.inference_mode()
def logits(model: Model, hidden: torch.Tensor) -> torch.Tensor:
    """float32 [rows, vocabulary] of some rows' last hidden states."""
    return model.network.lm_head(hidden).float()


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    fusionkv_batch: Batch,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention: query [1, q_heads, rows, head_dim], key and value [1, kv_heads, rows, head_dim]."""
    batch, layer = fusionkv_batch, module.layer_idx
    k_pool, v_pool = batch.pool[layer]
    k_pool.index_copy_(0, batch.slots, key[0].transpose(0, 1))
    v_pool.index_copy_(0, batch.slots, value[0].transpose(0, 1))
    rows = query[0].transpose(0, 1)
    for probe in batch.probes:
        if layer in probe.layers:
            scores = attention_scores(rows, k_pool, probe.span, batch.rotation, scaling, sliding_window)
            probe.scores = scores if probe.scores is None else probe.scores + scores
    return sparse_attention(rows, k_pool, v_pool, batch.spans, batch.rotation, scaling, sliding_window)[None], None
