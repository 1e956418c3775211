"""Prints docs/recipes.md from the table of recipes and the modifiers (`make docs`)."""

from fusionkv.fusion_worker.client import DEFAULT_RECIPE
from fusionkv.fusion_worker.recipes.modifiers import MODIFIERS
from fusionkv.fusion_worker.recipes.recipes import RECIPES, Recipe, SimilarityGuided

HEAD = f"""# Recipes

A recipe determines how the KV of a prompt's context is made: how chunks are encoded, which tokens are recomputed, and
how many. This page says which recipe to choose, lists all recipes, and shows how to combine them with modifiers.

    fusionkv ask CORPUS QUESTION --recipe prophetkv --ratio 0.3

The ratio is the share of context tokens to recompute. Without a recipe, or with `default`, a request uses the
gateway's `default_recipe`: `{DEFAULT_RECIPE}`, the best one on a real model with chunks encoded alone
([quality](quality.md#real-models)).

| you want | use |
|---|---|
| the best answers for the time | the default |
| less time, at some loss | a smaller ratio, or `full_reuse+corrected` |
| better answers where similar passages are retrieved together | chunks encoded with similar ones, then the default |
| exact answers | `full_attention`, or `prefix_cache` if whole prompts repeat |

`fusionkv encode CORPUS --recipe default+similarity_guided` encodes chunks with similar ones, which are
[corrected](correction.md) first. The default then uses these chunks, and the reply names
`{DEFAULT_RECIPE}+similarity_guided(10)`.

## All recipes
"""
MODIFIED = """
A request can't change a fixed ratio. A ratio of 1 equals full attention for every recipe without `snapkv`.

## Modifiers

A modifier changes one part of a recipe. Join up to 8 of them with `+`, as in `a3+window` or
`prophetkv+similarity_guided(5)+window`. Numbers in brackets may be left out; the table shows their defaults.
"""
VERSIONS = """
`full_attention` and `prefix_cache` take no modifiers. For SnapKV with full attention, use a recipe with `snapkv` at a
ratio of 1: `fusionkv eval --recipes "epic+snapkv(64)" --ratios 1`.

## Versions of a chunk

With `versions(N)` a chunk is reused as it was computed after other chunks, if some of those precede it again
(Cache-Craft). The cache keeps at most N versions of a chunk, up to 16 ([cache](cache.md)). This pays if the same
chunks occur together again; otherwise it costs as much as full attention.

- An exact hit is preferred, then the version whose earlier chunks are most similar to the prompt's.
- A chunk without such a version is computed in full, and stored as a new version.
- `fusionkv eval` refuses it, because its results depend on earlier questions.
"""
ADAPTIVE = """
## Adaptive ratio

`adaptive(N,M)` recomputes N% of the ratio first. When a token of the answer has a probability below M per mille, the
rest is recomputed, and decoding continues. The reply then has `ratio_raised`.
"""
LINKED = """
## Link tokens

`kvlink`, and any recipe with `linked(N)`, puts N trained tokens after every chunk (KVLink 2.3). They are computed for
each request and see everything before them; the question and the answer see them. A ratio of 1 uses none.

The model's tokenizer must have the added tokens `<|link_1_1|>`, `<|link_1_2|>`, ... for the first chunk,
`<|link_2_1|>`, ... for the second, and so on. Other models are refused with FAILED_PRECONDITION. No such model is
shipped: [models/README.md](../models/README.md#fine-tuning-for-link-tokens) trains one.
"""
ANCHORED = """
## Compressed chunks

`full_reuse+anchored(50)`, `kvlink+anchored(75)` and `ape` with either keep only the KV of trained anchor tokens of
every chunk, N% fewer than its tokens (KVLink 2.4). An entry takes N% fewer bytes.

- Link tokens, question and answer see only the anchor tokens of a chunk.
- The tokenizer must have the added tokens `<|anchor_50_1|>`, `<|anchor_50_2|>`, ... Other models and percentages are
  refused with FAILED_PRECONDITION. No such model is shipped:
  [models/README.md](../models/README.md#fine-tuning-for-anchor-tokens) trains one.
- The ratio is 0, or 1 for full attention of the text.
- Entries are made when a request first needs them; `fusionkv encode` makes none.

The [notes on quality](journal/quality.md#compressed-chunks) show how much quality compression costs.
"""


def encoded(recipe: Recipe) -> str:
    if recipe.encode is None:
        return "-"
    if recipe.in_place:
        return "in place"
    return f"with {recipe.neighbours} similar" if isinstance(recipe.encode, SimilarityGuided) else "alone"


def linked(description: str) -> str:
    """A description with references to pages as links."""
    return description.replace("(docs/correction.md)", "([corrections](correction.md))")


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
        print(f"| `{modifier.name}` | {numbers} | {linked(modifier.description)} |")
    print(VERSIONS, end="")
    print(ADAPTIVE, end="")
    print(LINKED, end="")
    print(ANCHORED, end="")


if __name__ == "__main__":
    main()
