"""What runs on all ranks of a worker at once, driven by rank 0. Most workers are one rank, and tell nobody."""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fusionkv.fusion_worker.tensor_parallel.channel import Channel
from fusionkv.fusion_worker.tensor_parallel.ranks import ALONE, Ranks
from fusionkv.protos.runtime.errors import Unavailable

log = logging.getLogger(__name__)


class RankLost(Unavailable):
    """A rank ended, was silent for too long, or could not do its part: the ranks are out of step for good."""


class TPGroup:
    """A group of one. own: what each rank has of its own; a call that names some of it means each rank's."""

    ranks: Ranks = ALONE

    def __init__(self) -> None:
        self.own: list[Any] = []

    def step(self, call: Callable[[], Any]) -> Any:
        """Runs a step of the engine on all ranks; returns what it returns here. For the engine's thread alone."""
        return call()

    def copy(self, call: Callable[..., Any], parts: Sequence[torch.Tensor] = ()) -> list[torch.Tensor]:
        """Runs a copy of KV on all ranks, beside steps, from any thread; each is given its part, if there are parts.

        Returns what it returns on each rank: uint8 tensors of one size, or nothing.
        """
        return [call(*parts)]


class Driver(TPGroup):
    """Of several ranks, at rank 0. Steps and copies go on side by side, each in one order on all ranks.

    on_lost: told why the group can't go on, from the thread that found out. Every call raises it from then on.
    """

    def __init__(self, ranks: Ranks, steps: Channel, copies: Channel, on_lost: Callable[[RankLost], None]) -> None:
        self.ranks, self._on_lost = ranks, on_lost
        self._steps, self._copies = steps, copies
        self.own = steps.own = copies.own
        self._copying = threading.Lock()
        self._lost: RankLost | None = None

    def step(self, call: Callable[[], Any]) -> Any:
        with self._together(self._steps, call):
            return call()

    def copy(self, call: Callable[..., Any], parts: Sequence[torch.Tensor] = ()) -> list[torch.Tensor]:
        size = len(parts[0]) if parts else 0
        with self._copying, self._together(self._copies, partial(self._copies.copy, call, size)):
            return self._copies.copy(call, size, parts)

    @contextmanager
    def _together(self, channel: Channel, call: Callable[..., Any]) -> Iterator[None]:
        """While all ranks run a call, to its end on the last. Nothing can follow a failure on any of them."""
        if self._lost is not None:
            raise self._lost
        try:
            channel.send(call)
            yield
            dist.barrier(group=channel.data)
        except Exception as error:
            if self._lost is None:
                self._lost = RankLost(f"the {self.ranks.count} ranks of this worker are out of step: {error}")
                log.error("the ranks are out of step", exc_info=error)
                self._on_lost(self._lost)
            raise self._lost from error
