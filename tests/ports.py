"""Ports for processes that are to be found at the same place again."""

import itertools
import os
import socket
import zlib

# Below those that a system gives to outgoing connections and to whoever asks for port 0 (from 32768 on, or 16000):
# else one of them takes the port while nobody listens there, or a connection to it meets itself. A Redis Cluster
# listens 10,000 above as well.
_LOW, _HIGH = 2000, 5900
# Two runs on one machine begin at different places; the processes of one run (pytest-xdist) take turns.
_run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
_process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_numbers = itertools.count(zlib.crc32(_run.encode()) * _processes + _process, _processes)


def free_port(*above: int) -> int:
    """A port that nobody has, nor those so far `above` it."""
    while True:
        port = _LOW + next(_numbers) % (_HIGH - _LOW)
        if all(_free(port + more) for more in (0, *above)):
            return port


def _free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
