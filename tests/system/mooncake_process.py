"""A real Mooncake master for tests; without the package, or a library that it needs, the test is skipped."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from fusionkv.protos.runtime import process
from tests.ports import free_port
from tests.system.redis_process import Killable

# Of one service: the tests' entries are small, and memory is allocated as a whole.
SEGMENT = "64MiB"


class MooncakeMaster(Killable):
    """One master on a port that stays its own over restarts; what it knows of is in its clients' memory."""

    def __init__(self, folder: Path, *, port: int = 0, host: str = "127.0.0.1", before: Sequence[str] = ()) -> None:
        """before: a command to run it with."""
        try:
            from fusionkv.kvcache_service.remote import mooncake_engine

            mooncake_engine._store_class()
            import mooncake
        except ImportError as error:
            pytest.skip(f"no Mooncake Store: pip install 'fusionkv[mooncake]', and its libraries ({error})")
        self._program = Path(mooncake.__path__[0], "mooncake_master")
        self._log = folder / "mooncake.log"
        self._metrics = free_port()
        self._host, self._before = host, before
        self.port = port or free_port()
        self.url = f"mooncake://{host}:{self.port}"
        self.flags = ("--remote-memory-bytes", SEGMENT)
        self.start()

    def start(self) -> None:
        ports = ("--rpc_port", str(self.port), "--metrics_port", str(self._metrics))
        # Of a client that was killed its memory is given up soon.
        where = ("--rpc_address", self._host, "--metrics_host", self._host, "--client_ttl", "3")
        command = [*self._before, str(self._program), *ports, *where]
        self._begin(command, self._log, lambda: process.listens(f"{self._host}:{self.port}"))
