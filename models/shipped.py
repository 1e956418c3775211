"""The reference models shipped with this package."""

from pathlib import Path

# Models trained for reuse: they are no test of how much quality a recipe recovers.
_TUNED = ("linked-", "anchored-")


def shipped() -> list[Path]:
    """Directories of the shipped models, without those trained for reuse."""
    found = (path.parent for path in Path(__file__).parent.glob("*/model.safetensors"))
    return sorted(path for path in found if not path.name.startswith(_TUNED))
