"""The checksum of an entry's bytes: XXH3-128 over the XXH3-64 digests of its pieces of 256 KiB.

One XXH3 is a chain, which a GPU's many processors can't share. Pieces are independent: bytes that were read from a
disk straight into a GPU are verified there (kernels/checksum.py). On a CPU that takes 8% of the rate (22.5 instead of
24.6 GB/s on one core).
"""

from collections.abc import Iterable

import xxhash

PIECE_BYTES = 256 << 10


class Checksum:
    """The checksum of bytes that come one after the other, cut anywhere."""

    def __init__(self) -> None:
        self._root = xxhash.xxh3_128()
        self._piece = xxhash.xxh3_64()
        self._begun = 0  # bytes of the piece

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Takes the next bytes."""
        rest = memoryview(data).cast("B")
        while len(rest):
            part = rest[: PIECE_BYTES - self._begun]
            if len(part) == PIECE_BYTES:
                self._root.update(xxhash.xxh3_64_digest(part))
            else:
                self._piece.update(part)
                self._begun += len(part)
                if self._begun == PIECE_BYTES:
                    self._root.update(self._piece.digest())
                    self._piece.reset()
                    self._begun = 0
            rest = rest[len(part) :]

    def digest(self) -> bytes:
        """16 bytes, of all that was taken."""
        root = self._root.copy()
        if self._begun:
            root.update(self._piece.digest())
        return root.digest()


def checksum(data: bytes | bytearray | memoryview) -> bytes:
    """Of bytes that are all there."""
    whole = Checksum()
    whole.update(data)
    return whole.digest()


def of_pieces(digests: Iterable[bytes]) -> bytes:
    """Of bytes whose pieces have these XXH3-64 digests (8 bytes each, big-endian), the last of what is left."""
    return xxhash.xxh3_128_digest(b"".join(digests))
