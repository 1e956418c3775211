"""Trains a correction further: until answers over corrected KV are predicted as over full attention's KV.

A least-squares fit weighs every change of KV alike, whether or not a question would notice. From that fit, gradient
descent minimises the KL divergence of corrected reuse from full attention, over questions that quote the corpus: a
piece of a passage as the question, the text that follows it as the answer.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from fusionkv.fusion_worker.correct.correction import Correction, pairs, places
from fusionkv.fusion_worker.models import Model
from fusionkv.fusion_worker.prompt import Prompt

# Prompts that it is trained on, and how often on each: with SmolLM2, three minutes on two CPU cores.
LESSONS, EPOCHS = 10, 4
# Of Adam, falling to 0 along a cosine. 20 times as much undoes the fit.
RATE = 5e-5
# Questions about a prompt, the tokens of each and of its answer, and the weight of a question's token beside an
# answer's.
_QUESTIONS, _ASKED, _ANSWERED, _QUESTION_WEIGHT = 3, 16, 24, 0.3
MADE = repr((LESSONS, EPOCHS, RATE, _QUESTIONS, _ASKED, _ANSWERED, _QUESTION_WEIGHT)).encode()


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
class _Questions:
    """Rows of several questions with their answers, each right after the same prompt.

    ids, positions: int64 [rows]. groups: int64 [rows], the question that a row belongs to. weights: float32 [rows],
    of its prediction in the loss.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    groups: torch.Tensor
    weights: torch.Tensor

    @property
    def counted(self) -> torch.Tensor:
        """The rows whose predictions count, int64."""
        return self.weights.nonzero()[:, 0]


@dataclass(frozen=True, eq=False)
class _Exercise:
    """What a step is trained on.

    Attributes:
        lesson: whose `together` ends with the first chunk.
        wanted: full attention's log probabilities of the next token, float32 [counted rows, vocabulary], on the CPU.
    """

    lesson: Lesson
    rows: _Questions
    wanted: torch.Tensor


@dataclass(frozen=True, eq=False)
class _Context:
    """What the rows of questions attend to: a prompt's KV, and the earlier rows of their own question.

    kv: [2, tokens, kv_heads, head_dim] of each layer, with keys at their positions.
    """

    kv: Sequence[torch.Tensor]
    rows: _Questions

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        """As `Batch.attend`; gradients flow through it."""
        keys, values = (torch.cat([old, new]) for old, new in zip(self.kv[layer], (key, value), strict=True))
        rows, context = self.rows, torch.arange(self.kv[layer].shape[1], device=query.device)
        at = torch.cat([context, rows.positions])
        own = rows.groups[:, None] == rows.groups
        seen = torch.cat([own.new_ones(len(own), len(context)), own], 1) & (at <= rows.positions[:, None])
        if window is not None:
            seen &= at > rows.positions[:, None] - window
        q, k, v = (x.transpose(0, 1)[None] for x in (query, keys, values))
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scaling, enable_gqa=True)
        return out[0].transpose(0, 1)


