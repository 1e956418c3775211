"""The engine: a thread that computes ragged steps, one after another."""

import logging
import threading

import torch

from fusionkv.fusion_worker.attention import Batch, Probe, forward, install, logits
from fusionkv.fusion_worker.engine.kv_pool import KVPool
from fusionkv.fusion_worker.engine.scheduler import Part, Scheduler
from fusionkv.fusion_worker.engine.work import Result, Work, settled
from fusionkv.fusion_worker.models import Model
from fusionkv.kernels.segment_table import Spans
from fusionkv.kernels.segments import Span

log = logging.getLogger(__name__)


class Engine:
    """Computes works of many requests together. `run` is called from the event loop, the rest is the thread's."""

    def __init__(self, model: Model, pool: KVPool, max_step_tokens: int) -> None:
        install(model)
        self._model = model
        self._pool = pool
        self._scheduler = Scheduler(max_step_tokens)
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._thread.start()

    async def run(self, work: Work) -> Result:
        """Computes a work. Cancelling the caller frees nothing too early: it returns when the step is over."""
        self._scheduler.add(work)
        return await settled(work.future, work)

    def close(self) -> None:
        """Ends the thread after the step it is in."""
        self._scheduler.close()
        self._thread.join()

    def _loop(self) -> None:
        while (parts := self._scheduler.take()) is not None:
            if parts:
                self._compute(parts)

    def _compute(self, parts: list[Part]) -> None:
        """A step. When it fails, its works are computed one by one, so that only what is at fault fails."""
        try:
            self.step(parts)
        except Exception as error:
            left = [part for part in parts if not part.work.future.done()]
            if len(parts) > 1:
                log.warning("a step of %d works failed and is done again one by one: %r", len(parts), error)
                for part in left:
                    self._compute([part])
                return
            log.error("a work failed", exc_info=error)
            for part in left:
                part.work.abandoned = True
                part.work.future.set_exception(error)

    def step(self, parts: list[Part]) -> None:
        """One forward over the parts' rows; finished works get their results."""
        batch, probes = self._assemble(parts)
        hidden = forward(self._model, batch)
        spans = dict(zip(parts, batch.spans, strict=True))
        tokens = self._sample([p for p in parts if p.last and p.work.sampler], spans, hidden)
        for part, span in spans.items():
            if part.last:
                work = part.work
                scores = probes[work].scores if work in probes else None
                mean = hidden[span.start : span.stop].float().mean(0).cpu() if work.mean else None
                work.future.set_result(Result(tokens.get(work), scores, mean))

    def _sample(self, parts: list[Part], spans: dict[Part, Span], hidden: torch.Tensor) -> dict[Work, int]:
        if not parts:
            return {}
        rows = torch.tensor([spans[part].stop - 1 for part in parts], device=hidden.device)
        scores = logits(self._model, hidden[rows])
        return {p.work: p.work.sampler.draw(row) for p, row in zip(parts, scores, strict=True) if p.work.sampler}

    def _assemble(self, parts: list[Part]) -> tuple[Batch, dict[Work, Probe]]:
        spans: list[Span] = []
        probes: dict[Work, Probe] = {}
        at = 0
        for part in parts:
            work = part.work
            positions = work.positions[part.start : part.stop]
            span = Span(at, at + len(positions), positions, (*work.seen, *work.own(part.stop)))
            at = span.stop
            spans.append(span)
            if work.probe:
                probes[work] = Probe(span, work.probe)
        batch = Batch(
            ids=torch.cat([p.work.ids[p.start : p.stop] for p in parts]),
            positions=torch.cat([s.positions for s in spans]),
            slots=torch.cat([p.work.slots(p.start, p.stop) for p in parts]),
            spans=Spans(spans),
            pool=self._pool.kv,
            rotation=self._model.rotation,
            probes=tuple(probes.values()),
        )
        return batch, probes
