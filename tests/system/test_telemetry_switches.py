"""Telemetry is off unless it is asked for, and as much as the environment says."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from fusionkv.kvcache_service.client import CacheClient
from tests.system.otlp import receiving

pytestmark = pytest.mark.system


def test_nothing_is_sent_without_an_endpoint(launch: Any, tmp_path: Path) -> None:
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": ""}
    cache = launch(
        "fusionkv.kvcache_service", "--listen", "127.0.0.1:0", "--data-dir", str(tmp_path / "data"), env=env
    )
    assert cache.stop() == 0
    assert "otlp" not in cache.log.lower()
    assert "metrics at" not in cache.log


def test_sampling_is_set_by_the_environment(launch: Any, tmp_path: Path) -> None:
    """A sampler that takes nothing: the calls are answered, and nothing of them is sent."""

    async def ask(address: str) -> None:
        client = CacheClient(address)
        await client.stats()
        await client.close()

    with receiving() as received:
        for sampler, count in (("always_off", 0), ("always_on", 1)):
            env = {"OTEL_EXPORTER_OTLP_ENDPOINT": received.endpoint, "OTEL_TRACES_SAMPLER": sampler}
            data = ("--data-dir", str(tmp_path / sampler))
            cache = launch("fusionkv.kvcache_service", "--listen", "127.0.0.1:0", *data, env=env)
            asyncio.run(ask(cache.address))
            assert cache.stop() == 0
            assert len(received.spans) == count
