"""`fusionkv encode --wait`, over services that come after it: as at an install, and as at an upgrade."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fusionkv.gateway.client.client import Client

pytestmark = [pytest.mark.system, pytest.mark.timeout(480), pytest.mark.slow]
Launch = Callable[..., Any]


class Late:
    """A gateway and a worker, whose addresses are known before they are there."""

    def __init__(self, launch: Launch, folder: Path, model: Path) -> None:
        self.address = f"unix:{folder}/gateway.sock"
        self._launch, self._folder, self._model = launch, folder, model

    def gateway(self) -> Any:
        flags = ("--listen", self.address, "--workers", f"unix:{self._folder}/worker.sock")
        return self._launch("fusionkv.gateway", *flags, "--data-dir", str(self._folder / "gateway"))

    def worker(self) -> Any:
        flags = ("--listen", f"unix:{self._folder}/worker.sock", "--model", str(self._model))
        own = ("--cache", self.cache, "--threads", "1", "--pool-bytes", "64MiB")
        return self._launch("fusionkv.fusion_worker", *flags, *own)

    @property
    def cache(self) -> str:
        return f"unix:{self._folder}/kvcache.sock"

    def encode(self, *flags: str) -> Any:
        own = ("encode", "notes", "--recipe", "fusionrag", "--gateway", self.address)
        return self._launch("fusionkv.gateway.cli.main", *own, *flags, services=0)

    def ingest(self) -> None:
        with Client(self.address) as client:
            client.ingest("notes", "a.md", " ".join(f"The code of page {i} is {7 * i}." for i in range(40)))


@pytest.fixture
def late(launch: Launch, tmp_path: Path, tiny_model: Path) -> Late:
    made = Late(launch, tmp_path, tiny_model)
    launch("fusionkv.kvcache_service", "--listen", made.cache, "--data-dir", str(tmp_path / "kvcache"))
    return made


def test_what_comes_late_is_waited_for(late: Late) -> None:
    encoder = late.encode("--wait", "600")
    encoder.wait_for_line("waiting for up to", timeout=120)
    assert "no corpus" not in encoder.log
    gateway = late.gateway()
    encoder.wait_for_line("no corpus 'notes'", timeout=120)
    worker = late.worker()
    late.ingest()
    assert encoder.wait(120) == 0, encoder.log
    assert re.search(r" [1-9]\d* chunks encoded, 0 already stored", encoder.log)

    # The corpus is there at an upgrade, and the worker still loads its model.
    for service in (worker, gateway):
        assert service.stop() == 0
    late.gateway()
    encoder = late.encode("--wait", "600")
    encoder.wait_for_line("waiting for up to", timeout=120)
    late.worker()
    assert encoder.wait(120) == 0, encoder.log
    assert " 0 chunks encoded" in encoder.log


def test_a_corpus_without_a_document_is_waited_for(late: Late) -> None:
    """As it is at the moment after its making, and here for as long as it takes."""
    late.gateway()
    late.worker()
    late.ingest()
    with Client(late.address) as client:
        client.delete("notes", "a.md")
    encoder = late.encode("--wait", "600")
    encoder.wait_for_line("corpus 'notes' has no documents yet", timeout=120)
    late.ingest()
    assert encoder.wait(120) == 0, encoder.log
    assert re.search(r" [1-9]\d* chunks encoded, 0 already stored", encoder.log)


def test_a_corpus_that_does_not_come_ends_the_wait(late: Late) -> None:
    late.gateway()
    for flags in ((), ("--wait", "0.1")):
        encoder = late.encode(*flags)
        assert encoder.wait() == 1
        assert "fusionkv: gateway: no corpus 'notes'" in encoder.log.splitlines()[-1]
