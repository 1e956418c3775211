"""A step of the engine: slices of jobs as one batch, and the results of the jobs that it completes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusionkv.fusion_worker.compute.batch import Batch, Probe, Votes
from fusionkv.fusion_worker.compute.jobs import AttentionScores, Logits, NextToken, Sampled
from fusionkv.fusion_worker.compute.scheduler import ScheduledSlice
from fusionkv.fusion_worker.decode.sampling import Best, best
from fusionkv.fusion_worker.models import Model
from fusionkv.kernels.segments import QuerySpan, Spans


@dataclass(frozen=True, slots=True)
class Step:
    """Slices of jobs and their batch. spans: of each slice. probes, votes: by index of the slice."""

    slices: Sequence[ScheduledSlice]
    batch: Batch
    spans: Sequence[QuerySpan]
    probes: dict[int, Probe]
    votes: dict[int, Votes]

    @classmethod
    def of(cls, slices: Sequence[ScheduledSlice], model: Model, kv: torch.Tensor) -> "Step":
        """The step that computes these slices. kv: the pool, [layers, tensors, slots, kv_heads, head_dim]."""
        spans: list[QuerySpan] = []
        probes: dict[int, Probe] = {}
        votes: dict[int, Votes] = {}
        at = 0
        for index, one in enumerate(slices):
            job = one.job
            positions = job.positions[one.start : one.stop]
            span = QuerySpan(at, at + len(positions), positions, job.visible(one.stop))
            at = span.stop
            spans.append(span)
            match job.output:
                case AttentionScores(layers):
                    probes[index] = Probe(span, layers, torch.zeros(int(positions[-1]) + 1, device=kv.device))
                case NextToken(votes=count) if count:
                    votes[index] = Votes(QuerySpan(at - count, at, positions[-count:], span.segments))
        tempers = [one.job.temper for one in slices]
        batch = Batch(
            ids=torch.cat([one.job.ids[one.start : one.stop] for one in slices]),
            positions=torch.cat([span.positions for span in spans]),
            slots=torch.cat([one.job.targets(one.start, one.stop) for one in slices]),
            spans=Spans([span for span, temper in zip(spans, tempers, strict=True) if temper is None]),
            pool=kv,
            rotations=model.rotations,
            probes=tuple(probes.values()),
            votes=tuple(votes.values()),
            tempered=[(span, temper) for span, temper in zip(spans, tempers, strict=True) if temper is not None],
            used=[_used(one, model.kv.layers - 1) for one in slices],
        )
        return cls(slices, batch, spans, probes, votes)

    def predicted(self) -> dict[int, int]:
        """By index of the slice, the number of last rows of which logits are needed."""
        counts = dict[int, int]()
        for index, one in enumerate(self.slices):
            match one.job.output:
                case NextToken() if one.last:
                    counts[index] = 1
                case Logits(count) if one.last:
                    counts[index] = count
        return counts

    def best(self, predicted: Mapping[int, torch.Tensor]) -> dict[int, Best]:
        """By index of the slice, the best token of each greedy answer: one copy from the device for all of them.

        predicted: by index of the slice, its logits, float32 [predicted rows, vocabulary].
        """
        outputs = {index: self.slices[index].job.output for index in predicted}
        greedy = [
            index for index, output in outputs.items() if isinstance(output, NextToken) and output.sampler.greedy
        ]
        logits = [predicted[index] for index in greedy]
        return dict(zip(greedy, best(torch.cat(logits)), strict=True)) if greedy else {}

    def result(self, index: int, logits: torch.Tensor | None, drawn: Best | None) -> Any:
        """The result of a slice's job, of type `T_co`; for the last slice of a job.

        logits: float32 [predicted rows, vocabulary]; None if the job needs none. drawn: of `best`. Raises NotFinite
        as `Sampler.draw`.
        """
        match self.slices[index].job.output:
            case NextToken(sampler, wants_logits) if logits is not None:
                votes = torch.stack(self.votes[index].layers) if index in self.votes else None
                return Sampled(sampler.draw(logits[0], drawn), logits[0] if wants_logits else None, votes)
            case Logits():
                return logits
            case AttentionScores():
                return self.probes[index].scores.cpu()  # waits for the step
        return None


def _used(one: ScheduledSlice, last_layer: int) -> int:
    """Number of rows at the end of a slice whose attention in the last layer or last hidden state is used."""
    match one.job.output:
        case AttentionScores(layers) if last_layer in layers:
            return one.stop - one.start
        case NextToken(votes=votes) if one.last:
            return max(1, votes)
        case Logits(count) if one.last:
            return count
    return 0
