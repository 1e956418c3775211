"""Runs Hugging Face models over the KV pool: forward passes of ragged batches."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import AttentionInterface

from fusionkv.fusion_worker.compute import latent
from fusionkv.fusion_worker.compute.batch import Batch
from fusionkv.fusion_worker.models import Model, Ranks
from fusionkv.kernels import norms, rotary
from fusionkv.kernels.gpu import has_triton
from fusionkv.kernels.segments import AttentionSpec, KVSegment, QuerySpan, Rotation, Spans
from fusionkv.kernels.upload import upload
from fusionkv.protos.runtime.errors import FailedPrecondition

NAME = "fusionkv"
_FAR = 100  # positions, by which the check of the rotation moves tokens


@dataclass(frozen=True, slots=True)
class States:
    """The inputs of one layer's attention: q [rows, q_heads, head_dim]; k, v [rows, kv_heads, head_dim]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    spec: AttentionSpec


@dataclass(slots=True)
class _Recorder:
    """Records the inputs of a layer's attention, in place of computing it."""

    rotations: Sequence[Rotation]
    states: States | None = None

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        """As `Batch.attend`; returns zeros."""
        self.states = States(query, key, value, spec)
        return torch.zeros_like(query)


def install(model: Model) -> None:
    """Makes the model attend over the pool. Called at each engine's start: the configuration names the function.

    Raises FailedPrecondition if the model's keys don't rotate with their position as `model.rotations` say.
    """
    AttentionInterface.register(NAME, _attend)
    # Without a mask function of this name, transformers makes no mask; positions and spans take its place.
    model.network.config._attn_implementation = NAME
    latent.install(model.network)
    norms.install(model.network)
    _install_rotary(model)
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


def _install_rotary(model: Model) -> None:
    """Rotates queries and keys by one kernel on a GPU. On a CPU, fewer passes over memory gained nothing."""
    if model.device.type != "cuda" or not has_triton():
        return
    from fusionkv.kernels.gpu import rotary_triton

    decoder, like = model.network.model, torch.empty(0, dtype=model.kv.dtype, device=model.device)
    positions = torch.tensor([[0, 1, _FAR, 3 * _FAR]], device=model.device)
    for layer, rotation in zip(decoder.layers, model.rotations, strict=True):
        embeddings = position_embeddings(decoder, layer, like, positions)
        rotary.install(layer.self_attn, partial(rotary_triton.rotate, rotation), embeddings)


def _keys(model: Model, start: int) -> torch.Tensor:
    """Keys [layers, 4, kv_heads, head_dim] of four tokens from position `start` on; only RoPE depends on `start`."""
    shape, rows = model.kv, torch.arange(4)
    sizes = shape.layers, shape.tensors, 4, shape.kv_heads, shape.head_dim
    pool = torch.zeros(sizes, dtype=shape.dtype, device=model.device)
    spans = Spans([QuerySpan(0, 4, rows + start, (KVSegment(0, 4, start),))])
    forward(model, Batch(rows % model.vocabulary, rows + start, rows, spans, pool, model.rotations))
    return pool[:, 0]


@torch.inference_mode()
def forward(model: Model, batch: Batch) -> torch.Tensor:
    """Runs all layers over the rows; writes their KV to the pool. Returns the last hidden states [rows, hidden]."""
    decoder, there = model.network.model, batch.there()
    if batch.narrows and len(decoder.layers) > 1:
        before = through(model, there, _layers(decoder, slice(0, -1)))
        hidden = _last_layer(decoder, before[None], batch, there)
    else:
        hidden = through(model, there)
    if model.ranks.count > 1:
        _reduce_over_ranks(batch, model.ranks)
    return hidden


@torch.inference_mode()
def by_layer(model: Model, batch: Batch) -> Iterator[torch.Tensor]:
    """As `forward`, for one rank: computes a layer for each item that is drawn. The last item is the result."""
    decoder, there = model.network.model, batch.there()
    last = len(decoder.layers) - 1
    hidden: torch.Tensor | None = None
    for number in range(last):
        hidden = through(model, there, _layers(decoder, slice(number, number + 1)), hidden)
        yield hidden
    if hidden is not None and batch.narrows:
        yield _last_layer(decoder, hidden[None], batch, there)
    else:
        yield through(model, there, _layers(decoder, slice(last, None)), hidden)


