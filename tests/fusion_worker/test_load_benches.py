"""The worker's benches at a small size: everything is answered, and what is worked out of it is right."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.progress import Progress

from fusionkv.bench.worker import bench, layerwise, mixing, overlap, throughput
from fusionkv.bench.worker.throughput import Traffic
from fusionkv.fusion_worker.models import Model


def small() -> Model:
    """Computes for long enough that it shows in milliseconds, and no longer."""
    return throughput.random_model(
        "small",
        torch.float32,
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )


def test_questions_have_chunks_of_their_own() -> None:
    traffic = Traffic(base=10, chunk_tokens=8, chunks=4)
    prompts = traffic.prompts(50, seed=1)
    assert all(len(set(p.chunks)) == 4 and p.tokens == 32 + 4 * 8 + 32 for p in prompts)
    assert len({p.chunks for p in prompts}) > 40
    asked = [sum(traffic.chunk(n) in p.chunks for p in prompts) for n in range(10)]
    assert asked[0] > 2 * asked[9], "Zipf"


def test_capacity_lies_between_two_rates() -> None:
    def rows(*p99: float) -> list[dict[str, object]]:
        return [
            {"name": "x", "requests_per_s": rate, "ttft_p99_s": late, "bound_s": 2.0}
            for rate, late in zip((1, 2, 4), p99, strict=False)
        ]

    assert throughput.capacity(rows(0.5, 1.0, 3.0), "x") == (3.0, False)
    assert throughput.capacity(rows(4.0), "x") == (0.5, False)
    assert throughput.capacity(rows(0.5, 1.0, 1.9), "x") == (4, True)


@pytest.mark.slow
async def test_rates_rise_until_questions_are_late(monkeypatch: pytest.MonkeyPatch) -> None:
    systems = (("full_attention", 1.0), ("prophetkv", 0.3))
    monkeypatch.setattr(throughput, "_MOST_RATES", 2)
    rows = await throughput.bench(small(), Traffic(4, 16, 2), systems, 4, Console(quiet=True))
    for name, _ in systems:
        mine = [row for row in rows if row["name"] == name]
        assert 1 <= len(mine) <= 2
        for row in mine:
            assert 0 < float(str(row["ttft_p50_s"])) <= float(str(row["ttft_p99_s"]))
            assert 0 <= float(str(row["engine_idle"])) < 1
            assert float(str(row["tokens_per_s"])) > 0


@pytest.mark.system
async def test_a_prefix_cache_has_every_path_from_the_second_time_on() -> None:
    """What stands behind other chunks too: the cache service on its own would not keep a second replica yet."""
    model, traffic = small(), Traffic(4, 16, 3)
    async with throughput._worker(model, traffic) as servicer:
        throughput.store_at_once(servicer)
        station = throughput.Station(servicer)
        await throughput.fill(servicer, traffic)
        found = []
        for question in range(2):
            servicer.pool.clear()
            _, summary = await station.ask(traffic.prompt([2, 0, 1], question), "prefix_cache", 0.0)
            found.append((summary.stages.missed, summary.lossless))
            await servicer.settle()
    assert found == [(2, 48), (0, 48)], "the first stands where it was encoded"


async def test_fetches_and_steps_alternate_and_fetches_go_side_by_side() -> None:
    alternation, begun = overlap.Alternation(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def step(entered: asyncio.Event, leave: threading.Event) -> None:
        with alternation.stepping():
            loop.call_soon_threadsafe(entered.set)
            assert leave.wait(60)

    both = asyncio.Barrier(3)

    async def fetch() -> None:
        async with alternation.fetching():
            begun.set()
            await both.wait()
            await both.wait()

    # A step is under way: nothing is fetched until it is over.
    first, leave = asyncio.Event(), threading.Event()
    stepping = asyncio.create_task(asyncio.to_thread(step, first, leave))
    await first.wait()
    fetches = [asyncio.create_task(fetch()) for _ in range(2)]
    await asyncio.sleep(0.05)
    assert not begun.is_set()
    # The next one wants to begin at once, and must not before both fetches are over.
    second, free = asyncio.Event(), threading.Event()
    free.set()
    leave.set()
    await stepping
    waiting = asyncio.create_task(asyncio.to_thread(step, second, free))
    async with asyncio.timeout(60):
        await both.wait()  # both at once
        await asyncio.sleep(0.05)
        assert not second.is_set()
        await both.wait()
        await asyncio.gather(*fetches, waiting)
        await second.wait()


async def test_a_fetch_given_up_holds_no_step_back() -> None:
    alternation = overlap.Alternation()

    async def fetch() -> None:
        async with alternation.fetching():
            await asyncio.sleep(60)

    async def step() -> None:
        def run() -> None:
            with alternation.stepping():
                pass

        await asyncio.to_thread(run)

    with alternation.stepping():
        waits = asyncio.create_task(fetch())
        await asyncio.sleep(0)
        waits.cancel()
        await asyncio.wait([waits])
    fetches = asyncio.create_task(fetch())
    await asyncio.sleep(0)
    stepping = asyncio.create_task(step())
    fetches.cancel()
    async with asyncio.timeout(60):
        await stepping


@pytest.mark.slow
async def test_an_engine_that_stands_still_gives_the_same_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "SYSTEMS", (("full_reuse", 0.0),))
    # All at once: more chunks to fetch than there are threads to wait in.
    monkeypatch.setattr(overlap, "DEVICES", ((0.0, (50.0,)), (3.0, (50.0,))))
    rows = await overlap.bench(small(), Traffic(24, 16, 8), 8, Console(quiet=True))
    disk, slow = (float(str(row["device_s"])) for row in rows)
    assert disk == 0 < slow
    for row in rows:
        still, beside = float(str(row["ttft_still_s"])), float(str(row["ttft_beside_s"]))
        assert min(still, beside) > 0.5 * float(str(row["device_s"])), "the chunks come from the device"
        # All three are rounded to a thousandth.
        assert row["saved"] == pytest.approx(1 - beside / still, abs=0.001 * (1 + (1 + beside / still) / still))


async def test_times_to_the_first_token() -> None:
    rows = await bench.bench(small(), [2 * bench.CHUNK], 1, Console(quiet=True))
    assert [(row["name"], row["r"]) for row in rows] == list(bench.ROWS)
    ideals = [float(str(row["ideal"])) for row in rows]
    assert ideals[0] > 2 * max(ideals[1:]), "nothing but the question is computed at r = 0"
    for row in rows:
        baseline, value = float(str(row["baseline_s"])), float(str(row["value_s"]))
        # Times are rounded to 0.1 ms, which is much of what a fast machine takes.
        rounding = 0.01 + 0.0001 * (1 + baseline / value) / value
        assert row["ratio"] == pytest.approx(baseline / value, abs=rounding)
        assert row["tokens_recomputed"] == round(float(str(row["r"])) * 2 * bench.CHUNK)
        # The first chunk stands where it was encoded: what is computed is in the second.
        assert row["mean_position"] is None or int(str(row["mean_position"])) > bench.SYSTEM + bench.CHUNK


async def test_layers_that_wait_for_their_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layerwise, "RECIPES", (("full_reuse", 0.0),))
    monkeypatch.setattr(layerwise, "SHARES", (3.0,))
    (row,) = await layerwise.bench(small(), Traffic(4, 16, 2), 2, Console(quiet=True))
    loading = 3 * float(str(row["computing_s"]))
    # Nothing comes before the device could have brought it, and what is computed meanwhile is little.
    assert float(str(row["ttft_whole_s"])) > 0.9 * loading
    assert float(str(row["ttft_layers_s"])) > 0.9 * loading
    # Layers that wait hold every answer up; requests that wait, none but themselves.
    assert float(str(row["stream_gap_layers_s"])) > 0.5 * loading


async def test_the_median_pause_counts() -> None:
    class Stand:
        """Times of three runs each: without a device's time, whole, and by layer."""

        bytes = 100
        device = SimpleNamespace(rate=0.0, layered=False)
        times = iter([9.0, 1.0, 2.0, 4.0, 3.0, 8.0, 2.0, 6.0, 3.0])
        gaps = iter([0.5, 0.1, 0.3, 0.9, 0.2, 0.6])

        async def ttft(self, recipe: str, ratio: float) -> float:
            return next(self.times)

        async def gap(self, recipe: str, ratio: float) -> float:
            return next(self.gaps)

    progress = Progress(console=Console(quiet=True))
    stand: Any = Stand()
    row = await layerwise._row(stand, "epic", 0.15, 3.0, 3, progress, progress.add_task(""))
    assert (row["computing_s"], row["ttft_whole_s"], row["ttft_layers_s"]) == (2.0, 4.0, 3.0)
    assert (row["stream_gap_whole_s"], row["stream_gap_layers_s"]) == (0.3, 0.6)


async def test_streams_go_on_beside_a_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step holds a token of each stream: so many steps as the prefill needs, so many tokens at least."""
    # On a busy machine a row may take longer than the 2 ms that a step waits, and miss it.
    monkeypatch.setattr("fusionkv.fusion_worker.compute.scheduler._GRACE", 60.0)
    rows = await mixing.bench(small(), Traffic(10, 128, 8), [32, 512], 2, 1, Console(quiet=True))
    assert [row["max_mixed_tokens"] for row in rows] == [32, 512]
    for row in rows:
        steps = int(str(row["prefill_tokens"])) // int(str(row["max_mixed_tokens"]))
        assert int(str(row["stream_tokens"])) >= 2 * (steps - 1)
        assert (
            0 < float(str(row["pause_median_s"])) <= float(str(row["pause_longest_s"])) <= float(str(row["ttft_s"]))
        )
