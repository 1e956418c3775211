"""FusionKV as a secondary tier of vLLM's offloading: blocks of one instance are found by others, or are a miss."""

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fusionkv.bench.services.vllm import ROOT, VLLM
from tests.services import Launch, start_cache

pytestmark = [
    pytest.mark.slow,
    pytest.mark.system,
    pytest.mark.skipif(not VLLM.exists(), reason="vLLM is not installed: scripts/setup.sh vllm"),
]
KEYS = [*range(20)]
MIB = 1 << 20
# A call in vLLM's scheduler that waited for a hung service would take two seconds. A step takes a millisecond.
STEP_SECONDS = 0.5


class Tiering:
    """A process with vLLM's tiering managers."""

    def __init__(self) -> None:
        command = [str(VLLM), "-P", str(ROOT / "tests/vllm/tiering.py")]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self, do: str, name: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps({"do": do, "name": name, **arguments}), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate(timeout=60)
        assert self._process.returncode == 0


@pytest.fixture(scope="module")
def tiering() -> Iterator[Tiering]:
    process = Tiering()
    yield process
    process.close()


@pytest.fixture
def cache(launch: Launch, tmp_path: Path) -> Any:
    return start_cache(launch, tmp_path)


def tier(service: Any, /, **more: Any) -> dict[str, Any]:
    return {"cache": service.address, "weights": "w", "seconds": 2} | more


@pytest.mark.parametrize("near", [False, True], ids=["tcp", "unix"])
@pytest.mark.parametrize("row_bytes", [16384, 9 * MIB])
def test_what_one_instance_stores_another_loads(
    tiering: Tiering, launch: Launch, tmp_path: Path, near: bool, row_bytes: int
) -> None:
    listen = ("--listen", f"unix:{tmp_path}/s") if near else ()
    cache = start_cache(launch, tmp_path, *listen)
    for name in "ab":
        assert tiering("open", name, tier=tier(cache), row_bytes=row_bytes, rows=24) == ""
    tiering("store", "a", keys=KEYS)
    loaded = tiering("load", "b", keys=[*KEYS, 99])
    assert (loaded["found"], loaded["right"]) == (KEYS, True)
    assert loaded["longest"] < STEP_SECONDS
    tiering("reset", "b")
    assert tiering("load", "b", keys=KEYS)["found"] == KEYS
    for name in "ab":
        tiering("close", name)
    cache.kill9()
    again = start_cache(launch, tmp_path, *listen)
    assert tiering("open", "c", tier=tier(again), row_bytes=row_bytes, rows=24) == ""
    loaded = tiering("load", "c", keys=KEYS)
    assert loaded["right"]
    assert loaded["found"], "what was on disk outlives the service"
    tiering("close", "c")


def test_another_tenant_or_layout_finds_nothing(tiering: Tiering, cache: Any) -> None:
    assert tiering("open", "a", tier=tier(cache)) == ""
    tiering("store", "a", keys=KEYS)
    others: list[dict[str, Any]] = [
        {"tier": tier(cache, tenant="t")},
        {"tier": tier(cache, weights="x")},
        {"tier": tier(cache), "model": "n"},
        {"tier": tier(cache), "dtype": "bfloat16"},
        {"tier": tier(cache), "row_bytes": 32768},
    ]
    for other in others:
        assert tiering("open", "b", **other) == ""
        assert tiering("load", "b", keys=KEYS)["found"] == []
        tiering("close", "b")
    assert tiering("open", "b", tier=tier(cache)) == ""
    assert tiering("load", "b", keys=KEYS)["found"] == KEYS
    for name in "ab":
        tiering("close", name)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"cash": "x"}, "secondary_tiers.cash is not one of cache, tenant, weights"),
        ({"cache": ""}, "secondary_tiers.cache is missing"),
        ({"seconds": 0}, "secondary_tiers.seconds is 0"),
        ({"weights": ""}, "the files of m can't be read: set weights"),
    ],
)
def test_a_configuration_that_is_refused(tiering: Tiering, cache: Any, wrong: dict[str, Any], why: str) -> None:
    assert why in tiering("open", "a", tier=tier(cache, **wrong))


