"""Maps scores from one tokenizer's tokens to another's, by the characters that they cover (CacheClip 3.4)."""

from collections.abc import Sequence

import torch
from tokenizers import Tokenizer

from fusionkv.fusion_worker.decode.text import Characters

# Characters `[start, stop)` of a text.
CharacterSpan = tuple[int, int]


def spans_of(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[str, list[CharacterSpan]]:
    """Decodes tokens to a text, and to the characters that each token covers.

    Tokens that only together form a character each cover it. Tokens of an incomplete character at the end cover
    nothing.
    """
    characters = Characters(tokenizer, skip_special_tokens=False)
    text, spans, open_tokens = "", list[CharacterSpan](), 0
    for token in ids:
        open_tokens += 1
        piece = characters.step(token)
        if piece is not None:
            spans += [(len(text), len(text) + len(piece))] * open_tokens
            text, open_tokens = text + piece, 0
    return text, spans + [(len(text), len(text))] * open_tokens


def carry_over(scores: torch.Tensor, spans: Sequence[CharacterSpan], to: Sequence[CharacterSpan]) -> torch.Tensor:
    """Maps scores to another tokenizer's tokens. Each gets the highest score of the tokens that share its characters.

    spans, to: characters of the scored and of the other tokens, in order, over the same text. Returns float32
    [len(to)]; 0 for a token that shares no character.
    """
    best = [0.0] * (max((stop for _, stop in (*spans, *to)), default=0))
    for (start, stop), score in zip(spans, scores.tolist(), strict=True):
        for at in range(start, stop):
            best[at] = max(best[at], score)
    return torch.tensor([max(best[start:stop], default=0.0) for start, stop in to])
