"""Kinds of hits, one for each element of a path in a Lookup."""

import enum


class HitKind(enum.Enum):
    """EXACT: found by its exact path. ALTERNATIVE: encoded behind other chunks, or as a variant. MISS: not found."""

    EXACT = "exact"
    ALTERNATIVE = "alternative"
    MISS = "miss"
