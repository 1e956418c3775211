"""Trains a reference model from scratch: `python -m fusionkv.models.train --recipe forced --seed 1 --out DIR`."""

import argparse
import random
import shutil
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from fusionkv.fusion_worker.evaluate.data.stories import PROMPT
from fusionkv.models import tokenizer as tokenizers
from fusionkv.models.crew import Crew, means
from fusionkv.models.curriculum import NONE, RECIPES, Encoder, Sequence
from fusionkv.models.network import new_network

_HIDDEN = -30000.0  # added to the logit of a token that a row must not see
_MARKED = 3  # first layer that is trained on marks: a link resolved in the last layer helps no later link
_END_WEIGHT = 0.1  # weight of the end token in the loss, which is easy to predict


class Batch(NamedTuple):
    """A padded batch. Token tensors are [batch, token]; `mask` is additive, [batch, 1, token, token]."""

    ids: torch.Tensor
    position: torch.Tensor
    segment: torch.Tensor
    answer: torch.Tensor
    resolved: torch.Tensor
    owner: torch.Tensor
    mask: torch.Tensor
    tasks: list[list[str]]


def collate(sequences: list[Sequence]) -> Batch:
    """Pads sequences to one length, and builds the mask that separates packed questions."""
    length = (max(len(s.ids) for s in sequences) + 7) // 8 * 8

    def column(name: str, padding: int) -> torch.Tensor:
        rows = [getattr(s, name) for s in sequences]
        return torch.tensor([row + [padding] * (length - len(row)) for row in rows])

    segment, page, only, alone = column("segment", -1), column("page", 0), column("only", 0), column("alone", 0)
    visible = (segment[:, None] == 0) | (segment[:, None] == segment[:, :, None])
    bit = (1 << page).to(torch.int16)
    only = torch.where(alone == 1, bit, only.to(torch.int16))
    allowed = (only[:, :, None] == 0) | (page[:, None] == 0) | ((bit[:, None] & only[:, :, None]) != 0)
    # Text that anchor tokens replace is seen only by them and by itself, and sees no anchor tokens.
    text, reads = column("text", 0), column("reads", 0)
    own = (text[:, None] == text[:, :, None]) | (text[:, None] == reads[:, :, None])
    allowed &= (text[:, None] == 0) | own
    allowed &= (text[:, :, None] == 0) | (reads[:, None] == 0)
    visible &= allowed & torch.ones(length, length, dtype=torch.bool).tril()
    visible |= torch.eye(length, dtype=torch.bool)
    mask = torch.zeros(visible.shape, dtype=torch.bfloat16).masked_fill_(~visible, _HIDDEN)[:, None]
    answer, resolved, owner = column("answer", NONE), column("resolved", NONE), column("owner", NONE)
    tasks = [s.tasks for s in sequences]
    return Batch(column("ids", 0), column("position", 0), segment, answer, resolved, owner, mask, tasks)


def hidden_states(model: Qwen2ForCausalLM, batch: Batch) -> tuple[torch.Tensor, ...]:
    """The hidden states of a batch, [batch, token, width] each: the embeddings, then each layer's output."""
    return model.model(
        input_ids=batch.ids,
        attention_mask=batch.mask,
        position_ids=batch.position,
        use_cache=False,
        output_hidden_states=True,
    ).hidden_states


def losses(
    model: Qwen2ForCausalLM, batch: Batch, end: int, with_marks: bool
) -> tuple[torch.Tensor, dict[str, float], torch.Tensor]:
    """The loss of the answers, the share of correct answers by task, and the loss of the marks in the documents."""
    with torch.autocast("cpu", torch.bfloat16):
        states = hidden_states(model, batch)
        hidden = states[-1]
        asked = batch.answer != NONE
        scores = model.lm_head(hidden[asked]).float()
        marks = [
            (model.lm_head(state[marked]).float(), mark[marked])
            for mark in ((batch.resolved, batch.owner) if with_marks else ())
            for marked in (mark != NONE,)
            for state in (*(model.model.norm(middle) for middle in states[_MARKED:-1]), hidden)
        ]
    layers = len(states) - _MARKED
    auxiliary = sum((cross_entropy(s, m) / layers for s, m in marks if len(m)), torch.zeros(()))
    return *judge(scores, batch, end), auxiliary


