"""Runs Hugging Face models over the KV pool: ragged batches of rows of several requests, and their forward passes."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import torch
from transformers import AttentionInterface

from fusionkv.fusion_worker.models import Model, Ranks
from fusionkv.kernels.attention import Temper, attention_scores, sparse_attention, tempered_attention
from fusionkv.kernels.segments import KVSegment, QuerySpan, Rotation, Spans
from fusionkv.protos.runtime.errors import FailedPrecondition

NAME = "fusionkv"
_FAR = 100  # positions, by which the check of the rotation moves tokens


@dataclass(frozen=True, slots=True)
class States:
    """The inputs of one layer's attention: q [rows, q_heads, head_dim]; k, v [rows, kv_heads, head_dim]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    window: int | None


@dataclass(slots=True)
class Probe:
    """Sums the attention of one span's rows to each position, over the given layers.

    scores: float32 [last position + 1], complete after the forward pass.
    """

    span: QuerySpan
    layers: frozenset[int]
    scores: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.scores = torch.zeros(int(self.span.positions[-1]) + 1, device=self.span.positions.device)


@dataclass(slots=True)
class Votes:
    """The attention of one span's rows to each position, by layer and KV head.

    layers: float32 [kv_heads, last position + 1] for each layer, complete after the forward pass.
    """

    span: QuerySpan
    layers: list[torch.Tensor] = field(default_factory=list)


@dataclass(slots=True)
class Batch:
    """A ragged batch: token rows of several requests, concatenated, with the slots of their keys.

    ids, positions: int64 [rows]; row i has position positions[i].
    slots: int64, slots of the pool to which the KV of the last len(slots) rows is written. Other rows write no KV.
    pool: [layers, 2, slots, kv_heads, head_dim]. rotations: of each layer.
    tempered: spans whose rows attend to their context at a temperature; `spans` holds all others.
    wanted: for each span, in the order of their rows, the number of rows at its end whose attention in the last
        layer or last hidden state is used; None for all.
    states: inputs of attention by layer, for the layers to record in place of computing attention.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    spans: Spans
    pool: torch.Tensor
    rotations: Sequence[Rotation]
    probes: Sequence[Probe] = ()
    votes: Sequence[Votes] = ()
    tempered: Sequence[tuple[QuerySpan, Temper]] = ()
    wanted: Sequence[int] | None = None
    states: dict[int, States | None] = field(default_factory=dict)

    @property
    def narrows(self) -> bool:
        """Whether less than half of the rows are wanted; with more, a separate pass would save little."""
        return self.wanted is not None and 2 * sum(self.wanted) < len(self.ids)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        """Writes a layer's keys and values to the pool, and attends to it. As `Attending.attend`."""
        rotation = self.rotations[layer]
        if layer in self.states:
            self.states[layer] = States(query, key, value, scaling, window)
            return torch.zeros_like(query)
        k_pool, v_pool = self.pool[layer]
        stored = slice(len(self.ids) - len(self.slots), None)
        k_pool.index_copy_(0, self.slots, key[stored])
        v_pool.index_copy_(0, self.slots, value[stored])
        groups = query.shape[1] // k_pool.shape[1]
        for votes in self.votes:
            by_head = [
                attention_scores(
                    query[:, head * groups : (head + 1) * groups],
                    k_pool[:, head : head + 1],
                    votes.span,
                    rotation,
                    scaling,
                    window,
                )
                for head in range(k_pool.shape[1])
            ]
            votes.layers.append(torch.stack(by_head))
        scores = {probe.span: probe.scores for probe in self.probes if layer in probe.layers}
        out = sparse_attention(query, k_pool, v_pool, self.spans, rotation, scaling, window, scores)
        for span, temper in self.tempered:
            part = slice(span.start, span.stop)
            out[part] = tempered_attention(query[part], k_pool, v_pool, span, temper, rotation, scaling, window)
        return out

    def _all_spans(self) -> list[QuerySpan]:
        """Tempered and other spans, in the order of their rows."""
        return sorted((*self.spans, *(span for span, _ in self.tempered)), key=lambda span: span.start)

    def last(self, counts: Sequence[int]) -> "tuple[torch.Tensor, Batch]":
        """int64, the last rows of each span, and a batch of them that writes no KV.

        The order of keys that earlier layers computed is kept.
        """
        new: dict[int, QuerySpan] = {}  # by the `stop` of the old span
        at = 0
        for span, count in zip(self._all_spans(), counts, strict=True):
            if count:
                new[span.stop] = QuerySpan(at, at + count, span.positions[-count:], span.segments)
                known = {rotation: span.views[rotation] for rotation in self.rotations if rotation in span.views}
                new[span.stop].views.update(known)
                at += count
        rows = [torch.arange(stop - span.rows, stop, device=self.ids.device) for stop, span in new.items()]
        kept = torch.cat([self.slots[:0], *rows])
        return kept, replace(
            self,
            ids=self.ids[kept],
            positions=self.positions[kept],
            slots=self.slots[:0],
            spans=Spans([new[span.stop] for span in self.spans if span.stop in new]),
            probes=[_moved(probe, new) for probe in self.probes if probe.span.stop in new],
            votes=[_moved(votes, new) for votes in self.votes if votes.span.stop in new],
            tempered=[(new[span.stop], temper) for span, temper in self.tempered if span.stop in new],
            wanted=None,
            states={},
        )


