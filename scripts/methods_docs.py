"""Prints docs/methods.md: its text, and tables of recipes and modifiers (`make docs`)."""

import re
from collections.abc import Iterable
from pathlib import Path

from fusionkv.protos.contract.recipes import MODIFIERS, RECIPES, Modifier, Recipe, SimilarityGuided

PAGE = Path(__file__).parent.parent / "docs/methods.md"


def recipe_row(recipe: Recipe) -> str:
    encoded = f"with {recipe.neighbours} similar" if isinstance(recipe.encode, SimilarityGuided) else "alone"
    encoded = "-" if recipe.encode is None else "in place" if recipe.in_place else encoded
    ratio = f"{recipe.ratio:g}{', fixed' if recipe.fixed else ''}"
    return f"| `{recipe.name}` | {encoded} | {ratio} | {recipe.description} |\n"


def modifier_row(modifier: Modifier) -> str:
    numbers = ", ".join(map(str, modifier.defaults)) or "-"
    return f"| `{modifier.name}` | {numbers} | {modifier.description} |\n"


def replaced(page: str, before: str, old: str, new: Iterable[str]) -> str:
    """Replaces what a pattern finds directly behind a text. Raises ValueError unless there is one such place."""
    page, count = re.subn(f"({re.escape(before)}){old}", lambda match: match[1] + "".join(new), page)
    if count != 1:
        raise ValueError(f"{PAGE} has {count} places behind {before!r}")
    return page


def page() -> str:
    head = "| recipe | chunks encoded | ratio | what it does |\n|---|---|---|---|\n"
    text = replaced(PAGE.read_text(), head, r"(?:\|.*\n)+", map(recipe_row, RECIPES.values()))
    head = "| modifier | numbers | what it changes |\n|---|---|---|\n"
    return replaced(text, head, r"(?:\|.*\n)+", map(modifier_row, MODIFIERS.values()))


if __name__ == "__main__":
    print(page(), end="")
