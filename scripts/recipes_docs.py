"""Prints docs/recipes.md from the table of recipes and the modifiers (`make docs`)."""

from fusionkv.fusion_worker.client import DEFAULT_RECIPE
from fusionkv.fusion_worker.recipes.modifiers import MODIFIERS
from fusionkv.fusion_worker.recipes.recipes import RECIPES, Recipe, SimilarityGuided

HEAD = f"""# Recipes

How a prompt's context is made, by request: `fusionkv ask CORPUS QUESTION --recipe NAME --ratio R`. The ratio is the
share of context tokens that is recomputed. With a ratio of 1 a recipe equals full attention, until `snapkv` lets
context go. What they are worth: [quality.md](quality.md).

A request that names no recipe, or `default`, gets the gateway's: `{DEFAULT_RECIPE}`, unless its configuration says
otherwise, the best one on a real model ([quality.md](quality.md#real-models)). `fusionkv encode CORPUS` encodes the
chunks alone, as that one wants them, and learns the corpus's correction. Where chunks were encoded with neighbours
(`fusionkv encode CORPUS --recipe fusionrag`), it chooses among those: with 10, the request is answered by
`{DEFAULT_RECIPE}+similarity_guided(10)`, and the reply says so. A default that says itself how chunks are encoded,
such as `fusionrag` or `{DEFAULT_RECIPE}+isolated`, stays as it is.
"""
MODIFIED = """
A recipe is made of slots, and a modifier fills one otherwise: `a3+window`, `prophetkv+similarity_guided(5)+window`.
Numbers in brackets are the modifier's own; those left out take the defaults.
"""
VERSIONS = """
`full_attention` and `prefix_cache` take no modifier. SnapKV over full attention is a recipe with `snapkv` at a ratio
of 1: all of the context is computed, the question votes, and what it does not vote for goes
(`fusionkv eval --recipes "epic+snapkv(64)" --ratios 1`).

## Versions

`cache_craft+versions(3)`, and any recipe with `versions(N)`, reuses a chunk as it was computed behind other chunks,
if some of those stand before it now (Cache-Craft, as FusionRAG 1.1 and CacheClip 5 have it). The cache keeps at most
N versions of each chunk, N up to 16; which, and which of them is found: [cache.md](cache.md).

- A chunk that is there by its exact path is lossless and comes first. Then comes the version whose earlier chunks are
  most like the prompt's, moved to its place. It is stale on its own path too.
- A chunk without a version that shares an earlier chunk is computed in this prompt, in full, over what was laid
  before it, versions and all. That is put into the cache in the background, as a version. It is lossless in this
  prompt if all before it is. Entries encoded alone do not serve in its stead: nearly every chunk has one sooner or
  later, and then there would be no versions.
- So with chunks that meet ever other chunks it costs about as much as full attention; it pays where they come
  together again. A chunk's versions take N times its bytes at most, 3 times by default.
- The row `cache_craft` reuses chunks as encoded alone, as all figures of it in [quality.md](quality.md) do: what
  versions are worth depends on what was asked before, and `fusionkv eval` asks each sample by itself. It refuses
  them.
"""
ADAPTIVE = """
## A ratio that adapts

`prophetkv+adaptive(40,999)`, and any recipe with `adaptive(N,M)` whose ratio is not fixed, recomputes N% of the ratio
first. If the first token of the answer, or any later one, then has a probability of less than M per mille, the rest
of the ratio is recomputed and the answer goes on from there; what was said stays. `ratio_raised` of the reply says
so. The time to the first token is that of the small ratio unless the first token itself is in doubt; a doubt later on
costs a prefill in the middle of the answer.
"""
LINKED = """
## Link tokens

`kvlink`, and any recipe with `linked(N)`, puts N trained tokens behind every chunk (KVLink 2.3). They are computed
for each request and see all that stands before them: system prompt, earlier chunks and their link tokens, their own
chunk. Question and answer see them; reused chunks do not. They take N positions, so what stands behind moves.

- A model has them when its tokenizer has the added tokens `<|link_1_1|>`, `<|link_1_2|>`, ... for the first chunk,
  `<|link_2_1|>`, ... for the second, as many for each (KVLink A.2). Their embeddings are rows of the model's own, so
  the directory is an ordinary one. Other models, a higher N and more chunks than there are link tokens for are
  refused with FAILED_PRECONDITION. Every model takes `linked(0)`: it is how a model trained for k = 0 is asked.
- The cache holds chunks as for every other recipe: link tokens are never stored.
- With a ratio above 0 (`prophetkv+linked(5)`), tokens are chosen as without link tokens, and what is recomputed sees
  the link tokens before it. `tokens_recomputed` does not count link tokens.
- Where no token is stale there are none: at a ratio of 1, for a prompt of one chunk, and for a prompt all of whose
  chunks are there by their exact path. So a ratio of 1 is full attention here too.

How a model is trained for them: [models/README.md](../models/README.md). What they bring: [quality.md](quality.md).
"""
ANCHORED = """
## Compressed chunks

`full_reuse+anchored(50)`, `kvlink+anchored(75)`, and `ape` with either, keep of every chunk the KV of trained anchor
tokens alone: N% fewer than its tokens, so that an entry takes N% fewer bytes in the cache, on the wire and in the
pool (KVLink 2.4). What that costs in answers: [quality.md](quality.md#compressed-chunks).

- A chunk is cut into segments of one length, each with anchor tokens behind it. The text of a segment sees the system
  prompt and itself; its anchor tokens see the system prompt, it, and the chunk's anchor tokens before them. Then the
  text is dropped. Link tokens, question and answer see anchor tokens and nothing else of a chunk.
- The last segment begins in the one before it, if it were shorter otherwise, and has anchor tokens for what is left:
  a chunk of 40 tokens in segments of 16 has 8, 8 and 4 at 50%. A chunk shorter than a segment is one by itself.
- Anchor tokens take as many positions as there are, next to each other. A segment stands right before its own, over
  those of the segments before it: so every anchor token finds its text at the same distance, and those of a chunk
  are as far from each other when they are made as when they are used. That is one row of positions under one mask,
  which is what a model is trained with; only the distance to the system prompt is another in training.
- A model has them when its tokenizer has the added tokens `<|anchor_50_1|>`, `<|anchor_50_2|>`, ...: as many as stand
  behind a whole segment, whose length follows from that: 8 that save 50% are of 16 tokens. Other models and other
  percentages are refused with FAILED_PRECONDITION.
- The ratio is 0: the text is gone, so nothing of it can be recomputed. Recipes that would are refused, and so is a
  ratio above 0, but for 1, which is full attention of the text. So it is when the cache fails.
- Entries are found by the text's tokens and are a variant of their own, beside whatever else is stored of a chunk.
  They are made when they are first asked for; `fusionkv encode` makes none. Counts of context tokens are of the text,
  `bytes_fetched` and the pool's bytes of anchor tokens.

How a model is trained for them: [models/README.md](../models/README.md#fine-tuning-for-anchor-tokens).
"""


def encoded(recipe: Recipe) -> str:
    if recipe.encode is None:
        return "-"
    if recipe.in_place:
        return "in place"
    return f"with {recipe.neighbours} similar" if isinstance(recipe.encode, SimilarityGuided) else "alone"


def main() -> None:
    print(HEAD)
    print("| recipe | chunks encoded | ratio | what it does |")
    print("|---|---|---|---|")
    for recipe in RECIPES.values():
        ratio = f"{recipe.ratio:g}, fixed" if recipe.fixed else f"{recipe.ratio:g}"
        print(f"| `{recipe.name}` | {encoded(recipe)} | {ratio} | {recipe.description} |")
    print(MODIFIED)
    print("| modifier | numbers | what it changes |")
    print("|---|---|---|")
    for modifier in MODIFIERS.values():
        numbers = ", ".join(map(str, modifier.defaults)) or "-"
        print(f"| `{modifier.name}` | {numbers} | {modifier.description} |")
    print(VERSIONS, end="")
    print(ADAPTIVE, end="")
    print(LINKED, end="")
    print(ANCHORED, end="")


if __name__ == "__main__":
    main()
