"""Which exact paths were asked for more than once of late."""


class FrequencySketch:
    """Counts names approximately in bounded memory: the last `limit` to twice `limit` different names are known.

    About 150 bytes a name. A name is kept by its first 8 bytes: of 65,536 names, two agree once in 4 billion times.
    """

    def __init__(self, limit: int = 32_768) -> None:
        self._limit = limit
        self._young: dict[bytes, int] = {}
        self._old: dict[bytes, int] = {}

    def ask(self, name: bytes) -> None:
        short = name[:8]
        self._young[short] = self.count(name) + 1
        if len(self._young) >= self._limit:
            self._young, self._old = {}, self._young

    def count(self, name: bytes) -> int:
        """How often it was asked for, as far as is known."""
        short = name[:8]
        return self._young.get(short) or self._old.get(short, 0)
