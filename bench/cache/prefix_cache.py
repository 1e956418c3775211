"""The simulations' baseline: an unbounded prefix cache like that of vLLM, with or without backtracking."""

from collections.abc import Sequence

from fusionkv.kvcache_service.index.record import HitKind
from fusionkv.kvcache_service.keys import entry_key, path_keys


class PrefixCache:
    """A cache of chunks by their exact path. Misses are stored.

    With `backtrack` it also tries shorter paths, as FusionRAG 4.1 describes: the chunks after the system prompt are
    dropped one at a time until an entry is found.
    """

    def __init__(self, namespace: bytes, *, backtrack: bool) -> None:
        self._namespace = namespace
        self._backtrack = backtrack
        self._entries: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._entries)

    def ask(self, path: Sequence[bytes]) -> list[HitKind]:
        """Looks up each element of a path, and stores misses."""
        kinds = []
        for at, key in enumerate(path_keys(self._namespace, path)):
            if key in self._entries:
                kinds.append(HitKind.EXACT)
            elif self._backtrack and any(self._shorter(path, drop, at) for drop in range(2, at + 1)):
                kinds.append(HitKind.ALTERNATIVE)
            else:
                kinds.append(HitKind.MISS)
                self._entries.add(key)
        return kinds

    def _shorter(self, path: Sequence[bytes], first: int, at: int) -> bool:
        return entry_key(self._namespace, [path[0], *path[first : at + 1]]) in self._entries
