"""The Helm chart: valid for several Kubernetes versions, strict about values, true to the services' settings; the
time that pods have to start and to end, and how many there may be.
"""

import json
import re
import subprocess
from typing import Any

import pytest
import yaml

from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.gateway.workers import members
from fusionkv.kvcache_service.config import Config as CacheConfig
from tests.deploy.rendering import (
    CASES,
    CHART,
    COMPONENT,
    CONFIGS,
    DATA_PORT,
    EVERYTHING,
    PORTS,
    VERSIONS,
    Objects,
    Render,
    called,
    env_of,
    restricted,
)

pytestmark = pytest.mark.slow
# For as long a cluster's DNS keeps an answer: the cache of CoreDNS, as kubeadm and most providers configure it.
DNS_SECONDS = 30


def test_helm_lint(helm: str) -> None:
    done = subprocess.run([helm, "lint", "--strict", str(CHART)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_oldest_kubernetes_is_the_oldest_tested() -> None:
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["kubeVersion"] == f">={VERSIONS[0]}.0-0"
    page = " ".join((CHART / "README.md").read_text().split())
    assert f"Kubernetes {VERSIONS[0]}, {VERSIONS[1]} and {VERSIONS[2]}" in page


@pytest.mark.parametrize(
    ("case", "version"),
    [
        (case, version)
        for case in CASES
        for version in (VERSIONS if case in ("defaults", *EVERYTHING) else VERSIONS[-1:])
    ],
)
def test_what_holds_of_every_release(render: Render, case: str, version: str) -> None:
    """It is valid, pods have no rights, ways lead to pods, and the services take what they are told."""
    found = render(CASES[case], version)
    for pod in found.pods:
        restricted(pod)
    templates = {name: made["spec"]["template"] for name, made in found.workloads.items()}
    for name, made in found.workloads.items():
        labels = templates[name]["metadata"]["labels"]
        assert made["metadata"]["labels"][COMPONENT] == labels[COMPONENT] == name
        assert made["spec"]["selector"]["matchLabels"].items() <= labels.items()
        if made["kind"] == "StatefulSet":
            assert made["spec"]["serviceName"] == f"rel-{name}"
        assert found.pod(name)["serviceAccountName"] in {f"rel-{account}" for account in found["ServiceAccount"]}
        (apart,) = found.pod(name)["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
        assert apart["podAffinityTerm"]["labelSelector"]["matchLabels"].items() <= labels.items()
    for selecting in (*found["Service"].values(), *found.get("PodDisruptionBudget", {}).values()):
        name, selector = selecting["metadata"]["labels"][COMPONENT], selecting["spec"]["selector"]
        if name != "metrics":  # which selects all of them
            assert selector.get("matchLabels", selector).items() <= templates[name]["metadata"]["labels"].items()
    for name in CONFIGS:
        _is_told_right(found, name)


def _is_told_right(found: Objects, name: str) -> None:
    """A service accepts its settings, has the memory and the time that they ask for, and answers its probes."""
    (container,) = found.pod(name)["containers"]
    config, limit = found.config(name), container["resources"]["limits"]["memory"]
    assert config.listen == (f"[::]:{PORTS[name]}",)
    assert all(key.startswith((f"FUSIONKV_{name.upper()}_", "FUSIONKV_LOG", "OTEL_")) for key in env_of(container))
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
    allowed = int(limit[:-2]) << (30 if limit.endswith("Gi") else 20)
    if name == "kvcache":
        assert config.memory_bytes + (512 << 20) <= allowed
        # What was looked up is used for a shorter time.
        assert config.drain_seconds > max(config.lease_ms / 1000, found.config("worker").cache_seconds)
    if name == "worker" and "nvidia.com/gpu" not in container["resources"]["limits"]:
        assert config.pool_bytes < allowed
    (hook,) = container["lifecycle"].values()
    assert hook["exec"]["command"][0] == "sleep"
    grace = found.pod(name)["terminationGracePeriodSeconds"]
    assert grace > config.drain_seconds + int(hook["exec"]["command"][1])
    assert name == "kvcache" or config.drain_seconds >= found.config("gateway").request_seconds
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        # A gateway that no worker serves gets no requests, but is not started again for it.
        ready = {"service": "gateway.v1.GatewayService"} if (name, probe) == ("gateway", "readinessProbe") else {}
        assert container[probe]["grpc"] == {"port": 7079 if config.tls_cert else PORTS[name], **ready}
    ports = {"grpc": PORTS[name], "data": DATA_PORT if name == "kvcache" else 0}
    ports |= {at: port_of(getattr(config, f"{at}_listen", "")) for at in ("health", "http", "metrics")}
    named = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert named == {at: port for at, port in ports.items() if port}


def port_of(listen: str | tuple[str, ...]) -> int:
    """0 for none."""
    (address,) = (listen,) if isinstance(listen, str) else listen or ("",)
    return int(address.rpartition(":")[2] or 0)


@pytest.mark.parametrize("gpus", [0, 1])
def test_images_are_of_this_version(render: Render, gpus: int) -> None:
    found = render({"worker": {"gpu": {"count": gpus}}, "networkPolicy": {"enabled": False}})
    assert "NetworkPolicy" not in found
    for name in PORTS:
        (container,) = found.pod(name)["containers"]
        assert container["image"] == f"fusionkv-{name}{'-gpu' * (gpus and name == 'worker')}:0.2.0"
        assert container["resources"]["limits"].get("nvidia.com/gpu", 0) == (gpus if name == "worker" else 0)


def test_several_gpus_share_the_model(render: Render) -> None:
    """As the example has it: a rank for each GPU, and the shared memory that they need."""
    found = render(CASES["tensor-parallel"])
    (container,) = found.pod("worker")["containers"]
    assert container["image"] == "fusionkv-worker-gpu:0.2.0"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert env_of(container)["FUSIONKV_WORKER_TENSOR_PARALLEL"] == "4"
    assert found.shared_memory("worker")


def test_a_secret_is_mounted(render: Render) -> None:
    files = {f"tls_{kind}": f"/etc/fusionkv/tls.{end}" for kind, end in (("cert", "crt"), ("key", "key"))}
    secured = {"secret": "fusionkv-tls", "config": files}
    found = render(dict.fromkeys(PORTS, secured))
    for name in PORTS:
        assert found.secret(name, "fusionkv-tls") == found.config(name).tls_cert.parent
        assert found.config(name).health_listen == "[::]:7079"


def test_the_environment_is_what_the_services_accept(render: Render) -> None:
    own: dict[str, dict[str, Any]] = {
        "kvcache": {"memory_bytes": 3 << 30, "sync": True},
        "worker": {"pool_bytes": "2GiB", "dtype": "float32"},
        "gateway": {"dense_weight": 0.25, "vllm_model": "a model: 'x'"},
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


def test_what_may_be_set_is_what_the_services_know() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    places = {"listen", "health_listen", "http_listen", "metrics_listen", "data_dir", "data_port", "data_host"}
    own = places | {"model", "cache", "workers", "tensor_parallel"}
    for name, config in CONFIGS.items():
        parts = schema["properties"][name]["properties"]["config"]["allOf"]
        allowed = next(p["propertyNames"]["enum"] for p in parts if "propertyNames" in p)
        assert set(allowed) == set(config.__dataclass_fields__) - own, "run `make docs`"


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


@pytest.mark.parametrize("kind", ["StatefulSet", "DaemonSet"])
@pytest.mark.parametrize(
    ("url", "endpoint", "ports"),
    [
        ("redis://redis", "", [6379]),
        ("rediss://:secret@redis.data.svc:6380/0", "", [6380]),
        ("s3://bucket/kv", "", [443]),
        ("s3://bucket/kv", "http://minio.data.svc:9000", [443, 9000]),
    ],
)
def test_caches_reach_the_tier_that_they_share(
    render: Render, url: str, endpoint: str, ports: list[int], kind: str
) -> None:
    env = [{"name": "AWS_ENDPOINT_URL", "value": endpoint}] if endpoint else []
    found = render({"kvcache": {"kind": kind, "replicas": 3, "config": {"remote_url": url}, "extraEnv": env}})
    workload = found[kind]["kvcache"]
    assert found.config("kvcache").remote_url == url
    reached = {53: [], **{port: [] for port in ports}}
    assert found.traffic("kvcache") == (called("kvcache", ["worker"]), reached)
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


def test_routers_alone_hear_kv_events(render: Render) -> None:
    values: dict[str, Any] = {"kvcache": {"config": {"events_endpoint": "tcp://*:5557"}}}
    found = render(values)
    (container,) = found.pod("kvcache")["containers"]
    assert {5557, 5558} <= {port["containerPort"] for port in container["ports"]}
    assert found.traffic("kvcache")[0] == called("kvcache", ["worker"])
    values["networkPolicy"] = {"routers": [{"podSelector": {"matchLabels": {"app": "router"}}}]}
    callers, _ = render(values).traffic("kvcache")
    assert callers == {**called("kvcache", ["worker"]), 5557: ["router"], 5558: ["router"]}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kvcahe": {}}, "kvcahe"),
        ({"kvcache": {"config": {"memroy_bytes": "1GiB"}}}, "propertyNames|memroy_bytes"),
        ({"kvcache": {"config": {"data_dir": "/tmp"}}}, "propertyNames|data_dir"),
        ({"kvcache": {"config": {"drain_seconds": "10s"}}}, "drain_seconds"),
        ({"kvcache": {"resources": {"limits": {"memory": "1GB"}}}}, "memory"),
        ({"kvcache": {"replicas": 2}}, "remote_url"),
        ({"kvcache": {"kind": "DaemonSet"}}, "remote_url"),
        ({"worker": {"replicas": 0}}, "replicas"),
        ({"worker": {"gpu": {"count": 9}}}, "count"),
        ({"worker": {"config": {"tensor_parallel": 2}}}, "propertyNames|tensor_parallel"),
        ({"worker": {"model": {"uri": "pvc://models/../etc"}}}, "uri"),
        ({"worker": {"model": {"uri": "hf://gpt2"}}}, "uri"),
        ({"gateway": {"replicas": 2}}, "milvus_url"),
        ({"gateway": {"autoscaling": {"max": 2}}}, "milvus_url"),
        ({"otlp": {"endpoint": "collector"}}, "endpoint"),
        ({"otlp": {"ratio": 5}}, "ratio"),
        ({"metrics": {"port": 7071}}, "port"),
        ({"log": {"level": "loud"}}, "level"),
        ({"networkPolicy": {"clients": [{"labels": {}}]}}, "clients"),
        ({"redis": {"image": "redis:latest@sha"}}, "image"),
        ({"encode": {"ray": {"operator": []}}}, "operator"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else None,
)
def test_bad_values_are_refused(render: Render, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.compile(f"schema.*({message})", re.DOTALL)):
        render(values)


@pytest.mark.parametrize(
    ("cache", "worker", "told"),
    [
        ({"drain_seconds": CacheConfig().lease_ms / 1000}, {}, "longer than a lease"),
        ({"drain_seconds": 60, "lease_ms": 90_000}, {}, r"\(60\) .* 90 s"),
        ({}, {"cache_seconds": 60}, r"\(40\) .* 60\)"),
        ({"drain_seconds": WorkerConfig().cache_seconds, "lease_ms": 1000}, {}, "than a request waits"),
    ],
)
def test_a_shorter_drain_is_refused(render: Render, cache: Any, worker: Any, told: str) -> None:
    with pytest.raises(ValueError, match=f"drain_seconds .*{told}"):
        render({"kvcache": {"config": cache}, "worker": {"config": worker}})


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
