"""Fused prefill in vLLM's process: the fusion worker on vLLM's weights, which gateways may reach as a worker."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from google.protobuf.json_format import MessageToDict, ParseDict

from fusionkv.fusion_worker import meters
from fusionkv.fusion_worker.compute.jobs import Nothing
from fusionkv.fusion_worker.compute.plan import PrefillPlan
from fusionkv.fusion_worker.compute.planner import Planner
from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.fusion_worker.load.lookup import NotFiniteKV
from fusionkv.fusion_worker.meters import PrefillFigures, Stopwatch, Summary
from fusionkv.fusion_worker.models import Model
from fusionkv.fusion_worker.quality.verdict import Verdict
from fusionkv.fusion_worker.select.base import budget
from fusionkv.fusion_worker.servicer import SERVICE, FusionServicer, handler
from fusionkv.fusion_worker.transfer.handover import HANDLE_BYTES, prompt_layers
from fusionkv.kernels.segments import QuerySpan
from fusionkv.protos.answer.v1 import answer_pb2
from fusionkv.protos.fusion.v1 import fusion_pb2 as pb
from fusionkv.protos.runtime import process, rpc
from fusionkv.protos.runtime.errors import FailedPrecondition, ResourceExhausted
from fusionkv.vllm_connector.spans import SpannedPrompt
from fusionkv.vllm_connector.steps import VLLMSteps

log = logging.getLogger("vllm.fusionkv")
# Keys and values of each layer, [tokens, kv_heads, head_dim].
Layers = Iterable[Sequence[torch.Tensor]]
Write = Callable[[Layers], Awaitable[None]]


class FusedPrefill(FusionServicer):
    """Makes the KV of prompts before their questions. Create it in the event loop that uses it.

    As a worker, it describes the model, renders templates, deletes primers, and promises the KV of prompts.
    """

    def __init__(self, config: WorkerConfig, model: Model, steps: VLLMSteps, listen: str = "") -> None:
        """Takes the memory of the pool.

        Args:
            steps: the turns of the engine's steps, which start now.
            listen: address of the service; empty for none.

        Raises:
            FailedPrecondition: the file of `fusionkv check` beside the model can't be used.
            OSError: the address is in use.
        """
        super().__init__(config, model, None, Verdict.read(config.model, model.fingerprint), steps)
        self.steps, self._planner = steps, Planner(model, self.engine)
        self._busy, self._stop = ExitStack(), asyncio.Event()
        # Figures of prompts that were promised, by ticket.
        self._promised: dict[str, asyncio.Future[answer_pb2.Summary]] = {}
        steps.start()
        log.info("vLLM fuses passages, with a KV pool of %d tokens", self.pool.capacity)
        self._serving: asyncio.Task[None] | None = None
        if listen:
            process.check_ports([listen], "listen")
            alone = replace(config, listen=(listen,), drain_seconds=0.0, health_listen="")
            served = rpc.Served({SERVICE.full_name: handler(self)})
            self._serving = asyncio.create_task(rpc.serve("fusionkv-vllm", alone, served, self._stop))

    def run_steps(self, busy: bool, loading: Callable[[], bool]) -> None:
        """As `VLLMSteps.run`. While vLLM is busy, steps are shorter (the worker's `max_mixed_tokens`)."""
        mixed = self._busy.pop_all()
        if busy:
            self._busy.enter_context(self.engine.streaming())
        mixed.close()
        self.steps.run(busy, loading)

    async def fill(self, asked: SpannedPrompt, write: Write) -> dict[str, Any]:
        """Makes the KV of a prompt before its question; returns the figures, as answer.v1.Summary in JSON.

        write: takes the KV of the prompt. Raises CacheFault and ServiceError as the worker's loader and engine, and
        for a recipe that the model can't follow.
        """
        request, replaced = await self._checked(asked.request(), portable=True)
        prompt, recipe, ratio, stopwatch = request.prompt, request.recipe, request.ratio, Stopwatch()

        def fresh(stale: int) -> int:
            # The question's rows are computed for scores alone: vLLM computes them again.
            return budget(ratio, prompt.context_tokens, stale) + len(prompt.question)

        assert recipe.encode is not None
        async with self.loader.prompt(prompt, fresh, stopwatch, recipe.encode) as loaded:
            with stopwatch.clock("select"):
                whole = await self._planner.fuse(loaded.layout, prompt, recipe, ratio)
            rows = slice(len(whole.chosen))
            plan = replace(whole, ids=whole.ids[rows], positions=whole.positions[rows])
            with stopwatch.clock("prefill"):
                if len(plan.chosen):
                    await self.engine.run(plan.prefill(Nothing()))
                try:
                    await write(self._layers(plan, asked.tokens))
                except NotFiniteKV:
                    await self.loader.loads.discard(plan.layout.parts)
                    raise
            figures = PrefillFigures(prompt, recipe, ratio, loaded.figures, plan.lossless_tokens, len(plan.chosen))
        meters.first_token(figures, stopwatch.seconds)
        summary = Summary(figures, "", 0, stopwatch.seconds).message(replaced)
        return MessageToDict(summary, preserving_proto_field_name=True)

    async def tell(self, told: Mapping[str, dict[str, Any]]) -> None:
        """Takes the figures of requests that have ended, by their tickets. Unknown tickets are ignored."""
        for ticket, figures in told.items():
            if (promised := self._promised.get(ticket)) is not None and not promised.done():
                promised.set_result(ParseDict(figures, answer_pb2.Summary()))

    async def Prefill(self, request: pb.PrefillRequest, context: Any) -> AsyncIterator[pb.PrefillResponse]:
        """Promises the KV of a prompt, and yields its figures once vLLM has ended the request with the ticket."""
        checked, _ = await self._checked(request.prompt, portable=True)
        if checked.explained:
            raise FailedPrecondition("only a fusion worker can explain a prompt, and vLLM has none")
        if len(self._promised) >= self._config.max_requests + self._config.max_queue:
            raise ResourceExhausted(f"{len(self._promised)} prompts are promised already: try again later")
        ticket = os.urandom(HANDLE_BYTES)
        self._promised[ticket.hex()] = figures = asyncio.get_running_loop().create_future()
        try:
            exact, limit = checked.recipe.encode is None, checked.params.max_tokens
            yield pb.PrefillResponse(promise=pb.Promise(ticket=ticket, lossless=exact, max_tokens=limit))
            yield pb.PrefillResponse(summary=await figures, pool_tokens=self.pool.capacity)
        finally:
            del self._promised[ticket.hex()]

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        """Refused: vLLM has the answers."""
        raise FailedPrecondition("this worker is inside vLLM, which decodes: set decode = vllm in the gateway")
        yield  # makes this a generator

    async def Encode(self, request: pb.EncodeRequest, context: Any) -> pb.EncodeResponse:
        """Refused: while vLLM has no request, nothing is computed."""
        raise FailedPrecondition("vLLM encodes passages with the first prompt that has them, not ahead of time")

    async def close(self) -> None:
        """Ends service and engine, and stores or drops what waits."""
        self._stop.set()
        if self._serving is not None:
            await asyncio.wait([self._serving])
        self.steps.close()
        await super().close()

    def _layers(self, plan: PrefillPlan, tokens: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields the KV of the prompt's first tokens, keys at their positions. Raises NotFiniteKV at the end."""
        span, finite = QuerySpan(0, 1, torch.tensor([tokens - 1]), plan.visible()), []
        for layer in prompt_layers(span, self.pool.kv, self._model):
            finite.append(torch.stack([each.isfinite().all() for each in layer]))
            yield layer
        if not bool(torch.stack(finite).all()):
            raise NotFiniteKV("the fused KV is not finite (NaN or infinity)")
