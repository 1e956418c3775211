"""The reference models that come with this package."""

from pathlib import Path

# Trained to reuse: what they lose by it is another question than what a recipe brings back.
_TUNED = ("linked-", "anchored-")


def shipped() -> list[Path]:
    """Their directories, without those of models that were trained to reuse."""
    found = (path.parent for path in Path(__file__).parent.glob("*/model.safetensors"))
    return sorted(path for path in found if not path.name.startswith(_TUNED))
