"""What operators set of the chart's pods and of the ways to them: scheduling, security, images, further fields."""

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

from tests.deploy import foreign
from tests.deploy.rendering import (
    CHART,
    CONFIGS,
    EXAMPLES,
    PORTS,
    VERSIONS,
    Objects,
    Render,
    env_of,
    merged,
    template,
)

pytestmark = pytest.mark.slow
SERVED = (*CONFIGS, "vllm")
# A release with all that the chart can make at once, in two parts.
EVERYTHING: tuple[dict[str, Any], ...] = (
    {
        **{name: {"enabled": True} for name in ("redis", "milvus", "vllm", "certManager")},
        "worker": {"model": {"uri": "hf://o/m"}, "gpu": {"count": 2}},
        "encode": {"corpora": ["a"]},
    },
    {"mooncake": {"enabled": True}, "encode": {"corpora": ["a"], "ray": {"enabled": True}}},
)
ROUTE = {"enabled": True, "parents": [{"name": "gw"}], "hostnames": ["a.example"]}


@pytest.mark.parametrize("version", VERSIONS)
def test_fields_of_pods_are_passed_on(render: Render, version: str) -> None:
    scheduling: dict[str, Any] = {
        "nodeSelector": {"disk": "ssd"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}],
        "priorityClassName": "high",
    }
    extra = {"name": "ca", "mountPath": "/ca"}, {"name": "ca", "configMap": {"name": "ca"}}
    own = {
        **scheduling,
        "podLabels": {"team": "a"},
        "podAnnotations": {"note": "b"},
        "serviceAccount": {"annotations": {"role": "c"}},
        "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
        "extraVolumeMounts": [extra[0]],
        "extraVolumes": [extra[1]],
    }
    more = {"name": "more", "image": "registry.example/more:1"}
    values: dict[str, Any] = {name: {**own, "initContainers": [more], "sidecars": [more]} for name in CONFIGS}
    values["worker"]["runtimeClassName"] = "nvidia"
    values["vllm"] = {**values["gateway"], "enabled": True, "runtimeClassName": "nvidia"}
    values["worker"]["model"] = {"uri": "hf://o/m"}
    found = render(values, version)
    for name in SERVED:
        made = found.workloads[name]["spec"]["template"]
        pod, container = made["spec"], made["spec"]["containers"][0]
        assert {field: pod[field] for field in scheduling} == scheduling
        assert pod.get("runtimeClassName") == ("nvidia" if name in ("worker", "vllm") else None)
        assert made["metadata"]["labels"]["team"] == "a"
        assert made["metadata"]["annotations"] == {"note": "b"}
        assert found["ServiceAccount"][name]["metadata"]["annotations"] == {"role": "c"}
        assert env_of(container)["HTTPS_PROXY"] == "http://proxy:3128"
        assert extra[0] in container["volumeMounts"]
        assert extra[1] in pod["volumes"]
        assert pod["containers"][1:] == [more]
        assert pod["initContainers"][-1] == more
    download, _ = found.pod("worker")["initContainers"]
    assert env_of(download)["HTTPS_PROXY"] == "http://proxy:3128"


def pods_of(found: Objects) -> list[Any]:
    """All pods that come of a release."""
    pods = [found.pod(name) for name in found.workloads]
    pods += [job["spec"]["template"]["spec"] for job in found.get("Job", {}).values()]
    pods += [pod["spec"] for job in found.get("RayJob", {}).values() for pod in foreign.pods(job)]
    return [*pods, found["Pod"]["test"]["spec"]]


