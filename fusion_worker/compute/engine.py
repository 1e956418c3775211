"""The engine: a thread that computes ragged steps, one after another."""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from fusionkv.fusion_worker.compute.batch import Batch
from fusionkv.fusion_worker.compute.jobs import ForwardJob, ShallowScores, T_co
from fusionkv.fusion_worker.compute.model_runner import forward, install, logits, shallow
from fusionkv.fusion_worker.compute.scheduler import QueuedJob, ScheduledSlice, Scheduler
from fusionkv.fusion_worker.compute.step import Step
from fusionkv.fusion_worker.compute.step_graphs import StepGraphs
from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.fusion_worker.decode.sampling import Best, NotFinite, best_of
from fusionkv.fusion_worker.models import ALONE, Model, Ranks
from fusionkv.fusion_worker.pool.kv_pool import KVPool, owned
from fusionkv.fusion_worker.select.base import scores
from fusionkv.fusion_worker.select.fresh_layer import FreshStates
from fusionkv.kernels.upload import upload
from fusionkv.protos.observe import logs
from fusionkv.protos.runtime.cancellation import to_the_end
from fusionkv.protos.runtime.errors import Unavailable, first_line

log = logging.getLogger(__name__)


class TPGroup:
    """The ranks that run a worker's steps and copies together: here a single one.

    own: objects that every rank has itself; a call that refers to one runs with each rank's own.
    on_lost: called with the error, in the thread that noticed, when the worker can't go on.
    captures: whether a step may take as long as capturing it as a CUDA graph.
    """

    ranks: Ranks = ALONE
    captures = True

    def __init__(self, on_lost: Callable[[Unavailable], None] = lambda _: None) -> None:
        self.own: list[Any] = []
        self.on_lost = on_lost

    def step(self, call: Callable[[], Any]) -> Any:
        """Runs a step of the engine on all ranks and returns rank 0's result. For the engine's thread only."""
        return call()

    def forward(self, model: Model, batch: Batch) -> torch.Tensor:
        """Runs all layers over a step's rows on all ranks, as `model_runner.forward`. For the engine only."""
        return self.step(partial(forward, model, batch))

    def copy(self, call: Callable[..., Any], parts: Sequence[torch.Tensor] = ()) -> list[torch.Tensor]:
        """Runs a copy of KV on all ranks, concurrently with steps; returns all results. Thread-safe.

        Args:
            call: takes the rank's part, if there are parts, and returns a uint8 tensor of the same size on all ranks,
                or None.
            parts: a uint8 tensor for each rank.
        """
        return [call(*parts)]