def through(model: Model, there: Batch, layers: Any = None, before: torch.Tensor | None = None) -> torch.Tensor:
    """Last hidden states, [rows, hidden], of a batch that is on the device; only launches kernels there.

    layers: a decoder of some of the layers; None for all. before: hidden states before these; None for embeddings.
    """
    decoder = model.network.model if layers is None else layers
    given = {"input_ids": there.ids[None]} if before is None else {"inputs_embeds": before[None]}
    out = decoder(**given, position_ids=there.positions[None], use_cache=False, fusionkv_batch=there)
    return out.last_hidden_state[0]


def _last_layer(decoder: Any, before: torch.Tensor, batch: Batch, there: Batch) -> torch.Tensor:
    """Runs the last layer: the used rows in full, all other rows only up to their KV.

    before: [1, rows, hidden], after all other layers. there: the batch on the pool's device. Returns [rows, hidden],
    0 for rows that are not used.
    """
    layer = decoder.layers[-1]
    number = layer.self_attn.layer_idx
    states = _attention_inputs(decoder, layer, before, there)
    there.write(number, states.k, states.v)
    hidden = torch.zeros_like(before[0])
    assert batch.used is not None
    rows, narrowed = batch.last(batch.used)
    if len(rows):
        last = _layers(decoder, slice(-1, None))
        (used,), narrowed = upload([rows], before.device), narrowed.there()
        place = narrowed.positions[None]
        out = last(inputs_embeds=before[:, used], position_ids=place, use_cache=False, fusionkv_batch=narrowed)
        hidden[used] = out.last_hidden_state[0]
    return hidden


def _attention_inputs(decoder: Any, layer: Any, before: torch.Tensor, batch: Batch) -> States:
    """The inputs of a layer's attention for rows [1, rows, hidden]."""
    recorder = _Recorder(batch.rotations)
    layer.self_attn(
        hidden_states=layer.input_layernorm(before),
        position_embeddings=position_embeddings(decoder, layer, before, batch.positions[None]),
        attention_mask=None,
        fusionkv_batch=recorder,
    )
    assert recorder.states is not None
    return recorder.states


def position_embeddings(decoder: Any, layer: Any, like: torch.Tensor, positions: torch.Tensor) -> Any:
    """What the model's RoPE gives a layer's attention for positions [1, rows], in the dtype of `like`."""
    # Some models have one RoPE per type of layer, chosen by the type.
    kind = () if hasattr(decoder.rotary_emb, "inv_freq") else (layer.self_attn.layer_type,)
    return decoder.rotary_emb(like, positions, *kind)


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
    decoder, batch = model.network.model, batch.there()
    place, first = batch.positions[None], _layers(decoder, slice(0, 1))
    hidden = first(input_ids=batch.ids[None], position_ids=place, use_cache=False, fusionkv_batch=batch)[0]
    return _attention_inputs(decoder, decoder.layers[1], hidden, batch)


def _layers(decoder: Any, span: slice) -> Any:
    """A decoder of some of the layers, which shares their weights; without the final norm if more layers follow."""
    part = copy.copy(decoder)
    layers = list(decoder.layers)
    part._modules = {**decoder._modules, "layers": torch.nn.ModuleList(layers[span])}
    if kinds := getattr(decoder.config, "layer_types", None):  # indexed by the layer's place in this decoder
        part.config = copy.copy(decoder.config)
        part.config.layer_types = kinds[span]
    if span.stop is not None:
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
    fusionkv_batch: Batch | _Recorder,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention for transformers: query [1, q_heads, rows, head_dim], key and value [1, kv_heads, rows, head_dim]."""
    latents: latent.Latent | None = vars(module).get("expand_kv")
    own = query[0] if latents is None else latents.query(query[0])
    q, k, v = (x.transpose(0, 1) for x in (own, key[0], value[0]))
    window = sliding_window or getattr(module, "sliding_window", None)  # Qwen2-MoE leaves its windows to the mask
    spec = AttentionSpec(fusionkv_batch.rotations[module.layer_idx], scaling, window, s_aux)
    out = fusionkv_batch.attend(module.layer_idx, q, k, v, spec)
    return (out if latents is None else latents.output(out))[None], None
