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
Render = Callable[..., dict[str, dict[str, Any]]]
_CHART = Path(__file__).parent.parent.parent / "k8s/fusionkv"


def template(helm: str, folder: Path, values: Any, version: str = VERSIONS[-1]) -> list[Any]:
    """The objects of a release `rel` in the namespace `ns`. ValueError with what helm says if it refuses them."""
    (folder / "values.yaml").write_text(yaml.safe_dump(values))
    command = [helm, "template", "rel", str(_CHART), "-n", "ns", "--kube-version", version]
    done = subprocess.run([*command, "-f", str(folder / "values.yaml")], capture_output=True, text=True)
    if done.returncode != 0:
        raise ValueError(done.stderr)
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def notes(helm: str, folder: Path, *flags: str) -> str:
    """What helm tells after an installation, in one line: only with a cluster, so an object is made of it."""
    chart = folder / "chart"
    shutil.copytree(_CHART, chart)
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


def named(documents: Iterable[Any]) -> dict[str, dict[str, Any]]:
    """Objects by kind, then by what follows the release in their names."""
    found: dict[str, dict[str, Any]] = {}
    for document in documents:
        found.setdefault(document["kind"], {})[document["metadata"]["name"].removeprefix("rel-")] = document
    return found


def pod_of(found: dict[str, dict[str, Any]], name: str) -> Any:
    """The pod's spec of a StatefulSet, Deployment or DaemonSet."""
    kinds = ("StatefulSet", "Deployment", "DaemonSet")
    return {k: v for kind in kinds for k, v in found.get(kind, {}).items()}[name]["spec"]["template"]["spec"]


def config_of(found: dict[str, dict[str, Any]], name: str) -> Any:
    """The settings that a service reads from its pod's environment."""
    env = {e["name"]: e["value"] for e in pod_of(found, name)["containers"][0]["env"] if "value" in e}
    ours = {key: value for key, value in env.items() if key.startswith(f"FUSIONKV_{name.upper()}_")}
    return settings.load(CONFIGS[name], name, environ=ours)
