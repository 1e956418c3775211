"""How long the chart lets pods start and end, and how many of them it lets there be."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.kvcache_service.config import Config as CacheConfig
from tests.deploy.rendering import CONFIGS, Render

pytestmark = pytest.mark.slow

EXAMPLES = sorted((Path(__file__).parent.parent.parent / "k8s/examples").glob("*.yaml"))


@pytest.mark.parametrize("drain", [1, 10, 37.5, 600])
def test_no_pod_is_killed_while_it_drains(render: Render, drain: float) -> None:
    values: dict[str, Any] = {name: {"config": {"drain_seconds": drain}} for name in CONFIGS}
    # Which a cache service drains for longer than.
    values["kvcache"]["config"]["lease_ms"] = 900
    values["worker"]["config"]["cache_seconds"] = 0.9
    found = render(values)
    for name in CONFIGS:
        assert found.config(name).drain_seconds == drain
        assert found.pod(name)["terminationGracePeriodSeconds"] > drain + 10


@pytest.mark.parametrize("example", [None, *EXAMPLES], ids=lambda file: file.stem if file else "defaults")
def test_a_cache_drains_for_longer_than_what_was_looked_up_is_used(render: Render, example: Path | None) -> None:
    found = render(yaml.safe_load(example.read_text()) if example else {})
    cache = found.config("kvcache")
    assert cache.drain_seconds > cache.lease_ms / 1000
    assert cache.drain_seconds > found.config("worker").cache_seconds
    assert found.pod("kvcache")["terminationGracePeriodSeconds"] > cache.drain_seconds


@pytest.mark.parametrize(
    ("cache", "worker", "told"),
    [
        ({"drain_seconds": 1}, {}, "longer than a lease"),
        ({"drain_seconds": CacheConfig().lease_ms / 1000}, {}, "longer than a lease"),
        ({"drain_seconds": 60, "lease_ms": 90_000}, {}, r"\(60\) .* 90 s"),
        ({}, {"cache_seconds": 60}, r"\(40\) .* 60\)"),
        ({"drain_seconds": WorkerConfig().cache_seconds, "lease_ms": 1000}, {}, "than a request waits"),
    ],
)
def test_a_shorter_drain_is_refused(render: Render, cache: Any, worker: Any, told: str) -> None:
    with pytest.raises(ValueError, match=f"drain_seconds .*{told}"):
        render({"kvcache": {"config": cache}, "worker": {"config": worker}})


def test_caches_are_replaced_one_after_the_other(render: Render) -> None:
    """So that most of what workers ask for is in some memory."""
    found = render({"kvcache": {"replicas": 3}, "redis": {"enabled": True}})
    assert "updateStrategy" not in found["StatefulSet"]["kvcache"]["spec"], "which is what Kubernetes does"
    assert found["PodDisruptionBudget"]["kvcache"]["spec"]["maxUnavailable"] == 1
    found = render({"kvcache": {"kind": "DaemonSet"}, "redis": {"enabled": True}})
    assert found["DaemonSet"]["kvcache"]["spec"]["updateStrategy"]["rollingUpdate"]["maxUnavailable"] == 1


@pytest.mark.parametrize(("name", "least"), [("kvcache", 2 * 208), ("worker", 600)])
def test_what_takes_long_to_start_has_the_time(render: Render, name: str, least: int) -> None:
    """A cache with ten million entries took 208 s (docs/performance.md)."""
    for values, wanted in (({}, least), ({name: {"startupSeconds": 1801}}, 1800)):
        probe = render(values).pod(name)["containers"][0]["startupProbe"]
        allowed = probe["periodSeconds"] * probe["failureThreshold"]
        assert allowed >= wanted
        assert not values or allowed <= 1801


@pytest.mark.parametrize("name", ["worker", "gateway"])
def test_an_autoscaler_has_no_less_at_most_than_at_least(render: Render, name: str) -> None:
    values = {"metrics": {"port": 9464}, "milvus": {"enabled": True}}
    own = {"replicas": 4, "autoscaling": {"max": 4}}
    assert render({**values, name: own})["HorizontalPodAutoscaler"][name]["spec"]["maxReplicas"] == 4
    with pytest.raises(ValueError, match=rf"{name}\.autoscaling\.max is less than {name}\.replicas"):
        render({**values, name: {**own, "autoscaling": {"max": 2}}})
