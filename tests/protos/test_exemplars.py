"""Exemplars at a scrape endpoint, read as Prometheus reads them."""

from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import Metric
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from fusionkv.protos.observe.exemplars import Exemplified


def test_each_bucket_leads_to_the_trace_that_it_last_had() -> None:
    registry = Exemplified()
    provider = MeterProvider([registry.reader])
    histogram = provider.get_meter("test").create_histogram(
        "fusionkv.test.ttft", unit="s", explicit_bucket_boundaries_advisory=[0.1, 1.0]
    )

    def record(value: float, trace_id: int, recipe: str = "a") -> None:
        sampled = trace.SpanContext(trace_id, 7, is_remote=False, trace_flags=trace.TraceFlags(1))
        with trace.use_span(trace.NonRecordingSpan(sampled)):
            histogram.record(value, {"fusionkv.recipe": recipe})

    def scraped() -> dict[tuple[str, str], tuple[str, float]]:
        """Trace and value, by recipe and bound."""
        families = {f.name: f for f in text_string_to_metric_families(generate_latest(registry).decode())}
        assert "process_start_time_seconds" in families
        found: Metric = families["fusionkv_test_ttft_seconds"]
        return {
            (s.labels["fusionkv_recipe"], s.labels["le"]): (s.exemplar.labels["trace_id"], s.exemplar.value)
            for s in found.samples
            if s.exemplar is not None
        }

    record(0.05, 1)
    record(5.0, 2)
    first = {("a", "0.1"): (f"{1:032x}", 0.05), ("a", "+Inf"): (f"{2:032x}", 5.0)}
    assert scraped() == first
    # It stays for the next scraper, until there is another.
    assert scraped() == first
    record(0.1, 3)
    record(0.5, 4, "b")
    assert scraped() == {**first, ("a", "0.1"): (f"{3:032x}", 0.1), ("b", "1.0"): (f"{4:032x}", 0.5)}
    # Outside a trace there is none to lead to.
    histogram.record(0.05, {"fusionkv.recipe": "c"})
    assert not [place for place in scraped() if place[0] == "c"]
    provider.shutdown()