@pytest.mark.parametrize("values", [*EVERYTHING, *EXAMPLES], ids=["everything", "ray", *(f.stem for f in EXAMPLES)])
def test_all_pods_fit_the_standard_restricted(render: Render, values: Any) -> None:
    for pod in pods_of(render(values if isinstance(values, dict) else yaml.safe_load(values.read_text()))):
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        kinds = {kind for volume in pod["volumes"] for kind in volume if kind != "name"}
        assert kinds <= {"configMap", "emptyDir", "persistentVolumeClaim", "projected", "secret"}
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for each in (*pod["containers"], *pod.get("initContainers", [])):
            assert each["securityContext"]["allowPrivilegeEscalation"] is False
            assert each["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert not {"privileged", "procMount"} & each["securityContext"].keys()
            assert not [port for port in each.get("ports", []) if "hostPort" in port]


@pytest.mark.parametrize("values", EVERYTHING, ids=["everything", "ray"])
def test_all_containers_fit_a_quota_of_cores(render: Render, values: Any) -> None:
    """Which refuses pods without a limit of them."""
    limited: dict[str, Any] = {"resources": {"limits": {"cpu": "3"}}}
    more: dict[str, Any] = dict.fromkeys((*SERVED, "redis", "mooncake", "milvus", "test"), limited)
    more["encode"] = {**limited, "ray": {**limited, "headResources": limited["resources"]}}
    for pod in pods_of(render(merged(values, more))):
        for each in (*pod["containers"], *pod.get("initContainers", [])):
            assert each["resources"]["limits"]["cpu"] == "3", each["name"]


def test_jobs_run_where_gateways_may(render: Render) -> None:
    placed = {"nodeSelector": {"pool": "rag"}, "tolerations": [{"key": "rag", "operator": "Exists"}]}
    gpus = {"nodeSelector": {"pool": "gpu"}, "tolerations": [{"key": "gpu", "operator": "Exists"}]}
    for ray in (False, True):
        encode = {"corpora": ["a"], "ray": {"enabled": ray}}
        found = render({"gateway": placed, "worker": gpus, "encode": encode})
        *_, last, tested = pods_of(found)
        assert placed.items() <= tested.items()
        assert (gpus if ray else placed).items() <= last.items()
        if ray:
            head, _ = foreign.pods(*found["RayJob"].values())
            assert placed.items() <= head["spec"].items()


def test_a_cluster_may_choose_the_users(render: Render) -> None:
    """As OpenShift does: the chart then names none."""
    chosen = dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"))
    found = render(
        {
            "podSecurityContext": chosen,
            **{key: {"enabled": True} for key in ("vllm", "milvus", "redis")},
            "worker": {"model": {"uri": "hf://o/m"}},
            "encode": {"corpora": ["a"]},
        }
    )
    for pod in pods_of(found):
        assert pod["securityContext"]["runAsNonRoot"] is True
        for each in (pod, *pod["containers"], *pod.get("initContainers", [])):
            assert not chosen.keys() & each["securityContext"].keys()
    assert 5353 in {
        port["port"] for rule in found["NetworkPolicy"]["worker"]["spec"]["egress"] for port in rule["ports"]
    }


def test_all_images_come_from_one_registry_or_by_digest(render: Render) -> None:
    digest = f"@sha256:{'0' * 64}"
    values: dict[str, Any] = {name: {"enabled": True} for name in ("redis", "milvus", "vllm")}
    values["worker"] = {"model": {"uri": "hf://o/m"}, "gpu": {"count": 1}}

    def images(more: Any) -> dict[str, str]:
        found = render({**values, **more})
        return {name: found.pod(name)["containers"][0]["image"] for name in found.workloads}

    mirrored = images({"global": {"imageRegistry": "mirror.example/hub"}})
    assert all(image.startswith("mirror.example/hub/") for image in mirrored.values())
    assert mirrored["redis"] == "mirror.example/hub/library/redis:7.2.7-alpine"
    assert mirrored["worker"] == "mirror.example/hub/fusionkv-worker-gpu:0.2.0"
    own = images({"global": {"imageRegistry": "mirror.example"}, "image": {"registry": "own.example"}})
    assert (own["gateway"], own["milvus"].split("/")[0]) == ("own.example/fusionkv-gateway:0.2.0", "mirror.example")
    values["worker"]["image"] = f"fusionkv-worker-gpu{digest}"
    values["redis"]["image"] = f"docker.io/library/redis:7{digest}"
    pinned = images({})
    assert (pinned["worker"], pinned["redis"]) == (values["worker"]["image"], values["redis"]["image"])


@pytest.mark.parametrize("version", VERSIONS)
def test_a_node_that_is_drained_does_not_wait_for_pods_that_are_not_ready(render: Render, version: str) -> None:
    found = render({"gateway": {"config": {"milvus_url": "http://milvus:19530"}}}, version)
    for name in CONFIGS:
        spec = found["PodDisruptionBudget"][name]["spec"]
        assert (spec["maxUnavailable"], spec["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")


def test_a_worker_reads_the_memory_of_its_nodes_cache(render: Render) -> None:
    kvcache = {"kind": "DaemonSet", "hostPath": "/var/lib/fusionkv"}
    found = render({"kvcache": kvcache, "redis": {"enabled": True}})
    address = found.config("worker").cache
    assert address in found.config("kvcache").listen
    for name in ("kvcache", "worker"):
        pod = found.pod(name)
        (volume,) = [v for v in pod["volumes"] if "hostPath" in v]
        assert volume["hostPath"] == {"path": "/var/lib/fusionkv", "type": "Directory"}
        (mount,) = [m for m in pod["containers"][0]["volumeMounts"] if m["name"] == volume["name"]]
        assert address.startswith(f"unix:{mount['mountPath']}/")
    assert found.pod("kvcache")["containers"][0]["resources"]["requests"]["ephemeral-storage"] == "20Gi"
    with pytest.raises(ValueError, match="hostPath is for"):
        render({"kvcache": {"hostPath": "/var/lib/fusionkv"}})
    assert "ephemeral-storage" not in render({}).pod("kvcache")["containers"][0]["resources"]["requests"]


def test_two_releases_of_a_namespace_share_nothing(helm: str, tmp_path: Path) -> None:
    """One with a name of its own for all objects, as if it were another release."""
    for values in EVERYTHING:
        one, other = (
            {(each["kind"], each["metadata"]["name"]) for each in template(helm, tmp_path, {**values, **more})}
            for more in ({}, {"fullnameOverride": "other"})
        )
        assert len(one) == len(other)
        assert not one & other
    named = Objects(template(helm, tmp_path, {"nameOverride": "rag"}))
    for name in PORTS:
        selector = named.workloads[name]["spec"]["selector"]["matchLabels"]
        assert selector["app.kubernetes.io/name"] == "rag"
        assert named["Service"][name]["spec"]["selector"] == selector


def test_the_openai_endpoint_has_a_route_or_an_ingress(render: Render) -> None:
    ingress = {"enabled": True, "className": "nginx", "hosts": ["a.example"], "annotations": {"a": "b"}}
    tls = [{"secretName": "cert", "hosts": ["a.example"]}]
    found = render({"gateway": {"http": {"port": 8080}, "httpRoute": ROUTE, "ingress": {**ingress, "tls": tls}}})
    (backend,) = found["HTTPRoute"]["gateway"]["spec"]["rules"][0]["backendRefs"]
    ports = {port["name"]: port["port"] for port in found["Service"]["gateway"]["spec"]["ports"]}
    assert backend == {"name": "rel-gateway", "port": ports["http"]}
    assert found["Service"]["gateway"]["spec"]["ports"][1]["appProtocol"] == "http"
    spec = found["Ingress"]["gateway"]["spec"]
    assert (spec["ingressClassName"], spec["tls"]) == ("nginx", tls)
    (path,) = spec["rules"][0]["http"]["paths"]
    assert path["backend"]["service"] == {"name": "rel-gateway", "port": {"name": "http"}}
    for way in ({"httpRoute": ROUTE}, {"ingress": ingress}):
        with pytest.raises(ValueError, match=r"set gateway\.http\.port"):
            render({"gateway": way})
    secured = {"gateway": {"http": {"port": 8080}, "ingress": ingress}, "certManager": {"enabled": True}}
    assert render(secured)["Service"]["gateway"]["spec"]["ports"][1]["appProtocol"] == "https"
    with pytest.raises(ValueError, match="BackendTLSPolicy"):
        render({"gateway": {"http": {"port": 8080}, "httpRoute": ROUTE}, "certManager": {"enabled": True}})
    for taken in ({"gateway": {"service": {"port": 8080}}}, {"metrics": {"port": 8080}}):
        with pytest.raises(ValueError, match=r"gateway\.http\.port has to differ"):
            render(merged({"gateway": {"http": {"port": 8080}}}, taken))


def test_all_services_reach_what_is_added(render: Render) -> None:
    rule = {"to": [{"ipBlock": {"cidr": "10.1.0.0/16"}}], "ports": [{"port": 3128, "protocol": "TCP"}]}
    found = render({"networkPolicy": {"egress": [rule]}})
    for name in CONFIGS:
        assert rule in found["NetworkPolicy"][name]["spec"]["egress"]


def test_helm_4_makes_the_same(helm: str, tmp_path: Path) -> None:
    sdk = pytest.importorskip("helm_python", reason="Helm 4 is installed for Linux on x86-64")
    chart = sdk.Chart.load(str(CHART))
    for values in ({}, *EVERYTHING, *(yaml.safe_load(file.read_text()) for file in EXAMPLES)):
        made = chart.render(values, name="rel", namespace="ns")
        texts = [text for name, text in made.items() if name.endswith(".yaml")]
        documents = [document for text in texts for document in yaml.safe_load_all(text) if document]
        assert Objects(documents) == Objects(template(helm, tmp_path, values)), values


def test_services_and_further_objects(render: Render) -> None:
    service = {"type": "LoadBalancer", "loadBalancerIP": "10.0.0.9", "loadBalancerSourceRanges": ["10.0.0.0/8"]}
    more = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "{{ .Release.Name }}-more"},
        "data": {"a": "b"},
    }
    values = {"gateway": {"service": service}, "ipFamilyPolicy": "PreferDualStack", "extraObjects": [more]}
    found = render(values)
    assert service.items() <= found["Service"]["gateway"]["spec"].items()
    assert {made["spec"]["ipFamilyPolicy"] for made in found["Service"].values()} == {"PreferDualStack"}
    assert found["ConfigMap"]["more"]["data"] == {"a": "b"}


