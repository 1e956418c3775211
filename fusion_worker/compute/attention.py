"""Runs Hugging Face models over the KV pool: an attention function for transformers, and forward passes."""

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AttentionInterface

from fusionkv.fusion_worker.compute.batch import Batch, States
from fusionkv.fusion_worker.models import Model
from fusionkv.fusion_worker.tensor_parallel.group import Ranks
from fusionkv.kernels.attention_scores import attention_scores
from fusionkv.kernels.segments import KVSegment, QuerySpan, Spans
from fusionkv.kernels.sparse_attention import sparse_attention
from fusionkv.kernels.tempered_attention import tempered_attention
from fusionkv.protos.runtime.errors import FailedPrecondition

NAME = "fusionkv"
_FAR = 100  # positions, by which the check of the rotation moves tokens


@dataclass(frozen=True, slots=True)
class Shallow:
    """The states of rows after layer 0, from which some of the rows can continue.

    hidden: [rows, hidden]. first, second: inputs of the attention of layer 0 and of layer 1.
    """

    hidden: torch.Tensor
    first: States
    second: States

    def of(self, rows: torch.Tensor) -> "LayerState":
        """The states from which the rows of these indices continue."""
        return LayerState(self.hidden[rows], self.first.k[rows], self.first.v[rows])


@dataclass(frozen=True, slots=True)
class LayerState:
    """States of rows after layer 0: hidden [rows, hidden], and k, v of layer 0 [rows, kv_heads, head_dim]."""

    hidden: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def install(model: Model) -> None:
    """Makes the model attend over the pool. Called once, at start: the model's configuration names the function.

    Raises:
        FailedPrecondition: the model's keys don't rotate with their position as `model.rotations` say.
    """
    AttentionInterface.register(NAME, _attend)
    # Without a mask function of this name, transformers makes no mask; positions and spans take its place.
    model.network.config._attn_implementation = NAME
    near, far = (_keys(model, start) for start in (0, _FAR))
    for rotation in set(model.rotations):
        layer = model.rotations.index(rotation)
        error = float((rotation.turn(near[layer], _FAR) - far[layer]).float().norm() / far[layer].float().norm())
        # Measured over the families, in layer 0: up to 6e-7 in float32, 5e-3 in bfloat16; a wrong pairing of channels
        # gives about 1.
        if not error < max(1e-4, 16 * torch.finfo(far.dtype).eps):
            raise FailedPrecondition(
                f"the keys of {model.name} don't follow their rotary embedding (error {error:.1e} in layer {layer})"
            )


def _keys(model: Model, start: int) -> torch.Tensor:
    """Keys [layers, 4, kv_heads, head_dim] of four tokens from position `start` on; only RoPE depends on `start`."""
    device, shape = model.device, model.kv
    rows = torch.arange(4, device=device)
    pool = torch.zeros(shape.layers, 2, 4, shape.kv_heads, shape.head_dim, dtype=shape.dtype, device=device)
    spans = Spans([QuerySpan(0, 4, rows + start, (KVSegment(0, 4, start),))])
    forward(model, Batch(rows % model.vocabulary, rows + start, rows, spans, pool, model.rotations))
    return pool[:, 0]


@torch.inference_mode()
def forward(model: Model, batch: Batch, ahead: LayerState | None = None) -> torch.Tensor:
    """Runs all layers over the rows; writes their KV to the pool. Returns the last hidden states [rows, hidden].

    ahead: the rows' states after layer 0; None runs the rows through layer 0 too.
    """
    decoder, first = model.network.model, 0
    if ahead is None:
        rows = {"input_ids": batch.ids[None]}
    else:
        decoder, rows, first = _layers(decoder, slice(1, None)), {"inputs_embeds": ahead.hidden[None]}, 1
        batch.pool[0, 0].index_copy_(0, batch.slots, ahead.k)
        batch.pool[0, 1].index_copy_(0, batch.slots, ahead.v)
    if batch.depth is None:
        hidden = _run(decoder, rows, batch)
    else:
        cut = batch.depth - first
        early = _run(_layers(decoder, slice(0, cut)), rows, replace(batch, wanted=None))
        kept, remaining = batch.remaining()
        hidden = torch.zeros_like(early)
        if len(kept):
            rows = {"inputs_embeds": early[None, kept]}
            hidden[kept] = _run(_layers(decoder, slice(cut, None)), rows, remaining)
    _reduce_over_ranks(batch, model.ranks)
    return hidden


def _run(decoder: Any, rows: dict[str, torch.Tensor], batch: Batch) -> torch.Tensor:
    """Runs the rows of a batch through all layers of a decoder. Returns their hidden states [rows, hidden]."""
    narrows = batch.narrows and len(decoder.layers) > 1
    layers = _layers(decoder, slice(0, -1)) if narrows else decoder
    out = layers(**rows, position_ids=batch.positions[None], use_cache=False, fusionkv_batch=batch)
    return _last_layer(decoder, out.last_hidden_state, batch) if narrows else out.last_hidden_state[0]


