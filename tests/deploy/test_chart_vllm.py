"""The chart's vLLM: its pod, what it is told of workers and caches, and who may call it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fusionkv.vllm_connector.options import ConnectorOptions
from tests.deploy.rendering import CASES, Objects, Render, called, env_of

pytestmark = pytest.mark.slow

ON = {"vllm": {"enabled": True}}


def flags(found: Objects) -> dict[str, str]:
    (container,) = found.pod("vllm")["containers"]
    assert container["command"][:2] == ["vllm", "serve"]
    return {name: value for name, _, value in (word.partition("=") for word in container["command"][3:])}


def transfer(found: Objects) -> tuple[Any, Any]:
    """What the connector is told, and what it takes itself of that."""
    told = json.loads(flags(found)["--kv-transfer-config"])
    return told, told.pop("kv_connector_extra_config")


def test_nothing_of_it_is_made_by_default(render: Render) -> None:
    found = render({})
    assert not [name for objects in found.values() for name in objects if "vllm" in name]
    assert "vllm" not in json.dumps(found)
    assert found.config("gateway").decode == "worker"


def test_the_gateway_has_it_decode(render: Render) -> None:
    """As the example has it."""
    found = render(CASES["vllm"])
    gateway, worker = found.config("gateway"), found.config("worker")
    service = found["Service"]["vllm"]["spec"]
    assert gateway.decode == "vllm"
    assert gateway.vllm_url == f"http://rel-vllm:{service['ports'][0]['port']}"
    pod = found["Deployment"]["vllm"]["spec"]["template"]
    assert service["selector"].items() <= pod["metadata"]["labels"].items()
    (container,) = pod["spec"]["containers"]
    (port,) = container["ports"]
    assert (port["name"], port["containerPort"]) == (service["ports"][0]["targetPort"], 8000)
    assert flags(found)["--port"] == "8000"
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": "http"}
    # KV of another model, or of another dtype, would be refused.
    assert container["command"][2] == str(worker.model) == "/models/main/Qwen/Qwen2.5-7B-Instruct"
    assert flags(found)["--dtype"] == worker.dtype == "bfloat16"
    assert worker.prefill_bytes == 8 << 30
    claims = [
        [v["persistentVolumeClaim"] for v in each["volumes"] if v["name"] == "models"]
        for each in (pod["spec"], found.pod("worker"))
    ]
    assert claims == [[{"claimName": "rel-model"}]] * 2
    assert flags(found)["--max-model-len"] == "32768"


def test_an_init_container_copies_the_connector_to_where_python_looks(render: Render, root: Path) -> None:
    pod = render({**ON, "image": {"registry": "registry.example/team"}}).pod("vllm")
    (init,), (container,) = pod["initContainers"], pod["containers"]
    assert init["image"] == "registry.example/team/fusionkv-vllm-connector:0.2.0"
    assert container["image"].startswith("docker.io/vllm/vllm-openai:v0.")
    (target,) = re.findall(r'^ENTRYPOINT \["cp", .+, "(.+)"\]$', (root / "Dockerfile").read_text(), re.MULTILINE)
    assert "command" not in init
    (copied,) = init["volumeMounts"]
    assert copied["mountPath"] == target
    (mount,) = [m for m in container["volumeMounts"] if m["name"] == copied["name"]]
    assert (mount["mountPath"], mount["readOnly"]) == (env_of(container)["PYTHONPATH"], True)


def test_its_pod_has_no_rights(render: Render) -> None:
    found = render(ON)
    pod = found.pod("vllm")
    assert pod["serviceAccountName"] == found["ServiceAccount"]["vllm"]["metadata"]["name"]
    assert pod["securityContext"]["runAsUser"] == 2000
    # Files of the claim and of Secrets are of the group that workers have.
    assert pod["securityContext"]["fsGroup"] == found.pod("worker")["securityContext"]["fsGroup"]


def test_several_gpus_share_the_model(render: Render) -> None:
    vllm = {"enabled": True, "gpu": {"count": 4, "resource": "amd.com/gpu"}, "startupSeconds": 3600}
    found = render({"vllm": vllm})
    (container,) = found.pod("vllm")["containers"]
    assert flags(found)["--tensor-parallel-size"] == "4"
    assert container["resources"]["limits"]["amd.com/gpu"] == 4
    assert found.shared_memory("vllm")
    assert container["startupProbe"]["failureThreshold"] * container["startupProbe"]["periodSeconds"] == 3600


def test_the_connector_takes_what_it_is_told(render: Render, root: Path) -> None:
    found = render(ON)
    told, extra = transfer(found)
    module = {"kv_connector": "FusionKVConnector", "kv_connector_module_path": "fusionkv.vllm_connector.connector"}
    assert told == {**module, "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    # It can't be imported without vLLM.
    code = (root / "vllm_connector/connector.py").read_text()
    assert f"class {told['kv_connector']}(" in code
    assert extra == {"cache": found.config("worker").cache}
    assert transfer(render({"vllm": {"enabled": True, "prefixes": False}}))[1] == {}
    _, secured = transfer(render({**ON, "certManager": {"enabled": True}}))
    assert secured.keys() == {"cache", "tls_ca", "tls_cert", "tls_key", "tls_worker"}
    ConnectorOptions.of(secured)


def test_it_shows_a_certificate_to_workers_and_caches(render: Render) -> None:
    found = render({**ON, "certManager": {"enabled": True}})
    certificate = found["Certificate"]["vllm"]["spec"]
    assert certificate["issuerRef"] == found["Certificate"]["worker"]["spec"]["issuerRef"]
    assert "client auth" in certificate["usages"]
    (_, extra), at = transfer(found), found.secret("vllm", certificate["secretName"])
    # A gateway names workers by the addresses of their pods.
    assert extra["tls_worker"] in found["Certificate"]["worker"]["spec"]["dnsNames"]
    assert {Path(extra[name]).parent for name in ("tls_ca", "tls_cert", "tls_key")} == {at}
    assert "vllm" not in render({"certManager": {"enabled": True}})["Certificate"]


@pytest.mark.parametrize("prefixes", [True, False])
def test_only_the_gateway_calls_it_and_it_calls_workers_and_caches(render: Render, prefixes: bool) -> None:
    found = render({"vllm": {"enabled": True, "prefixes": prefixes}})
    assert found["NetworkPolicy"]["vllm"]["spec"]["policyTypes"] == ["Ingress", "Egress"]
    shared = called("kvcache", ["kvcache"]) if prefixes else {}
    assert found.traffic("vllm") == ({8000: ["gateway"]}, {53: [], 7071: ["worker"], **shared})
    assert found.traffic("gateway")[1] == {53: [], 7071: ["worker"], 8000: ["vllm"]}
    assert found.traffic("worker")[0] == {7071: ["gateway", "vllm"]}
    assert found.traffic("kvcache")[0] == called("kvcache", ["worker", *(["vllm"] if prefixes else [])])
    assert "NetworkPolicy" not in render({**ON, "networkPolicy": {"enabled": False}})


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"gateway": {"config": {"decode": "vllm"}}}, "vllm.enabled sets decode itself"),
        ({"gateway": {"config": {"vllm_url": "http://other:8000"}}}, "vllm.enabled sets vllm_url itself"),
        ({"worker": {"config": {"tls_cert": "/etc/fusionkv/tls.crt"}}}, "needs certManager .* worker.config"),
        ({"kvcache": {"config": {"tls_cert": "/etc/fusionkv/tls.crt"}}}, "needs certManager .* kvcache.config"),
        ({"vllm": {"gpu": {"count": 0}}}, "schema"),
        ({"vllm": {"replicas": 2}}, "schema"),
    ],
    ids=str,
)
def test_values_that_do_not_go_with_it_are_refused(render: Render, values: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        render({**values, "vllm": {"enabled": True, **values.get("vllm", {})}})
