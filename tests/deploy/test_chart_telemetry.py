"""What the chart says about logs, traces and metrics, and that a process of ours does as it says."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.commands import run_python
from tests.deploy.rendering import CONFIGS, VERSIONS, named, pod_of, template, validate

pytestmark = pytest.mark.slow
SENT = {
    "log": {"level": "debug", "format": "json"},
    "otlp": {
        "endpoint": "https://collector.observability:4317",
        "ratio": 0.05,
        "headersSecret": "collector",
        "caSecret": "collector-ca",
    },
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


@pytest.fixture(params=CONFIGS)
def pod(request: Any, helm: str, tmp_path: Path) -> Any:
    """The spec of each pod that logs and sends."""
    documents = template(helm, tmp_path, SENT)
    validate(documents, VERSIONS[-1])
    return pod_of(named(documents), request.param)


def test_every_pod_logs_and_sends_as_told(pod: Any, authority: Any) -> None:
    (container,) = pod["containers"]
    given = {e["name"]: e for e in container["env"]}
    header = given["OTEL_EXPORTER_OTLP_HEADERS"]["valueFrom"]["secretKeyRef"]
    assert header == {"name": "collector", "key": "headers"}
    (mount,) = [m for m in container["volumeMounts"] if m["name"] == "otlp"]
    (volume,) = [v for v in pod["volumes"] if v["name"] == "otlp"]
    assert volume["secret"]["secretName"] == "collector-ca"
    assert given["OTEL_EXPORTER_OTLP_CERTIFICATE"]["value"] == f"{mount['mountPath']}/ca.crt"

    env = {
        name: e["value"] for name, e in given.items() if name.startswith(("OTEL_", "FUSIONKV_LOG")) and "value" in e
    }
    assert env["OTEL_EXPORTER_OTLP_ENDPOINT"] == "https://collector.observability:4317"
    # Each process is told apart by its pod's name, which Kubernetes puts in if it stands above.
    assert env["OTEL_RESOURCE_ATTRIBUTES"] == "service.instance.id=$(K8S_POD_NAME)"
    order = [e["name"] for e in container["env"]]
    assert len(order) == len(given)
    users = [e["name"] for e in container["env"] if "$(K8S_POD_NAME)" in e.get("value", "")]
    assert all(order.index("K8S_POD_NAME") < order.index(name) for name in users)
    env |= {
        "OTEL_EXPORTER_OTLP_CERTIFICATE": str(authority("ca").ca),
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=x",
    }
    done = run_python("-c", PROCESS, env=env)
    assert done.stdout.startswith("ParentBased{root:TraceIdRatioBased{0.05}")
    (line,) = [json.loads(line) for line in done.stderr.splitlines() if '"probe"' in line]
    assert (line["level"], line["message"]) == ("DEBUG", "told")


def test_the_share_may_be_text(helm: str, tmp_path: Path) -> None:
    """Helm takes the number of `--set otlp.ratio=0.05` for a text."""
    otlp = {"endpoint": "http://collector:4317"}
    shares = (("0.05", "0.05"), (0.05, "0.05"), ("0", "0"), (0, "0"), ("1.0", None), (1, None))
    for given, told in shares:
        env = pod_of(named(template(helm, tmp_path, {"otlp": {**otlp, "ratio": given}})), "gateway")["containers"][0][
            "env"
        ]
        assert {e["name"]: e.get("value") for e in env}.get("OTEL_TRACES_SAMPLER_ARG") == told


def test_nothing_is_sent_unless_there_is_an_endpoint(helm: str, tmp_path: Path) -> None:
    found = named(template(helm, tmp_path, {**SENT, "otlp": {**SENT["otlp"], "endpoint": ""}}))
    for name in CONFIGS:
        pod = pod_of(found, name)
        assert not [e for e in pod["containers"][0]["env"] if e["name"].startswith("OTEL_")]
        assert "otlp" not in {v["name"] for v in pod["volumes"]}
    # All requests are traced, as the SDK does without being told.
    found = named(template(helm, tmp_path, {"otlp": {"endpoint": "http://collector:4317"}}))
    names = {e["name"] for e in pod_of(found, "gateway")["containers"][0]["env"]}
    assert {name for name in names if name.startswith("OTEL_")} == {
        "OTEL_EXPORTER_OTLP_ENDPOINT",
        "OTEL_RESOURCE_ATTRIBUTES",
    }
