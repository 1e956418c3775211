"""Counts failed TLS handshakes of gRPC, which writes a line of each to standard error, and logs one a minute."""

import contextlib
import logging
import os
import re
import sys
import threading
from typing import BinaryIO

from fusionkv.protos.observe import rejected

_FAILED = re.compile(rb"ssl_transport_security\.cc:\d+\] Handshake failed with error (.*)")


def attach() -> None:
    """Reads what libraries write to file descriptor 2, and passes on all other lines. Call it after `logs.attach`.

    Lines of Python go to standard error at once. A process that a library aborts may lose the library's last lines.
    """
    error = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
    read, write = os.pipe()
    # A library that writes while it holds Python's lock would wait for the reader forever: it loses lines instead.
    os.set_blocking(write, False)
    os.dup2(write, 2)
    os.close(write)
    sys.stderr = error
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(error)
    source = os.fdopen(read, "rb")
    threading.Thread(target=_pass_on, args=(source, error.fileno()), name="stderr", daemon=True).start()


def _pass_on(source: BinaryIO, target: int) -> None:
    for line in source:
        if failed := _FAILED.search(line):
            rejected.note("tls_handshake", failed[1].decode(errors="replace"))
        else:
            with contextlib.suppress(OSError):  # the disk is full
                os.write(target, line)
