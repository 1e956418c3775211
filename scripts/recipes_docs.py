"""Prints docs/recipes.md from the table of recipes and the modifiers (`make docs`)."""

from fusionkv.fusion_worker.methods.modifiers import MODIFIERS
from fusionkv.fusion_worker.methods.recipes import RECIPES, Recipe, SimilarityGuided

HEAD = """# Recipes

How a prompt's context is made, by request: `fusionkv ask CORPUS QUESTION --recipe NAME --ratio R`. The ratio is the
share of context tokens that is recomputed. With a ratio of 1 a recipe equals full attention. What they are worth:
[quality.md](quality.md). How `trace` chooses: [selection.md](selection.md).
"""
MODIFIED = """
A recipe is made of slots, and a modifier fills one otherwise: `a3+window`, `prophetkv+similarity_guided(5)+window`.
Numbers in brackets are the modifier's own; those left out take the defaults.
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
    print(LINKED, end="")


if __name__ == "__main__":
    main()
