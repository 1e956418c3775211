"""The Helm chart: valid for several Kubernetes versions, strict about values, true to the services' settings."""

import itertools
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from fusionkv.kvcache_service.config import Config as CacheConfig
from fusionkv.protos.runtime import settings
from tests.deploy.rendering import CONFIGS, VERSIONS, template, validate

pytestmark = pytest.mark.slow

PORTS = {"kvcache": 7070, "worker": 7071, "gateway": 7072}
# Values that change what is rendered, in all combinations.
VARIANTS: list[dict[str, Any]] = [
    {"gpu": gpu, "replicas": replicas, "otlp": otlp, "policy": policy}
    for gpu, replicas, otlp, policy in itertools.product((0, 1), (1, 3), (False, True), (False, True))
]
Render = Callable[..., list[Any]]


@pytest.fixture(scope="session")
def chart(root: Path) -> Path:
    return root / "k8s/fusionkv"


@pytest.fixture
def render(helm: str, tmp_path: Path) -> Render:
    def run(values: dict[str, Any] | None = None, version: str = VERSIONS[-1]) -> list[Any]:
        return template(helm, tmp_path, values or {}, version)

    return run


def values_of(variant: dict[str, Any]) -> dict[str, Any]:
    return {
        "worker": {"gpu": {"count": variant["gpu"]}, "replicas": variant["replicas"]},
        "otlp": {"endpoint": "http://collector.observability:4317" if variant["otlp"] else ""},
        "networkPolicy": {"enabled": variant["policy"]},
    }


def workloads(documents: list[Any]) -> dict[str, Any]:
    found = [d for d in documents if d["kind"] in ("StatefulSet", "Deployment", "DaemonSet")]
    return {d["metadata"]["labels"]["app.kubernetes.io/component"]: d for d in found}


def environment(workload: Any) -> dict[str, str]:
    env = workload["spec"]["template"]["spec"]["containers"][0]["env"]
    return {e["name"]: e["value"] for e in env if "value" in e}


