"""The worker's benches at a small size: everything is answered, and what is worked out of it is right."""

import pytest
import torch
from rich.console import Console

from fusionkv.bench.worker import bench, encode, throughput
from fusionkv.bench.worker.passages import Passages
from fusionkv.bench.worker.shapes import ModelShape, build
from fusionkv.bench.worker.throughput import Traffic
from fusionkv.fusion_worker.models import Model

SMALL = ModelShape("small", 4, 128, 256, 4, 2, 1024, tied=True)


def small() -> Model:
    """Computes for long enough that it shows in milliseconds, and no longer."""
    return build(SMALL, torch.float32, torch.device("cpu"))


def test_questions_have_chunks_of_their_own() -> None:
    traffic = Traffic(Passages.random(10, 8), chunks=4)
    prompts = traffic.prompts(50, seed=1)
    assert all(len(set(p.chunks)) == 4 and p.tokens == 32 + 4 * 8 + 32 for p in prompts)
    assert len({p.chunks for p in prompts}) > 40
    asked = [sum(chunk in p.chunks for p in prompts) for chunk in traffic.passages.chunks]
    assert asked[0] > 2 * asked[9], "Zipf"


def test_capacity_lies_between_two_rates() -> None:
    def rows(*p99: float) -> list[dict[str, object]]:
        return [
            {"name": "x", "requests_per_s": rate, "ttft_p99_s": late, "bound_s": 2.0}
            for rate, late in zip((1, 2, 4), p99, strict=False)
        ]

    for p99, expected in (((0.5, 1.0, 3.0), (3.0, False)), ((4.0,), (0.5, False)), ((0.5, 1.0, 1.9), (4, True))):
        assert throughput.capacity(rows(*p99), "x") == expected


@pytest.mark.long
@pytest.mark.slow
async def test_rates_rise_until_questions_are_late(monkeypatch: pytest.MonkeyPatch) -> None:
    systems = (("full_attention", 1.0), ("prophetkv", 0.3))
    monkeypatch.setattr(throughput, "_MAX_RATES", 2)
    traffic = Traffic(Passages.random(4, 16), 2)
    rows = await throughput.bench(small(), traffic, systems, 4, Console(quiet=True))
    for name, _ in systems:
        mine = [row for row in rows if row["name"] == name]
        assert 1 <= len(mine) <= 2
        for row in mine:
            assert 0 < float(str(row["ttft_p50_s"])) <= float(str(row["ttft_p99_s"]))
            assert 0 <= float(str(row["engine_idle"])) < 1
            assert float(str(row["tokens_per_s"])) > 0


@pytest.mark.system
async def test_a_shape_encodes_chunks_of_random_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokenizer makes one token of a passage."""
    monkeypatch.setitem(encode.SHAPES, "flag", SMALL)
    monkeypatch.setattr(encode, "CHUNK", 96)
    (row,) = await encode.measure(small(), 4, 2)
    assert row["tokens"] == 4 * 96


@pytest.mark.system
async def test_a_prefix_cache_has_every_path_from_the_second_time_on() -> None:
    """What stands behind other chunks too: the cache service on its own would not keep a second replica yet."""
    passages = Passages.random(4, 16)
    async with throughput.worker(small(), passages) as servicer:
        throughput.store_at_once(servicer)
        station = throughput.Station(servicer, "prefix_cache", 0.0)
        found = []
        for question in range(2):
            servicer.pool.clear()
            _, summary = await station.answer(passages.prompt([2, 0, 1], question))
            found.append((summary.prefill.loaded.missed, summary.prefill.lossless))
            await servicer.wait_idle()
    assert found == [(2, 48), (0, 48)], "the first stands where it was encoded"


async def test_a_stopped_run_keeps_the_contexts_before() -> None:
    written: list[list[object]] = []
    recipes = [("full_reuse", 0.0), ("epic", 0.3)]
    passages, quiet = Passages.random(2, 64), Console(quiet=True)
    await bench.bench(
        small(), passages, [64, 128], 1, quiet, recipes, lambda rows: written.append([row["context"] for row in rows])
    )
    assert written == [[64, 64], [64, 64, 128, 128]]


async def test_times_to_the_first_token() -> None:
    rows = await bench.bench(small(), Passages.random(2, bench.CHUNK), [2 * bench.CHUNK], 1, Console(quiet=True))
    assert [(row["name"], row["r"]) for row in rows] == list(bench.ROWS)
    ideals = [float(str(row["ideal"])) for row in rows]
    assert ideals[0] > 2 * max(ideals[1:]), "nothing but the question is computed at r = 0"
    for row in rows:
        baseline, value = float(str(row["baseline_s"])), float(str(row["value_s"]))
        # Times are rounded to 0.1 ms, which is much of what a fast machine takes.
        rounding = 0.01 + 0.0001 * (1 + baseline / value) / value
        assert row["ratio"] == pytest.approx(baseline / value, abs=rounding)
        assert 0 < float(str(row["resident_s"])) < baseline
        assert row["tokens_recomputed"] == round(float(str(row["r"])) * 2 * bench.CHUNK)
