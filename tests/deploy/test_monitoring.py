"""Dashboard and alerts: their queries are PromQL over metrics and labels that the services have; what the chart makes
of them.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from tests.deploy.promql import Database
from tests.deploy.rendering import DATA_PORT, PORTS, Render

FILES = "k8s/fusionkv/files"
KINDS = ("ConfigMap", "PrometheusRule", "ServiceMonitor")
MONITORED: dict[str, Any] = {
    "metrics": {
        "port": 9464,
        "scrapers": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}],
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "rules": {"enabled": True, "labels": {"release": "prometheus"}},
        "dashboard": {"enabled": True},
    },
    "gateway": {"http": {"port": 8080}},
}


def dashboard_of(root: Path) -> Any:
    return json.loads((root / FILES / "dashboard.json").read_text())


def rules_of(root: Path) -> list[Any]:
    (group,) = yaml.safe_load((root / FILES / "rules.yaml").read_text())["groups"]
    return list(group["rules"])


def queries(root: Path) -> Iterator[tuple[str, str]]:
    """Where it stands, and the query."""
    for panel in dashboard_of(root)["panels"]:
        for target in panel["targets"]:
            # Grafana puts the interval in.
            yield panel["title"], target["expr"].replace("$__rate_interval", "5m")
    for rule in rules_of(root):
        yield rule["alert"], rule["expr"]


def parts(node: Any) -> Iterator[Any]:
    """A parsed query and everything in it."""
    yield node
    for name in ("lhs", "rhs", "expr", "vector_selector", "vs"):
        if (below := getattr(node, name, None)) is not None:
            yield from parts(below)
    for below in getattr(node, "args", None) or []:
        yield from parts(below)


def test_every_query_is_over_what_there_is(root: Path) -> None:
    registered = yaml.safe_load((root / "docs/telemetry.yaml").read_text())["metrics"]
    known: dict[str, set[str]] = {}  # labels of every time series
    for metric in registered:
        labels = {a.replace(".", "_") for a in metric.get("attributes", [])}
        for part in ("", "_bucket", "_sum", "_count"):
            known[metric["prometheus"] + part] = labels | ({"le"} if part == "_bucket" else set())
    used = set()
    for where, query in queries(root):
        found = list(parts(promql_parser.parse(query)))
        selectors = [node for node in found if isinstance(node, promql_parser.VectorSelector)]
        assert selectors, where
        labels = set()
        for selector in selectors:
            assert selector.name in known, f"{where}: {selector.name}"
            assert {m.name for m in selector.matchers.matchers} <= known[selector.name], where
            used.add(selector.name)
            labels |= known[selector.name]
        for node in found:
            if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
                assert set(node.modifier.labels) <= labels, f"{where}: {node.modifier.labels}"
    # What is measured can be seen.
    shown = {name.removesuffix(part) for name in used for part in ("_bucket", "_sum", "_count", "")}
    unseen = {"gateway_documents_total", "worker_ttft_seconds", "worker_time_per_token_seconds"}
    assert {metric["prometheus"] for metric in registered} - shown == {f"fusionkv_{name}" for name in unseen}


def test_a_collector_gives_metrics_the_same_names(root: Path) -> None:
    """On the way from OTLP to Prometheus a unit is added to a name only if the name does not hold it already."""
    for metric in yaml.safe_load((root / "docs/telemetry.yaml").read_text())["metrics"]:
        own, unit = metric["name"].replace(".", "_"), metric["prometheus"].removesuffix("_total")
        assert unit.removeprefix(own).strip("_") not in own.split("_"), metric["name"]


def test_alerts_say_what_is_wrong_and_what_to_do(root: Path) -> None:
    rules = rules_of(root)
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}
        # It is a condition, or it would always fire.
        assert any(getattr(node, "op", None) is not None for node in parts(promql_parser.parse(rule["expr"])))


def shares(root: Path) -> Iterator[tuple[str, str, Database, float]]:
    """A title, its query, what is counted, and the share that it shows."""
    titles = {panel["title"]: panel["targets"][0]["expr"] for panel in dashboard_of(root)["panels"]}
    chunks, answers = "fusionkv_gateway_chunks_total", "fusionkv_worker_shadow_answers_total"
    missed = {"fusionkv_kind": "miss", "fusionkv_tenant": "a"}
    found = {"fusionkv_kind": "exact", "fusionkv_tenant": "a"}
    same = {"fusionkv_same_answer": "true", "fusionkv_recipe": "r"}
    other = {"fusionkv_same_answer": "false", "fusionkv_recipe": "r"}
    for title in ("Chunks from the cache", "Hits by tenant"):
        for samples, share in (([(missed, 8)], 0.0), ([(found, 8)], 1.0), ([(missed, 6), (found, 2)], 0.25)):
            yield title, titles[title], Database(*((chunks, labels, (0, n)) for labels, n in samples)), share
    title = "Quality: same answer as full attention"
    for samples, share in (([(other, 60)], 0.0), ([(same, 60)], 1.0), ([(same, 45), (other, 15)], 0.75)):
        yield title, titles[title], Database(*((answers, labels, (0, n)) for labels, n in samples)), share


def test_shares_of_nothing_and_of_all_are_shown(root: Path) -> None:
    """What never happened has no time series."""
    for title, query, counted, share in shares(root):
        assert [*counted.ask(query.replace("$__rate_interval", "5m")).values()] == [share], title


@pytest.mark.parametrize(
    ("same", "others", "fires"), [(0, 60, True), (45, 15, True), (55, 5, False), (60, 0, False), (0, 40, False)]
)
def test_bad_quality_is_told(root: Path, same: int, others: int, fires: bool) -> None:
    """Also if no answer at all was full attention's."""
    (query,) = (rule["expr"] for rule in rules_of(root) if rule["alert"] == "FusionKVQuality")
    counts = {"true": same, "false": others}
    counted = Database(
        *(
            ("fusionkv_worker_shadow_answers_total", {"fusionkv_recipe": "r", "fusionkv_same_answer": each}, (0, n))
            for each, n in counts.items()
            if n
        )
    )
    assert [*counted.ask(query).values()] == ([same / (same + others)] if fires else [])


