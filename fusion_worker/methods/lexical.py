"""Links between passages by words alone: what stands near the question's words, and where it is spoken of again.

A token that looks back at another passage (a name spoken of again, "the mayor chose ...") holds in its stale KV only
what its own passage says, and the question may not attend to it at all. Both ends of a reference often share a word.
Recomputed, a token sees what stands before it: so it counts only with a word that an earlier passage holds, in itself
or a few tokens before it in its sentence.
"""

from collections.abc import Sequence

import torch

from fusionkv.fusion_worker.methods.choose import spread

# Tokens to either side of a word, in its sentence, that belong to it, each step counting a little less. 10 change
# nothing on the reference models, whose sentences are short.
_REACH, _FADE = 6, 0.95
# What is known of a rare token is often kept at the next one, be it as common as a full stop.
_NEXT = 0.9
# Of what the question's own words link: with 1 a chain's second link comes later, and at 0.05 some too late.
_AHEAD = 0.7
SENTENCE_ENDS = ".!?\u3002\uff01\uff1f"
_CLOSING = " \t\"')]\u201d\u2019\u00bb"


def ends_sentence(token: str) -> bool:
    """Whether a token's text ends a sentence or a line."""
    return "\n" in token or token.rstrip(_CLOSING).endswith(tuple(SENTENCE_ENDS))


def references(
    ids: Sequence[int], chunks: Sequence[int], ends: Sequence[bool], question: Sequence[int]
) -> torch.Tensor:
    """A score of every context token, float32 [tokens]: how well words link it to another chunk and to the question.

    The better of two, and rare tokens count more in both:
    ahead: closeness to a token that the question holds too, times closeness to a token before it that an earlier
        chunk holds.
    back: closeness to a token before it that stands, in another chunk, near one of the question's; if that chunk is a
        later one, times closeness to a token before it that an earlier chunk holds. Or being such a token of an
        earlier chunk: how common it is has been counted once.
    Only tokens of one sentence are close to each other.
    ids: of the context; chunks: the number of each token's chunk, ascending; ends: whether it ends a sentence.
    """
    chunk = torch.tensor(chunks)
    sentence = _numbered(chunk, torch.tensor(ends))
    token, count = torch.tensor(ids).unique(return_inverse=True, return_counts=True)[1:]
    rarity = 1 / count[token]
    named = torch.where(torch.isin(torch.tensor(ids), torch.tensor(question)), rarity, 0.0)
    near = spread(named, sentence, _REACH, _FADE)
    again = _before(token, chunk, torch.ones(len(ids)))
    refers = spread(again * rarity, sentence, _REACH, _FADE, both=False)
    # Not the question's own words: where those stand is what `near` says.
    source = torch.where(named > 0, 0.0, near)
    earlier, later = _before(token, chunk, source), _before(token, chunk.max() - chunk, source)
    by_earlier, by_later = (spread(s * rarity, sentence, _REACH, _FADE, both=False) for s in (earlier, later))
    behind = torch.maximum(by_earlier, by_later * refers) * spread(rarity, sentence, 1, _NEXT, both=False)
    back = torch.maximum(behind, earlier * rarity)
    return torch.maximum(_AHEAD * near * refers, back)


def _numbered(chunk: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """int64 [tokens]: the number of each token's sentence; none goes on in the next chunk."""
    first = torch.zeros_like(chunk)
    first[1:] = ends[:-1] | (chunk[1:] != chunk[:-1])
    return first.cumsum(0)


def _before(token: torch.Tensor, chunk: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """float32 [tokens]: the best score of the same token in chunks with a lower number; 0 if it is in none.

    scores: float32, 0 to 1.
    """
    pairs, of = (token * (chunk.max() + 1) + chunk).unique(return_inverse=True)
    # Above all scores of the token before it, so that one running maximum serves all tokens.
    floor = 2.0 * (pairs // (chunk.max() + 1)).double()
    best = torch.zeros_like(floor).scatter_reduce(0, of, scores.double(), "amax") + floor
    before = torch.cat([torch.zeros(1, dtype=torch.float64), best.cummax(0).values[:-1]]) - floor
    return before.clamp(min=0.0)[of].float()
