"""Exemplars at a scrape endpoint: a trace for each bucket of a histogram, which the SDK's own exporter leaves out."""

import bisect
from collections.abc import Iterator
from typing import Any

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics.export import HistogramDataPoint, MetricsData
from prometheus_client import REGISTRY, CollectorRegistry, Metric
from prometheus_client.samples import Exemplar, Sample

# Labels of a series, and the number of its bucket.
Place = tuple[frozenset[tuple[str, str]], int]


class Exemplified(CollectorRegistry):
    """What the process's own registry has, and the metrics of `reader`, whose histograms carry exemplars.

    Only a scraper that takes OpenMetrics sees them. The SDK has each but once; here the latest one of a bucket stays.
    """

    def __init__(self) -> None:
        super().__init__()
        self._latest: dict[str, dict[Place, Exemplar]] = {}
        self.register(REGISTRY)
        self.reader = _Reader(self)

    def note(self, metric: str, point: HistogramDataPoint) -> None:
        """Keeps what came with a point."""
        labels = frozenset((name.replace(".", "_"), str(value)) for name, value in (point.attributes or {}).items())
        for found in point.exemplars:
            if found.trace_id is not None and found.span_id is not None:
                leads_to = {"trace_id": f"{found.trace_id:032x}", "span_id": f"{found.span_id:016x}"}
                made = Exemplar(leads_to, found.value, found.time_unix_nano / 1e9)
                bucket = bisect.bisect_left(point.explicit_bounds, found.value)
                self._latest.setdefault(metric.replace(".", "_"), {})[labels, bucket] = made

    def collect(self) -> Iterator[Metric]:
        for family in super().collect():
            if family.type == "histogram":
                # Behind its own name stands the unit.
                known = self._latest.get(family.name.removesuffix(f"_{family.unit}"), {})
                family.samples = list(_exemplified(family.samples, known))
            yield family


class _Reader(PrometheusMetricReader):
    def __init__(self, registry: Exemplified) -> None:
        super().__init__(scope_info_enabled=False, registry=registry)
        self._exemplified = registry

    def _receive_metrics(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> None:
        for resource in metrics_data.resource_metrics if metrics_data else ():
            for metric in (metric for scope in resource.scope_metrics for metric in scope.metrics):
                for point in metric.data.data_points:
                    if isinstance(point, HistogramDataPoint):
                        self._exemplified.note(metric.name, point)
        super()._receive_metrics(metrics_data, timeout_millis, **kwargs)


def _exemplified(samples: list[Sample], known: dict[Place, Exemplar]) -> Iterator[Sample]:
    """The samples of a histogram: of each series its buckets, the lowest first."""
    buckets: dict[frozenset[tuple[str, str]], int] = {}
    for sample in samples:
        if "le" in sample.labels:
            series = frozenset(item for item in sample.labels.items() if item[0] != "le")
            number = buckets[series] = buckets.get(series, -1) + 1
            sample = sample._replace(exemplar=known.get((series, number)))
        yield sample
