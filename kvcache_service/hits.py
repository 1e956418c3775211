"""How a chunk was found: what Lookup says of every element of a path."""

import enum


class HitKind(enum.Enum):
    """By its exact prefix path, encoded behind other chunks or as a variant, or not at all."""

    EXACT = "exact"
    ALTERNATIVE = "alternative"
    MISS = "miss"