def test_keda_scales_workers_by_what_prometheus_says(render: Render) -> None:
    autoscaling = {"max": 5, "waiting": 3, "prometheus": "http://prometheus.monitoring:9090"}
    found = render({"worker": {"replicas": 2, "autoscaling": autoscaling}, "metrics": {"port": 9464}})
    assert "HorizontalPodAutoscaler" not in found
    spec = found["ScaledObject"]["worker"]["spec"]
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (2, 5)
    (trigger,) = spec["triggers"]
    assert trigger["metadata"]["serverAddress"] == autoscaling["prometheus"]
    assert trigger["metadata"]["threshold"] == "3"
    assert 'namespace="ns",pod=~"rel-worker-[0-9]+"' in trigger["metadata"]["query"]


KINDS = {
    "v1": ["Service", "ServiceAccount", "PersistentVolumeClaim", "Pod"],
    "apps/v1": ["StatefulSet", "Deployment"],
    "policy/v1": ["PodDisruptionBudget"],
    "networking.k8s.io/v1": ["NetworkPolicy"],
    "autoscaling/v2": ["HorizontalPodAutoscaler"],
}
RUNNING = {
    "apiVersion": "apps/v1",
    "kind": "StatefulSet",
    "metadata": {
        "name": "rel-worker",
        "namespace": "ns",
        "labels": {"app.kubernetes.io/managed-by": "Helm"},
        "annotations": {"meta.helm.sh/release-name": "rel", "meta.helm.sh/release-namespace": "ns"},
    },
    "spec": {"replicas": 3},
}


