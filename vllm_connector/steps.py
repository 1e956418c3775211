"""Runs the steps of the fusion worker's engine in vLLM's thread, between vLLM's own steps."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from fusionkv.fusion_worker.compute.batch import Batch
from fusionkv.fusion_worker.compute.engine import TPGroup
from fusionkv.fusion_worker.compute.model_runner import by_layer
from fusionkv.fusion_worker.models import Model
from fusionkv.protos.runtime.errors import Unavailable

T = TypeVar("T")
# While vLLM has nothing to compute, how long it waits for a step of the engine, and goes on with steps: in between,
# it admits new requests.
_WAIT_SECONDS = 0.01
_IDLE_SECONDS = 0.05
# A turn ends after the layer that reaches this. A step of vLLM that only decodes takes 6 ms with the smallest models.
_TURN_SECONDS = 0.003


class VLLMSteps(TPGroup):
    """The turns of the engine's steps. vLLM's layers, threads and CUDA stream are then used by one thread alone."""

    captures = False  # a turn is short

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._changed = threading.Condition()
        self._started = self._closed = False

    def start(self) -> None:
        """From now on, steps wait for `run`; before, vLLM's thread waits for the engine to be made."""
        self._started = True

    def step(self, call: Callable[[], Any]) -> Any:
        """As `TPGroup.step`. Raises Unavailable after `close`."""
        if not self._started:
            return call()
        future: Future[Any] = Future()
        with self._changed:
            if self._closed:
                raise Unavailable("vLLM is shutting down")
            self._calls.append((call, future))
            self._changed.notify()
        return future.result()

    def forward(self, model: Model, batch: Batch) -> torch.Tensor:
        """As `TPGroup.forward`, in as many turns as it takes."""
        return self.draw(by_layer(model, batch))

    def draw(self, work: Iterator[T]) -> T:
        """Draws all items, and returns the last one. A turn ends with the first item after `_TURN_SECONDS`."""
        last: list[T] = []

        def draws() -> bool:
            until = time.monotonic() + _TURN_SECONDS
            for item in work:
                last[:] = [item]
                if time.monotonic() >= until:
                    return True
            return False

        while self.step(draws):
            pass
        return last[0]

    def run(self, busy: bool, loading: Callable[[], bool]) -> None:
        """Runs the engine's next step, and more while vLLM has nothing else to do. In vLLM's thread.

        Args:
            busy: whether vLLM computes requests of its own.
            loading: whether a request waits for the engine.
        """
        until = time.monotonic() + (0.0 if busy else _IDLE_SECONDS)
        while busy or self._calls or loading():
            with self._changed:
                if not busy:
                    self._changed.wait_for(lambda: self._calls, _WAIT_SECONDS)
                if not self._calls:
                    return
                call, future = self._calls.popleft()
            self._compute(call, future)
            if time.monotonic() >= until:
                return

    def close(self) -> None:
        """Ends steps that wait, with Unavailable."""
        with self._changed:
            self._closed = True
            calls, self._calls = self._calls, deque()
        for _, future in calls:
            future.set_exception(Unavailable("vLLM is shutting down"))

    def _compute(self, call: Callable[[], Any], future: "Future[Any]") -> None:
        try:
            if self._device.type == "cuda":
                # What copies into and out of the pool knows the default stream alone, and vLLM computes on another,
                # where a step may still write to pages that this call fills, for a request that has ended.
                stream = torch.cuda.default_stream(self._device)
                stream.wait_stream(torch.cuda.current_stream(self._device))
                with torch.cuda.stream(stream):
                    result = call()
                stream.synchronize()
            else:
                result = call()
        except Exception as error:  # the engine's thread handles it
            future.set_exception(error)
        else:
            future.set_result(result)
