"""A CUDA stream for what moves KV while the model computes."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


class SideStream:
    """Runs copies beside the engine's kernels instead of behind all of them. Without CUDA, nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self) -> AbstractContextManager[None]:
        """Work within comes after what the engine has asked for so far, and is done on leaving. For any thread."""
        return nullcontext() if self._stream is None else self._beside(self._stream)

    @contextmanager
    def _beside(self, stream: torch.cuda.Stream) -> Iterator[None]:
        # Slots that are written here may have been read by, and those read here written by, the step that runs.
        stream.wait_stream(torch.cuda.default_stream(self._device))
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()