def test_helm_lint(helm: str, chart: Path) -> None:
    done = subprocess.run([helm, "lint", "--strict", str(chart)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid_for_kubernetes(render: Render, version: str) -> None:
    for variant in VARIANTS:
        validate(render(values_of(variant), version), version)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_workloads(render: Render, variant: dict[str, Any]) -> None:
    documents = render(values_of(variant))
    found = workloads(documents)
    assert set(found) == set(PORTS)
    accounts = {d["metadata"]["name"] for d in documents if d["kind"] == "ServiceAccount"}
    for name, workload in found.items():
        pod = workload["spec"]["template"]["spec"]
        container = pod["containers"][0]
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert workload["spec"]["selector"]["matchLabels"].items() <= labels.items()
        (apart,) = pod["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
        assert apart["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"
        assert apart["podAffinityTerm"]["labelSelector"]["matchLabels"] == workload["spec"]["selector"]["matchLabels"]
        assert pod["serviceAccountName"] in accounts
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == 10001
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["grpc"]["port"] == PORTS[name]
        assert container["ports"] == [{"name": "grpc", "containerPort": PORTS[name], "protocol": "TCP"}]
        assert "memory" in container["resources"]["limits"]
        assert {"cpu", "memory"} <= set(container["resources"]["requests"])
        mounted = {m["name"] for m in container["volumeMounts"]}
        claimed = {t["metadata"]["name"] for t in workload["spec"].get("volumeClaimTemplates", [])}
        assert mounted == {v["name"] for v in pod["volumes"]} | claimed
        # A Service called <release>-worker would otherwise become FUSIONKV_WORKER_PORT, an unknown setting.
        assert pod["enableServiceLinks"] is False


def test_the_gpu_comes_with_its_image(render: Render) -> None:
    for count, image in ((0, "fusionkv-worker:0.2.0"), (1, "fusionkv-worker-gpu:0.2.0")):
        container = workloads(render(values_of({"gpu": count, "replicas": 1, "otlp": False, "policy": False})))[
            "worker"
        ]
        container = container["spec"]["template"]["spec"]["containers"][0]
        assert container["image"] == image
        assert container["resources"]["limits"].get("nvidia.com/gpu", 0) == count


def test_several_gpus_share_the_model(render: Render, root: Path) -> None:
    """As the example has it: a rank for each GPU, and the shared memory that they need."""
    documents = render(yaml.safe_load((root / "k8s/examples/tensor-parallel.yaml").read_text()))
    pod = workloads(documents)["worker"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["image"] == "fusionkv-worker-gpu:0.2.0"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert {"name": "FUSIONKV_WORKER_TENSOR_PARALLEL", "value": "4"} in container["env"]
    (mount,) = [m for m in container["volumeMounts"] if m["mountPath"] == "/dev/shm"]
    (volume,) = [v for v in pod["volumes"] if v["name"] == mount["name"]]
    assert volume["emptyDir"]["medium"] == "Memory"
    for version in VERSIONS:
        validate(documents, version)


def test_a_secret_is_mounted_and_tls_changes_the_probes(render: Render) -> None:
    secured = {"secret": "fusionkv-tls", "config": {"tls_cert": "/etc/fusionkv/tls.crt"}}
    for values, probe in ((None, {"grpc"}), (secured, {"tcpSocket"})):
        for name, workload in workloads(
            render(dict.fromkeys(("kvcache", "worker", "gateway"), values or {}))
        ).items():
            pod = workload["spec"]["template"]["spec"]
            container = pod["containers"][0]
            probes = [container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")]
            assert {key for p in probes for key in p if key in ("grpc", "tcpSocket")} == probe
            mounted = [m["mountPath"] for m in container["volumeMounts"] if m["name"] == "secret"]
            volumes = [v["secret"]["secretName"] for v in pod["volumes"] if v["name"] == "secret"]
            assert (mounted, volumes) == ((["/etc/fusionkv"], ["fusionkv-tls"]) if values else ([], []))
            if values:
                assert environment(workload)[f"FUSIONKV_{name.upper()}_TLS_CERT"] == "/etc/fusionkv/tls.crt"


def test_the_environment_is_what_the_services_accept(render: Render) -> None:
    values = {
        "kvcache": {"config": {"memory_bytes": 3 << 30, "sync": True}},
        "worker": {"replicas": 2, "config": {"pool_bytes": "2GiB", "dtype": "float32"}},
        "gateway": {"config": {"dense_weight": 0.25, "tenant": "a tenant: 'x'"}},
    }
    loaded = {}
    for name, workload in workloads(render(values)).items():
        env = environment(workload)
        assert all(key.startswith((f"FUSIONKV_{name.upper()}_", "FUSIONKV_LOG")) for key in env)
        loaded[name] = settings.load(CONFIGS[name], name, environ=env)
        assert loaded[name].listen == (f"[::]:{PORTS[name]}",)
    assert (loaded["kvcache"].memory_bytes, loaded["kvcache"].sync) == (3 << 30, True)
    assert (loaded["worker"].pool_bytes, loaded["worker"].dtype) == (2 << 30, "float32")
    assert (loaded["gateway"].dense_weight, loaded["gateway"].tenant) == (0.25, "a tenant: 'x'")
    assert loaded["worker"].cache == "rel-kvcache:7070"
    assert loaded["gateway"].workers == ("rel-worker-0.rel-worker:7071", "rel-worker-1.rel-worker:7071")


def test_what_may_be_set_is_what_the_services_know(chart: Path) -> None:
    schema = json.loads((chart / "values.schema.json").read_text())
    places = {"listen", "http_listen", "metrics_listen", "data_dir"}
    own = places | {"model", "cache", "workers", "tensor_parallel"}
    for name, config in CONFIGS.items():
        parts = schema["properties"][name]["properties"]["config"]["allOf"]
        allowed = next(p["propertyNames"]["enum"] for p in parts if "propertyNames" in p)
        assert set(allowed) == set(config.__dataclass_fields__) - own, "run `make docs`"


def test_names_resolve_to_services_and_services_to_pods(render: Render) -> None:
    documents = render()
    found = workloads(documents)
    for service in (d for d in documents if d["kind"] == "Service"):
        name = service["metadata"]["labels"]["app.kubernetes.io/component"]
        labels = found[name]["spec"]["template"]["metadata"]["labels"]
        assert service["spec"]["selector"].items() <= labels.items()
        assert service["spec"]["ports"][0]["port"] == PORTS[name]
    for name in ("kvcache", "worker"):
        assert found[name]["spec"]["serviceName"] == f"rel-{name}"
    for budget in (d for d in documents if d["kind"] == "PodDisruptionBudget"):
        name = budget["metadata"]["labels"]["app.kubernetes.io/component"]
        labels = found[name]["spec"]["template"]["metadata"]["labels"]
        assert budget["spec"]["selector"]["matchLabels"].items() <= labels.items()


@pytest.mark.parametrize("clients", [[], [{"podSelector": {"matchLabels": {"app": "shop"}}}]], ids=["open", "named"])
def test_only_neighbours_may_call_each_other(render: Render, clients: list[Any]) -> None:
    values = {"networkPolicy": {"clients": clients}, "otlp": {"endpoint": "http://collector:4317"}}
    documents = render(values)
    policies = {
        d["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]: d["spec"]
        for d in documents
        if d["kind"] == "NetworkPolicy"
    }
    assert set(policies) == set(PORTS)

    def peers(rule: dict[str, Any], key: str) -> list[str]:
        labels = [peer["podSelector"]["matchLabels"] for peer in rule.get(key, [])]
        return [each.get("app.kubernetes.io/component", each.get("app")) for each in labels]

    callers = {"kvcache": ["worker"], "worker": ["gateway"], "gateway": ["shop", "test"] if clients else []}
    callees = {"kvcache": [], "worker": ["kvcache"], "gateway": ["worker"]}
    for name, spec in policies.items():
        assert spec["policyTypes"] == ["Ingress", "Egress"]
        assert [peers(rule, "from") for rule in spec["ingress"]] == [callers[name]]
        assert [rule["ports"][0]["port"] for rule in spec["ingress"]] == [PORTS[name]]
        reached = {rule["ports"][0]["port"]: peers(rule, "to") for rule in spec["egress"]}
        assert reached == {53: [], 4317: [], **{PORTS[c]: [c] for c in callees[name]}}


@pytest.mark.parametrize("kind", ["StatefulSet", "DaemonSet"])
@pytest.mark.parametrize(
    ("url", "port"),
    [("redis://redis", 6379), ("rediss://:secret@redis.data.svc:6380/0", 6380)],
    ids=["short", "long"],
)
def test_caches_reach_the_tier_that_they_share(render: Render, url: str, port: int, kind: str) -> None:
    documents = render({"kvcache": {"kind": kind, "replicas": 3, "config": {"remote_url": url}}})
    workload = workloads(documents)["kvcache"]
    assert workload["kind"] == kind
    assert settings.load(CacheConfig, "kvcache", environ=environment(workload)).remote_url == url
    of_cache = [d for d in documents if d["metadata"]["labels"]["app.kubernetes.io/component"] == "kvcache"]
    (policy,) = (d["spec"] for d in of_cache if d["kind"] == "NetworkPolicy")
    (incoming,) = policy["ingress"]
    callers = [peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for peer in incoming["from"]]
    assert callers == ["worker"]
    assert {rule["ports"][0]["port"]: "to" in rule for rule in policy["egress"]} == {53: False, port: False}
    (service,) = (d["spec"] for d in of_cache if d["kind"] == "Service")
    if kind == "DaemonSet":
        assert service["internalTrafficPolicy"] == "Local"
        (volume,) = [v for v in workload["spec"]["template"]["spec"]["volumes"] if v["name"] == "data"]
        assert volume["emptyDir"]["sizeLimit"] == "20Gi"
        assert not [d for d in of_cache if d["kind"] == "PodDisruptionBudget"]
    else:
        assert workload["spec"]["replicas"] == 3
        assert service["clusterIP"] == "None"
    for version in VERSIONS:
        validate(documents, version)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kvcahe": {}}, "kvcahe"),
        ({"kvcache": {"config": {"memroy_bytes": "1GiB"}}}, "propertyNames|memroy_bytes"),
        ({"kvcache": {"config": {"data_dir": "/tmp"}}}, "propertyNames|data_dir"),
        ({"kvcache": {"config": {"drain_seconds": "10s"}}}, "drain_seconds"),
        ({"kvcache": {"config": {"drain_seconds": -1}}}, "drain_seconds"),
        ({"kvcache": {"config": {"memory_bytes": ["1GiB"]}}}, "memory_bytes"),
        ({"kvcache": {"resources": {"limits": {"memory": "1GB"}}}}, "memory"),
        ({"kvcache": {"storage": {"size": "big"}}}, "size"),
        ({"kvcache": {"replicas": 2}}, "remote_url"),
        ({"kvcache": {"replicas": 2, "config": {"remote_url": ""}}}, "remote_url"),
        ({"kvcache": {"kind": "DaemonSet"}}, "remote_url"),
        ({"kvcache": {"kind": "Deployment"}}, "kind"),
        ({"kvcache": {"replicas": 0}}, "replicas"),
        ({"worker": {"replicas": 0}}, "replicas"),
        ({"worker": {"replicas": "two"}}, "replicas"),
        ({"worker": {"gpu": {"count": 9}}}, "count"),
        ({"worker": {"config": {"tensor_parallel": 2}}}, "propertyNames|tensor_parallel"),
        ({"worker": {"model": {"claim": ""}}}, "claim"),
        ({"worker": {"model": {"path": "../etc"}}}, "path"),
        ({"gateway": {"replicas": 2}}, "milvus_url"),
        ({"gateway": {"autoscaling": {"max": 2}}}, "milvus_url"),
        ({"gateway": {"service": {"type": "ExternalName"}}}, "type"),
        ({"image": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
        ({"otlp": {"endpoint": "collector"}}, "endpoint"),
        ({"otlp": {"ratio": 5}}, "ratio"),
        ({"otlp": {"ratio": "1.5"}}, "ratio"),
        ({"log": {"format": "xml"}}, "format"),
        ({"log": {"level": "loud"}}, "level"),
        ({"networkPolicy": {"clients": [{"labels": {}}]}}, "clients"),
        ({"certManager": {"issuer": {"kind": "Vault"}}}, "kind"),
        ({"redis": {"image": "redis:latest@sha"}}, "image"),
        ({"milvus": {"enable": True}}, "enable"),
        ({"encode": {"ray": {"encoders": 0}}}, "encoders"),
        ({"encode": {"ray": {"operator": []}}}, "operator"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else None,
)
def test_bad_values_are_refused(render: Render, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.compile(f"schema.*({message})", re.DOTALL)):
        render(values)