class Distillation:
    """Trains one correction of a model. For one thread at a time."""

    def __init__(self, model: Model, correction: Correction) -> None:
        """correction: where it starts. Takes four times its memory more."""
        self._model = model
        self._tail = model.tokenizer.encode(model.template.tail, add_special_tokens=False).ids
        self._weights = correction.weights.to(model.device, copy=True).requires_grad_()
        self._optimizer = torch.optim.Adam([self._weights], lr=RATE)
        self._exercises: list[_Exercise] = []
        self._steps = 0

    @property
    def ready(self) -> bool:
        """Whether there are enough lessons to train on."""
        return len(self._exercises) >= LESSONS

    @property
    def finished(self) -> bool:
        return self.ready and self._steps >= EPOCHS * LESSONS

    @property
    def correction(self) -> Correction:
        """The correction as trained so far."""
        return Correction(self._weights.detach().clone())

    def add(self, lesson: Lesson) -> None:
        """Draws questions about a lesson's prompt, and has full attention answer them.

        Keeps in the CPU's memory: the chunks' KV, and full attention's predictions (SmolLM2: 56 MB for 1,400 tokens).
        """
        rows = self._questions(lesson.prompt, random.Random(len(self._exercises)))
        with torch.no_grad():
            wanted = self._predictions(_Context([kv.to(self._model.device) for kv in lesson.together], rows))
        kept = replace(lesson, together=lesson.together[:, :, : lesson.starts[0]].clone())
        self._exercises.append(_Exercise(kept, rows, wanted.cpu()))

    def step(self) -> float:
        """One step of gradient descent, on one lesson. Returns the loss before it: a weighted mean of KL, in nats."""
        epoch, number = divmod(self._steps, len(self._exercises))
        exercise = random.Random(epoch).sample(self._exercises, len(self._exercises))[number]
        rows = exercise.rows
        found = self._predictions(_Context(self._corrected(exercise.lesson), rows))
        wanted = exercise.wanted.to(found.device)
        kl = functional.kl_div(found, wanted, reduction="none", log_target=True).sum(-1)
        weights = rows.weights[rows.counted]
        loss = (kl * weights).sum() / weights.sum()
        self._optimizer.zero_grad()
        loss.backward()
        for group in self._optimizer.param_groups:
            group["lr"] = RATE * (1 + math.cos(math.pi * self._steps / (EPOCHS * len(self._exercises)))) / 2
        self._optimizer.step()
        self._steps += 1
        return loss.item()

    def _questions(self, prompt: Prompt, chance: random.Random) -> _Questions:
        start = prompt.question_start
        ids, positions, groups, weights = list[int](), list[int](), list[int](), list[float]()
        for group in range(_QUESTIONS):
            text = chance.choice(prompt.chunks[1:]).ids
            at = chance.randint(0, max(0, len(text) - _ASKED - _ANSWERED))
            quote = text[at : at + _ASKED + _ANSWERED]
            cut = max(1, len(quote) * _ASKED // (_ASKED + _ANSWERED))
            rows = [*quote[:cut], *self._tail, *quote[cut:]]
            # Of the template, only the last token's prediction counts: the answer's first token.
            asked = cut if self._tail else cut - 1
            weights += [_QUESTION_WEIGHT] * asked
            weights += [0.0] * (cut + len(self._tail) - 1 - asked)
            weights += [1.0] * (len(quote) - cut + 1)
            ids += rows
            positions += range(start, start + len(rows))
            groups += [group] * len(rows)
        device = self._model.device
        return _Questions(*(torch.tensor(each, device=device) for each in (ids, positions, groups, weights)))

    def _predictions(self, context: _Context) -> torch.Tensor:
        """Log probabilities of the next token, float32 [counted rows, vocabulary]."""
        rows, network = context.rows, self._model.network
        out = network.model(
            input_ids=rows.ids[None], position_ids=rows.positions[None], use_cache=False, fusionkv_batch=context
        )
        return network.lm_head(out.last_hidden_state[0, rows.counted]).float().log_softmax(-1)

    def _corrected(self, lesson: Lesson) -> list[torch.Tensor]:
        """The KV of a lesson's prompt with all chunks but the first reused and corrected, as for `_Context`."""
        model, changed = self._model, list[torch.Tensor]()
        for alone, start in zip(lesson.alone, lesson.starts, strict=True):
            x = pairs(alone.to(model.device), lesson.base, model.rotations)
            where = places(x.shape[2], x.device).expand(*x.shape[:2], -1, -1)
            share = Correction(self._weights).behind(start - lesson.base).share
            changed.append(x + share * (torch.cat([x, where], -1) @ self._weights))
        new, first = torch.cat(changed, 2), lesson.starts[0]
        positions = torch.arange(first, first + new.shape[2], device=model.device)
        turns = {rotation: [f[:, None] for f in rotation.factors(positions)] for rotation in set(model.rotations)}
        layers = []
        for kv, layer, rotation in zip(lesson.together, new.transpose(1, 2), model.rotations, strict=True):
            key, value = layer.chunk(2, -1)
            reused = torch.stack([rotation.apply(key, *turns[rotation]), value]).to(kv.dtype)
            layers.append(torch.cat([kv[:, :first].to(model.device), reused], 1))
        return layers
