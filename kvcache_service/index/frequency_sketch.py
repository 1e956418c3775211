"""Approximate counts of recent lookups by exact path."""


class FrequencySketch:
    """Counts the last `limit` to 2 * `limit` distinct names, in about 150 bytes per name.

    Names are truncated to 8 bytes: among 65,536 names, two collide with a probability of 1 in 4 billion.
    """

    def __init__(self, limit: int = 32_768) -> None:
        self._limit = limit
        self._young: dict[bytes, int] = {}
        self._old: dict[bytes, int] = {}

    def add(self, name: bytes) -> None:
        short = name[:8]
        self._young[short] = self.count(name) + 1
        if len(self._young) >= self._limit:
            self._young, self._old = {}, self._young

    def count(self, name: bytes) -> int:
        """Number of recent calls of `add` for a name; 0 if forgotten."""
        short = name[:8]
        return self._young.get(short) or self._old.get(short, 0)
