"""Calls that rank 0 sends to the other ranks, one after another, and the bytes that belong to them."""

import io
import itertools
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from fusionkv.fusion_worker.tensor_parallel.ranks import Ranks

# Nothing to do for so long is no fault.
_IDLE = timedelta(days=3650)


class Channel:
    """Belongs to one thread of each rank at a time. Raises RuntimeError as `Ranks` does.

    Calls are pickles. What each rank has of its own goes as a number, and so does a tensor that was sent before: the
    masks of a request cross once, not at every step. Nobody may write to a tensor that was sent.
    """

    def __init__(self, ranks: Ranks, device: torch.device, timeout: timedelta) -> None:
        self.own: list[Any] = []
        self._ranks, self._device = ranks, device
        # Other ranks wait for calls without end; nobody waits longer than the timeout for anything else.
        self._calls = dist.new_group(backend="gloo", timeout=_IDLE if ranks.rank else timeout)
        self._data = dist.new_group(backend="gloo", timeout=timeout)
        self._count = itertools.count()
        self._numbers = WeakIdKeyDictionary()  # tensor -> number, at rank 0
        self._known: dict[int, torch.Tensor] = {}  # the reverse, at the others

    def send(self, call: Callable[..., Any] | None) -> None:
        """Has the other ranks run a call; None ends them."""
        file, new = io.BytesIO(), dict[int, torch.Tensor]()
        own = {id(thing): -number for number, thing in enumerate([self, *self.own], 1)}

        def number(thing: Any) -> int | None:
            if id(thing) in own or not isinstance(thing, torch.Tensor):
                return own.get(id(thing))
            if thing not in self._numbers:
                self._numbers[thing] = at = next(self._count)
                new[at] = thing
            return int(self._numbers[thing])

        pickler = pickle.Pickler(file, pickle.HIGHEST_PROTOCOL)
        pickler.persistent_id = number  # type: ignore[method-assign]
        pickler.dump(call)
        alive = set(self._numbers.values())
        arrays = {at: tensor.numpy(force=True) for at, tensor in new.items()}
        dist.broadcast_object_list([(file.getvalue(), arrays, alive)], group=self._calls)

    def obey(self) -> None:
        """Runs what rank 0 sends until it ends this rank. An error ends the process, which the others see at once."""
        try:
            while (call := self._receive()) is not None:
                call()
                self.meet()
        except Exception:
            print(f"fusionkv-worker: rank {self._ranks.rank} failed", file=sys.stderr)
            traceback.print_exc()
            os._exit(1)  # Other threads may wait for ranks that will never come.

    def _receive(self) -> Callable[[], Any] | None:
        message: list[Any] = [None]
        dist.broadcast_object_list(message, group=self._calls)
        data, arrays, alive = message[0]
        new = {at: torch.from_numpy(array).to(self._device) for at, array in arrays.items()}
        self._known = new | {at: tensor for at, tensor in self._known.items() if at in alive}
        own = {-number: thing for number, thing in enumerate([self, *self.own], 1)}
        unpickler = pickle.Unpickler(io.BytesIO(data))
        unpickler.persistent_load = (self._known | own).__getitem__  # type: ignore[method-assign]
        call: Callable[[], Any] | None = unpickler.load()
        return call

    def copy(self, call: Callable[..., Any], size: int, parts: Sequence[torch.Tensor] = ()) -> list[torch.Tensor]:
        """What every rank does for `TPGroup.copy`. size: of each part; 0 for none. parts: at rank 0."""
        part = torch.empty(size, dtype=torch.uint8)
        if size:
            dist.scatter(part, list(parts) or None, group=self._data)
        result = call(part) if size else call()
        results = [] if result is None else [torch.empty_like(result) for _ in range(self._ranks.count)]
        if results:
            dist.gather(result, None if self._ranks.rank else results, group=self._data)
        return results

    def meet(self) -> None:
        """Waits until all ranks have run the call."""
        dist.barrier(group=self._data)
