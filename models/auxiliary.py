"""Trains CacheClip's auxiliary model: `python -m fusionkv.models.auxiliary --out DIR`, then `--base DIR --out TUNED`.

The model has its own tokenizer, and sees only one page and the question (CacheClip 3.3). It first learns to answer
from that page. Fine-tuning (3.5) trains its last layer's attention to fall on the sentences that lead to the answer,
even if the answer is on another page.
"""

import argparse
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

from fusionkv.fusion_worker.evaluate.data import words
from fusionkv.fusion_worker.evaluate.data.stories import PROMPT, SYSTEM, Page, Question, Sample, sample
from fusionkv.models import tokenizer as tokenizers
from fusionkv.models.curriculum import NONE, Encoder, Sequence, Stage, question_pieces
from fusionkv.models.network import TRAINING_ATTENTION, small_network
from fusionkv.models.train import Batch, collate, hidden_states, judge, optimisers, save, update

_RATE, _TUNED_RATE = 4e-3, 2e-3
_BATCH = 24  # pages; three stories
_OTHERS = 3  # unanswerable questions about each page
# Training starts with word recall, until its smoothed accuracy or its share of the run reaches these values.
_WORDS = Stage("words", 32, "words")
_RECALLED, _MAX_RECALL = 0.9, 0.3
_STORIES = 200  # stories to train the tokenizer on
_MIN_ATTENTION = 1e-6  # lower bound of an attention weight in the loss


@dataclass
class PageRow(Sequence):
    """A page right after the system text, and questions about it.

    Attributes:
        rows: each question's tokens, without the answer.
        wanted: the tokens that each question should attend to; the first token if the page does not help.
    """

    rows: list[range] = field(default_factory=list)
    wanted: list[list[int]] = field(default_factory=list)


def leads(made: Sample, question: Question) -> set[tuple[int, int]]:
    """The sentences (page, number) that lead to the answer: on the pages that it needs, those that share a name or a
    role with the question or with each other.
    """
    there = [(p, i, _names(s.text)) for p in set(question.needs) for i, s in enumerate(made.pages[p].sentences)]
    keys, found = _names(question.text.split(":", 1)[1]), set[tuple[int, int]]()
    while new := {(p, i) for p, i, names in there if names & keys} - found:
        found |= new
        keys |= {name for p, i, names in there if (p, i) in new for name in names}
    return found


def _names(text: str) -> set[str]:
    split = [word.strip(".?:") for word in text.split()]
    return {word for word in split if word in words.ROLES or (word[:1].isupper() and word not in words.FUNCTION)}


class PageEncoder:
    """Turns stories into rows of one page."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._system = [tokenizer.bos_token_id, *self._encode(SYSTEM)]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def story(self, rng: random.Random, made: Sample, tuned: bool) -> list[PageRow]:
        """Makes a row for each page, with the questions that it answers and some that it does not help with.

        tuned: whether to include questions that also need other pages.
        """
        rows = list[PageRow]()
        for number, page in enumerate(made.pages):
            out = PageRow()
            out.extend_context(self._system, 0)
            spans = self._lay(out, page)
            helped = [q for q in made.questions if number in q.needs]
            others = [q for q in made.questions if number not in q.needs]
            for question in helped:
                if tuned or {number} == set(question.needs):
                    tokens = [t for p, i in sorted(leads(made, question)) if p == number for t in spans[i]]
                    self._ask(out, question, {number} == set(question.needs), tokens)
            for question in rng.sample(others, min(_OTHERS, len(others))):
                self._ask(out, question, False, [])
            rows.append(out)
        return rows

    def _lay(self, out: PageRow, page: Page) -> list[range]:
        """Adds a page to the row; returns the tokens of each sentence."""
        out.extend_context(self._encode(f"Report {page.title}."), 1)
        spans = list[range]()
        for sentence in page.sentences:
            start = len(out.ids)
            out.extend_context(self._encode(sentence.text), 1)
            spans.append(range(start, len(out.ids)))
        out.extend_context(self._encode("\n"), 1)
        return spans

    def _ask(self, out: PageRow, question: Question, answered: bool, wanted: list[int]) -> None:
        """Adds a question. Without `answered` the target is an empty answer; if the page helps partly, no target."""
        text = [t for piece in question_pieces(question.text) for t in self._encode(piece)]
        answer = self._encode(" " + question.answer) if answered else []
        out.rows.append(range(len(out.ids), len(out.ids) + len(text)))
        out.wanted.append(wanted or [0])
        out.ask(question.task if answered else "none", text, answer, self._tokenizer.eos_token_id)
        if wanted and not answered:
            out.answer[-1] = NONE


class Losses(NamedTuple):
    """The losses of answers and of attention, and the share of correct answers by task."""

    answer: torch.Tensor
    attention: torch.Tensor
    right: dict[str, float]


def losses(model: Qwen2ForCausalLM, batch: Batch, end: int, asked: list[PageRow]) -> Losses:
    """Computes the losses of a batch.

    asked: the rows of the batch if attention is trained, otherwise empty. Its loss is the cross-entropy of each
    question's attention, averaged over rows and heads, with a uniform distribution over the wanted tokens.
    """
    with torch.autocast("cpu", torch.bfloat16):
        states = hidden_states(model, batch)
        scores = model.lm_head(states[-1][batch.answer != NONE]).float()
    answer, right = judge(scores, batch, end)
    if not asked:
        return Losses(answer, torch.zeros(()), right)
    # [batch, question, token]: weights of a question's rows, and of its wanted tokens.
    shape = len(asked), max(len(one.rows) for one in asked), batch.ids.shape[1]
    of_rows, of_wanted = torch.zeros(shape), torch.zeros(shape)
    for row, one in enumerate(asked):
        for number, (rows, wanted) in enumerate(zip(one.rows, one.wanted, strict=True)):
            of_rows[row, number, rows.start : rows.stop] = 1 / len(rows)
            of_wanted[row, number, wanted] = 1 / len(wanted)
    attention = (of_rows @ last_attention(model, states[-2], batch)).clamp(min=_MIN_ATTENTION)
    return Losses(answer, -(of_wanted * attention.log()).sum() / of_wanted.sum(), right)


def last_attention(model: Qwen2ForCausalLM, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
    """float32 [batch, row, token]: the last layer's attention, averaged over heads. hidden: the layer's input."""
    layer: Any = model.model.layers[-1]
    attention, x = layer.self_attn, layer.input_layernorm(hidden.float())
    q, k = (
        p(x).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2) for p in (attention.q_proj, attention.k_proj)
    )
    q, k = apply_rotary_pos_emb(q, k, *model.model.rotary_emb(x, batch.position))
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2) * attention.scaling
    return (scores + batch.mask.float()).softmax(-1).mean(1)


def new_model(seed: int) -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerFast]:
    """A model with random parameters, and a tokenizer trained on stories of the training split."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    stories = (sample(rng, "train", PROMPT) for _ in range(_STORIES))
    tokenizer = tokenizers.learn("".join(page.text + "\n" for page in made.pages) for made in stories)
    return small_network(tokenizer), tokenizer


