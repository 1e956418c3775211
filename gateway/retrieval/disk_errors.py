"""Maps operating-system errors of the embedded engine (disk, file descriptors, memory) to service errors."""

import errno
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from fusionkv.protos.observe import logs
from fusionkv.protos.runtime.errors import ResourceExhausted, ServiceError, Unavailable

_faults = logs.RateLimitedLog(logging.getLogger(__name__))
# LanceDB raises RuntimeErrors that contain the system's error number only in their text.
_NUMBER = re.compile(r"\(os error (\d+)\)")
_EXHAUSTED = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
_UNAVAILABLE = {errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}


@contextmanager
def mapped() -> Iterator[None]:
    """Maps operating-system errors raised inside.

    Raises:
        ResourceExhausted: the disk is full, or there are no file descriptors or memory left.
        Unavailable: the disk can't be read or written.
    """
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        service_error = of(error)
        if service_error is None:
            raise
        _faults.warning("the corpora can't be used", error)
        raise service_error from error


def of(error: Exception) -> ServiceError | None:
    """The service error for an operating-system error; None for any other error."""
    match = _NUMBER.search(str(error))
    number = error.errno if isinstance(error, OSError) and error.errno else int(match[1]) if match else 0
    message = f"the gateway's data_dir can't be used: {os.strerror(number)}"
    if number in _EXHAUSTED:
        return ResourceExhausted(message)
    return Unavailable(message) if number in _UNAVAILABLE else None
