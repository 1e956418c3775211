"""Validates a correction on prompts that it did not learn from, before any answer uses it.

Over full attention's answers to questions that the model asks itself, plain reuse, the fit and the trained correction
are compared by their worst answers first, then by the answers that stay the same, then by their mean.
"""

from dataclasses import dataclass, field, replace

import torch

from fusionkv.fusion_worker.correct.correction import Correction
from fusionkv.fusion_worker.correct.distillation import Lesson, reused
from fusionkv.fusion_worker.correct.questions import Context, Questions, ask, log_probabilities
from fusionkv.fusion_worker.models import Model

# Prompts that are kept back, with six answers each. What a prompt costs beyond its KV and its answers are four
# forward passes over them; a training takes 24 passes forwards and back.
PROMPTS = 6
# An answer whose mean divergence from full attention's is above this many nats a token is another answer.
_OFF = 1.0
# Rows whose predictions are compared at a time, as in training.
_BLOCK = 64
MADE = repr((PROMPTS, _OFF)).encode()


@dataclass(slots=True)
class Trial:
    """The answers over the KV of one correction, or of none, beside full attention's.

    kl: mean KL divergence over each answer's tokens, in nats. kept, first: for each answer, whether all its tokens,
    and its first one, stay the most likely ones.
    """

    kl: list[float] = field(default_factory=list)
    kept: list[bool] = field(default_factory=list)
    first: list[bool] = field(default_factory=list)

    @property
    def mean(self) -> float:
        return sum(self.kl) / len(self.kl)

    @property
    def off(self) -> int:
        """Number of answers that are not full attention's any more. NaN counts."""
        return sum(not kl <= _OFF for kl in self.kl)

    @property
    def worst(self) -> float:
        """Mean KL divergence of the worst tenth of the answers."""
        count = -(-len(self.kl) // 10)
        return sum(sorted(self.kl)[-count:]) / count

    def loses(self, other: "Trial") -> str:
        """Why `other` is preferred; empty if it is not. Tails count before means."""
        answers = len(self.kl)
        if self.off > other.off:
            return f"{self.off} of {answers} answers are off by more than {_OFF:g} nat, not {other.off}"
        if not self.worst <= other.worst:
            return f"the worst tenth of {answers} answers are off by {self.worst:.3f} nats, not {other.worst:.3f}"
        for what, mine, others in (("answers", self.kept, other.kept), ("first tokens", self.first, other.first)):
            if sum(mine) < sum(others):
                return f"{sum(mine)} of {answers} {what} stay full attention's, not {sum(others)}"
        if not self.mean < other.mean:
            return f"{answers} answers are off by {self.mean:.3f} nats in the mean, not {other.mean:.3f}"
        return ""


class Validation:
    """Compares a correction with none and with the fit that it was trained from. For one thread at a time."""

    def __init__(self, model: Model, correction: Correction, fit: Correction | None) -> None:
        """fit: None if the correction was not trained, or nobody knows from what."""
        self._model = model
        self._corrections = [correction, *([fit] if fit is not None else [])]
        self._none, self._trials = Trial(), [Trial() for _ in self._corrections]
        self._prompts = 0

    @property
    def ready(self) -> bool:
        """Whether there are enough answers to decide."""
        return self._prompts >= PROMPTS

    def add(self, lesson: Lesson) -> None:
        """Has the model answer questions about a prompt, which no correction here learned from."""
        model, kv = self._model, [layer.to(self._model.device) for layer in lesson.together]
        rows = ask(model, lesson.prompt, kv, -1 - self._prompts)
        # Only answers count.
        rows = replace(rows, weights=(rows.weights == 1).float() * (rows.groups >= 0))
        with torch.no_grad():
            full = Context(kv).states(model, rows)
            for trial, correction in zip((self._none, *self._trials), (None, *self._corrections), strict=True):
                weights = None if correction is None else correction.weights.to(model.device)
                states = Context(reused(model, lesson, weights)).states(model, rows)
                _compare(model, rows, full, states, trial)
        self._prompts += 1

    def verdict(self) -> Correction:
        """The best of them, marked as validated, or as refused and without weights."""
        correction, trial = self._corrections[0], self._trials[0]
        if len(self._trials) > 1 and trial.loses(self._trials[1]):
            correction, trial = self._corrections[1], self._trials[1]
        answers = len(trial.kl)
        if why := trial.loses(self._none):
            return refused(f"with it, {why} as without it")
        why = (
            f"on {answers} answers it lowers the KL from {self._none.mean:.3f} to {trial.mean:.3f} nats, and keeps "
            f"{sum(trial.kept)} of them, not {sum(self._none.kept)}"
        )
        return replace(correction, trained=True, validated=True, why=why)


def refused(why: str) -> Correction:
    """What is kept of a correction that is not used."""
    return Correction(torch.zeros(0), trained=True, validated=False, why=why)


def _compare(model: Model, rows: Questions, full: torch.Tensor, states: torch.Tensor, trial: Trial) -> None:
    """Adds answers to a trial. full, states: last hidden states of the counted rows, [counted rows, hidden]."""
    kls, same = list[torch.Tensor](), list[torch.Tensor]()
    for wanted, state in zip(full.split(_BLOCK), states.split(_BLOCK), strict=True):
        p, q = log_probabilities(model, wanted), log_probabilities(model, state)
        kls.append((p.exp() * (p - q)).sum(-1))
        same.append(p.argmax(-1) == q.argmax(-1))
    groups, kl, kept = rows.groups[rows.counted], torch.cat(kls), torch.cat(same)
    for group in groups.unique().tolist():
        own = groups == group
        trial.kl.append(float(kl[own].mean()))
        trial.kept.append(bool(kept[own].all()))
        trial.first.append(bool(kept[own][0]))
