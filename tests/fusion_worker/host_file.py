"""What stands in for kvikio's file on a machine without a GPU."""

import os

import torch


class HostFile:
    """What of kvikio.CuFile is used."""

    reads: list[tuple[int, int]]

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        os.close(self._file)

    def read(self, buffer: torch.Tensor, size: int, file_offset: int) -> int:
        self.reads.append((file_offset, size))
        return os.preadv(self._file, [buffer.numpy()[:size]], file_offset)
