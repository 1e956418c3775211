"""What operators set of the chart's pods and of the ways to them: scheduling, security, images, further fields."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.rendering import (
    CASES,
    CHART,
    CONFIGS,
    EVERYTHING,
    EXAMPLES,
    PORTS,
    VERSIONS,
    Objects,
    Render,
    env_of,
    merged,
    ray_pods,
    template,
)

pytestmark = pytest.mark.slow
SERVED = (*CONFIGS, "vllm")
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


@pytest.mark.parametrize("values", EVERYTHING.values(), ids=EVERYTHING)
def test_all_containers_fit_a_quota_of_cores(render: Render, values: Any) -> None:
    """Which refuses pods without a limit of them."""
    limited: dict[str, Any] = {"resources": {"limits": {"cpu": "3"}}}
    more: dict[str, Any] = dict.fromkeys((*SERVED, "redis", "mooncake", "milvus", "test"), limited)
    more["encode"] = {**limited, "ray": {**limited, "headResources": limited["resources"]}}
    for pod in render(merged(values, more)).pods:
        for each in (*pod["containers"], *pod.get("initContainers", [])):
            assert each["resources"]["limits"]["cpu"] == "3", each["name"]


def test_jobs_run_where_gateways_may(render: Render) -> None:
    placed = {"nodeSelector": {"pool": "rag"}, "tolerations": [{"key": "rag", "operator": "Exists"}]}
    gpus = {"nodeSelector": {"pool": "gpu"}, "tolerations": [{"key": "gpu", "operator": "Exists"}]}
    for ray in (False, True):
        encode = {"corpora": ["a"], "ray": {"enabled": ray}}
        found = render({"gateway": placed, "worker": gpus, "encode": encode})
        *_, last, tested = found.pods
        assert placed.items() <= tested.items()
        assert (gpus if ray else placed).items() <= last.items()
        if ray:
            head, _ = ray_pods(*found["RayJob"].values())
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
    for pod in found.pods:
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


def test_a_node_that_is_drained_does_not_wait_for_pods_that_are_not_ready(render: Render) -> None:
    found = render({"gateway": {"config": {"milvus_url": "http://milvus:19530"}}})
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
    for values in EVERYTHING.values():
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
    for values in CASES.values():
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


def test_examples_with_gpus_run_where_gpus_are(render: Render) -> None:
    """Most providers taint such nodes."""
    for file in EXAMPLES:
        found = render(CASES[file.stem])
        for pod in map(found.pod, found.workloads):
            if any("nvidia.com/gpu" in each["resources"]["limits"] for each in pod["containers"]):
                assert "nvidia.com/gpu" in [each["key"] for each in pod.get("tolerations", [])], file.name
