"""What is encoded ahead of time is what the cache service has, whatever a corpus says of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fusionkv.gateway.client import Client

pytestmark = pytest.mark.system
Launch = Callable[..., Any]


def test_what_the_cache_lost_is_encoded_again(launch: Launch, tiny_model: Path, tmp_path: Path) -> None:
    """Two caches, one after the other, below one gateway's corpora."""

    def start(name: str) -> Any:
        cache = launch("fusionkv.kvcache_service", "--listen", "127.0.0.1:0", "--data-dir", str(tmp_path / name))
        own = ("--model", str(tiny_model), "--cache", cache.address, "--threads", "1", "--pool-bytes", "64MiB")
        worker = launch("fusionkv.fusion_worker", *own, "--listen", "127.0.0.1:0")
        data = ("--data-dir", str(tmp_path / "gateway"), "--listen", "127.0.0.1:0")
        return launch("fusionkv.gateway", "--workers", worker.address, *data)

    gateway = start("first")
    with Client(gateway.address, timeout=60) as client:
        for i in range(3):
            client.ingest("c", f"{i}.txt", f"page {i} is about subject{i}")
        assert [[*client.precompute("c", "fusionrag")][-1].skipped for _ in range(2)] == [0, 3]
    assert gateway.stop() == 0
    with Client(start("second").address, timeout=60) as client:
        assert [[*client.precompute("c", "fusionrag")][-1].skipped for _ in range(2)] == [0, 3]
        summary = client.ask("c", "subject1?", recipe="fusionrag", max_tokens=1).summary
        assert not summary.degraded
        assert (summary.chunks_missed, summary.tokens_encoded) == (0, 0)
