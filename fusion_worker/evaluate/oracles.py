"""Compares the engine with the model's own code, with all tokens recomputed and with none (invariant 1)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from fusionkv.fusion_worker.compute.engine import Engine
from fusionkv.fusion_worker.compute.jobs import Logits
from fusionkv.fusion_worker.compute.planner import Planner
from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.fusion_worker.load.loader import Loader
from fusionkv.fusion_worker.meters import Stopwatch
from fusionkv.fusion_worker.models import Model
from fusionkv.fusion_worker.pool.kv_pool import KVPool, pool_size
from fusionkv.fusion_worker.prompt import Chunk, Prompt
from fusionkv.protos.contract.recipes import find_recipe

_CHUNKS = (40, 1, 57, 23)
_QUESTION = 12
# Relative to the largest logit. Two correct computations in bfloat16 differed by 3% after three layers.
TOLERANCES = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@dataclass(frozen=True, slots=True)
class Oracles:
    """Largest differences of the next token's logits, relative to the largest logit of the model's own code."""

    full_attention: float
    full_reuse: float
    tolerance: float

    @property
    def held(self) -> bool:
        return max(self.full_attention, self.full_reuse) < self.tolerance


async def compare(directory: Path, model: Model, config: WorkerConfig) -> Oracles:
    """Computes a prompt of random tokens with the engine and with the unmodified model.

    There is no system prompt, so full reuse equals full attention with a block-diagonal mask: distances within a
    chunk are the same, and chunks do not see each other.
    """
    chance = torch.Generator().manual_seed(0)
    chunks = [_draw(model, count, chance) for count in _CHUNKS]
    prompt = Prompt(Chunk(()), tuple(map(Chunk, chunks)), _draw(model, _QUESTION, chance))
    computed = await _by_engine(model, prompt, config)
    network: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=model.kv.dtype, attn_implementation="eager", use_safetensors=True, trust_remote_code=False
    )
    network = network.to(model.device).eval()
    block = torch.tensor([i for i, c in enumerate(chunks) for _ in c] + [-1] * _QUESTION, device=model.device)
    apart = (block[:, None] == block) | (block[:, None] == -1)
    full = _error(computed[0], _own(network, prompt, torch.ones_like(apart)))
    reuse = _error(computed[1], _own(network, prompt, apart))
    return Oracles(full, reuse, TOLERANCES[model.kv.dtype])


def _draw(model: Model, count: int, chance: torch.Generator) -> tuple[int, ...]:
    return tuple(torch.randint(0, model.vocabulary, (count,), generator=chance).tolist())


async def _by_engine(model: Model, prompt: Prompt, config: WorkerConfig) -> list[torch.Tensor]:
    """Logits of the next token, with all tokens recomputed and with none."""
    pool = KVPool.of(model.kv, pool_size(config.pool_bytes, model), config.page_tokens, model.device)
    engine = Engine(model, pool, config)
    loader, planner = Loader(config, model, pool, engine, None), Planner(model, engine)
    computed = []
    try:
        for ratio in (1.0, 0.0):
            async with loader.prompt(prompt, lambda _: prompt.tokens, Stopwatch()) as (layout, _):
                plan = await planner.fuse(layout, prompt, find_recipe("epic"), ratio)
                computed.append((await engine.run(plan.prefill(Logits(1))))[0].cpu())
    finally:
        await loader.close()
        engine.close()
    return computed


@torch.inference_mode()
def _own(network: Any, prompt: Prompt, allowed: torch.Tensor) -> torch.Tensor:
    """float32 [vocabulary]: logits of the unmodified model with a causal mask that is limited to `allowed`."""
    config, at = network.config, torch.arange(len(allowed), device=allowed.device)

    def mask(window: int | None) -> torch.Tensor:
        visible = allowed & (at <= at[:, None])
        if window is not None:
            visible &= at > at[:, None] - window
        lowest = torch.finfo(network.dtype).min
        return torch.zeros_like(visible, dtype=network.dtype).masked_fill(~visible, lowest)[None, None]

    window = getattr(config, "sliding_window", None)
    if getattr(config, "layer_types", None) and config.model_type != "mistral":
        given: Any = {"full_attention": mask(None), "sliding_attention": mask(window)}
    else:
        given = mask(window)
    ids = prompt.ids[None].to(allowed.device)
    return network(ids, attention_mask=given, use_cache=False).logits[0, -1].float().cpu()


def _error(computed: torch.Tensor, expected: torch.Tensor) -> float:
    return float((computed - expected).abs().max() / expected.abs().max())