def judge(scores: torch.Tensor, batch: Batch, end: int) -> tuple[torch.Tensor, dict[str, float]]:
    """The loss of the answers, and the share of correct answers by task.

    scores: float32 [answer tokens of the batch, vocabulary], logits.
    """
    asked = batch.answer != NONE
    weight = torch.ones(scores.shape[-1])
    weight[end] = _END_WEIGHT
    answer = cross_entropy(scores, batch.answer[asked], weight=weight)
    right: dict[tuple[int, int], bool] = defaultdict(lambda: True)
    hits = scores.argmax(-1) == batch.answer[asked]
    for row, number, hit in zip(
        asked.nonzero()[:, 0].tolist(), batch.segment[asked].tolist(), hits.tolist(), strict=True
    ):
        right[row, number] &= hit
    by_task: dict[str, list[bool]] = defaultdict(list)
    for (row, number), hit in right.items():
        by_task[batch.tasks[row][number - 1]].append(hit)
    return answer, {task: sum(hits) / len(hits) for task, hits in by_task.items()}


def optimisers(model: Qwen2ForCausalLM, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for embeddings, norms and biases."""
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (matrices if parameter.ndim == 2 and "embed" not in name else others).append(parameter)
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def update(model: Qwen2ForCausalLM, optimisers: list[torch.optim.Optimizer], rate: float) -> None:
    """Applies the gradients, clipped to a norm of 1, at a learning rate, and clears them."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["lr"] = rate
        optimiser.step()
        optimiser.zero_grad()


def save(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Writes a model directory next to `out` and renames it, replacing `out`."""
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    shutil.rmtree(out, ignore_errors=True)
    partial.rename(out)


class Run:
    """A training run, whose state can be stored and restored."""

    def __init__(self, recipe: str, seed: int, crew: Crew) -> None:
        torch.manual_seed(seed)
        self.crew = crew
        # Every process draws different samples.
        self.rng = random.Random(seed + crew.rank * (1 << 32))
        self.recipe = RECIPES[recipe]
        made = self.recipe
        self.tokenizer = tokenizers.build(max(made.links, default=0), PROMPT.pages[1], made.anchors)
        self.encoder = Encoder(self.tokenizer, made.links, made.rates, made.segment)
        self.model = new_network(self.tokenizer, self.recipe.base)
        self.optimisers = optimisers(self.model, self.recipe.rate)
        self.steps, self.since, self.stage = 0, 0, 0
        self.seconds = 0.0  # CPU seconds, so that a busy machine does not end a run early
        self.smooth: dict[str, float] = {}  # training accuracy by task in this stage, smoothed

    def step(self, done: float) -> str:
        """Runs one step and returns a progress line. done: share of the run that is over."""
        start = time.process_time()
        self.steps, self.since = self.steps + 1, self.since + 1
        rate = self.recipe.rate * min(1, self.steps / 100) * min(1, max(0.02, 4 * (1 - done)))
        stage = self.recipe.stages[self.stage]
        mine = range(self.crew.rank, stage.batch, self.crew.count)
        batch = collate([self.encoder.make(self.rng, stage) for _ in mine])
        answer, right, auxiliary = losses(self.model, batch, self.tokenizer.eos_token_id, bool(self.recipe.auxiliary))
        (answer + self.recipe.auxiliary * auxiliary).backward()
        self.crew.average(self.model.parameters())
        update(self.model, self.optimisers, rate)
        found = self.crew.collect((right, time.process_time() - start, batch.ids.numel()))
        for task, share in sorted(means(right for right, _, _ in found).items()):
            self.smooth[task] = 0.95 * self.smooth.get(task, share) + 0.05 * share
        spent = max(seconds for _, seconds, _ in found)
        self.seconds += spent
        rate_of = sum(tokens for _, _, tokens in found) / spent
        shares = (
            f"{task}={100 * share:.0f}" for task, share in sorted(self.smooth.items(), key=lambda item: item[1])
        )
        return (
            f"{self.steps} {stage.name} {self.seconds / 60:.1f} min {rate_of:.0f} tokens/s "
            f"loss {answer.item():.3f} marks {auxiliary.item():.3f}, worst first: {' '.join(shares)}"
        )

    def advance(self, done: float) -> bool:
        """Starts the next stage if this one's worst task is good enough, or its share of the run is over."""
        stage = self.recipe.stages[self.stage]
        good = self.since >= self.recipe.least_steps and min(self.smooth.values()) >= stage.advance
        if (good or done >= stage.until) and self.stage + 1 < len(self.recipe.stages):
            self.stage, self.since, self.smooth = self.stage + 1, 0, {}
            return True
        return False

    def store(self, path: Path) -> None:
        """Writes the run's state, from which any recipe with the same first stages can continue."""
        generators = self.crew.collect(self.rng.getstate())
        if self.crew.rank:
            return
        counts = (self.steps, self.since, self.stage, self.seconds, self.smooth, generators)
        states = [optimiser.state_dict() for optimiser in self.optimisers]
        partial = path.with_suffix(".partial")
        torch.save({"model": self.model.state_dict(), "optimisers": states, "counts": counts}, partial)
        partial.replace(path)

    def restore(self, path: Path) -> None:
        """Restores a stored state, which must be of the same number of processes."""
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimiser, values in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(values)
        self.steps, self.since, self.stage, self.seconds, self.smooth, generators = state["counts"]
        if len(generators) != self.crew.count:
            raise SystemExit(
                f"{path} was stored by {len(generators)} processes: resume it with --processes {len(generators)}"
            )
        self.rng.setstate(generators[self.crew.rank])


def train(run: Run, out: Path, minutes: float, states: Path | None) -> None:
    """Trains to the recipe's last step, or ends and decays the learning rate earlier to stay within `minutes`."""
    started = time.monotonic()

    def say(line: str) -> None:
        if run.crew.rank == 0:
            print(line, flush=True)

    while (done := max((run.steps + 1) / run.recipe.steps, run.seconds / (60 * minutes))) <= 1:
        line = run.step(done)
        if run.steps % 50 == 0:
            say(line)
        advanced = run.advance(done)
        name = run.recipe.stages[run.stage].name
        if advanced:
            say(f"after {run.steps} steps, {run.seconds / 60:.1f} min: {name}")
        if states and (advanced or run.steps % 100 == 0):
            run.store(states / f"{name if advanced else 'latest'}.pt")
            if run.crew.rank == 0:
                save(run.model, run.tokenizer, out)
    if run.crew.rank == 0:
        save(run.model, run.tokenizer, out)
    clock = (time.monotonic() - started) / 60
    say(f"saved {out} after {run.steps} steps, {run.seconds / 60:.1f} minutes of computing, {clock:.1f} by the clock")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", choices=sorted(RECIPES), required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True, help="the model directory to write")
    parser.add_argument("--minutes", type=float, default=55.0, help="maximum CPU minutes, to which the decay adapts")
    parser.add_argument(
        "--processes", type=int, default=1, help="processes that share each batch, of one thread each"
    )
    parser.add_argument(
        "--states", type=Path, help="folder to store the run's state in, at the start of each stage and the latest"
    )
    parser.add_argument("--resume", type=Path, help="stored state to continue from")
    options = parser.parse_args()
    if options.states:
        options.states.mkdir(parents=True, exist_ok=True)
    if options.processes == 1:
        work(0, options, None)
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (options, Path(folder) / "meeting"), nprocs=options.processes)


def work(rank: int, options: argparse.Namespace, meeting: Path | None) -> None:
    """Runs one process of a training run."""
    torch.set_num_threads(1)
    run = Run(options.recipe, options.seed, Crew(rank, options.processes, meeting))
    if options.resume:
        run.restore(options.resume)
    train(run, options.out, options.minutes, options.states)
    run.crew.close()


if __name__ == "__main__":
    main()
