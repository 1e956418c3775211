"""A process's rank among the tensor-parallel ranks of a model, and its all-reduce."""

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Ranks:
    """Process `rank` of `count`. Each has an equal share of the model's heads.

    All ranks must call `total` in the same order. It raises RuntimeError when another rank ended, or did not answer
    within the timeout of torch.distributed's default group, which transformers' split layers use as well.
    """

    rank: int = 0
    count: int = 1

    def total(self, partial: torch.Tensor) -> torch.Tensor:
        """All-reduces a tensor in place: the sum over all ranks."""
        if self.count > 1:
            dist.all_reduce(partial)
        return partial


ALONE = Ranks()
