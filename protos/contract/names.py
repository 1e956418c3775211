"""Names of recipes: `default`, and names in metrics."""

# The name by which a worker takes what was recommended for its model; modifiers may follow it.
DEFAULT = "default"


def full_name(recipe: str, default: str) -> str:
    """A requested recipe's full name, with another default in place of the base `default`."""
    base, plus, modifiers = recipe.partition("+")
    return f"{default}{plus}{modifiers}" if base == DEFAULT else recipe


def recipe_label(recipe: str) -> str:
    """A recipe's name in metrics: its base, and its modifier without numbers, or `+several`.

    Callers choose modifiers and numbers, so that full names would be labels without end.
    """
    base, *modifiers = recipe.split("+")
    if len(modifiers) > 1:
        return f"{base}+several"
    return "+".join((base, *(modifier.partition("(")[0] for modifier in modifiers)))
