"""What adapters of engines share, over a cache service process: its faults are misses, and none takes long."""

import logging
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from fusionkv.kvcache_service.adapters import engine_blobs
from fusionkv.kvcache_service.adapters.engine_blobs import EngineBlobs, EngineOptions
from tests.ports import free_port
from tests.system.cache_process import MIB, flags, payload

pytestmark = pytest.mark.system
KEYS = [b"key %d" % n for n in range(40)]
DATA = [memoryview(payload(n, MIB // 8)) for n in range(40)]
SECONDS = 2.0


@pytest.fixture(scope="module")
def start(launch_module: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`start()` starts the service, always at the same address and over the same files."""
    port, data = free_port(), tmp_path_factory.mktemp("blobs")
    return lambda: launch_module(*flags(data, "--listen", f"127.0.0.1:{port}", memory="32MiB"))


@pytest.fixture(scope="module")
def services(start: Any) -> list[Any]:
    """The last one serves."""
    return [start()]


@pytest.fixture
def blobs(services: list[Any], request: pytest.FixtureRequest) -> Iterator[tuple[Any, EngineBlobs]]:
    """Each test is a tenant of its own."""
    options = EngineOptions(services[-1].address, seconds=SECONDS, tenant=request.node.name)
    made = EngineBlobs(options, {"engine": "a"}, logging.getLogger("engine"))
    assert stored(made) == [True] * 40
    yield services[-1], made
    made.close()


def stored(blobs: EngineBlobs) -> list[bool] | None:
    return blobs.run(lambda b: b.store(KEYS, DATA), None)


def read(blobs: EngineBlobs) -> list[bytes | None]:
    """What is found of each key."""
    into = [memoryview(bytearray(len(data))) for data in DATA]
    done = blobs.run(lambda b: b.retrieve(KEYS, into), [False] * len(KEYS))
    return [bytes(view) if filled else None for view, filled in zip(into, done, strict=True)]


def test_a_killed_service_is_a_miss_and_used_again(
    blobs: Any, services: list[Any], start: Any, monkeypatch: Any
) -> None:
    service, made = blobs
    monkeypatch.setattr(engine_blobs, "_AWAY_SECONDS", 0.1)
    right: list[bytes | None] = [bytes(data) for data in DATA]
    seen: list[list[bytes | None]] = []
    killer = threading.Timer(0.2, service.kill9)
    killer.start()
    while not seen or seen[-1] == right:
        seen.append(read(made))
    killer.join()
    assert len(seen) > 1
    assert all(got in (None, good) for got, good in zip(seen[-1], right, strict=True))
    services.append(start())
    end = time.monotonic() + 60
    while read(made) != right:
        assert time.monotonic() < end


@pytest.mark.parametrize("putting", [False, True])
def test_a_service_that_stands_still_costs_one_timeout(blobs: Any, caplog: Any, putting: bool) -> None:
    service, made = blobs
    service.process.send_signal(signal.SIGSTOP)
    try:
        began = time.monotonic()
        if putting:  # all puts of a call share its timeout
            assert made.run(lambda b: b.store([b"new " + key for key in KEYS], DATA), None) is None
        else:
            assert read(made) == [None] * 40
        assert stored(made) is None  # at once: it is away
        assert made.away
        assert SECONDS / 2 < time.monotonic() - began < SECONDS + 1
    finally:
        service.process.send_signal(signal.SIGCONT)
    assert [record.levelname for record in caplog.records if record.name == "engine"] == ["WARNING"]
    assert "is passed over" in caplog.text


def test_layout_weights_and_tenant_are_apart(blobs: Any, request: pytest.FixtureRequest) -> None:
    service, made = blobs
    assert made.run(lambda b: b.prefix(KEYS), 0) == 40
    for options, layout in (
        ({}, {"engine": "b"}),
        ({"weights": "2"}, {"engine": "a"}),
        ({"tenant": "t"}, {"engine": "a"}),
    ):
        own = EngineOptions(service.address, **{"tenant": request.node.name, **options})
        other = EngineBlobs(own, layout, logging.getLogger("engine"))
        assert other.run(lambda b: b.prefix(KEYS), 1) == 0
        other.close()


def test_who_starts_a_call_always_gets_a_result(blobs: Any, caplog: Any) -> None:
    _, made = blobs
    results: list[Any] = []
    done = threading.Event()

    async def broken(_: Any) -> int:
        raise BufferError("not contiguous")

    made.start(broken, 7, lambda result: (results.append(result), done.set()))
    assert done.wait(20)
    assert results == [7]
    assert "not contiguous" in caplog.text


def test_after_its_end_all_is_a_miss(blobs: Any) -> None:
    _, made = blobs
    made.close()
    results: list[Any] = []
    made.start(lambda b: b.prefix(KEYS), 7, results.append)
    assert (results, read(made), stored(made)) == ([7], [None] * 40, None)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, "config.cache is missing"),
        ({"cache": "x:1", "cachee": ""}, "config.cachee is not one of cache, tenant, weights, seconds"),
        ({"cache": 5}, "config.cache is 5, and has to be a string"),
        ({"cache": "x:1", "seconds": "5"}, "config.seconds is '5', and has to be a number above 0"),
        ({"cache": "x:1", "seconds": 0}, "has to be a number above 0"),
        ({"cache": "x:1", "seconds": True}, "has to be a number above 0"),
    ],
)
def test_wrong_options(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        EngineOptions.of(given, "config")
