"""The engine: a thread that computes ragged steps, one after another."""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from fusionkv.fusion_worker.compute.kv_pool import KVPool
from fusionkv.fusion_worker.compute.model_runner import Batch, Probe, Votes, forward, install, logits
from fusionkv.fusion_worker.compute.scheduler import ForwardJob, Result, ScheduledSlice, Scheduler
from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.fusion_worker.decode.sampling import NotFinite
from fusionkv.fusion_worker.models import ALONE, Model, Ranks
from fusionkv.kernels.segments import QuerySpan, Spans
from fusionkv.protos.observe import logs
from fusionkv.protos.runtime.cancellation import to_the_end
from fusionkv.protos.runtime.errors import Unavailable, first_line

log = logging.getLogger(__name__)


class TPGroup:
    """The ranks that run a worker's steps and copies together: here a single one.

    own: objects that every rank has itself; a call that refers to one runs with each rank's own.
    on_lost: called with the error, in the thread that noticed, when the worker can't go on.
    """

    ranks: Ranks = ALONE

    def __init__(self, on_lost: Callable[[Unavailable], None] = lambda _: None) -> None:
        self.own: list[Any] = []
        self.on_lost = on_lost

    def step(self, call: Callable[[], Any]) -> Any:
        """Runs a step of the engine on all ranks and returns rank 0's result. For the engine's thread only."""
        return call()

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
        self.tp.own[:] = pool.own(model)
        self.tp.step(partial(install, model))
        self._scheduler = Scheduler(config.max_step_tokens, config.max_mixed_tokens, config.deterministic)
        self.streaming = self._scheduler.streaming
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._thread.start()

    async def run(self, work: ForwardJob) -> Result:
        """Computes a job. If the caller is cancelled, this returns only after the step: slots are not freed early."""
        self._scheduler.add(work)
        waiting = asyncio.wrap_future(work.future)
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            work.abandoned = True
            # Nobody reads its error any more; the event loop must not report it as never retrieved.
            waiting.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            if not work.future.cancel():
                await to_the_end(asyncio.wait([waiting]))
            raise

    def close(self) -> None:
        """Ends the thread after its current step."""
        self._scheduler.close()
        self._thread.join()

    def _loop(self) -> None:
        with torch.cuda.device_of(self._pool.kv):  # where Triton launches kernels; each thread has its own
            while (parts := self._scheduler.take()) is not None:
                if parts:
                    self._compute(parts)

    def _compute(self, parts: list[ScheduledSlice]) -> None:
        """Computes a step. If it fails, its jobs are computed one by one, so that only the faulty job fails."""
        try:
            self.step(parts)
        except Exception as error:
            left = [part for part in parts if not part.work.future.done()]
            if len(parts) > 1:
                log.warning(
                    "a step of %d jobs failed and is repeated one by one: %s",
                    len(parts),
                    logs.kind(error),
                )
                for part in left:
                    self._compute([part])
                return
            log.error("a job failed", exc_info=error)
            for part in left:
                part.work.abandoned = True
                part.work.future.set_exception(error)
            if self._pool.kv.is_cuda:
                self._check_device()

    def _check_device(self) -> None:
        """Ends the worker after an error that the GPU's driver then gives for every call, such as a bad address."""
        try:
            torch.cuda.synchronize(self._pool.kv.device)
        except Exception as error:
            self.tp.on_lost(Unavailable(f"the GPU answers no more calls of this process: {first_line(error)}"))

    def step(self, parts: list[ScheduledSlice]) -> None:
        """One forward pass, and one for each part that is scored after layer 0. Sets results of jobs."""
        if through := [part for part in parts if not part.work.shallow]:
            self._advance(through)
        for part in parts:
            if part.work.shallow:
                self._score_shallow(part)

    def _advance(self, parts: list[ScheduledSlice]) -> None:
        """Runs the parts' rows through the layers."""
        step = self._assemble(parts)
        hidden = self.tp.step(partial(forward, self._model, step.batch))
        last = {part.work: span for part, span in zip(parts, step.spans, strict=True) if part.last}
        predicted = self._predict(last, hidden)
        for work in last:
            rows = predicted.get(work)
            try:
                token = work.sampler.draw(rows[-1]) if work.sampler is not None and rows is not None else None
            except NotFinite as error:  # of this job: the step's others have their results
                work.future.set_exception(error)
                continue
            result = Result(
                token=token,
                logits=rows if work.logits else None,
                scores=step.probes[work].scores.cpu() if work in step.probes else None,  # waits for the step, here
                votes=torch.stack(step.votes[work].layers) if work in step.votes else None,
            )
            work.future.set_result(result)

    def _predict(self, spans: dict[ForwardJob, QuerySpan], hidden: torch.Tensor) -> dict[ForwardJob, torch.Tensor]:
        """Logits of the last rows, for jobs that sample a token or want logits."""
        counts = {work: max(work.logits, int(work.sampler is not None)) for work in spans}
        wanted = {work: count for work, count in counts.items() if count}
        if not wanted:
            return {}
        rows = [torch.arange(spans[work].stop - count, spans[work].stop) for work, count in wanted.items()]
        found = logits(self._model, hidden[torch.cat(rows).to(hidden.device)])
        return dict(zip(wanted, found.split(list(wanted.values())), strict=True))

    def _score_shallow(self, part: ScheduledSlice) -> None:
        """Runs a job's rows through layer 0 and scores its tokens by their states there."""
        work, step = part.work, self._assemble([part])
        assert work.shallow is not None
        scores = self.tp.step(partial(work.shallow.look, self._model, step.batch))
        work.future.set_result(Result(scores=scores.cpu()))

    def _assemble(self, parts: list[ScheduledSlice]) -> "_Step":
        spans: list[QuerySpan] = []
        probes: dict[ForwardJob, Probe] = {}
        votes: dict[ForwardJob, Votes] = {}
        at = 0
        for part in parts:
            work = part.work
            positions = work.positions[part.start : part.stop]
            span = QuerySpan(at, at + len(positions), positions, (*work.seen, *work.own(part.stop)))
            at = span.stop
            spans.append(span)
            if work.probe:
                probes[work] = Probe(span, work.probe)
            if work.votes:
                voters = QuerySpan(at - work.votes, at, positions[-work.votes :], span.segments)
                votes[work] = Votes(voters)
        tempers = [part.work.temper for part in parts]
        batch = Batch(
            ids=torch.cat([p.work.ids[p.start : p.stop] for p in parts]),
            positions=torch.cat([s.positions for s in spans]),
            slots=torch.cat([p.work.slots(p.start, p.stop) for p in parts]),
            spans=Spans([s for s, t in zip(spans, tempers, strict=True) if t is None]),
            pool=self._pool.kv,
            rotations=self._model.rotations,
            probes=tuple(probes.values()),
            votes=tuple(votes.values()),
            tempered=[(s, t) for s, t in zip(spans, tempers, strict=True) if t is not None],
            wanted=[self._wanted(part) for part in parts],
        )
        return _Step(batch, spans, probes, votes)

    def _wanted(self, part: ScheduledSlice) -> int:
        """Number of rows at the end of a part whose attention in the last layer or last hidden state is used."""
        work, last = part.work, self._model.kv.layers - 1
        if last in work.probe:
            return part.stop - part.start
        return max(work.logits, work.votes, int(work.sampler is not None)) if part.last else 0


class _Step(NamedTuple):
    """A batch, the span of each part, and the probe or votes of each job."""

    batch: Batch
    spans: list[QuerySpan]
    probes: dict[ForwardJob, Probe]
    votes: dict[ForwardJob, Votes]
