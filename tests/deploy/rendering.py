"""What the chart makes of values, and the versions of Kubernetes that it has to be valid for."""

import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.gateway.config import GatewayConfig
from fusionkv.kvcache_service.config import Config as CacheConfig

VERSIONS = ("1.29", "1.33", "1.37")
CONFIGS: dict[str, Any] = {"kvcache": CacheConfig, "worker": WorkerConfig, "gateway": GatewayConfig}
COMPONENT = "app.kubernetes.io/component"
# Of the Gateway API, the Prometheus operator and cert-manager, which Kubernetes' own schemas lack.
_FOREIGN = {"GRPCRoute", "ServiceMonitor", "PrometheusRule", "Certificate", "Issuer"}
_CHART = Path(__file__).parent.parent.parent / "k8s/fusionkv"


def template(helm: str, folder: Path, values: Any, version: str = VERSIONS[-1]) -> list[Any]:
    """The objects of a release `rel` in the namespace `ns`. ValueError with what helm says if it refuses them."""
    (folder / "values.yaml").write_text(yaml.safe_dump(values))
    command = [helm, "template", "rel", str(_CHART), "-n", "ns", "--kube-version", version]
    done = subprocess.run([*command, "-f", str(folder / "values.yaml")], capture_output=True, text=True)
    if done.returncode != 0:
        raise ValueError(done.stderr)
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def validate(documents: Iterable[Any], version: str) -> None:
    """Holds objects to the schemas of a version of Kubernetes, as far as it has them."""
    for document in documents:
        if document["kind"] not in _FOREIGN:
            kubernetes_validate.validate(document, version, strict=True)
