"""What the machine lacks for the embedded corpora: room, file descriptors, a disk that can be written."""

import errno
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from fusionkv.protos.observe import logs
from fusionkv.protos.runtime.errors import ResourceExhausted, ServiceError, Unavailable

_faults = logs.RateLimitedLog(logging.getLogger(__name__))
# LanceDB raises RuntimeErrors, which name the system's error in their text alone.
_NUMBER = re.compile(r"\(os error (\d+)\)")
_EXHAUSTED = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
_UNAVAILABLE = {errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}


@contextmanager
def named() -> Iterator[None]:
    """Errors of the machine, raised inside, become those of a service.

    Raises:
        ResourceExhausted: the disk is full, or no file descriptor or memory is left.
        Unavailable: the disk can't be read or written.
    """
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        named = of(error)
        if named is None:
            raise
        _faults.warning("the corpora can't be used", error)
        raise named from error


def of(error: Exception) -> ServiceError | None:
    """What an error says of the machine; None when it says something else."""
    found = _NUMBER.search(str(error))
    number = error.errno if isinstance(error, OSError) and error.errno else int(found[1]) if found else 0
    message = f"the gateway's data_dir can't be used now: {os.strerror(number)}"
    if number in _EXHAUSTED:
        return ResourceExhausted(message)
    return Unavailable(message) if number in _UNAVAILABLE else None
