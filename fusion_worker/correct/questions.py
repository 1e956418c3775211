"""Questions about a prompt that the model asks itself, and answers with full attention.

A correction is trained on them: they resemble what users ask, and full attention's answer is what it is to preserve.
"""

import random
from collections.abc import Sequence, Set
from dataclasses import dataclass

import torch
from torch.nn import functional

from fusionkv.fusion_worker.models import Model
from fusionkv.fusion_worker.prompt import Prompt

# Questions about a prompt, and the most tokens of each, and of its answer.
COUNT, _ASKED, _ANSWERED = 6, 20, 24
# Tokens of a passage that are quoted to ask about it.
_QUOTED = 40
_REQUEST = '\n\nWrite one short question about this text: "{}..."'
_OPENINGS = ("Who", "When", "Where", "What", "Which", "How many", "What is the name of")
_INSTRUCTION = "\n\nAnswer the question using the passages, in as few words as possible.\nQuestion: "
# Temperature of questions; answers are greedy.
_HEAT = 0.7
# The weight of a question's token beside an answer's.
_QUESTION_WEIGHT = 0.3
# The group of the prompt's tokens, and of rows that all questions begin with.
_SHARED = -1
MADE = repr((COUNT, _ASKED, _ANSWERED, _QUOTED, _REQUEST, _OPENINGS, _INSTRUCTION, _HEAT, _QUESTION_WEIGHT)).encode()


@dataclass(frozen=True, eq=False)
class Questions:
    """Rows of several questions with their answers, right after the same prompt. What all begin with comes once.

    ids, positions: int64 [rows]. groups: int64 [rows], the question that a row belongs to; -1, to all. weights:
    float32 [rows], of its prediction in the loss.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    groups: torch.Tensor
    weights: torch.Tensor

    @property
    def counted(self) -> torch.Tensor:
        """The rows whose predictions count, int64."""
        return self.weights.nonzero()[:, 0]


class Context:
    """What rows of questions attend to: a prompt's KV, and the earlier rows of their own question.

    The rows of a pass stay for those of the next one.
    """

    def __init__(self, kv: Sequence[torch.Tensor]) -> None:
        """kv: [2, tokens, kv_heads, head_dim] of each layer, with keys at their positions."""
        self._kv = [*kv]
        self._positions = torch.arange(kv[0].shape[1], device=kv[0].device)
        self._groups = torch.full_like(self._positions, _SHARED)

    def states(self, model: Model, rows: Questions) -> torch.Tensor:
        """The last hidden states of the counted rows, [counted rows, hidden]. Gradients flow through them."""
        self._rows = rows
        self._positions = torch.cat([self._positions, rows.positions])
        self._groups = torch.cat([self._groups, rows.groups])
        self._seen = (self._groups == _SHARED) | (self._groups == rows.groups[:, None])
        self._seen &= self._positions <= rows.positions[:, None]
        ids, positions = rows.ids[None], rows.positions[None]
        out = model.network.model(input_ids=ids, position_ids=positions, use_cache=False, fusionkv_batch=self)
        found: torch.Tensor = out.last_hidden_state[0, rows.counted]
        return found

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        """As `Batch.attend`."""
        keys, values = self._kv[layer] = torch.cat([self._kv[layer], torch.stack([key, value])], 1)
        seen = self._seen
        if window is not None:
            seen = seen & (self._positions > self._rows.positions[:, None] - window)
        q, k, v = (x.transpose(0, 1)[None] for x in (query, keys, values))
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scaling, enable_gqa=True)
        return out[0].transpose(0, 1)


def log_probabilities(model: Model, states: torch.Tensor) -> torch.Tensor:
    """Of the next token, float32 [rows, vocabulary]. states: the last hidden states, [rows, hidden]."""
    logits: torch.Tensor = model.network.lm_head(states)
    return logits.float().log_softmax(-1)


@torch.no_grad()
def ask(model: Model, prompt: Prompt, kv: Sequence[torch.Tensor], seed: int) -> Questions:
    """Has the model ask questions about passages of a prompt, and answer them.

    kv: as for `Context`, of the system prompt and all chunks by full attention. seed: of the passages and the tokens.
    """

    def encode(text: str) -> list[int]:
        ids: list[int] = model.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    chance, start = random.Random(seed), prompt.question_start
    before, after = map(encode, _REQUEST.split("{}"))
    tail, ends = encode(model.template.tail), model.ends | {*encode("\n")}
    passages = [chance.choice(prompt.chunks[1:]).ids[:_QUOTED] for _ in range(COUNT)]
    openings = [encode(chance.choice(_OPENINGS)) for _ in passages]
    requests = [[*p, *after, *tail, *o] for p, o in zip(passages, openings, strict=True)]
    asked = _continued(model, kv, before, requests, start, _ASKED, ends, torch.Generator().manual_seed(seed))
    instruction, closing = encode(_INSTRUCTION), [*encode("\nAnswer:"), *tail]
    texts = [[*o, *a, *closing] for o, a in zip(openings, asked, strict=True)]
    answers = _continued(model, kv, instruction, texts, start, _ANSWERED, ends)
    # The instruction counts once for each question.
    parts = [(_SHARED, start, instruction, [_QUESTION_WEIGHT * COUNT] * len(instruction))]
    start += len(instruction)
    for group, (text, answer) in enumerate(zip(texts, answers, strict=True)):
        # Of the template, only the last token's prediction counts: the answer's first token.
        template = max(0, len(tail) - 1)
        weights = [_QUESTION_WEIGHT] * (len(text) - 1 - template) + [0.0] * template + [1.0] * (1 + len(answer))
        parts.append((group, start, [*text, *answer], weights))
    return _rows(parts, model.device)


def _continued(
    model: Model,
    kv: Sequence[torch.Tensor],
    shared: Sequence[int],
    texts: Sequence[Sequence[int]],
    start: int,
    most: int,
    ends: Set[int],
    generator: torch.Generator | None = None,
) -> list[list[int]]:
    """What follows the shared tokens with each text, up to one of `ends` or `most` tokens.

    The most likely tokens, without a generator.
    """
    context, added = Context(kv), [list[int]() for _ in texts]
    first = [(_SHARED, start, shared, [0.0] * len(shared))]
    running = {group: (start + len(shared), text) for group, text in enumerate(texts)}
    for _ in range(most):
        parts = [(g, at, ids, [0.0] * (len(ids) - 1) + [1.0]) for g, (at, ids) in running.items()]
        found = log_probabilities(model, context.states(model, _rows([*first, *parts], model.device))).cpu()
        first = []
        if generator is None:
            tokens = found.argmax(-1)
        else:
            tokens = torch.multinomial((found / _HEAT).softmax(-1), 1, generator=generator)[:, 0]
        for token, (group, at, ids, _) in zip(tokens.tolist(), parts, strict=True):
            if token in ends:
                del running[group]
            else:
                added[group].append(token)
                running[group] = (at + len(ids), [token])
        if not running:
            break
    return added


def _rows(parts: Sequence[tuple[int, int, Sequence[int], Sequence[float]]], device: torch.device) -> Questions:
    """parts: of each question, its number, the position of the first row, the tokens, and their weights."""
    ids = [token for _, _, tokens, _ in parts for token in tokens]
    positions = [start + i for _, start, tokens, _ in parts for i in range(len(tokens))]
    groups = [group for group, _, tokens, _ in parts for _ in tokens]
    weights = [weight for *_, each in parts for weight in each]
    return Questions(*(torch.tensor(values, device=device) for values in (ids, positions, groups, weights)))
