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


if __name__ == "__main__":
    main()
