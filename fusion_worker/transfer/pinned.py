"""Page-locks host memory, to and from which a GPU then copies without a buffer between."""

import asyncio
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch

log = logging.getLogger(__name__)
_PORTABLE, _READ_ONLY = 1, 8  # cudaHostRegisterPortable, cudaHostRegisterReadOnly


class PinnedMapping:
    """The mapping that is locked now; `holds` is for the event loop's thread, `reading` for any."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._mapping: Any = None  # locked, or being locked
        self._locked = False
        self._works = device.type == "cuda"
        self._readers = threading.Condition()
        self._reading = 0

    def holds(self, data: memoryview) -> bool:
        """Whether a GPU can copy from `data`.

        The first call for a mapping starts to lock it, which takes 0.07 s per GiB; until then its bytes are copied by
        way of a buffer.
        """
        if not self._works:
            return False
        if data.obj is not self._mapping and (self._mapping is None or self._locked):
            old, self._mapping, self._locked = self._mapping, data.obj, False
            asyncio.get_running_loop().run_in_executor(None, self._change, old, data.obj)
        return self._locked and data.obj is self._mapping

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A copy from the mapping, which remains locked until the copy has ended."""
        with self._readers:
            self._reading += 1
        try:
            yield
        finally:
            with self._readers:
                self._reading -= 1
                self._readers.notify_all()

    def _change(self, old: Any, new: Any) -> None:
        """Unlocks the mapping of an earlier start of the service, and locks the new one."""
        try:
            if old is not None:
                with self._readers:
                    self._readers.wait_for(lambda: not self._reading)
                unregister(address_of(old), self._device)
            register(address_of(new), len(new), self._device)
            self._locked = True
        except RuntimeError as error:
            self._works = False
            log.warning("the cache service's memory can't be page-locked; its bytes are copied twice: %s", error)


@contextmanager
def locked(data: memoryview, device: torch.device) -> Iterator[None]:
    """Page-locks memory that a GPU writes meanwhile. Where that fails, and for other devices, it does nothing."""
    address = address_of(data) if device.type == "cuda" else 0
    try:
        if address:
            register(address, len(data), device, flags=_PORTABLE)
    except RuntimeError as error:
        address = 0
        log.warning("%d bytes can't be page-locked, and are copied twice: %s", len(data), error)
    try:
        yield
    finally:
        if address:
            unregister(address, device)


def to_host(there: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, or a tensor there itself. From a GPU, it is complete once the stream has got there."""
    if not there.is_cuda:
        return there
    # torch keeps page-locked memory for the next copy.
    return torch.empty(there.shape, dtype=there.dtype, pin_memory=True).copy_(there, non_blocking=True)


def address_of(mapping: Any) -> int:
    """Of the first byte of a buffer, such as an mmap."""
    return int(np.frombuffer(mapping, np.uint8).ctypes.data)


def register(address: int, size: int, device: torch.device, flags: int = _PORTABLE | _READ_ONLY) -> None:
    """Page-locks bytes for a GPU. flags: by default for a mapping that is read-only. Raises RuntimeError."""
    _call("cudaHostRegister", device, address, size, flags)


def unregister(address: int, device: torch.device) -> None:
    """Ends what `register` of this address did. Raises RuntimeError."""
    _call("cudaHostUnregister", device, address)


def _call(name: str, device: torch.device, *arguments: int) -> None:
    with torch.cuda.device(device):  # otherwise it takes memory of GPU 0, too, for a context there
        try:
            torch.cuda.check_error(getattr(torch.cuda.cudart(), name)(*arguments))
        except RuntimeError:
            # CUDA keeps the error, and torch raises it at the thread's next launch: at this one, which is of no use.
            with suppress(RuntimeError):
                torch.ones(1, device=device)
            raise
