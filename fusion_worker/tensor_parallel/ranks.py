"""The processes that share one model. Each has an equal part of its heads, and what they find is put together."""

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Ranks:
    """One process, number `rank`, among `count`. Alone it has everything, and each method returns what it is given.

    All ranks call the same methods in the same order, in torch.distributed's default group, as the layers that
    transformers cuts do. Raises RuntimeError when another rank has ended, or was silent for the group's timeout.
    """

    rank: int = 0
    count: int = 1

    def total(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' tensors, in the place of this one's."""
        if self.count > 1:
            dist.all_reduce(partial)
        return partial

    def joined(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """All ranks' tensors, of one shape, one after another along `dim`."""
        parts = part.new_zeros(self.count, *part.shape)
        parts[self.rank] = part
        return torch.cat(list(self.total(parts)), dim)


ALONE = Ranks()
