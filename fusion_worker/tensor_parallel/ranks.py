"""The processes that share one model. Each has an equal part of its heads, and what they find is put together."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Ranks:
    """One process, number `rank`, among `count`. Alone it has everything, and each method returns what it is given.

    group: torch.distributed's, of all ranks, on the device that computes: NCCL's on GPUs, gloo's on CPUs.

    All ranks call the same methods in the same order.

    Raises:
        RuntimeError: another rank has ended, or was silent for the group's timeout.
    """

    rank: int = 0
    count: int = 1
    group: Any = None

    def total(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' tensors, in the place of this one's."""
        if self.count > 1:
            dist.all_reduce(partial, group=self.group)
        return partial

    def joined(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """All ranks' tensors, of one shape, one after another along `dim`."""
        if self.count == 1:
            return part
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.count)]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        return torch.cat(parts, dim)

    def part(self, size: int) -> slice:
        """Which of `size` heads, rows or columns are this rank's."""
        each = size // self.count
        return slice(self.rank * each, (self.rank + 1) * each)


ALONE = Ranks()
