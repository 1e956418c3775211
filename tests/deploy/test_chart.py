"""The Helm chart: valid for several Kubernetes versions, strict about values, true to the services' settings; the
time that pods have to start and to end, and how many there may be.
"""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.gateway.workers import members
from fusionkv.kvcache_service.config import Config as CacheConfig
from tests.deploy.rendering import COMPONENT, CONFIGS, DATA_PORT, PORTS, VERSIONS, Render, called, confined, env_of

pytestmark = pytest.mark.slow
# For as long a cluster's DNS keeps an answer: the cache of CoreDNS, as kubeadm and most providers configure it.
DNS_SECONDS = 30


@pytest.fixture(scope="session")
def chart(root: Path) -> Path:
    return root / "k8s/fusionkv"


def test_helm_lint(helm: str, chart: Path) -> None:
    done = subprocess.run([helm, "lint", "--strict", str(chart)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("policy", "endpoint"), [(False, ""), (True, "http://collector.observability:4317")])
@pytest.mark.parametrize("gpus", [0, 1])
@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("version", VERSIONS)
def test_workloads(render: Render, version: str, gpus: int, replicas: int, endpoint: str, policy: bool) -> None:
    worker = {"gpu": {"count": gpus}, "replicas": replicas}
    values = {"worker": worker, "otlp": {"endpoint": endpoint}, "networkPolicy": {"enabled": policy}}
    found = render(values, version)
    assert set(found.workloads) == set(PORTS)
    for name, workload in found.workloads.items():
        assert workload["metadata"]["labels"][COMPONENT] == name
        pod = workload["spec"]["template"]["spec"]
        claims = [t["metadata"]["name"] for t in workload["spec"].get("volumeClaimTemplates", [])]
        container = confined(pod, claims=claims)
        selected = workload["spec"]["selector"]["matchLabels"]
        assert selected.items() <= workload["spec"]["template"]["metadata"]["labels"].items()
        (apart,) = pod["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
        assert apart["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"
        assert apart["podAffinityTerm"]["labelSelector"]["matchLabels"] == selected
        assert pod["serviceAccountName"] in {d["metadata"]["name"] for d in found["ServiceAccount"].values()}
        wanted = {"runAsUser": 10001, "seccompProfile": {"type": "RuntimeDefault"}}
        assert wanted.items() <= pod["securityContext"].items()
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert len(container["securityContext"]) == 3
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            # A gateway that no worker serves gets no requests, but is not started again for it.
            ready = {"service": "gateway.v1.GatewayService"} if (name, probe) == ("gateway", "readinessProbe") else {}
            assert container[probe]["grpc"] == {"port": PORTS[name], **ready}
        ports = {"grpc": PORTS[name], **({"data": DATA_PORT} if name == "kvcache" else {})}
        assert container["ports"] == [
            {"name": at, "containerPort": port, "protocol": "TCP"} for at, port in ports.items()
        ]
        assert {"cpu", "memory"} <= set(container["resources"]["requests"])
        # A Service called <release>-worker would otherwise become FUSIONKV_WORKER_PORT, an unknown setting.
        assert pod["enableServiceLinks"] is False
        image = f"fusionkv-{name}{'-gpu' * (gpus and name == 'worker')}:0.2.0"
        assert container["image"] == image
        assert container["resources"]["limits"].get("nvidia.com/gpu", 0) == (gpus if name == "worker" else 0)


def test_several_gpus_share_the_model(render: Render, root: Path) -> None:
    """As the example has it: a rank for each GPU, and the shared memory that they need."""
    found = render(yaml.safe_load((root / "k8s/examples/tensor-parallel.yaml").read_text()))
    (container,) = found.pod("worker")["containers"]
    assert container["image"] == "fusionkv-worker-gpu:0.2.0"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert env_of(container)["FUSIONKV_WORKER_TENSOR_PARALLEL"] == "4"
    assert found.shared_memory("worker")


def test_a_secret_is_mounted_and_tls_changes_the_probes(render: Render) -> None:
    secured = {"secret": "fusionkv-tls", "config": {"tls_cert": "/etc/fusionkv/tls.crt"}}
    for values in (None, secured):
        found = render(dict.fromkeys(PORTS, values or {}))
        for name in PORTS:
            pod = found.pod(name)
            container = pod["containers"][0]
            probes = [container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")]
            assert {probe["grpc"]["port"] for probe in probes} == {7079 if values else PORTS[name]}
            ports = {port["name"] for port in container["ports"]}
            assert ports == {"grpc", *(["health"] if values else []), *(["data"] if name == "kvcache" else [])}
            mounted = [m["mountPath"] for m in container["volumeMounts"] if m["name"] == "secret"]
            volumes = [v["secret"]["secretName"] for v in pod["volumes"] if v["name"] == "secret"]
            assert (mounted, volumes) == ((["/etc/fusionkv"], ["fusionkv-tls"]) if values else ([], []))
            told = env_of(container).get(f"FUSIONKV_{name.upper()}_TLS_CERT")
            assert told == ("/etc/fusionkv/tls.crt" if values else None)


def test_the_environment_is_what_the_services_accept(render: Render) -> None:
    own: dict[str, dict[str, Any]] = {
        "kvcache": {"memory_bytes": 3 << 30, "sync": True},
        "worker": {"pool_bytes": "2GiB", "dtype": "float32"},
        "gateway": {"dense_weight": 0.25, "tenant": "a tenant: 'x'"},
    }
    found = render({name: {"replicas": 1 + (name == "worker"), "config": config} for name, config in own.items()})
    own["worker"]["pool_bytes"] = 2 << 30
    addresses = {"cache": "rel-kvcache-client:7070"}, ("dns:rel-worker:7071",)
    for name, config in own.items():
        env = env_of(found.pod(name)["containers"][0])
        assert all(key.startswith((f"FUSIONKV_{name.upper()}_", "FUSIONKV_LOG")) for key in env)
        loaded = found.config(name)
        assert {key: getattr(loaded, key) for key in config} == config
        assert loaded.listen == (f"[::]:{PORTS[name]}",)
    assert ({"cache": found.config("worker").cache}, found.config("gateway").workers) == addresses
    assert found.config("kvcache").data_port == DATA_PORT


def test_what_may_be_set_is_what_the_services_know(chart: Path) -> None:
    schema = json.loads((chart / "values.schema.json").read_text())
    places = {"listen", "health_listen", "http_listen", "metrics_listen", "data_dir", "data_port", "data_host"}
    own = places | {"model", "cache", "workers", "tensor_parallel"}
    for name, config in CONFIGS.items():
        parts = schema["properties"][name]["properties"]["config"]["allOf"]
        allowed = next(p["propertyNames"]["enum"] for p in parts if "propertyNames" in p)
        assert set(allowed) == set(config.__dataclass_fields__) - own, "run `make docs`"


def test_names_resolve_to_services_and_services_to_pods(render: Render) -> None:
    found = render()
    labels = {name: made["spec"]["template"]["metadata"]["labels"] for name, made in found.workloads.items()}
    for service in found["Service"].values():
        name = service["metadata"]["labels"][COMPONENT]
        assert service["spec"]["selector"].items() <= labels[name].items()
        assert service["spec"]["ports"][0]["port"] == PORTS[name]
    for budget in found["PodDisruptionBudget"].values():
        name = budget["metadata"]["labels"][COMPONENT]
        assert budget["spec"]["selector"]["matchLabels"].items() <= labels[name].items()
    for name in ("kvcache", "worker"):
        assert found.workloads[name]["spec"]["serviceName"] == f"rel-{name}"


@pytest.mark.parametrize("clients", [[], [{"podSelector": {"matchLabels": {"app": "shop"}}}]], ids=["open", "named"])
def test_only_neighbours_may_call_each_other(render: Render, clients: list[Any]) -> None:
    found = render({"networkPolicy": {"clients": clients}, "otlp": {"endpoint": "http://collector:4317"}})
    assert set(found["NetworkPolicy"]) == set(PORTS)
    callers = {"kvcache": ["worker"], "worker": ["gateway"], "gateway": ["shop", "test"] if clients else []}
    callees: dict[str, list[str]] = {"kvcache": [], "worker": ["kvcache"], "gateway": ["worker"]}
    for name, policy in found["NetworkPolicy"].items():
        assert policy["spec"]["podSelector"]["matchLabels"][COMPONENT] == name
        assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
        reached = {53: [], 4317: []}
        for callee in callees[name]:
            reached |= called(callee, [callee])
        assert found.traffic(name) == (called(name, callers[name]), reached)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", ["StatefulSet", "DaemonSet"])
@pytest.mark.parametrize(
    ("url", "port"),
    [("redis://redis", 6379), ("rediss://:secret@redis.data.svc:6380/0", 6380), ("s3://bucket/kv", 443)],
)
def test_caches_reach_the_tier_that_they_share(render: Render, url: str, port: int, kind: str, version: str) -> None:
    found = render({"kvcache": {"kind": kind, "replicas": 3, "config": {"remote_url": url}}}, version)
    workload = found[kind]["kvcache"]
    assert found.config("kvcache").remote_url == url
    assert found.traffic("kvcache") == (called("kvcache", ["worker"]), {53: [], port: []})
    service = found["Service"]["kvcache-client"]["spec"]
    assert service["selector"].items() <= workload["spec"]["template"]["metadata"]["labels"].items()
    assert "clusterIP" not in service, "an address that stays"
    assert service.get("internalTrafficPolicy") == ("Local" if kind == "DaemonSet" else None)
    if kind == "DaemonSet":
        assert "kvcache" not in found["Service"], "Kubernetes would keep it headless, and ask nodes in turn"
        (volume,) = [v for v in found.pod("kvcache")["volumes"] if v["name"] == "data"]
        assert volume["emptyDir"]["sizeLimit"] == "20Gi"
        assert "kvcache" not in found.get("PodDisruptionBudget", {})
    else:
        assert workload["spec"]["replicas"] == 3
        assert found["Service"]["kvcache"]["spec"]["clusterIP"] == "None"


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
        ({"worker": {"model": {"claim": "fusionkv-models"}}}, "claim"),
        ({"worker": {"model": {"uri": "pvc://models"}}}, "uri"),
        ({"worker": {"model": {"uri": "pvc://models/../etc"}}}, "uri"),
        ({"worker": {"model": {"uri": "hf://gpt2"}}}, "uri"),
        ({"worker": {"model": {"storage": {"existingClaim": "A b"}}}}, "existingClaim"),
        ({"gateway": {"replicas": 2}}, "milvus_url"),
        ({"gateway": {"autoscaling": {"max": 2}}}, "milvus_url"),
        ({"gateway": {"service": {"type": "ExternalName"}}}, "type"),
        ({"image": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
        ({"otlp": {"endpoint": "collector"}}, "endpoint"),
        ({"otlp": {"ratio": 5}}, "ratio"),
        ({"otlp": {"ratio": "1.5"}}, "ratio"),
        ({"metrics": {"port": 7071}}, "port"),
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


def test_a_pod_has_the_time_of_a_request_to_end(render: Render) -> None:
    found = render()
    longest = found.config("gateway").request_seconds
    for name in CONFIGS:
        pod = found.pod(name)
        (hook,) = pod["containers"][0]["lifecycle"].values()
        assert hook["exec"]["command"][0] == "sleep"
        drain = found.config(name).drain_seconds
        assert pod["terminationGracePeriodSeconds"] > drain + int(hook["exec"]["command"][1])
        assert name == "kvcache" or drain >= longest


def test_a_worker_is_replaced_after_gateways_found_the_last_one(render: Render) -> None:
    """Which tests/gateway/test_rolling.py shows to be enough, with a DNS that keeps answers for a shorter time."""
    found = render({"worker": {"replicas": 2}})
    spec = found["StatefulSet"]["worker"]["spec"]
    assert "updateStrategy" not in spec, "one after another, which is what Kubernetes does"
    assert spec["minReadySeconds"] > DNS_SECONDS + members.RESOLVE_SECONDS
    service = found["Service"]["worker"]["spec"]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    assert found["PodDisruptionBudget"]["worker"]["spec"]["maxUnavailable"] == 1


def test_a_gateway_finds_workers_however_many_there_are(render: Render) -> None:
    """It is not started again for one more."""
    made = [render({"worker": {"replicas": n}})["Deployment"]["gateway"]["spec"]["template"] for n in (1, 2)]
    assert made[0] == made[1]


def test_caches_are_replaced_one_after_the_other(render: Render) -> None:
    found = render({"kvcache": {"replicas": 3}, "redis": {"enabled": True}})
    assert "updateStrategy" not in found["StatefulSet"]["kvcache"]["spec"], "which is what Kubernetes does"
    assert found["PodDisruptionBudget"]["kvcache"]["spec"]["maxUnavailable"] == 1
    found = render({"kvcache": {"kind": "DaemonSet"}, "redis": {"enabled": True}})
    assert found["DaemonSet"]["kvcache"]["spec"]["updateStrategy"]["rollingUpdate"]["maxUnavailable"] == 1


@pytest.mark.parametrize(("name", "least"), [("kvcache", 120), ("worker", 600)])
def test_what_takes_long_to_start_has_the_time(render: Render, name: str, least: int) -> None:
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