def _last_layer(decoder: Any, before: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Runs the last layer: the wanted rows in full, all other rows only up to their KV.

    before: [1, rows, hidden], after all other layers. Returns [rows, hidden], 0 for rows that are not wanted.
    """
    layer = decoder.layers[-1]
    number = layer.self_attn.layer_idx
    batch.states = {number: None}
    seen, stored = _attention_inputs(decoder, layer, before, batch), slice(len(batch.ids) - len(batch.slots), None)
    batch.pool[number, 0].index_copy_(0, batch.slots, seen.k[stored])
    batch.pool[number, 1].index_copy_(0, batch.slots, seen.v[stored])
    hidden = torch.zeros_like(before[0])
    wanted, narrowed = batch.narrowed()
    if len(wanted):
        last = _layers(decoder, slice(-1, None))
        place = narrowed.positions[None]
        out = last(inputs_embeds=before[:, wanted], position_ids=place, use_cache=False, fusionkv_batch=narrowed)
        hidden[wanted] = out.last_hidden_state[0]
    return hidden


def _attention_inputs(decoder: Any, layer: Any, before: torch.Tensor, batch: Batch) -> States:
    """The inputs of a layer's attention for rows [1, rows, hidden]. The layer is the last of `batch.states`."""
    # Some models have one RoPE per type of layer, chosen by the type.
    kind = () if hasattr(decoder.rotary_emb, "inv_freq") else (layer.self_attn.layer_type,)
    layer.self_attn(
        hidden_states=layer.input_layernorm(before),
        position_embeddings=decoder.rotary_emb(before, batch.positions[None], *kind),
        attention_mask=None,
        fusionkv_batch=batch,
    )
    seen = batch.states[layer.self_attn.layer_idx]
    assert seen is not None
    return seen


def _reduce_over_ranks(batch: Batch, ranks: Ranks) -> None:
    """All-reduces probe scores and votes over tensor-parallel ranks."""
    for probe in batch.probes:
        ranks.total(probe.scores)
    for votes in batch.votes:
        mine = torch.stack(votes.layers)
        by_rank = mine.new_zeros(ranks.count, *mine.shape)
        by_rank[ranks.rank] = mine
        votes.layers = list(ranks.total(by_rank).transpose(0, 1).flatten(1, 2))


@torch.inference_mode()
def shallow(model: Model, batch: Batch) -> Shallow:
    """Runs layer 0 over the rows, and layer 1 up to its queries, keys and values. Writes layer 0's KV to the pool."""
    decoder, place = model.network.model, batch.positions[None]
    batch.states = {0: None, 1: None}
    first = _layers(decoder, slice(0, 1))
    hidden = first(input_ids=batch.ids[None], position_ids=place, use_cache=False, fusionkv_batch=batch)[0]
    second, seen = _attention_inputs(decoder, decoder.layers[1], hidden, batch), batch.states[0]
    assert seen is not None
    return Shallow(hidden[0], seen, second)


def _layers(decoder: Any, wanted: slice) -> Any:
    """A decoder of some of the layers, which shares their weights; without the final norm if more layers follow."""
    part = copy.copy(decoder)
    layers = list(decoder.layers)
    part._modules = {**decoder._modules, "layers": torch.nn.ModuleList(layers[wanted])}
    if kinds := getattr(decoder.config, "layer_types", None):  # indexed by the layer's place in this decoder
        part.config = copy.copy(decoder.config)
        part.config.layer_types = kinds[wanted]
    if wanted.stop is not None:
        part._modules["norm"] = torch.nn.Identity()
    return part


@torch.inference_mode()
def logits(model: Model, hidden: torch.Tensor) -> torch.Tensor:
    """Logits, float32 [rows, vocabulary], of last hidden states [rows, hidden]."""
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
    """Attention for transformers: query [1, q_heads, rows, head_dim], key and value [1, kv_heads, rows, head_dim]."""
    batch, layer = fusionkv_batch, module.layer_idx
    rotation = batch.rotations[layer]
    rows, fresh = query[0].transpose(0, 1), (key[0].transpose(0, 1), value[0].transpose(0, 1))
    if layer in batch.states:
        batch.states[layer] = States(rows, *fresh, scaling, sliding_window)
        if layer == max(batch.states):
            return torch.zeros_like(rows)[None], None
    k_pool, v_pool = batch.pool[layer]
    stored = slice(len(batch.ids) - len(batch.slots), None)
    k_pool.index_copy_(0, batch.slots, fresh[0][stored])
    v_pool.index_copy_(0, batch.slots, fresh[1][stored])
    groups = rows.shape[1] // k_pool.shape[1]
    for votes in batch.votes:
        by_head = [
            attention_scores(
                rows[:, head * groups : (head + 1) * groups],
                k_pool[:, head : head + 1],
                votes.span,
                rotation,
                scaling,
                sliding_window,
            )
            for head in range(k_pool.shape[1])
        ]
        votes.layers.append(torch.stack(by_head))
    scores = {probe.span: probe.scores for probe in batch.probes if layer in probe.layers}
    out = sparse_attention(rows, k_pool, v_pool, batch.spans, rotation, scaling, sliding_window, scores)
    for span, temper in batch.tempered:
        part = slice(span.start, span.stop)
        out[part] = tempered_attention(rows[part], k_pool, v_pool, span, temper, rotation, scaling, sliding_window)
    return out[None], None
