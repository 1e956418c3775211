"""What the chart says about logs, traces and metrics, and that a process of ours does as it says."""

import json
from typing import Any

import pytest

from tests.commands import run_python
from tests.deploy.rendering import CONFIGS, Objects, Render, env_of

pytestmark = pytest.mark.slow
SENT: dict[str, Any] = {
    "log": {"level": "debug", "format": "json"},
    "otlp": {"endpoint": "https://collector.observability:4317", "ratio": 0.05, "headersSecret": "collector"}
    | {"caSecret": "collector-ca"},
}
# What a process says of itself; it ends without sending anything, since nobody is there to take it.
PROCESS = """
import logging, os
from opentelemetry import trace
from fusionkv.protos.observe import telemetry
telemetry.attach("fusionkv-worker")
logging.getLogger("probe").debug("told")
print(trace.get_tracer_provider().sampler.get_description(), flush=True)
os._exit(0)
"""


def test_every_pod_logs_and_sends_as_told(render: Render, authority: Any) -> None:
    found = render(SENT)
    for name in CONFIGS:
        _sends_as_told(found, authority, name)


def _sends_as_told(found: Objects, authority: Any, name: str) -> None:
    (container,) = found.pod(name)["containers"]
    given = {e["name"]: e for e in container["env"]}
    header = given["OTEL_EXPORTER_OTLP_HEADERS"]["valueFrom"]["secretKeyRef"]
    assert header == {"name": "collector", "key": "headers"}
    env = {key: value for key, value in env_of(container).items() if key.startswith(("OTEL_", "FUSIONKV_LOG"))}
    assert env["OTEL_EXPORTER_OTLP_CERTIFICATE"] == str(found.secret(name, "collector-ca") / "ca.crt")
    assert env["OTEL_EXPORTER_OTLP_ENDPOINT"] == "https://collector.observability:4317"
    # Each process is told apart by its pod's name, which Kubernetes puts in if it stands above.
    assert env["OTEL_RESOURCE_ATTRIBUTES"] == "service.instance.id=$(K8S_POD_NAME)"
    order = [e["name"] for e in container["env"]]
    assert len(order) == len(given)
    users = [key for key, value in env.items() if "$(K8S_POD_NAME)" in value]
    assert all(order.index("K8S_POD_NAME") < order.index(user) for user in users)
    own = {"OTEL_EXPORTER_OTLP_CERTIFICATE": str(authority("ca").ca), "OTEL_EXPORTER_OTLP_HEADERS": "authorization=x"}
    done = run_python("-c", PROCESS, env={**env, **own})
    assert done.stdout.startswith("ParentBased{root:TraceIdRatioBased{0.05}")
    (line,) = [json.loads(line) for line in done.stderr.splitlines() if '"probe"' in line]
    assert (line["level"], line["message"]) == ("DEBUG", "told")


def otel(found: Objects, name: str) -> dict[str, str]:
    env = env_of(found.pod(name)["containers"][0])
    return {key: value for key, value in env.items() if key.startswith("OTEL_")}


def test_the_share_may_be_text(render: Render) -> None:
    """Helm takes the number of `--set otlp.ratio=0.05` for a text."""
    for given, told in (("0.05", "0.05"), (0, "0"), ("1.0", None)):
        found = render({"otlp": {"endpoint": "http://collector:4317", "ratio": given}})
        assert otel(found, "gateway").get("OTEL_TRACES_SAMPLER_ARG") == told


def test_nothing_is_sent_unless_there_is_an_endpoint(render: Render) -> None:
    found = render({**SENT, "otlp": {**SENT["otlp"], "endpoint": ""}})
    for name in CONFIGS:
        assert otel(found, name) == {}
        assert "otlp" not in {v["name"] for v in found.pod(name)["volumes"]}
    # All requests are traced, as the SDK does without being told.
    found = render({"otlp": {"endpoint": "http://collector:4317"}})
    assert set(otel(found, "gateway")) == {"OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_RESOURCE_ATTRIBUTES"}
