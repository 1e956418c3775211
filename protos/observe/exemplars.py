"""Exemplars at a Prometheus scrape endpoint: a trace for each bucket of a histogram, which the SDK omits."""

import bisect
from collections.abc import Iterator
from typing import Any

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics.export import HistogramDataPoint, MetricsData
from prometheus_client import REGISTRY, CollectorRegistry, Metric
from prometheus_client.samples import Exemplar, Sample

# Labels of a series, and the index of a bucket.
Place = tuple[frozenset[tuple[str, str]], int]


class Exemplified(CollectorRegistry):
    """The process's default registry and the metrics of `reader`, whose histograms carry exemplars.

    Only scrapers that accept OpenMetrics receive them. The SDK reports an exemplar once; the latest one of each
    bucket is kept here.
    """

    def __init__(self) -> None:
        super().__init__()
        self._latest: dict[str, dict[Place, Exemplar]] = {}
        self.register(REGISTRY)
        self.reader = _Reader(self)

    def note(self, metric: str, point: HistogramDataPoint) -> None:
        labels = frozenset((name.replace(".", "_"), str(value)) for name, value in (point.attributes or {}).items())
        for exemplar in point.exemplars:
            if exemplar.trace_id is not None and exemplar.span_id is not None:
                labels_of_trace = {"trace_id": f"{exemplar.trace_id:032x}", "span_id": f"{exemplar.span_id:016x}"}
                latest = Exemplar(labels_of_trace, exemplar.value, exemplar.time_unix_nano / 1e9)
                bucket = bisect.bisect_left(point.explicit_bounds, exemplar.value)
                self._latest.setdefault(metric.replace(".", "_"), {})[labels, bucket] = latest

    def collect(self) -> Iterator[Metric]:
        for family in super().collect():
            if family.type == "histogram":
                # The family's name ends with its unit.
                exemplars = self._latest.get(family.name.removesuffix(f"_{family.unit}"), {})
                family.samples = list(_exemplified(family.samples, exemplars))
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


def _exemplified(samples: list[Sample], exemplars: dict[Place, Exemplar]) -> Iterator[Sample]:
    """Adds exemplars to the samples of a histogram, in which each series has its buckets in ascending order."""
    buckets: dict[frozenset[tuple[str, str]], int] = {}
    for sample in samples:
        if "le" in sample.labels:
            series = frozenset(item for item in sample.labels.items() if item[0] != "le")
            number = buckets[series] = buckets.get(series, -1) + 1
            sample = sample._replace(exemplar=exemplars.get((series, number)))
        yield sample