@pytest.mark.slow
def test_the_chart_ships_them(render: Render, root: Path) -> None:
    found = render(MONITORED)
    (config,), (rule,), (monitor,) = (found[kind].values() for kind in KINDS)
    assert json.loads(config["data"]["fusionkv.json"]) == dashboard_of(root)
    assert config["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert rule["spec"] == yaml.safe_load((root / FILES / "rules.yaml").read_text())
    assert rule["metadata"]["labels"]["release"] == monitor["metadata"]["labels"]["release"] == "prometheus"
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    (scraped,) = [s for s in found["Service"].values() if wanted <= s["metadata"]["labels"].items()]
    assert [port["name"] for port in scraped["spec"]["ports"]] == [monitor["spec"]["endpoints"][0]["port"]]
    for name, workload in found.workloads.items():
        template, http = workload["spec"]["template"], [8080] if name == "gateway" else []
        data = [DATA_PORT] if name == "kvcache" else []
        (container,) = template["spec"]["containers"]
        assert scraped["spec"]["selector"].items() <= template["metadata"]["labels"].items()
        named = {port["name"]: port["containerPort"] for port in container["ports"]}
        others = {**({"http": 8080} if http else {}), **({"data": DATA_PORT} if data else {})}
        assert named == {"grpc": PORTS[name], "metrics": 9464, **others}
        assert found.config(name).metrics_listen == "[::]:9464"
        assert getattr(found.config(name), "http_listen", ()) == tuple(f"[::]:{port}" for port in http)
        served, scrape = found["NetworkPolicy"][name]["spec"]["ingress"]
        assert [p["port"] for p in served["ports"]] == [PORTS[name], *data, *http]
        assert [p["port"] for p in scrape["ports"]] == [9464]
        assert scrape["from"] == MONITORED["metrics"]["scrapers"]


@pytest.mark.slow
def test_nothing_of_it_unless_it_is_asked_for(render: Render) -> None:
    assert not set(render()) & set(KINDS)
    for wrong, why in (
        ({"metrics": {"serviceMonitor": {"enabled": True}}}, r"metrics\.serviceMonitor needs metrics\.port"),
        ({"metrics": {"port": "http"}}, "schema"),
        ({"metrics": {"rules": {"enabled": 1}}}, "schema"),
        ({"gateway": {"http": {}, "htpp": {}}}, "schema"),
    ):
        with pytest.raises(ValueError, match=why):
            render(wrong)