_Observer = TypeVar("_Observer", Probe, Votes)


def _moved(observer: _Observer, new: Mapping[int, QuerySpan]) -> _Observer:
    """The same probe or votes, with their results so far, for rows that moved in the batch."""
    moved, span, to = copy.copy(observer), observer.span, new[observer.span.stop]
    moved.span = (
        to if span.rows == to.rows else QuerySpan(to.stop - span.rows, to.stop, span.positions, span.segments)
    )
    return moved


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
def forward(model: Model, batch: Batch) -> torch.Tensor:
    """Runs all layers over the rows; writes their KV to the pool. Returns the last hidden states [rows, hidden]."""
    decoder, place = model.network.model, batch.positions[None]
    narrows = batch.narrows and len(decoder.layers) > 1
    layers = _layers(decoder, slice(0, -1)) if narrows else decoder
    out = layers(input_ids=batch.ids[None], position_ids=place, use_cache=False, fusionkv_batch=batch)
    hidden = _last_layer(decoder, out.last_hidden_state, batch) if narrows else out.last_hidden_state[0]
    if model.ranks.count > 1:
        _reduce_over_ranks(batch, model.ranks)
    return hidden


def _last_layer(decoder: Any, before: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Runs the last layer: the wanted rows in full, all other rows only up to their KV.

    before: [1, rows, hidden], after all other layers. Returns [rows, hidden], 0 for rows that are not wanted.
    """
    layer = decoder.layers[-1]
    number = layer.self_attn.layer_idx
    seen, stored = _attention_inputs(decoder, layer, before, batch), slice(len(batch.ids) - len(batch.slots), None)
    batch.pool[number, 0].index_copy_(0, batch.slots, seen.k[stored])
    batch.pool[number, 1].index_copy_(0, batch.slots, seen.v[stored])
    hidden = torch.zeros_like(before[0])
    assert batch.wanted is not None
    wanted, narrowed = batch.last(batch.wanted)
    if len(wanted):
        last = _layers(decoder, slice(-1, None))
        place = narrowed.positions[None]
        out = last(inputs_embeds=before[:, wanted], position_ids=place, use_cache=False, fusionkv_batch=narrowed)
        hidden[wanted] = out.last_hidden_state[0]
    return hidden


def _attention_inputs(decoder: Any, layer: Any, before: torch.Tensor, batch: Batch) -> States:
    """The inputs of a layer's attention for rows [1, rows, hidden]."""
    number = layer.self_attn.layer_idx
    batch.states = {number: None}
    # Some models have one RoPE per type of layer, chosen by the type.
    kind = () if hasattr(decoder.rotary_emb, "inv_freq") else (layer.self_attn.layer_type,)
    layer.self_attn(
        hidden_states=layer.input_layernorm(before),
        position_embeddings=decoder.rotary_emb(before, batch.positions[None], *kind),
        attention_mask=None,
        fusionkv_batch=batch,
    )
    seen = batch.states[number]
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
def shallow(model: Model, batch: Batch) -> States:
    """Runs layer 0 over the rows, and layer 1 up to its queries, keys and values. Writes layer 0's KV to the pool.

    Returns the inputs of layer 1's attention.
    """
    decoder, place = model.network.model, batch.positions[None]
    first = _layers(decoder, slice(0, 1))
    hidden = first(input_ids=batch.ids[None], position_ids=place, use_cache=False, fusionkv_batch=batch)[0]
    return _attention_inputs(decoder, decoder.layers[1], hidden, batch)


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


class Attending(Protocol):
    """What a model's rows attend to."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        """A layer's attention, [rows, q_heads, head_dim].

        query: [rows, q_heads, head_dim]. key, value: [rows, kv_heads, head_dim]. window: of a sliding-window layer.
        """


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    fusionkv_batch: Attending,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention for transformers: query [1, q_heads, rows, head_dim], key and value [1, kv_heads, rows, head_dim]."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return fusionkv_batch.attend(module.layer_idx, q, k, v, scaling, sliding_window)[None], None