class Engine:
    """Computes jobs of many requests together, on a thread of its own.

    `run`, `streaming` and `close` are for the event loop.
    """

    def __init__(self, model: Model, pool: KVPool, config: WorkerConfig, tp: TPGroup | None = None) -> None:
        """tp: the ranks that compute each step; None for one rank."""
        self._model = model
        self._pool = pool
        self.tp = tp or TPGroup()
        self.tp.own[:] = owned(pool, model)
        with torch.cuda.device_of(pool.kv):  # where Triton launches kernels; each thread has its own
            self.tp.step(partial(install, model))
        self._graphs = StepGraphs(model, pool)
        self._scheduler = Scheduler(config.max_step_tokens, config.max_mixed_tokens, config.deterministic)
        self.streaming = self._scheduler.streaming
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._thread.start()

    async def run(self, job: ForwardJob[T_co], background: bool = False) -> T_co:
        """Computes a job. If the caller is cancelled, this returns only after the step: slots are not freed early.

        background: whether it runs after all prefills of waiting requests.
        """
        queued = QueuedJob(job, background)
        self._scheduler.add(queued)
        waiting: asyncio.Future[T_co] = asyncio.wrap_future(queued.future)
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            queued.abandoned = True
            # Nobody reads its error any more; the event loop must not report it as never retrieved.
            waiting.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            if not queued.future.cancel():
                await to_the_end(asyncio.wait([waiting]))
            raise

    def close(self) -> None:
        """Ends the thread after its current step."""
        self._scheduler.close()
        self._thread.join()

    def _loop(self) -> None:
        with torch.cuda.device_of(self._pool.kv):
            while (slices := self._scheduler.take()) is not None:
                if slices:
                    self._compute(slices)

    def _compute(self, slices: list[ScheduledSlice]) -> None:
        """Computes a step. If it fails, its jobs are computed one by one, so that only the faulty job fails."""
        try:
            self.step(slices)
        except Exception as error:
            unfinished = [one for one in slices if not one.queued.future.done()]
            if len(slices) > 1:
                log.warning("a step of %d jobs failed and is repeated one by one: %s", len(slices), logs.kind(error))
                for one in unfinished:
                    self._compute([one])
                return
            log.error("a job failed", exc_info=error)
            for one in unfinished:
                one.queued.abandoned = True
                one.queued.future.set_exception(error)
            if self._pool.kv.is_cuda:
                self._check_device()

    def _check_device(self) -> None:
        """Ends the worker after an error that the GPU's driver then gives for every call, such as a bad address."""
        try:
            torch.cuda.synchronize(self._pool.kv.device)
        except Exception as error:
            self.tp.on_lost(Unavailable(f"the GPU answers no more calls of this process: {first_line(error)}"))

    def step(self, slices: list[ScheduledSlice]) -> None:
        """One forward pass, and one for each slice that is scored at layer 1. Sets results of jobs."""
        if through := [one for one in slices if not isinstance(one.job.output, ShallowScores)]:
            self._advance(Step.of(through, self._model, self._pool.kv))
        for one in slices:
            if isinstance(one.job.output, ShallowScores):
                batch = Step.of([one], self._model, self._pool.kv).batch
                scored = self.tp.step(partial(_score_shallow, one.job.output, self._model, batch))
                one.queued.future.set_result(scored.cpu())

    def _advance(self, step: Step) -> None:
        """Runs a step's rows through all layers, and completes the jobs of which it has the last rows."""
        graphs, predicted, drawn = self._graphs, dict[int, torch.Tensor](), dict[int, Best]()
        if graphs.decodes(step) and (found := self.tp.step(partial(graphs.predict, step))) is not None:
            predicted = dict(enumerate(found.logits.split(1)))
            drawn = dict(enumerate(best_of(found.figures)))
        elif not (self.tp.captures and graphs.chooses(step) and self.tp.step(partial(graphs.score, step))):
            hidden = self.tp.forward(self._model, step.batch)
            predicted = self._predict(step, hidden)
            drawn = step.best(predicted)
        for index, one in enumerate(step.slices):
            if one.last:
                try:
                    one.queued.future.set_result(step.result(index, predicted.get(index), drawn.get(index)))
                except NotFinite as error:  # of this job: the step's others have their results
                    one.queued.future.set_exception(error)

    def _predict(self, step: Step, hidden: torch.Tensor) -> dict[int, torch.Tensor]:
        """By index of the slice, logits of its last rows, where a token or logits are wanted."""
        counts = step.predicted()
        if not counts:
            return {}
        stops = {index: step.spans[index].stop for index in counts}
        rows = [torch.arange(stops[index] - count, stops[index]) for index, count in counts.items()]
        kept = torch.cat(rows)
        if len(kept) < len(hidden):
            hidden = hidden[upload([kept], hidden.device)[0]]
        predicted = logits(self._model, hidden)
        return dict(zip(counts, predicted.split(list(counts.values())), strict=True))


@torch.inference_mode()
def _score_shallow(output: ShallowScores, model: Model, batch: Batch) -> torch.Tensor:
    """Scores of a batch's single span, float32 [selectors, last position + 1]."""
    (span,), states = batch.spans, shallow(model, batch)
    fresh = FreshStates(states, batch.pool[1], span, output.starts, model.ranks)
    return torch.stack([scores(selector, fresh) for selector in output.selectors])
