"""The engine: a thread that computes ragged steps, one after another."""

import logging
import threading

import torch

from fusionkv.fusion_worker.attention import Batch, Probe, forward, install, logits, shallow
from fusionkv.fusion_worker.engine.kv_pool import KVPool
from fusionkv.fusion_worker.engine.scheduler import Part, Scheduler
from fusionkv.fusion_worker.engine.work import Result, ShallowProbe, Work, settled
from fusionkv.fusion_worker.methods.shallow import scores
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
        """One forward over the parts' rows, and one for each that goes alone; finished works get their results."""
        together = [part for part in parts if not part.work.alone]
        for group in ([together] if together else []) + [[part] for part in parts if part.work.alone]:
            if group[0].work.shallow:
                self._look(group[0])
            else:
                self._advance(group)

    def _advance(self, parts: list[Part]) -> None:
        """Runs the parts' rows through all layers, or all that are left of them."""
        batch, spans, probes = self._assemble(parts)
        hidden = forward(self._model, batch, parts[0].work.ahead)
        last = {part: span for part, span in zip(parts, spans, strict=True) if part.last}
        predicted = self._predict(last, hidden)
        for part, span in last.items():
            work = part.work
            rows = predicted.get(work)
            token = work.sampler.draw(rows[-1]) if work.sampler is not None and rows is not None else None
            scores = probes[work].scores if work in probes else None
            mean = hidden[span.start : span.stop].float().mean(0).cpu() if work.mean else None
            work.future.set_result(Result(token, rows if work.logits else None, scores, mean))

    def _predict(self, spans: dict[Part, Span], hidden: torch.Tensor) -> dict[Work, torch.Tensor]:
        """Logits of the last rows of works that are sampled from or want some."""
        counts = {part.work: max(part.work.logits, part.work.sampler is not None) for part in spans}
        wanted = {part.work: (span.stop - counts[part.work], span.stop) for part, span in spans.items()}
        rows = [torch.arange(*wanted[work]) for work, count in counts.items() if count]
        if not rows:
            return {}
        found = logits(self._model, hidden[torch.cat(rows).to(hidden.device)])
        return dict(zip([w for w, n in counts.items() if n], found.split([len(r) for r in rows]), strict=True))

    def _look(self, part: Part) -> None:
        """Runs a work's rows through layer 0 and scores its tokens by what they are there."""
        work, (batch, (span,), _) = part.work, self._assemble([part])
        assert isinstance(work.probe, ShallowProbe)
        found = shallow(self._model, batch)
        scored = scores(
            work.probe.score, found.second, self._pool.kv[1], span, self._model.rotation, work.probe.starts
        )
        work.future.set_result(Result(scores=scored, shallow=found))

    def _assemble(self, parts: list[Part]) -> tuple[Batch, list[Span], dict[Work, Probe]]:
        spans: list[Span] = []
        probes: dict[Work, Probe] = {}
        at = 0
        for part in parts:
            work = part.work
            positions = work.positions[part.start : part.stop]
            span = Span(at, at + len(positions), positions, (*work.seen, *work.own(part.stop)))
            at = span.stop
            spans.append(span)
            if work.probe and not isinstance(work.probe, ShallowProbe):
                probes[work] = Probe(span, work.probe)
        batch = Batch(
            ids=torch.cat([p.work.ids[p.start : p.stop] for p in parts]),
            positions=torch.cat([s.positions for s in spans]),
            slots=torch.cat([p.work.slots(p.start, p.stop) for p in parts]),
            spans=Spans([s for s, p in zip(spans, parts, strict=True) if p.work.temper is None]),
            pool=self._pool.kv,
            rotation=self._model.rotation,
            probes=tuple(probes.values()),
            tempered=[(s, p.work.temper) for s, p in zip(spans, parts, strict=True) if p.work.temper is not None],
        )
        return batch, spans, probes
