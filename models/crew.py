"""Data-parallel training on several processes: each computes a part of every batch, and gradients are averaged."""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import distributed


class Crew:
    """One of `count` processes; a single process exchanges nothing.

    On small matrices, two threads of a process wait for each other longer than they compute. Two processes
    synchronise once per step, with 4 MB of gradients.
    """

    def __init__(self, rank: int = 0, count: int = 1, meeting: Path | None = None) -> None:
        """meeting: the rendezvous file of all processes, which must not exist yet."""
        self.rank, self.count = rank, count
        if count > 1:
            distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=count)

    def average(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Replaces the gradients by their mean over all processes."""
        if self.count == 1:
            return
        gradients = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([gradient.view(-1) for gradient in gradients])
        distributed.all_reduce(flat)
        flat /= self.count
        for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))

    def collect(self, value: Any) -> list[Any]:
        """Gathers a value from each process, in order of rank."""
        if self.count == 1:
            return [value]
        found: list[Any] = [None] * self.count
        distributed.all_gather_object(found, value)
        return found

    def close(self) -> None:
        if self.count > 1:
            distributed.destroy_process_group()


def means(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    """The mean of each name's values over the parts that have it."""
    found: dict[str, list[float]] = defaultdict(list)
    for part in parts:
        for name, value in part.items():
            found[name].append(value)
    return {name: sum(values) / len(values) for name, values in found.items()}
