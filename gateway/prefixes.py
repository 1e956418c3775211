"""Begins a prompt with the chunks that a recent prompt began with: exact hits for recipes that reuse nothing else."""

import itertools
from collections import OrderedDict
from collections.abc import Hashable, Sequence

from fusionkv.gateway.plan import Passage

# Prompts remembered. All of them are compared with each new one, which takes 1 ms with ten chunks a prompt.
_MOST = 1024


class Prefixes:
    """Orders the passages of prompts for `ORDER_PREFIX`, and remembers these orders.

    It knows what prompts began with, not what the cache service still has: a wrong guess costs time, not quality.
    """

    def __init__(self) -> None:
        # Root and hashes of the chunks, least recently used first.
        self._recent: OrderedDict[tuple[Hashable, tuple[int, ...]], None] = OrderedDict()

    def order(self, root: Hashable, passages: Sequence[Passage]) -> list[Passage]:
        """Sorts passages, best first: those that a recent prompt began with, then the others from worst to best.

        Args:
            root: the same for prompts that are the same up to their first chunk, and may share KV.
            passages: of equal ones, only the first can belong to a beginning.
        """
        root = hash(root)  # it holds texts of a request, of up to half a megabyte
        hashes = [hash(chunk.ids) for chunk, _ in passages]
        lengths = {number: len(chunk.ids) for number, (chunk, _) in zip(hashes, passages, strict=True)}
        shared = max(
            ([*itertools.takewhile(lengths.__contains__, chunks)] for at, chunks in self._recent if at == root),
            key=lambda begun: sum(lengths[number] for number in begun),
            default=[],
        )
        # Where none begins alike, the best passage comes first, as in ORDER_ENDS: it may begin others.
        begun = [hashes.index(number) for number in shared] or [0][: len(passages)]
        ordered = [*begun, *(at for at in reversed(range(len(passages))) if at not in begun)]
        numbers = [hashes[at] for at in ordered]
        # Up to a chunk that comes again, which no beginning has.
        made = root, tuple(numbers[: next((at for at, n in enumerate(numbers) if n in numbers[:at]), None)])
        self._recent[made] = None
        self._recent.move_to_end(made)
        if len(self._recent) > _MOST:
            self._recent.popitem(last=False)
        return [passages[at] for at in ordered]
