"""What the chart makes of values, and the versions of Kubernetes that it has to be valid for."""

import json
import subprocess
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.gateway.config import GatewayConfig
from fusionkv.kvcache_service.config import Config as CacheConfig
from fusionkv.protos.runtime import settings

# Python's own is slow.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# From the oldest that the chart takes on.
VERSIONS = ("1.27", "1.33", "1.37")
CONFIGS: dict[str, Any] = {"kvcache": CacheConfig, "worker": WorkerConfig, "gateway": GatewayConfig}
COMPONENT = "app.kubernetes.io/component"
PORTS = {"kvcache": 7070, "worker": 7071, "gateway": 7072}
# Of the cache service's data plane.
DATA_PORT = 7073
CHART = Path(__file__).parent.parent.parent / "k8s/fusionkv"
EXAMPLES = sorted((CHART.parent / "examples").glob("*.yaml"))
# All that the chart can make at once, in two parts.
EVERYTHING: dict[str, dict[str, Any]] = {
    "everything": {
        **{name: {"enabled": True} for name in ("redis", "milvus", "vllm", "certManager")},
        "worker": {"model": {"uri": "hf://o/m"}, "gpu": {"count": 2}, "autoscaling": {"max": 2}},
        "gateway": {"http": {"port": 8080}, "ingress": {"enabled": True, "hosts": ["a.example"]}},
        "metrics": {"port": 9464, "serviceMonitor": {"enabled": True}, "rules": {"enabled": True}},
        "encode": {"corpora": ["a"]},
    },
    "ray": {"mooncake": {"enabled": True}, "encode": {"corpora": ["a"], "ray": {"enabled": True}}},
}
CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    **EVERYTHING,
    **{file.stem: yaml.load(file.read_text(), LOADER) for file in EXAMPLES},
}


