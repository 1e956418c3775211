"""Prints the chart's values.schema.json, updated with the services' current settings (`make docs`)."""

import json
from pathlib import Path

from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.gateway.config import GatewayConfig
from fusionkv.kvcache_service.config import Config
from fusionkv.protos.runtime.settings import declared

SCHEMA = Path(__file__).parent.parent / "k8s/fusionkv/values.schema.json"
# Settings that the chart sets itself.
OWN: tuple[tuple[str, type, set[str]], ...] = (
    ("kvcache", Config, {"listen", "health_listen", "metrics_listen", "data_dir", "data_port", "data_host"}),
    ("worker", WorkerConfig, {"listen", "health_listen", "metrics_listen", "model", "cache", "tensor_parallel"}),
    ("gateway", GatewayConfig, {"listen", "health_listen", "http_listen", "metrics_listen", "data_dir", "workers"}),
)


def schema() -> str:
    made = json.loads(SCHEMA.read_text())
    for section, config, own in OWN:
        settings = made["properties"][section]["properties"]["config"]["allOf"]
        names = next(part["propertyNames"] for part in settings if "propertyNames" in part)
        names["enum"] = [field.name for field in declared(config) if field.name not in own]
    return json.dumps(made, indent=2) + "\n"


if __name__ == "__main__":
    print(schema(), end="")
