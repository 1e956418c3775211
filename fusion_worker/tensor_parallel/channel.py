"""A channel by which rank 0 sends calls, with their tensors, to the other ranks."""

import io
import itertools
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from socket import socket
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary


class Channel:
    """Runs calls on all ranks in one order. For one thread of each rank at a time.

    Calls are pickled and sent through sockets that no other process can write to. Objects in `own`, which each rank
    has itself, are sent as numbers. So are tensors that were sent before, which must not change: masks are sent once,
    not at every step. A tensor in host memory remains in host memory. Methods raise OSError, and RuntimeError when
    another rank ended.
    """

    def __init__(self, device: torch.device, timeout: timedelta, pipes: Sequence[socket]) -> None:
        self.own: list[Any] = []
        self._rank, self._device, self._pipes = dist.get_rank(), device, pipes
        for pipe in pipes:  # Other ranks wait for calls without a timeout.
            pipe.settimeout(None if self._rank else timeout.total_seconds())
        self.data = dist.new_group(backend="gloo", timeout=timeout)
        self._numbers = WeakIdKeyDictionary()  # tensor -> number, at rank 0
        self._count = itertools.count(100)  # Numbers below 100 are for `own`.
        self._sent: dict[int, Any] = {}  # number -> tensor, at the other ranks

    def send(self, call: Callable[..., Any]) -> None:
        """Sends a call to the other ranks, which run it."""
        own = {id(thing): number for number, thing in enumerate((self, *self.own))}

        def number(thing: Any) -> int | None:
            if id(thing) in own or not isinstance(thing, torch.Tensor):
                return own.get(id(thing))
            return int(self._numbers.setdefault(thing, next(self._count)))

        file = io.BytesIO()
        pickler = pickle.Pickler(file, pickle.HIGHEST_PROTOCOL)
        pickler.persistent_id = number  # type: ignore[method-assign]
        pickler.dump(call)
        new = {
            at: (tensor.numpy(force=True), tensor.is_cpu)
            for tensor, at in self._numbers.items()
            if at not in self._sent
        }
        self._sent = dict.fromkeys(self._numbers.values())
        message = pickle.dumps((new, [*self._sent])) + file.getvalue()
        for pipe in self._pipes:
            pipe.sendall(message)

    def obey(self) -> None:
        """Runs the calls that rank 0 sends, forever. An error ends the process, which the other ranks notice."""
        try:
            file = self._pipes[0].makefile("rb")
            while True:
                new, sent = pickle.load(file)
                self._sent |= {
                    number: torch.from_numpy(array).to("cpu" if on_host else self._device)
                    for number, (array, on_host) in new.items()
                }
                self._sent = {number: self._sent[number] for number in sent}
                unpickler = pickle.Unpickler(file)
                known = dict(enumerate((self, *self.own))) | self._sent
                unpickler.persistent_load = known.__getitem__  # type: ignore[method-assign]
                unpickler.load()()
                dist.barrier(group=self.data)
        except Exception:
            print(f"fusionkv-worker: rank {self._rank} failed", file=sys.stderr)
            traceback.print_exc()
            os._exit(1)  # Other threads may be waiting for other ranks forever.

    def copy(self, call: Callable[..., Any], size: int, parts: Sequence[torch.Tensor] = ()) -> list[torch.Tensor]:
        """This rank's work for `TPGroup.copy`.

        size: bytes of each part; 0 without parts. parts: all ranks' parts, given at rank 0 only. Returns all ranks'
        results, of which those of other ranks are valid at rank 0 only.
        """
        part = torch.empty(size, dtype=torch.uint8)
        if size:
            dist.scatter(part, list(parts) or None, group=self.data)
        result = call(part) if size else call()
        results = [] if result is None else [torch.empty_like(result) for _ in range(dist.get_world_size())]
        if results:
            dist.gather(result, None if self._rank else results, group=self.data)
        return results