def load(directory: Path) -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerFast]:
    """Loads a trained model for further training."""
    model = Qwen2ForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.set_attn_implementation(TRAINING_ATTENTION)
    return model.train(), PreTrainedTokenizerFast.from_pretrained(directory)


class Run:
    """A training run of the base model, or, if `tuned`, of its attention."""

    def __init__(self, model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int, tuned: bool) -> None:
        self.model, self.tokenizer, self.tuned = model, tokenizer, tuned
        self.rng = random.Random(seed)
        self.pages, self.words = PageEncoder(tokenizer), Encoder(tokenizer)
        self.optimisers = optimisers(model, _RATE)
        self.steps, self.seconds = 0, 0.0  # CPU seconds
        self.smooth: dict[str, float] = {}  # training accuracy by task, smoothed
        self._waiting: list[PageRow] = []

    def step(self, done: float) -> str:
        """Runs one step and returns a progress line. done: share of the run that is over."""
        start = time.process_time()
        self.steps += 1
        recall = not self.tuned and done < _MAX_RECALL and self.smooth.get("words", 0.0) < _RECALLED
        if recall:
            made: list[Any] = [self.words.make(self.rng, _WORDS) for _ in range(_WORDS.batch)]
        else:
            made = self._rows()
        found = losses(self.model, collate(made), self.tokenizer.eos_token_id, made if self.tuned else [])
        (found.answer + found.attention).backward()
        rate = (_TUNED_RATE if self.tuned else _RATE) * min(1, self.steps / 20) * min(1, max(0.02, 3 * (1 - done)))
        update(self.model, self.optimisers, rate)
        for task, share in found.right.items():
            self.smooth[task] = 0.95 * self.smooth.get(task, share) + 0.05 * share
        self.seconds += time.process_time() - start
        stage = "words" if recall else "tuned" if self.tuned else "pages"
        shares = " ".join(f"{task}={100 * share:.0f}" for task, share in sorted(self.smooth.items()))
        loss = f"answers {found.answer.item():.3f} attention {found.attention.item():.3f}"
        return f"{self.steps} {stage} {self.seconds / 60:.1f} min {loss} right {shares}"

    def _rows(self) -> list[PageRow]:
        """The next batch."""
        while len(self._waiting) < _BATCH:
            self._waiting += self.pages.story(self.rng, sample(self.rng, "train", PROMPT), self.tuned)
        made, self._waiting = self._waiting[:_BATCH], self._waiting[_BATCH:]
        return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, help="the model directory to fine-tune (default: train a new one)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True, help="the model directory to write")
    parser.add_argument("--minutes", type=float, default=8.0, help="CPU minutes to train (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load(options.base) if options.base else new_model(options.seed)
    run = Run(model, tokenizer, options.seed, tuned=bool(options.base))
    while (done := run.seconds / (60 * options.minutes)) < 1:
        line = run.step(done)
        if run.steps % 50 == 0:
            print(line, flush=True)
    save(model, tokenizer, options.out)
    print(f"saved {options.out} after {run.steps} steps, {run.seconds / 60:.1f} minutes of computing")


if __name__ == "__main__":
    main()