def discovery() -> dict[str, Any]:
    """What an API server says of its kinds, by path."""
    versions = {
        group: {"groupVersion": group, "version": group.rpartition("/")[2]} for group in KINDS if "/" in group
    }
    groups = [
        {"name": group.partition("/")[0], "versions": [each], "preferredVersion": each}
        for group, each in versions.items()
    ]
    found: dict[str, Any] = {
        "/version": {"major": "1", "minor": "33", "gitVersion": "v1.33.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "groups": groups},
    }
    for group, kinds in KINDS.items():
        resources = [
            {"name": f"{kind.lower()}s".replace("ys", "ies"), "namespaced": True, "kind": kind, "verbs": ["get"]}
            for kind in kinds
        ]
        path = f"/apis/{group}" if "/" in group else f"/api/{group}"
        found[path] = {"kind": "APIResourceList", "groupVersion": group, "resources": resources}
    return found


class Cluster(BaseHTTPRequestHandler):
    """As much of an API server as `helm install` asks for: it runs a StatefulSet of three workers."""

    found: ClassVar[dict[str, Any]] = {**discovery(), "/apis/apps/v1/namespaces/ns/statefulsets/rel-worker": RUNNING}

    def do_GET(self) -> None:
        body = self.found.get(self.path.partition("?")[0])
        self._reply(200 if body else 404, body or {"kind": "Status", "status": "Failure", "reason": "NotFound"})

    def do_POST(self) -> None:
        self._reply(201, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def do_PATCH(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._reply(200, RUNNING)

    def _reply(self, status: int, body: Any) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Path]:
    """The kubeconfig of it."""
    server = HTTPServer(("127.0.0.1", 0), Cluster)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    at = {"cluster": {"server": f"http://127.0.0.1:{server.server_port}"}, "name": "c"}
    context = {"context": {"cluster": "c", "user": "u", "namespace": "ns"}, "name": "c"}
    users = [{"name": "u", "user": {}}]
    config = {"apiVersion": "v1", "kind": "Config", "clusters": [at], "contexts": [context], "users": users}
    file = tmp_path / "kubeconfig"
    file.write_text(yaml.safe_dump({**config, "current-context": "c"}))
    yield file
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_upgrade_keeps_as_many_workers_as_an_autoscaler_made(helm: str, tmp_path: Path, cluster: Path) -> None:
    values = {"worker": {"autoscaling": {"max": 5}}, "metrics": {"port": 9464}}
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
    command = [helm, "install", "rel", CHART, "-n", "ns", "-f", tmp_path / "values.yaml", "-o", "json", "--no-hooks"]
    flags = ["--kubeconfig", cluster, "--disable-openapi-validation"]
    (tmp_path / "releases.yaml").write_text("[]")
    env = {**os.environ, "HELM_DRIVER": "memory", "HELM_MEMORY_DRIVER_DATA": str(tmp_path / "releases.yaml")}
    done = subprocess.run([*command, *flags], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    installed = Objects(yaml.safe_load_all(json.loads(done.stdout)["manifest"]))
    assert installed["StatefulSet"]["worker"]["spec"]["replicas"] == 3
    # Without a cluster to look at.
    assert "replicas" not in Objects(template(helm, tmp_path, values))["StatefulSet"]["worker"]["spec"]


def test_examples_with_gpus_run_where_gpus_are(render: Render, root: Path) -> None:
    """Most providers taint such nodes."""
    for file in (root / "k8s/examples").glob("*.yaml"):
        found = render(yaml.safe_load(file.read_text()))
        for name in found.workloads:
            pod = found.pod(name)
            limits = [each["resources"]["limits"] for each in pod["containers"]]
            if any("nvidia.com/gpu" in limit for limit in limits):
                assert "nvidia.com/gpu" in [each["key"] for each in pod.get("tolerations", [])], file.name
