"""The bench of what telemetry costs: what it makes of its measurements, and a run of it."""

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from tests.commands import run_python

BENCH = "bench/services/telemetry_cost.py"


@pytest.fixture(scope="module")
def bench(root: Path) -> dict[str, Any]:
    return runpy.run_path(str(root / BENCH))


def test_the_difference_is_that_of_the_pairs(bench: dict[str, Any]) -> None:
    """What both of a pair have in common, such as a slow question or a busy machine, is no cost."""
    common = np.random.default_rng(0).exponential(0.05, 301)
    more = np.linspace(0.0008, 0.0012, 301)
    figures = bench["report"](np.stack([common, common + more], axis=1))
    assert figures["pairs"] == 301
    assert figures["more_ms"] == pytest.approx(1.0)
    assert 0.9 < figures["more_low_ms"] < 1.0 < figures["more_high_ms"] < 1.1
    assert figures["more_percent"] == pytest.approx(100 / figures["without_ms"], abs=0.01)
    assert figures["more_percent_of_1_s"] == pytest.approx(0.1)


def test_spans_are_counted_by_trace(bench: dict[str, Any]) -> None:
    receiver = bench["Receiver"]()
    for trace in (b"a", b"b", b"a"):
        scope = ScopeSpans(spans=[Span(trace_id=trace), Span(trace_id=b"c")])
        request = pb.ExportTraceServiceRequest(resource_spans=[ResourceSpans(scope_spans=[scope])])
        receiver.traces.append(request.SerializeToString())
    assert receiver.spans({b"a"}) == 2
    assert receiver.spans({b"a", b"b", b"c"}) == 6


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.system
def test_a_run(root: Path) -> None:
    figures = json.loads(run_python(root / BENCH, 2, timeout=540).stdout)
    assert figures["pairs"] == 2
    # Those of one request that nothing has to be encoded for: of all three services, from its RPC to its last token.
    assert 15 <= figures["spans_each"] <= 25
    assert figures["exports"] >= 6
    assert figures["more_low_ms"] <= figures["more_ms"] <= figures["more_high_ms"]
