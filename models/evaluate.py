"""Measures exact match of the reference models with full attention and with full reuse, on held-out samples."""

import argparse
import json
import random
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

from fusionkv.fusion_worker.evaluate.data.stories import SYSTEM, TASKS, Sample, sample
from fusionkv.fusion_worker.evaluate.data.tasks import shipped

METHODS = ("full_attention", "full_reuse")
_SEED = 20_000_003  # different from all training seeds
_NONE = -100
_ROWS = 50  # samples of a pass


@dataclass(frozen=True)
class Prompts:
    """Prompts with one question per row. All tensors are [row, token], padded on the right.

    Attributes:
        ids: token ids.
        chunk: 0 in the system text, 1.. in the pages, -1 in the question and answer, -2 in the padding.
        alone: each token's position if its page follows the system text directly.
        answer: the expected next token where it belongs to the answer, otherwise -100.
    """

    ids: torch.Tensor
    chunk: torch.Tensor
    alone: torch.Tensor
    answer: torch.Tensor

    @property
    def visible(self) -> torch.Tensor:
        """bool [row, token, token]: which tokens a token sees with full attention."""
        length = self.ids.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        return causal & (self.chunk != -2)[:, None] | torch.eye(length, dtype=torch.bool)

    @property
    def visible_alone(self) -> torch.Tensor:
        """The same with every page encoded after the system text only."""
        same = self.chunk[:, None] == self.chunk[:, :, None]
        return self.visible & (same | (self.chunk == 0)[:, None])


def held_out(task: str, count: int) -> list[Sample]:
    """`count` held-out samples, each with one question of `task`."""
    rng = random.Random(f"{_SEED} {task}")
    out: list[Sample] = []
    while len(out) < count:
        made = sample(rng)
        fitting = [q for q in made.questions if q.task == task]
        if fitting:
            out.append(Sample(made.pages, (rng.choice(fitting),)))
    return out


def lay_out(samples: list[Sample], tokenizer: PreTrainedTokenizerBase) -> Prompts:
    """Prompts of samples with one question each: system text, pages, question and expected answer."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    rows: list[tuple[list[int], list[int], list[int], list[int]]] = []
    for made in samples:
        system = [tokenizer.bos_token_id, *encode(SYSTEM)]
        ids, chunk, alone = list(system), [0] * len(system), list(range(len(system)))
        for number, page in enumerate(made.pages, 1):
            part = encode(page.text + "\n")
            ids += part
            chunk += [number] * len(part)
            alone += range(len(system), len(system) + len(part))
        question = encode(f"Question: {made.questions[0].text}\nAnswer:")
        reply = encode(" " + made.questions[0].answer)
        alone += range(len(ids), len(ids) + len(question) + len(reply))
        answer = [_NONE] * (len(ids) + len(question) - 1) + reply + [tokenizer.eos_token_id]
        ids += question + reply
        chunk += [-1] * (len(question) + len(reply))
        rows.append((ids, chunk, alone, answer))
    length = max(len(row[0]) for row in rows)
    columns = []
    for i, padding in enumerate((tokenizer.pad_token_id, -2, 0, _NONE)):
        columns.append(torch.tensor([row[i] + [padding] * (length - len(row[i])) for row in rows]))
    return Prompts(*columns)


def forward(
    model: Qwen2ForCausalLM,
    ids: torch.Tensor,
    position: torch.Tensor,
    visible: torch.Tensor,
    fresh: torch.Tensor | None = None,
    cache: list[tuple[torch.Tensor, torch.Tensor]] | None = None,
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Returns logits, and every layer's keys (before rotation) and values, [row, kv_head, token, head_dim].

    With a `cache`, keys and values of tokens that are not `fresh` are taken from it. Keys are rotated to `position`
    afterwards, which moves a page to its position.
    """
    hidden = model.model.embed_tokens(ids)
    rotation = model.model.rotary_emb(hidden, position)
    states = []
    for number, layer in enumerate(model.model.layers):
        attention, normed = layer.self_attn, layer.input_layernorm(hidden)
        query, key, value = (
            part(normed).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
            for part in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if cache is not None and fresh is not None:
            choice = fresh[:, None, :, None]
            key, value = torch.where(choice, key, cache[number][0]), torch.where(choice, value, cache[number][1])
        states.append((key, value))
        query, key = apply_rotary_pos_emb(query, key, *rotation)
        out = scaled_dot_product_attention(query, key, value, attn_mask=visible[:, None], enable_gqa=True)
        hidden = hidden + attention.o_proj(out.transpose(1, 2).flatten(2))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return model.lm_head(model.model.norm(hidden)), states


def exact(logits: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
    """bool [row]: whether every token of the answer, including the end token, is the most likely one.

    The expected answer is fed in. This equals generating it: up to the first wrong token both see the same.
    """
    return ((logits.argmax(-1) == answer) | (answer == _NONE)).all(-1)


@torch.inference_mode()
def evaluate(directory: Path, count: int, tasks: tuple[str, ...] = TASKS) -> dict[str, dict[str, float]]:
    """Exact match in percent, by method and task, over `count` held-out questions of each task."""
    # Not AutoTokenizer: for a qwen2 model it replaces the pre-tokenizer of tokenizer.json by the family's.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    model = Qwen2ForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    table: dict[str, dict[str, float]] = {method: {} for method in METHODS}
    for task in tasks:
        start, samples = time.monotonic(), held_out(task, count)
        right: dict[str, list[bool]] = defaultdict(list)
        for first in range(0, count, _ROWS):
            prompts = lay_out(samples[first : first + _ROWS], tokenizer)
            place = torch.arange(prompts.ids.shape[1]).expand_as(prompts.ids)
            logits, _ = forward(model, prompts.ids, place, prompts.visible)
            right["full_attention"] += exact(logits, prompts.answer).tolist()
            _, cache = forward(model, prompts.ids, prompts.alone, prompts.visible_alone)
            logits, _ = forward(model, prompts.ids, place, prompts.visible, prompts.chunk <= 0, cache)
            right["full_reuse"] += exact(logits, prompts.answer).tolist()
        for method in METHODS:
            table[method][task] = round(100 * sum(right[method]) / count, 1)
        shares = "  ".join(f"{method} {table[method][task]:5.1f}" for method in METHODS)
        print(f"{directory.name:12s} {task:10s} {shares}  ({time.monotonic() - start:.1f} s)", flush=True)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directories", type=Path, nargs="*", help="model directories (default: all shipped models)")
    parser.add_argument("--n", type=int, default=100, help="questions per task")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--json", type=Path, help="file to write the figures to as JSON")
    options = parser.parse_args()
    directories = options.directories or shipped()
    tables = {path.name: evaluate(path, options.n, tuple(options.tasks)) for path in directories}
    if options.json:
        options.json.write_text(json.dumps({"n": options.n, "exact_match": tables}, indent=1) + "\n")


if __name__ == "__main__":
    main()
