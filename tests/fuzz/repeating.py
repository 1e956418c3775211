"""Bytes of about a given size: a piece again and again, side by side or one within the other."""

from collections.abc import Callable

Make = Callable[[int], bytes]


def repeated(unit: str, before: str = "", after: str = "") -> Make:
    raw = unit.encode()
    return lambda size: before.encode() + raw * max(1, size // len(raw)) + after.encode()


def nested(opens: str, closes: str, inside: str = "x", before: str = "", after: str = "") -> Make:
    def make(size: int) -> bytes:
        depth = max(1, size // len(opens + closes))
        return (before + opens * depth + inside + closes * depth + after).encode()

    return make
