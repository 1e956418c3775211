"""The benches of the cache service, at small sizes, and its simulation: what they measure is what they say."""

import asyncio
import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from fusionkv.bench.cache import bench, scale
from fusionkv.bench.cache.simulation import PAPER, SYSTEM, Outcome, PrefixCache, Service, compare, simulate
from fusionkv.bench.cache.workload import Workload
from fusionkv.bench.services.process import Process
from tests.commands import run_python


@pytest.mark.long
@pytest.mark.system
@pytest.mark.slow
def test_every_row_has_its_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SIZES", [(8 * bench.MIB, 2)])
    assert bench.main(["--rounds", "1", "--json", str(tmp_path / "rows.json")]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["way"] for row in rows] == ["shared", "extent", "cold"]
    assert all(min(row["gb_per_s"], row["limit_gb_per_s"]) > 0 for row in rows)


@pytest.mark.long
@pytest.mark.system
@pytest.mark.slow
def test_every_system_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "new" / "peers.json"
    done = run_python("-m", "fusionkv.bench.cache.peers", "--quick", "--json", out, timeout=240)
    rows = json.loads(out.read_text())
    assert set(rows[0]) == {"system", "operation", "bytes", "gb_s", "cpu_s_per_gb", "p99_ms"}
    by_system = {row["system"]: row for row in rows}
    assert len(rows) == 2 * len(by_system)
    for engine in ("redis", "mooncake"):
        assert (engine in by_system) == (f"{engine} is not measured" not in done.stderr)
        assert (f"fusionkv over {engine}" in by_system) == (engine in by_system)
    assert all(row["gb_s"] > 0 and row["p99_ms"] > 0 and row["cpu_s_per_gb"] > 0 for row in rows)


@pytest.mark.long
@pytest.mark.slow
def test_a_small_row(tmp_path: Path) -> None:
    """In a process of its own, as for every row: what other tests free would count as its memory."""
    # It asserts itself that every path is found as meant, and that as many entries come back.
    flags = ["--only", "3000", "--directory", str(tmp_path)]
    row = scale.Row(**json.loads(run_python("-m", "fusionkv.bench.cache.scale", *flags, timeout=60).stdout))
    assert row.chunks == 3000
    assert 0 < row.bytes_per_chunk < 10_000
    assert set(row.lookup_us) == {"exact", "alternative", "miss"}
    assert all(0 < median <= high for median, high in row.lookup_us.values())


def test_a_server_that_does_not_start_is_told(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"python\S* did not start:\nfor a reason"):
        _ = Process(tmp_path, sys.executable, "-c", "print('for a reason')").addresses


async def test_the_store_that_it_opens_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "ADDED", 100)
    scale.write_files(tmp_path, 2000)
    store = scale.make_store(tmp_path, 2000)
    await store.open()
    store.check_integrity()
    assert len({entry.record.chunk for entry in store.entries}) == 2 * (scale.GROUP - 1)
    scale.add(store, 2000)
    store.check_integrity()
    assert len(store.entries) == 2100
    await store.close()


SMALL = Workload(queries=200, chunks=4, knowledge=20, shared=16, zipf=0.8, topics=2)


def outcome(workload: Workload, cache: Service | PrefixCache) -> Outcome:
    return asyncio.run(simulate(workload, cache, [workload.queries]))[-1][1]


def test_queries_are_seeded_and_hold_different_chunks_in_the_shares_asked_for() -> None:
    queries = list(PAPER)
    assert queries == list(PAPER)
    assert queries != list(replace(PAPER, seed=1))
    assert all(query[0] == SYSTEM and len(set(query[1:])) == PAPER.chunks for query in queries)
    times = Counter(chunk for query in queries for chunk in query[1:])
    knowledge = sum(times[chunk] for chunk in PAPER.corpus())
    assert knowledge / times.total() == pytest.approx(0.6, abs=0.02)
    assert sum(1 for n in times.values() if n == 1) / times.total() == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize("workload", [SMALL, replace(SMALL, topics=1, sorted=True)])
def test_the_service_computes_each_chunk_once(workload: Workload) -> None:
    asked = {chunk for query in workload for chunk in query[1:]}
    known = set(workload.corpus())
    service = Service.with_room(2000)
    done = outcome(workload, service)
    service.store.check_integrity()
    assert (done.stored, done.missed, done.redundant) == (len(asked | known), len(asked - known), 0)
    assert done.exact + done.alternative + done.missed == workload.queries * workload.chunks


def test_a_prefix_cache_computes_each_path_once() -> None:
    paths = {tuple(query[:n]) for query in SMALL for n in range(2, SMALL.chunks + 2)}
    known = {(SYSTEM, chunk) for chunk in SMALL.corpus()}
    done = outcome(SMALL, PrefixCache())
    assert (done.stored, done.missed, done.alternative) == (len(paths | known), len(paths - known), 0)
    assert done.redundant == done.stored - len({path[-1] for path in paths | known})


def test_rows_compare_both_and_follow_growth() -> None:
    rows = asyncio.run(compare(SMALL, [50, 200]))
    assert [row["workload"]["queries"] for row in rows] == [50, 200]
    last = rows[-1]
    assert last["service"]["storage"] == last["service"]["stored"] / last["prefix"]["stored"] - 1 < 0
    assert rows[0]["prefix"]["stored"] < last["prefix"]["stored"]


def test_the_goals_are_met_at_the_paper_s_point() -> None:
    """FusionRAG 5.3.3; queries are seeded, so that this is the same on every machine."""
    (row,) = asyncio.run(compare(PAPER, [PAPER.queries]))
    service = row["service"]
    assert service["storage"] <= -0.71
    assert service["redundant_saved"] >= 0.823
    assert service["hit_rate"] >= 0.779
