"""Tensor-parallel ranks: a process's part of a model, and a group that runs steps and copies on all of them.

transformers splits the weights by the family's `tp_plan`, including the plan's all-reduces.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fusionkv.fusion_worker.tensor_parallel.channel import Channel
from fusionkv.protos.runtime.errors import Unavailable

if TYPE_CHECKING:
    from transformers.distributed import DistributedConfig

log = logging.getLogger(__name__)
# Embedding and head are replicated, because rank 0 samples tokens alone.
_WHOLE = {"model.embed_tokens": "replicate", "lm_head": "replicate"}
# GLM-4's own plan makes every rank gather the gate and up projections of all ranks; split like this, a rank needs
# only its own channels.
_GLM4 = {"model.layers.*.mlp.gate_up_proj": "packed_colwise", "model.layers.*.mlp.down_proj": "rowwise"}


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


def part_of(config: Any, count: int) -> "DistributedConfig":
    """The configuration by which transformers loads one of `count` ranks' parts of a model."""
    from transformers.distributed import DistributedConfig

    return DistributedConfig(tp_size=count, tp_plan=_WHOLE | (_GLM4 if config.model_type == "glm4" else {}))


def settle(network: Any) -> None:
    """Replaces DTensors by plain tensors. Layers split by columns keep transformers' forward, which all-reduces."""
    # Imported late: it loads SymPy, among others.
    from torch.distributed.tensor import DTensor

    for module in network.modules():
        for name, value in list(module.named_parameters(recurse=False)):
            if isinstance(value, DTensor):
                setattr(module, name, torch.nn.Parameter(value.to_local(), requires_grad=False))
                if name == "weight" and not value.placements[0].is_shard(1):
                    del module.forward  # Split by rows, its forward does extra work only for training.


class RankLost(Unavailable):
    """A rank ended, timed out or failed. The ranks are out of sync, and the worker has to restart."""


class TPGroup:
    """A group of one rank.

    own: objects that every rank has itself; a call that refers to one runs with each rank's own.
    """

    ranks: Ranks = ALONE

    def __init__(self) -> None:
        self.own: list[Any] = []

    def step(self, call: Callable[[], Any]) -> Any:
        """Runs a step of the engine on all ranks and returns rank 0's result. For the engine's thread only."""
        return call()

    def copy(self, call: Callable[..., Any], parts: Sequence[torch.Tensor] = ()) -> list[torch.Tensor]:
        """Runs a copy of KV on all ranks, concurrently with steps; returns all results. Thread-safe.

        Args:
            call: takes the rank's part, if there are parts, and returns a uint8 tensor of the same size on all ranks,
                or None.
            parts: a uint8 tensor for each rank.
        """
        return [call(*parts)]


class Driver(TPGroup):
    """Rank 0's side of a group of several ranks. Steps and copies run concurrently, each in one order on all ranks.

    on_lost is called with the error when a rank is lost, in the thread that noticed. Later calls raise that error.
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
        """Sends a call, runs the body, and waits for all ranks. After a failure on any rank all calls fail."""
        if self._lost is not None:
            raise self._lost
        try:
            channel.send(call)
            yield
            dist.barrier(group=channel.data)
        except Exception as error:
            if self._lost is None:
                self._lost = RankLost(f"the {self.ranks.count} ranks of this worker are out of sync: {error}")
                log.error("the tensor-parallel ranks are out of sync", exc_info=error)
                self._on_lost(self._lost)
            raise self._lost from error
