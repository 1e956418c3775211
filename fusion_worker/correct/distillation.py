"""Trains a correction further: until answers over corrected KV are predicted as over full attention's KV.

A least-squares fit weighs every change of KV alike, whether or not a question would notice. From that fit, gradient
descent minimises the KL divergence of corrected reuse from full attention, over questions that the model asks itself.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from fusionkv.fusion_worker.correct import questions
from fusionkv.fusion_worker.correct.correction import Correction, pairs, places
from fusionkv.fusion_worker.correct.questions import Context, Questions, ask, log_probabilities
from fusionkv.fusion_worker.models import Model
from fusionkv.fusion_worker.prompt import Prompt

# Prompts that it is trained on, and how often on each: with SmolLM2, two minutes on two CPU cores.
LESSONS, EPOCHS = 8, 3
# Adam's rate, which falls to 0 along a cosine, times the number of the map's inputs. The more inputs add up, the less
# each weight is to move. For SmolLM2 it is 8e-5 (1e-3 undoes the fit); for Gemma 3, 2e-5 (8e-5 is too much).
RATE = 0.0109
# Rows whose predictions are compared at a time. With a vocabulary of 262,144 each takes 1 MB, several times over.
_BLOCK = 64
MADE = repr((LESSONS, EPOCHS, RATE)).encode() + questions.MADE


@dataclass(frozen=True, eq=False)
class Lesson:
    """A prompt's KV by full attention, and that of its chunks as encoded alone.

    Attributes:
        together: [layers, 2, tokens, kv_heads, head_dim], of the system prompt and all chunks.
        alone: the same of every chunk but the first, written for positions from `base` on.
        starts: positions of these chunks in the prompt.
    """

    prompt: Prompt
    together: torch.Tensor
    alone: Sequence[torch.Tensor]
    starts: Sequence[int]

    @property
    def base(self) -> int:
        """Tokens of the system prompt."""
        return len(self.prompt.system)


@dataclass(frozen=True, eq=False)
class _Exercise:
    """What a step is trained on.

    Attributes:
        lesson: whose `together` ends with the first chunk.
        wanted: full attention's last hidden states, [counted rows, hidden], on the CPU.
    """

    lesson: Lesson
    rows: Questions
    wanted: torch.Tensor


class Distillation:
    """Trains one correction of a model. For one thread at a time."""

    def __init__(self, model: Model, correction: Correction) -> None:
        """correction: where it starts. Takes four times its memory more."""
        self._model = model
        self._fit = correction
        self._weights = correction.weights.to(model.device, copy=True).requires_grad_()
        self._optimizer = torch.optim.Adam([self._weights])
        self._exercises: list[_Exercise] = []
        self._steps = 0
        self._ended = False

    @property
    def prompts(self) -> int:
        """Lessons so far."""
        return len(self._exercises)

    @property
    def ready(self) -> bool:
        """Whether there are enough lessons to train on."""
        return self.prompts >= LESSONS or self._ended

    @property
    def finished(self) -> bool:
        return self._ended or (self.ready and self._steps >= EPOCHS * LESSONS)

    def end(self) -> None:
        """Leaves the correction as trained so far."""
        self._ended = True

    @property
    def fit(self) -> Correction:
        """The correction that it began with."""
        return self._fit

    @property
    def correction(self) -> Correction:
        """The correction as trained so far."""
        return Correction(self._weights.detach().clone())

    def add(self, lesson: Lesson) -> None:
        """Has the model ask questions about a lesson's prompt, and answer them with full attention.

        Keeps the chunks' KV in the CPU's memory (SmolLM2: 32 MB for 1,400 tokens).
        """
        kv = [layer.to(self._model.device) for layer in lesson.together]
        rows = ask(self._model, lesson.prompt, kv, len(self._exercises))
        with torch.no_grad():
            wanted = Context(kv).states(self._model, rows)
        kept = replace(lesson, together=lesson.together[:, :, : lesson.starts[0]].clone())
        self._exercises.append(_Exercise(kept, rows, wanted.cpu()))

    def step(self) -> float:
        """One step of gradient descent, on one lesson. Returns the loss before it: a weighted mean of KL, in nats."""
        epoch, number = divmod(self._steps, len(self._exercises))
        exercise = random.Random(epoch).sample(self._exercises, len(self._exercises))[number]
        states = Context(reused(self._model, exercise.lesson, self._weights)).states(self._model, exercise.rows)
        loss, gradient = self._loss(states.detach(), exercise)
        self._optimizer.zero_grad()
        states.backward(gradient)
        inputs, done = self._weights.shape[-2], self._steps / (EPOCHS * len(self._exercises))
        for group in self._optimizer.param_groups:
            group["lr"] = RATE / inputs * (1 + math.cos(math.pi * done)) / 2
        self._optimizer.step()
        self._steps += 1
        return loss

    def _loss(self, states: torch.Tensor, exercise: _Exercise) -> tuple[float, torch.Tensor]:
        """The loss, and its gradient by the states, [counted rows, hidden]."""
        model, weights = self._model, exercise.rows.weights[exercise.rows.counted]
        weights, loss, gradients = weights / weights.sum(), 0.0, list[torch.Tensor]()
        wanted = exercise.wanted.to(model.device)
        for state, target, weight in zip(*(x.split(_BLOCK) for x in (states, wanted, weights)), strict=True):
            with torch.no_grad():
                full = log_probabilities(model, target)
            state.requires_grad_()
            kl = functional.kl_div(log_probabilities(model, state), full, reduction="none", log_target=True).sum(-1)
            part = (kl * weight).sum()
            gradients += torch.autograd.grad(part, state)
            loss += part.item()
        return loss, torch.cat(gradients)


def reused(model: Model, lesson: Lesson, weights: torch.Tensor | None) -> list[torch.Tensor]:
    """The KV of a lesson's prompt with all chunks but the first reused, as for `Context`.

    weights: of the correction that is applied to them; None applies none.
    """
    changed = list[torch.Tensor]()
    for alone, start in zip(lesson.alone, lesson.starts, strict=True):
        x = pairs(alone.to(model.device), lesson.base, model.rotations)
        if weights is not None:
            where = places(x.shape[2], x.device).expand(*x.shape[:2], -1, -1)
            share = Correction(weights).behind(start - lesson.base).share
            x = x + share * (torch.cat([x, where], -1) @ weights)
        changed.append(x)
    new, first = torch.cat(changed, 2), lesson.starts[0]
    positions = torch.arange(first, first + new.shape[2], device=model.device)
    turns = {rotation: [f[:, None] for f in rotation.factors(positions)] for rotation in set(model.rotations)}
    layers = []
    for kv, layer, rotation in zip(lesson.together, new.transpose(1, 2), model.rotations, strict=True):
        key, value = layer.chunk(2, -1)
        placed = torch.stack([rotation.apply(key, *turns[rotation]), value]).to(kv.dtype)
        layers.append(torch.cat([kv[:, :first].to(model.device), placed], 1))
    return layers
