"""What the chart makes of values, and the versions of Kubernetes that it has to be valid for."""

import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.gateway.config import GatewayConfig
from fusionkv.kvcache_service.config import Config as CacheConfig
from fusionkv.protos.runtime import settings
from tests.deploy import foreign

# From the oldest that the chart takes on.
VERSIONS = ("1.27", "1.33", "1.37")
CONFIGS: dict[str, Any] = {"kvcache": CacheConfig, "worker": WorkerConfig, "gateway": GatewayConfig}
COMPONENT = "app.kubernetes.io/component"
PORTS = {"kvcache": 7070, "worker": 7071, "gateway": 7072}
# Of the cache service's data plane.
DATA_PORT = 7073
CHART = Path(__file__).parent.parent.parent / "k8s/fusionkv"
EXAMPLES = sorted((CHART.parent / "examples").glob("*.yaml"))


def template(helm: str, folder: Path, values: Any, version: str = VERSIONS[-1], chart: Path = CHART) -> list[Any]:
    """The objects of a release `rel` in the namespace `ns`. ValueError with what helm says if it refuses them."""
    (folder / "values.yaml").write_text(yaml.safe_dump(values))
    command = [helm, "template", "rel", str(chart), "-n", "ns", "--kube-version", version]
    done = subprocess.run([*command, "-f", str(folder / "values.yaml")], capture_output=True, text=True)
    if done.returncode != 0:
        raise ValueError(done.stderr)
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def merged(values: Any, changes: Any) -> Any:
    """As `helm --set` has it."""
    if not isinstance(values, dict) or not isinstance(changes, dict):
        return changes
    return {**values, **{name: merged(values.get(name), change) for name, change in changes.items()}}


def notes(helm: str, folder: Path, *flags: str) -> str:
    """What helm tells after an installation, in one line: only with a cluster, so an object is made of it."""
    chart = folder / "chart"
    shutil.copytree(CHART, chart)
    text = chart / "templates/NOTES.txt"
    defined = f'{{{{ define "notes" }}}}{text.read_text()}{{{{ end }}}}'
    text.with_name("notes.yaml").write_text(defined + 'kind: Notes\ntext: {{ include "notes" . | quote }}')
    command = [helm, "template", "rel", str(chart), "--kube-version", VERSIONS[-1], *flags]
    done = subprocess.run([*command, "-s", "templates/notes.yaml"], capture_output=True, text=True)
    if done.returncode != 0:
        raise ValueError(done.stderr)
    return " ".join(yaml.safe_load(done.stdout)["text"].split())


def validate(documents: Iterable[Any], version: str) -> None:
    """Holds objects to the schemas of a version of Kubernetes, and those of other APIs to what is known of these."""
    for document in documents:
        if document["kind"] in foreign.KINDS:
            foreign.validate(document)
            made = foreign.pods(document)
        else:
            made = [document]
        for each in made:
            kubernetes_validate.validate(each, version, strict=True)
            _have_names_of_their_own(each)


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


def confined(pod: Any, *, claims: Iterable[str] = ()) -> Any:
    """Its container. The pod has no rights and bounded memory, and mounts its volumes and claims, and no others."""
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    containers = [*pod.get("initContainers", []), *pod["containers"]]
    for each in containers:
        rights = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert rights.items() <= each["securityContext"].items()
        assert "memory" in each["resources"]["limits"]
    mounted = {mount["name"] for each in containers for mount in each["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]} | set(claims)
    (container,) = pod["containers"]
    return container


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
