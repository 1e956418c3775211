"""Objects of other APIs, made by the chart, have no field that those lack."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy import foreign
from tests.deploy.rendering import VERSIONS, template

pytestmark = pytest.mark.slow

ROUTE = {"enabled": True, "parents": [{"name": "a", "namespace": "b"}], "hostnames": ["c.example"]}
EVERYTHING = {
    "metrics": {"port": 9464, "serviceMonitor": {"enabled": True, "labels": {"a": "b"}}, "rules": {"enabled": True}},
    "gateway": {"route": ROUTE, "httpRoute": ROUTE, "http": {"port": 8080}},
    "worker": {"autoscaling": {"max": 2, "prometheus": "http://prometheus:9090"}},
    "encode": {"corpora": ["a"], "ray": {"enabled": True}},
}


@pytest.fixture
def objects(helm: str, tmp_path: Path) -> list[Any]:
    """All that are of no API of Kubernetes' own."""
    found = []
    # Not at once: a route leads to no gateway with TLS.
    for values in (EVERYTHING, {"certManager": {"enabled": True}}):
        found += [document for document in template(helm, tmp_path, values) if document["kind"] in foreign.KINDS]
    return found


def test_all_of_them_are_made_and_valid(objects: list[Any]) -> None:
    assert {document["kind"] for document in objects} == foreign.KINDS
    for document in objects:
        foreign.validate(document)


@pytest.mark.parametrize(
    ("kind", "change", "told"),
    [
        ("GRPCRoute", lambda spec: spec.update(parentRef=spec.pop("parentRefs")), "no field parentRef"),
        ("GRPCRoute", lambda spec: spec["rules"][0]["backendRefs"][0].update(port="grpc"), "port can't be 'grpc'"),
        ("ServiceMonitor", lambda spec: spec["endpoints"][0].update(intervall="30s"), "no field intervall"),
        ("PrometheusRule", lambda spec: spec["groups"][0]["rules"][0].pop("expr"), "lacks ['expr!']"),
        ("Certificate", lambda spec: spec.update(usages=["server-auth"]), "usages can't be 'server-auth'"),
        ("Issuer", lambda spec: spec.update(selfsigned={}), "no field selfsigned"),
        ("RayJob", lambda spec: spec.update(submissionMode="HTTP"), "submissionMode can't be 'HTTP'"),
        ("RayJob", lambda spec: spec["rayClusterSpec"]["headGroupSpec"].pop("template"), "lacks ['template!']"),
    ],
)
def test_a_wrong_field_is_noticed(objects: list[Any], kind: str, change: Any, told: str) -> None:
    document = next(each for each in objects if each["kind"] == kind and not each["spec"].get("isCA"))
    change(document["spec"])
    with pytest.raises(ValueError, match=re.escape(told)):
        foreign.validate(document)
    with pytest.raises(ValueError, match="v2 has no"):
        foreign.validate({**document, "apiVersion": "v2"})


def test_the_oldest_kubernetes_is_the_oldest_tested(root: Path) -> None:
    chart = yaml.safe_load((root / "k8s/fusionkv/Chart.yaml").read_text())
    assert chart["kubeVersion"] == f">={VERSIONS[0]}.0-0"
    page = " ".join((root / "k8s/fusionkv/README.md").read_text().split())
    assert f"Kubernetes {VERSIONS[0]}, {VERSIONS[1]} and {VERSIONS[2]}" in page
