"""A CUDA stream for copies of KV that overlap with the model's computation."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


class SideStream:
    """Runs copies concurrently with the engine's kernels rather than after all of them. Does nothing without CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self) -> AbstractContextManager[None]:
        """Copies inside wait for the kernels launched so far, and are complete on exit. Thread-safe."""
        return nullcontext() if self._stream is None else self._beside(self._stream)

    @contextmanager
    def _beside(self, stream: torch.cuda.Stream) -> Iterator[None]:
        # The running step may still read slots that are written here, or write slots that are read here.
        stream.wait_stream(torch.cuda.default_stream(self._device))
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()
