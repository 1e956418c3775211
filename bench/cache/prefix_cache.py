"""What simulations compare the index with: a prefix cache without bounds, as vLLM's, with or without backtracking."""

from collections.abc import Sequence

from fusionkv.kvcache_service.hits import HitKind
from fusionkv.kvcache_service.keys import entry_key, path_keys


class PrefixCache:
    """Chunks by the exact path before them.

    With `backtrack` it also looks behind shorter paths, as FusionRAG 4.1 describes: the earlier chunks are dropped
    one at a time, the system prompt never, until an entry is found. What is not found is stored by its exact path.
    """

    def __init__(self, namespace: bytes, *, backtrack: bool) -> None:
        self._namespace = namespace
        self._backtrack = backtrack
        self._entries: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._entries)

    def ask(self, path: Sequence[bytes]) -> list[HitKind]:
        """How each element of a path was found; those that were not are stored."""
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
