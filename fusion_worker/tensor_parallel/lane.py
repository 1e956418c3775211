"""A lane: orders from rank 0 to the other ranks, one after another, and the bytes that belong to them."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fusionkv.fusion_worker.tensor_parallel.ranks import Ranks

# Ranks read their weights from one disk, and come when they have them.
_START = timedelta(hours=2)
# Nothing to do for so long is no fault.
_IDLE = timedelta(days=3650)
# Sent at once, with the order's length before it. An order of a decode step is a few hundred bytes a request.
_FIRST = 8192


@dataclass(frozen=True, slots=True)
class Lane:
    """Belongs to one thread of each rank at a time. Raises RuntimeError as `Ranks` does.

    orders, data: gloo's groups of all ranks. Other ranks wait for orders without end; nobody waits longer than the
    timeout for anything else.
    """

    ranks: Ranks
    orders: Any
    data: Any

    def tell(self, order: bytes) -> None:
        """Rank 0's side of `hear`."""
        first = torch.zeros(_FIRST, dtype=torch.uint8)
        whole = torch.frombuffer(bytearray(len(order).to_bytes(8, "little") + order), dtype=torch.uint8)
        first[: len(whole)] = whole[:_FIRST]
        dist.broadcast(first, 0, group=self.orders)
        if len(whole) > _FIRST:
            dist.broadcast(whole[_FIRST:], 0, group=self.orders)

    def hear(self) -> bytes:
        """Waits for the next order."""
        first = torch.empty(_FIRST, dtype=torch.uint8)
        dist.broadcast(first, 0, group=self.orders)
        data = first.numpy().tobytes()
        left = 8 + int.from_bytes(data[:8], "little") - _FIRST
        if left <= 0:
            return data[8 : _FIRST + left]
        rest = torch.empty(left, dtype=torch.uint8)
        dist.broadcast(rest, 0, group=self.orders)
        return data[8:] + rest.numpy().tobytes()

    def scatter(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Gives each rank its part; returns rank 0's."""
        dist.scatter(torch.empty_like(parts[0]), list(parts), 0, group=self.data)
        return parts[0]

    def scattered(self, size: int) -> torch.Tensor:
        """The other ranks' side of `scatter`: uint8 [size]."""
        part = torch.empty(size, dtype=torch.uint8)
        dist.scatter(part, None, 0, group=self.data)
        return part

    def gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        """All ranks' parts, of one size, on rank 0; nothing on the others."""
        parts = [torch.empty_like(part) for _ in range(self.ranks.count)] if self.ranks.rank == 0 else None
        dist.gather(part, parts, 0, group=self.data)
        return parts or []

    def meet(self) -> None:
        """Waits until all ranks are here."""
        dist.barrier(group=self.data)


@dataclass(frozen=True, slots=True)
class Joined:
    """A rank among the others: what it computes with, and the lanes of the engine's steps and of copies beside it."""

    ranks: Ranks
    steps: Lane
    copies: Lane


def join(rank: int, count: int, meeting: Path, device: torch.device, timeout: float) -> Joined:
    """Waits for all ranks. meeting: a file that they find one another by, on this machine; there is none yet.

    timeout: seconds that ranks wait for one another later. Raises RuntimeError.
    """
    # All ranks run on one machine, and whoever is elsewhere has no business with them.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(meeting), count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=_START)
    wait = timedelta(seconds=timeout)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    computing = dist.new_group(backend="nccl" if device.type == "cuda" else "gloo", timeout=wait)
    ranks = Ranks(rank, count, computing)
    lanes = []
    for _ in range(2):
        orders = dist.new_group(backend="gloo", timeout=_IDLE if rank else wait)
        lanes.append(Lane(ranks, orders, dist.new_group(backend="gloo", timeout=wait)))
    return Joined(ranks, *lanes)


def all_here() -> None:
    """Waits until every rank that joined has called this: they have read their weights."""
    dist.barrier()


def leave() -> None:
    """Lets go of what `join` took."""
    dist.destroy_process_group()