def template(helm: str, folder: Path, values: Any, version: str = VERSIONS[-1], chart: Path = CHART) -> list[Any]:
    """The objects of a release `rel` in the namespace `ns`. ValueError with what helm says if it refuses them."""
    file = folder / "values.yaml"
    file.write_text(json.dumps(values))
    command = [helm, "template", "rel", str(chart), "-n", "ns", "--kube-version", version, "-f", str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise ValueError(done.stderr)
    return [document for document in yaml.load_all(done.stdout, LOADER) if document]


def merged(values: Any, changes: Any) -> Any:
    """As `helm --set` has it."""
    if not isinstance(values, dict) or not isinstance(changes, dict):
        return changes
    return {**values, **{name: merged(values.get(name), change) for name, change in changes.items()}}


# Kinds that Kubernetes does not have, and which it has no schema of.
FOREIGN = {"GRPCRoute", "HTTPRoute", "ScaledObject", "ServiceMonitor", "PrometheusRule"}
FOREIGN |= {"Issuer", "Certificate", "RayJob"}


# Read anew for every object, the schemas took most of the tests' time.
kubernetes_validate.utils.schema_contents = cache(kubernetes_validate.utils.schema_contents)


def validate(documents: Iterable[Any], version: str) -> None:
    """Holds objects, and the pods of those of other APIs, to the schemas of a version of Kubernetes."""
    for document in documents:
        for each in ray_pods(document) if document["kind"] in FOREIGN else [document]:
            _validated(json.dumps(each), version)


@cache
def _validated(text: str, version: str) -> None:
    """Once for all releases that have the same object."""
    kubernetes_validate.validate(json.loads(text), version, strict=True)
    _have_names_of_their_own(json.loads(text))


def ray_pods(document: Any) -> list[Any]:
    """The pods that are to be made from the templates of a RayJob; of other kinds none."""
    if document["kind"] != "RayJob":
        return []
    cluster = document["spec"]["rayClusterSpec"]
    templates = [group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    return [{"apiVersion": "v1", "kind": "Pod", **template} for template in templates]


# Of a list of objects, the field that names each. Server-side apply, which Helm 4 uses, refuses two of a name.
_NAMED = {"env": "name", "volumeMounts": "mountPath", "volumes": "name", "containers": "name", "ports": "name"}


def _have_names_of_their_own(value: Any) -> None:
    for key, inner in value.items() if isinstance(value, dict) else ():
        if key in _NAMED and isinstance(inner, list) and all(_NAMED[key] in each for each in inner):
            names = [each[_NAMED[key]] for each in inner]
            assert len(names) == len(set(names)), f"{key}: {names}"
        for each in inner if isinstance(inner, list) else [inner]:
            _have_names_of_their_own(each)


def env_of(container: Any) -> dict[str, str]:
    """Variables whose values are known before the pod is."""
    return {each["name"]: each["value"] for each in container["env"] if "value" in each}


def restricted(pod: Any) -> None:
    """It has no rights and bounded memory, as the standard `restricted` asks, and mounts what it has."""
    assert pod["automountServiceAccountToken"] is False
    # A Service called <release>-worker would otherwise become FUSIONKV_WORKER_PORT, an unknown setting.
    assert pod["enableServiceLinks"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    kinds = {kind for volume in pod["volumes"] for kind in volume if kind != "name"}
    assert kinds <= {"configMap", "emptyDir", "persistentVolumeClaim", "projected", "secret"}
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    containers = [*pod.get("initContainers", []), *pod["containers"]]
    for each in containers:
        rights = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert rights.items() <= each["securityContext"].items()
        assert each["securityContext"].keys() <= {*rights, "readOnlyRootFilesystem", "runAsUser"}
        assert not [port for port in each.get("ports", []) if "hostPort" in port]
        assert "memory" in each["resources"]["limits"]
    mounted = {mount["name"] for each in containers for mount in each["volumeMounts"]}
    assert {volume["name"] for volume in pod["volumes"]} <= mounted


class Objects(dict[str, dict[str, Any]]):
    """By kind, then by what follows the release in their names."""

    def __init__(self, documents: Iterable[Any]) -> None:
        for document in documents:
            self.setdefault(document["kind"], {})[document["metadata"]["name"].removeprefix("rel-")] = document

    @property
    def documents(self) -> Iterable[Any]:
        return (document for named in self.values() for document in named.values())

    @property
    def workloads(self) -> dict[str, Any]:
        """StatefulSets, Deployments and DaemonSets, by name."""
        kinds = ("StatefulSet", "Deployment", "DaemonSet")
        return {name: made for kind in kinds for name, made in self.get(kind, {}).items()}

    @property
    def pods(self) -> list[Any]:
        """The specs of all pods that come of a release: of workloads, of jobs, and that of the test, the last."""
        jobs = [job["spec"]["template"]["spec"] for job in self.get("Job", {}).values()]
        jobs += [pod["spec"] for job in self.get("RayJob", {}).values() for pod in ray_pods(job)]
        return [*map(self.pod, self.workloads), *jobs, self["Pod"]["test"]["spec"]]

    def pod(self, name: str) -> Any:
        """The pod's spec of a workload."""
        return self.workloads[name]["spec"]["template"]["spec"]

    def config(self, name: str) -> Any:
        """The settings that a service reads from its pod's environment."""
        env = env_of(self.pod(name)["containers"][0])
        ours = {key: value for key, value in env.items() if key.startswith(f"FUSIONKV_{name.upper()}_")}
        return settings.load(CONFIGS[name], name, environ=ours)

    def secret(self, name: str, secret: str) -> Path:
        """Where the first container of a workload's pod finds a Secret."""
        (volume,) = [v for v in self.pod(name)["volumes"] if v.get("secret", {}).get("secretName") == secret]
        (mount,) = [m for m in self.pod(name)["containers"][0]["volumeMounts"] if m["name"] == volume["name"]]
        return Path(mount["mountPath"])

    def shared_memory(self, name: str) -> bool:
        """Whether /dev/shm of that container is memory of its own."""
        (mount,) = [m for m in self.pod(name)["containers"][0]["volumeMounts"] if m["mountPath"] == "/dev/shm"]
        (volume,) = [v for v in self.pod(name)["volumes"] if v["name"] == mount["name"]]
        return bool(volume["emptyDir"]["medium"] == "Memory")

    def traffic(self, name: str) -> tuple[dict[int | None, list[str]], dict[int | None, list[str]]]:
        """Who may call the pods of a name, and whom they may call, by port; None stands for all ports."""
        spec = self["NetworkPolicy"][name]["spec"]

        def peers(rules: Any, key: str) -> dict[int | None, list[str]]:
            found = {}
            for rule in rules:
                labels = [peer["podSelector"]["matchLabels"] for peer in rule.get(key, [])]
                ports = [port["port"] for port in rule.get("ports", [{"port": None}])]
                for port in ports[:1] if ports[0] == 53 else ports:  # of DNS, the others are a cluster's own
                    found[port] = [each.get(COMPONENT) or "".join(each.values()) for each in labels]
            return found

        return peers(spec["ingress"], "from"), peers(spec["egress"], "to")


def called(name: str, peers: list[str]) -> dict[int | None, list[str]]:
    """The ports at which a service of this name is called, as in `Objects.traffic`: all by the same peers."""
    return dict.fromkeys((PORTS[name], *([DATA_PORT] if name == "kvcache" else [])), peers)


Render = Callable[..., Objects]
