"""Fused prefill in vLLM's process: the fusion worker's engine on vLLM's weights."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from google.protobuf.json_format import MessageToDict

from fusionkv.fusion_worker import meters
from fusionkv.fusion_worker.compute.engine import Engine
from fusionkv.fusion_worker.compute.jobs import Nothing
from fusionkv.fusion_worker.compute.kv_pool import KVPool
from fusionkv.fusion_worker.compute.plan import PrefillPlan
from fusionkv.fusion_worker.compute.planner import Planner
from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.fusion_worker.load.loader import Loader
from fusionkv.fusion_worker.load.lookup import NotFiniteKV
from fusionkv.fusion_worker.meters import PrefillFigures, Stopwatch, Summary
from fusionkv.fusion_worker.models import Model
from fusionkv.fusion_worker.quality.verdict import Verdict
from fusionkv.fusion_worker.select.base import budget
from fusionkv.fusion_worker.transfer.handover import copy_prompt
from fusionkv.kernels.segments import QuerySpan
from fusionkv.kvcache_service.client import CacheClient
from fusionkv.protos.contract.names import DEFAULT
from fusionkv.protos.contract.recipes import RECIPES, Recipe
from fusionkv.protos.contract.requests import RequestedRecipe
from fusionkv.protos.runtime import settings
from fusionkv.protos.runtime.cancellation import to_the_end
from fusionkv.vllm_connector.spans import SpannedPrompt
from fusionkv.vllm_connector.steps import VLLMSteps

log = logging.getLogger("vllm.fusionkv")
Write = Callable[[torch.Tensor], Awaitable[None]]


class FusedPrefill:
    """Makes the KV of prompts before their questions. Create it in the event loop that uses it."""

    def __init__(
        self, model: Model, directory: Path, pool_bytes: int, rows: int, steps: VLLMSteps, cache: CacheClient | None
    ) -> None:
        """Takes the memory of the pool. Raises SettingsError for a wrong environment variable of the worker.

        Args:
            directory: of the model's files, which may hold verdicts of `fusionkv check`.
            rows: maximum rows of a step.
            steps: the turns of the engine's steps, which start now.
        """
        # Timeouts, the storage format and the like come from the worker's environment variables.
        own = {"model": directory, "pool_bytes": pool_bytes, "max_step_tokens": rows}
        config = settings.load(WorkerConfig, "worker", flags=own)
        self.pool = KVPool.of(model.kv, pool_bytes, config.page_tokens, model.device)
        self._model, self._steps = model, steps
        self._engine = Engine(model, self.pool, config, steps)
        self._loader = Loader(config, model, self.pool, self._engine, cache)
        self._planner = Planner(model, self._engine)
        self._verdict = Verdict.read(directory, model.fingerprint)
        self._described = model.described(auxiliary=False)
        self._described.default_recipe = self._verdict.default.choice.recipe
        self._busy = ExitStack()
        steps.start()
        log.info("vLLM fuses passages, with a KV pool of %d tokens", self.pool.capacity)

    def run_steps(self, busy: bool, loading: Callable[[], bool]) -> None:
        """As `VLLMSteps.run`. While vLLM is busy, steps are shorter (the worker's `max_mixed_tokens`)."""
        mixed = self._busy.pop_all()
        if busy:
            self._busy.enter_context(self._engine.streaming())
        mixed.close()
        self._steps.run(busy, loading)

    async def fill(self, asked: SpannedPrompt, write: Write) -> dict[str, Any]:
        """Makes the KV of a prompt before its question; returns the figures, as answer.v1.Summary in JSON.

        Args:
            write: takes the KV, [layers, 2, tokens, kv_heads, head_dim].

        Raises:
            CacheFault, ServiceError: as the worker's loader and engine, and for a recipe that the model can't follow.
        """
        recipe, ratio, replaced = self._recipe(asked)
        prompt, stopwatch = asked.prompt(), Stopwatch()

        def fresh(stale: int) -> int:
            # The question's rows are computed for scores alone: vLLM computes them again.
            return budget(ratio, prompt.context_tokens, stale) + len(prompt.question)

        assert recipe.encode is not None
        async with self._loader.prompt(prompt, fresh, stopwatch, recipe.encode) as loaded:
            with stopwatch.clock("select"):
                whole = await self._planner.fuse(loaded.layout, prompt, recipe, ratio)
            rows = slice(len(whole.chosen))
            plan = replace(whole, ids=whole.ids[rows], positions=whole.positions[rows])
            with stopwatch.clock("prefill"):
                if len(plan.chosen):
                    await self._engine.run(plan.prefill(Nothing()))
                kv = await to_the_end(asyncio.to_thread(self._copied, plan, asked.tokens))
                if not bool(kv.isfinite().all()):
                    await self._loader.loads.discard(plan.layout.parts)
                    raise NotFiniteKV("the fused KV is not finite (NaN or infinity)")
                await write(kv)
            figures = PrefillFigures(prompt, recipe, ratio, loaded.figures, plan.lossless_tokens, len(plan.chosen))
        meters.first_token(figures, stopwatch.seconds)
        summary = Summary(figures, "", 0, stopwatch.seconds).message(replaced)
        return MessageToDict(summary, preserving_proto_field_name=True)

    async def close(self) -> None:
        """Ends the engine and stores or drops what waits."""
        self._steps.close()
        await self._loader.close()
        self._engine.close()

    def _recipe(self, asked: SpannedPrompt) -> tuple[Recipe, float, str]:
        """The recipe, its ratio, and why it is another one than requested; empty if it is not."""
        requested = RequestedRecipe.of(asked.recipe, self._described)
        requested.check(asked.ratio, len(asked.spans), self._described)
        requested.check_portable()
        given = asked.ratio
        if given is None and asked.recipe.partition("+")[0] == DEFAULT:
            given = self._verdict.default.choice.ratio
        ratio = requested.recipe.ratio_for(given)
        if replaced := self._verdict.unsafe(requested.recipe, ratio):
            return RECIPES["prefix_cache"], 0.0, replaced
        return requested.recipe, ratio, ""

    def _copied(self, plan: PrefillPlan, tokens: int) -> torch.Tensor:
        """The KV of the prompt's first tokens, keys at their positions."""
        kv = self.pool.kv
        out = torch.empty(kv.shape[0], 2, tokens, *kv.shape[3:], dtype=kv.dtype, device=kv.device)
        last = torch.tensor([tokens - 1], device=kv.device)
        copy_prompt(QuerySpan(0, 1, last, plan.visible()), kv, self._model, out)
        return out
