"""Processes that train one model together: each computes a part of every batch, and all stay alike."""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import distributed


class Crew:
    """One of `count` processes. Alone, nothing is exchanged.

    On small matrices two threads of one process wait for each other more than they compute; two processes meet once a
    step, over 4 MB of gradients.
    """

    def __init__(self, rank: int = 0, count: int = 1, meeting: Path | None = None) -> None:
        """meeting: a file that does not exist yet, the same for all."""
        self.rank, self.count = rank, count
        if count > 1:
            distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=count)

    def average(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Gives every process the mean of all gradients."""
        if self.count == 1:
            return
        gradients = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([gradient.view(-1) for gradient in gradients])
        distributed.all_reduce(flat)
        flat /= self.count
        for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))

    def collect(self, value: Any) -> list[Any]:
        """What each process has, by rank."""
        if self.count == 1:
            return [value]
        found: list[Any] = [None] * self.count
        distributed.all_gather_object(found, value)
        return found

    def close(self) -> None:
        if self.count > 1:
            distributed.destroy_process_group()


def means(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    """By name, the mean of what the parts have under it."""
    found: dict[str, list[float]] = defaultdict(list)
    for part in parts:
        for name, value in part.items():
            found[name].append(value)
    return {name: sum(values) / len(values) for name, values in found.items()}
