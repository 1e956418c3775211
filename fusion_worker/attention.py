"""The one place where a Hugging Face model meets the pool: an attention function and the forwards that feed it."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface

from fusionkv.fusion_worker.methods.shallow import States
from fusionkv.fusion_worker.models import Model
from fusionkv.fusion_worker.tensor_parallel.ranks import Ranks
from fusionkv.kernels.attention_scores import attention_scores
from fusionkv.kernels.rope import Rotation
from fusionkv.kernels.segment_table import Spans
from fusionkv.kernels.segments import Segment, Span
from fusionkv.kernels.sparse_attention import sparse_attention
from fusionkv.kernels.tempered_attention import Temper, tempered_attention
from fusionkv.protos.errors import FailedPrecondition

NAME = "fusionkv"
_FAR = 100  # positions, for the check of the rotation


@dataclass(slots=True)
class Probe:
    """Sums up the attention of one span's rows into each position, over the given layers.

    scores: float32 [last position + 1], complete when the forward is done.
    """

    span: Span
    layers: frozenset[int]
    scores: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.scores = torch.zeros(int(self.span.positions[-1]) + 1, device=self.span.positions.device)


@dataclass(slots=True)
class Votes:
    """The attention of one span's rows into each position, by layer and KV head.

    layers: float32 [kv_heads, last position + 1] each, when the forward is done.
    """

    span: Span
    layers: list[torch.Tensor] = field(default_factory=list)


@dataclass(slots=True)
class Followed:
    """The attention of each row of one span, the mean over heads and over the model's layers.

    weights: float32 [rows, last position + 1], complete when the forward is done; every row sums to 1.
    """

    span: Span
    weights: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        positions = self.span.positions
        self.weights = torch.zeros(len(positions), int(positions[-1]) + 1, device=positions.device)


@dataclass(frozen=True, slots=True)
class Shallow:
    """What rows are once they have been through layer 0, so that some of them can go on from there.

    hidden: [rows, hidden]. first, second: what the attention of layer 0 and of layer 1 was given.
    """

    hidden: torch.Tensor
    first: States
    second: States

    def of(self, rows: torch.Tensor) -> "Ahead":
        """What the rows of these indices go on from."""
        return Ahead(self.hidden[rows], self.first.k[rows], self.first.v[rows])


@dataclass(frozen=True, slots=True)
class Ahead:
    """Rows that have been through layer 0: hidden [rows, hidden], and their k, v [rows, kv_heads, head_dim] there."""

    hidden: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


@dataclass(slots=True)
class Batch:
    """A ragged batch: token rows of several requests, one after another, and where their keys are and go.

    ids, positions: int64 [rows]; row i stands at positions[i].
    slots: int64, of the pool: where the KV of the last len(slots) rows is written. Rows before them write nothing.
    pool: [layers, 2, slots, kv_heads, head_dim].
    tempered: spans whose rows attend to their context otherwise; `spans` holds all others.
    states: layer -> what its attention was given, for the layers to be looked at; the last of them attends no more.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    spans: Spans
    pool: torch.Tensor
    rotation: Rotation
    probes: Sequence[Probe] = ()
    votes: Sequence[Votes] = ()
    followed: Sequence[Followed] = ()
    tempered: Sequence[tuple[Span, Temper]] = ()
    states: dict[int, States | None] = field(default_factory=dict)


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
def forward(model: Model, batch: Batch, ahead: Ahead | None = None) -> torch.Tensor:
    """Runs all layers over the rows; writes their KV to the pool. Returns the last hidden states [rows, hidden].

    ahead: the rows, when they have been through layer 0 already.
    """
    decoder = model.network.model
    if ahead is None:
        rows = {"input_ids": batch.ids[None]}
    else:
        decoder, rows = _layers(decoder, slice(1, None)), {"inputs_embeds": ahead.hidden[None]}
        batch.pool[0, 0].index_copy_(0, batch.slots, ahead.k)
        batch.pool[0, 1].index_copy_(0, batch.slots, ahead.v)
    out = decoder(**rows, position_ids=batch.positions[None], use_cache=False, fusionkv_batch=batch)
    _put_together(batch, model.ranks)
    return out.last_hidden_state[0]


def _put_together(batch: Batch, ranks: Ranks) -> None:
    """What was seen of the attention of this rank's heads becomes what was seen of all heads'."""
    for probe in batch.probes:
        ranks.total(probe.scores)
    for votes in batch.votes:
        votes.layers = list(ranks.joined(torch.stack(votes.layers), dim=1))
    for followed in batch.followed:
        weights = ranks.total(followed.weights)
        weights /= weights[0].sum()


@torch.inference_mode()
def shallow(model: Model, batch: Batch) -> Shallow:
    """Runs layer 0 over the rows, and layer 1 up to its queries, keys and values. Writes what `batch.slots` says."""
    decoder, place = model.network.model, batch.positions[None]
    batch.states = {0: None, 1: None}
    first = _layers(decoder, slice(0, 1))
    hidden = first(input_ids=batch.ids[None], position_ids=place, use_cache=False, fusionkv_batch=batch)[0]
    layer = decoder.layers[1]
    layer.self_attn(
        hidden_states=layer.input_layernorm(hidden),
        position_embeddings=decoder.rotary_emb(hidden, place),
        attention_mask=None,
        fusionkv_batch=batch,
    )
    seen = batch.states
    assert seen[0] is not None
    assert seen[1] is not None
    return Shallow(hidden[0], seen[0], seen[1])


def _layers(decoder: Any, wanted: slice) -> Any:
    """The decoder with some of its layers only, sharing their weights; without its last norm when layers follow."""
    part = copy.copy(decoder)
    layers = list(decoder.layers)
    part._modules = {**decoder._modules, "layers": torch.nn.ModuleList(layers[wanted])}
    if wanted.stop is not None:
        part._modules["norm"] = torch.nn.Identity()
    return part


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
                batch.rotation,
                scaling,
                sliding_window,
            )
            for head in range(k_pool.shape[1])
        ]
        votes.layers.append(torch.stack(by_head))
    scores = {probe.span: probe.scores for probe in batch.probes if layer in probe.layers}
    scores |= {followed.span: followed.weights for followed in batch.followed}
    out = sparse_attention(rows, k_pool, v_pool, batch.spans, batch.rotation, scaling, sliding_window, scores)
    for span, temper in batch.tempered:
        part = slice(span.start, span.stop)
        out[part] = tempered_attention(
            rows[part], k_pool, v_pool, span, temper, batch.rotation, scaling, sliding_window
        )
    return out[None], None
