"""A Qwen2 model with random weights, served as in the fusion worker: chunks in host memory, a pool, a question."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from fusionkv.bench.gpu.setup import ModelShape, Setup
from fusionkv.bench.gpu.workload import QUESTION, SYSTEM, Part, cached, lay_out
from fusionkv.fusion_worker import models
from fusionkv.fusion_worker.compute import model_runner
from fusionkv.fusion_worker.compute.model_runner import Batch, Probe
from fusionkv.fusion_worker.select.base import budget, top_k
from fusionkv.kernels.segments import KVSegment, QuerySpan, Spans


class HostCache:
    """KV of a prompt's chunks in pinned host memory: [chunks, layers, 2, tokens, kv_heads, head_dim].

    Layers are copied in order on a separate stream, and each layer of the model waits only for its own keys. Without
    CUDA, copies are synchronous.
    """

    def __init__(self, pool: torch.Tensor, parts: Sequence[Part], layers: Iterable[torch.nn.Module]) -> None:
        """pool: [layers, 2, slots, kv_heads, head_dim]. parts: slots of the chunks, all of the same length."""
        count, _, _, heads, dim = pool.shape
        size = (len(parts), count, 2, parts[0].length, heads, dim)
        self._cuda = pool.device.type == "cuda"
        host = torch.empty(size, dtype=pool.dtype, pin_memory=self._cuda)
        for chunk in host:
            # Generated on the device: the CPU would take seconds.
            chunk.copy_(torch.randn(chunk.shape, dtype=pool.dtype, device=pool.device))
        self.bytes = host.nbytes
        # Views are made once, because a chunk's slots are known before loading.
        self._sources = [[chunk[layer, kv] for chunk in host for kv in (0, 1)] for layer in range(count)]
        self._targets = [
            [pool[layer, kv, part.slot : part.slot + part.length] for part in parts for kv in (0, 1)]
            for layer in range(count)
        ]
        if self._cuda:
            self._stream = torch.cuda.Stream(pool.device)
            self._ready = [torch.cuda.Event() for _ in range(count)]
            for layer, event in zip(layers, self._ready, strict=True):
                layer.register_forward_pre_hook(lambda *_, event=event: torch.cuda.current_stream().wait_event(event))

    def load(self) -> None:
        """Launches all copies. They wait for the current stream, where an earlier forward may still read the pool."""
        if not self._cuda:
            for targets, sources in zip(self._targets, self._sources, strict=True):
                torch._foreach_copy_(targets, sources)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for targets, sources, event in zip(self._targets, self._sources, self._ready, strict=True):
                torch._foreach_copy_(targets, sources, non_blocking=True)
                event.record()


class Served:
    """A request to a model. Positions are system prompt, chunks, question; slots are the same, then fresh ones."""

    def __init__(self, setup: Setup) -> None:
        sizes, self._device = setup.sizes, setup.device
        self.name, self.context = sizes.model.name, sizes.model_context
        self._shape = sizes.model
        self._model = build(sizes.model, setup.dtype, setup.device)
        self._start, self._tokens = SYSTEM + self.context, SYSTEM + self.context + QUESTION
        self._parts = cached(self.context, sizes.chunk)
        self._stale = torch.zeros(self._start, dtype=torch.bool)
        self._stale[SYSTEM:] = True
        self._ids = torch.randint(self._model.vocabulary, (self._tokens,), device=self._device)
        kv = self._model.kv
        # Fresh tokens fit after the cached ones. Full attention overwrites all slots, and loading restores them.
        slots = 2 * self._start + QUESTION
        self._pool = torch.zeros(kv.layers, 2, slots, kv.kv_heads, kv.head_dim, dtype=kv.dtype, device=self._device)
        self._host = HostCache(self._pool, self._parts[1:], self._model.network.model.layers)
        self.cached_bytes = self._host.bytes

    def install(self) -> None:
        """Switches the model permanently to attention over the pool."""
        model_runner.install(self._model)

    def sdpa(self) -> int:
        """First token by transformers' SDPA over the whole prompt, without a cache; only before `install`."""
        return self._first(self._sdpa_hidden())

    def full(self) -> int:
        """First token with every token a row, in one step: 28k rows of a 7B model take 4 GiB besides the weights."""
        return self._first(self._full_hidden())

    def disagreement(self) -> float:
        """Relative norm of the difference between the last hidden states of both full forwards."""
        ours = self._full_hidden()[-1].float()
        network = self._model.network
        network.config._attn_implementation = "sdpa"
        other = self._sdpa_hidden()[-1].float()
        network.config._attn_implementation = model_runner.NAME
        return float((ours - other).norm() / other.norm())

    def load(self) -> None:
        """Starts copying all chunks into the pool."""
        self._host.load()

    def select(self, ratio: float) -> torch.Tensor:
        """int64 [tokens], ascending, on the CPU: positions that the question attends to most in the last layer."""
        count = budget(ratio, self.context, self.context)
        if count == 0:
            return torch.empty(0, dtype=torch.int64)
        span = self._span(torch.empty(0, dtype=torch.int64))
        probe = Probe(span, frozenset({self._shape.layers - 1}))
        model_runner.forward(self._model, self._batch(span, [probe]))
        return top_k(probe.scores[: self._start].cpu(), self._stale, count)

    def answer(self, chosen: torch.Tensor) -> int:
        """First token, with the chosen tokens and the question as rows."""
        return self._first(model_runner.forward(self._model, self._batch(self._span(chosen), [])))

    def operations(self, ratio: float) -> int:
        """Floating-point operations of a forward over a share of the context and the question, without scoring."""
        if ratio == 1:
            rows, pairs = self._tokens, self._tokens * (self._tokens + 1) // 2
        else:
            count = budget(ratio, self.context, self.context)
            rows = count + QUESTION
            # A chosen token is anywhere among the chunks, so on average it sees half of them.
            pairs = (count * (SYSTEM + self._start) + QUESTION * (self._start + self._tokens)) // 2
        shape, kv = self._shape, self._model.kv
        width = 2 * shape.hidden + 2 * kv.kv_heads * kv.head_dim + 3 * shape.intermediate
        layer = 2 * rows * shape.hidden * width + 4 * shape.heads * kv.head_dim * pairs
        return shape.layers * layer + 2 * shape.vocabulary * shape.hidden

    def _span(self, chosen: torch.Tensor) -> QuerySpan:
        computed = torch.cat([chosen, torch.arange(self._start, self._tokens)])
        return lay_out(self._parts, computed, self._start, 0, len(computed), self._device)

    def _batch(self, span: QuerySpan, probes: list[Probe]) -> Batch:
        slots = torch.arange(self._start, self._start + span.rows, device=self._device)
        ids = self._ids[span.positions]
        return Batch(ids, span.positions, slots, Spans([span]), self._pool, self._model.rotations, probes)

    def _full_hidden(self) -> torch.Tensor:
        where = torch.arange(self._tokens, device=self._device)
        spans = Spans([QuerySpan(0, self._tokens, where, (KVSegment(0, self._tokens, 0),))])
        batch = Batch(self._ids, where, where, spans, self._pool, self._model.rotations)
        return model_runner.forward(self._model, batch)

    @torch.inference_mode()
    def _sdpa_hidden(self) -> torch.Tensor:
        # Named explicitly so that the baseline on a GPU is not a slower backend. The CPU has a flash backend, too.
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = self._model.network.model(input_ids=self._ids[None], use_cache=False)
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden

    def _first(self, hidden: torch.Tensor) -> int:
        return int(model_runner.logits(self._model, hidden[-1:]).argmax())


def build(shape: ModelShape, dtype: torch.dtype, device: torch.device) -> models.Model:
    """A model with random weights, which do not affect speed, created on its device."""
    config = Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=shape.tied,
        dtype=dtype,
    )
    torch.manual_seed(0)
    with torch.device("meta"):
        network: Any = Qwen2ForCausalLM(config)
    network = network.to(dtype=dtype).to_empty(device=device)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    for module in network.modules():
        if module.__class__.__name__.endswith("RMSNorm"):
            torch.nn.init.ones_(module.weight)
    network.tie_weights()
    # Buffers are uninitialised after `to_empty`: create them again.
    network.model.rotary_emb = type(network.model.rotary_emb)(config).to(device)
    words = Tokenizer(WordLevel({str(i): i for i in range(1000)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    return models.wrap(shape.name, network.eval(), tokenizer, b"\0" * 32, config.max_position_embeddings)