def test_the_files_of_a_model_name_its_weights(tiering: Tiering, cache: Any, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    weights = model / "model.safetensors"
    found = []
    for content in (b"one", b"two", b"one"):
        weights.write_bytes(content)
        assert tiering("open", "a", tier=tier(cache, weights=""), model=str(model)) == ""
        found.append(tiering("load", "a", keys=KEYS)["found"])
        if len(found) == 1:
            tiering("store", "a", keys=KEYS)
        tiering("close", "a")
    assert found == [[], [], KEYS]


def test_a_service_that_is_down_is_a_miss(tiering: Tiering, cache: Any) -> None:
    cache.kill9()
    assert tiering("open", "a", tier=tier(cache)) == ""
    loaded = tiering("load", "a", keys=KEYS)
    assert loaded["found"] == []
    assert loaded["seconds"] < 2
    tiering("store", "a", keys=KEYS)
    assert tiering("load", "a", keys=KEYS)["found"] == KEYS, "they are in vLLM's own tier"
    assert loaded["longest"] < STEP_SECONDS
    tiering("close", "a")


def test_a_service_that_hangs_is_a_miss(tiering: Tiering, cache: Any) -> None:
    for name in "ab":
        assert tiering("open", name, tier=tier(cache)) == ""
    tiering("store", "a", keys=KEYS)
    cache.process.send_signal(signal.SIGSTOP)
    loaded = tiering("load", "b", keys=KEYS)
    assert loaded["found"] == []
    assert loaded["seconds"] < 4
    soon = tiering("load", "b", keys=[key + 100 for key in KEYS])
    assert soon["seconds"] < 0.5, "a service that does not answer is not asked for a while"
    assert soon["longest"] < STEP_SECONDS
    for name in "ab":
        tiering("close", name)


@pytest.mark.parametrize("near", [False, True], ids=["tcp", "unix"])
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_service_that_fails_during_a_load_leaves_no_wrong_bytes(
    tiering: Tiering, launch: Launch, tmp_path: Path, near: bool, sent: signal.Signals
) -> None:
    listen = ("--listen", f"unix:{tmp_path}/s") if near else ()
    cache = start_cache(launch, tmp_path, "--memory-bytes", "512MiB", *listen)
    many = {"row_bytes": 4 * MIB, "rows": 64}
    for name in "ab":
        assert tiering("open", name, tier=tier(cache), **many) == ""
    keys = [*range(60)]
    tiering("store", "a", keys=keys)
    tiering("look_up", "b", keys=keys)
    tiering("step", "b")
    cache.process.send_signal(sent)
    loaded = tiering("end", "b")
    assert loaded["right"]
    assert loaded["longest"] < STEP_SECONDS
    # Rows of a failed load go to other blocks.
    tiering("store", "b", keys=[key + 100 for key in keys[: len(loaded["missed"]) or 1]])
    assert tiering("load", "b", keys=[key + 100 for key in keys])["right"]
    for name in "ab":
        tiering("close", name)


def test_what_is_lost_between_lookup_and_load_is_not_tried_again(
    tiering: Tiering, cache: Any, launch: Launch, tmp_path: Path
) -> None:
    for name in "ab":
        assert tiering("open", name, tier=tier(cache)) == ""
    tiering("store", "a", keys=KEYS)
    tiering("look_up", "b", keys=KEYS)
    cache.kill9()
    launch("fusionkv.kvcache_service", "--listen", cache.address, "--data-dir", str(tmp_path / "empty"))
    loaded = tiering("end", "b")
    assert loaded["found"] == []
    assert loaded["missed"] == KEYS, "another load of them would fail again"
    for name in "ab":
        tiering("close", name)


def test_an_engine_loads_after_a_restart_what_it_had_computed(cache: Any, reference_model: Path) -> None:
    """The copies between vLLM's blocks and its CPU tier are those of cpu_spec.py: vLLM's own need a GPU."""
    connector = {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {
            "spec_name": "CPUTieringSpec",
            "spec_module_path": "cpu_spec",
            "cpu_bytes_to_use": 64 * MIB,
            "secondary_tiers": [
                {
                    "type": "FusionKVTier",
                    "module_path": "fusionkv.kvcache_service.adapters.vllm",
                    "cache": cache.address,
                }
            ],
        },
    }
    prompt = [10 + (i * i * 31 + i * 7) % 400 for i in range(700)]
    arguments = str(reference_model), json.dumps(connector), json.dumps([(prompt, "tenant"), (prompt, "other")])
    # cpu_spec.py is found beside it.
    command = [str(VLLM), str(ROOT / "tests/vllm/engine.py"), *arguments]
    first, second = (
        json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=280).stdout) for _ in range(2)
    )
    assert [answer["ids"] for answer in (*first, *second)] == [first[0]["ids"]] * 4
    assert [answer["loaded"] for answer in first] == [0, 0], "the salt is part of a block's key"
    assert second[0]["loaded"] >= 640
