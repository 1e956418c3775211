"""What the chart brings besides its workloads: jobs, autoscaling, a route, and values to start from."""

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fusionkv.gateway.cli import main as cli
from fusionkv.protos.runtime import settings
from tests.deploy.rendering import CASES, COMPONENT, CONFIGS, VERSIONS, Objects, Render, called, env_of, restricted

pytestmark = pytest.mark.slow


def parsed(command: list[str]) -> Any:
    assert command[0] == "fusionkv"
    return cli._parser().parse_args(command[1:])


def container(job: Any) -> Any:
    pod = job["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    restricted(pod)
    (found,) = pod["containers"]
    assert found["securityContext"]["readOnlyRootFilesystem"] is True
    return found


@pytest.mark.parametrize(("url", "port"), [("https://milvus.data.svc", 19530), ("http://milvus:443/x", 443)])
def test_gateways_that_share_a_milvus_are_several(render: Render, url: str, port: int) -> None:
    found = render({"gateway": {"replicas": 2, "autoscaling": {"max": 5, "cpu": 60}, "config": {"milvus_url": url}}})
    gateway = found["Deployment"]["gateway"]
    assert "replicas" not in gateway["spec"], "the autoscaler's business"
    assert gateway["spec"]["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    assert {"name": "data", "emptyDir": {}} in found.pod("gateway")["volumes"]
    assert not [name for name in found.get("PersistentVolumeClaim", {}) if "gateway" in name]
    (scaler,) = found["HorizontalPodAutoscaler"].values()
    assert scaler["spec"]["scaleTargetRef"]["name"] == gateway["metadata"]["name"]
    assert (scaler["spec"]["minReplicas"], scaler["spec"]["maxReplicas"]) == (2, 5)
    assert set(found.traffic("gateway")[1]) == {53, 7071, port}
    budgets = [b["spec"]["selector"]["matchLabels"][COMPONENT] for b in found["PodDisruptionBudget"].values()]
    assert budgets.count("gateway") == 1


def test_only_workers_get_the_keys_that_entries_are_signed_with(render: Render) -> None:
    found = render(CASES["secured"])
    volumes = [(name, volume) for name in found.workloads for volume in found.pod(name)["volumes"]]
    secrets = [(name, volume["secret"]["secretName"]) for name, volume in volumes if "secret" in volume]
    assert [name for name, secret in secrets if secret == "fusionkv-worker"] == ["worker"]
    (container,) = found.pod("worker")["containers"]
    (mount,) = [m for m in container["volumeMounts"] if m["name"] == "secret"]
    assert (mount["mountPath"], mount["readOnly"]) == ("/etc/fusionkv", True), "the whole volume, so that keys rotate"
    assert found.config("worker").signing_keys == Path("/etc/fusionkv/signing.keys")


def test_a_model_is_fetched_into_the_claim_that_workers_read(render: Render) -> None:
    model = {"uri": "hf://Qwen/Qwen2.5-0.5B@v1", "secret": "hub", "storage": {"accessMode": "ReadWriteOnce"}}
    found = render({"worker": {"model": model}})
    assert "Job" not in found, "a job can't be changed"
    pod = found.pod("worker")
    (fetching,) = pod["initContainers"]
    assert fetching["image"] == pod["containers"][0]["image"]
    env = {e["name"]: e for e in fetching["env"]}
    # The image says otherwise.
    assert env["HF_HUB_OFFLINE"]["value"] == "0"
    assert env["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "hub", "key": "token"}
    claim = found["PersistentVolumeClaim"]["model"]
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    (volume,) = [v for v in pod["volumes"] if v["name"] == "models"]
    assert volume["persistentVolumeClaim"] == {"claimName": "rel-model"}
    mounts = [
        next(m for m in each["volumeMounts"] if m["name"] == "models") for each in (fetching, *pod["containers"])
    ]
    assert [mount.get("readOnly", False) for mount in mounts] == [False, True]
    assert found.config("worker").model == Path("/models/v1/Qwen/Qwen2.5-0.5B")
    assert found.traffic("worker")[1] == {53: [], 443: [], **called("kvcache", ["kvcache"])}
    held = render({"worker": {"model": {**model, "storage": {"existingClaim": "weights"}}}})
    assert "model" not in held["PersistentVolumeClaim"]
    (volume,) = [v for v in held.pod("worker")["volumes"] if v["name"] == "models"]
    assert volume["persistentVolumeClaim"] == {"claimName": "weights"}


def test_a_model_that_is_there_is_not_fetched_again(render: Render, tmp_path: Path) -> None:
    """The command of the init container, with a download that fails, then one that succeeds, then none."""
    (fetching,) = render({"worker": {"model": {"uri": "hf://o/m"}}}).pod("worker")["initContainers"]
    command = [word.replace("/models/", f"{tmp_path}/models/") for word in fetching["command"]]
    program = tmp_path / "bin/hf"
    program.parent.mkdir()
    for status, calls in ((1, 1), (0, 2), (0, 2)):
        program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nmkdir -p "$6"\nexit {status}\n')
        program.chmod(0o755)
        done = subprocess.run(command, env={"PATH": f"{program.parent}:{os.environ['PATH']}"})
        assert done.returncode == status
        lines = (tmp_path / "calls").read_text().splitlines()
        assert lines == [f"download o/m --revision main --local-dir {tmp_path}/models/main/o/m"] * calls


def test_a_model_of_a_claim_is_only_read(render: Render) -> None:
    found = render({"worker": {"model": {"uri": "pvc://weights/a/b"}}})
    pod = found.pod("worker")
    assert "initContainers" not in pod
    assert found.config("worker").model == Path("/models/a/b")
    (volume,) = [v for v in pod["volumes"] if v["name"] == "models"]
    assert volume["persistentVolumeClaim"] == {"claimName": "weights", "readOnly": True}
    assert set(found["PersistentVolumeClaim"]) == {"gateway"}
    assert 443 not in found.traffic("worker")[1]


def test_corpora_outlive_a_release(render: Render) -> None:
    found = render({})
    assert found["PersistentVolumeClaim"]["gateway"]["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    held = render({"gateway": {"storage": {"existingClaim": "corpora"}}})
    assert "PersistentVolumeClaim" not in held
    for made, claim in ((found, "rel-gateway"), (held, "corpora")):
        (volume,) = [v for v in made.pod("gateway")["volumes"] if v["name"] == "data"]
        assert volume["persistentVolumeClaim"] == {"claimName": claim}
    # Of a StatefulSet, Kubernetes keeps the volumes.
    kept = render({"milvus": {"enabled": True}})
    existing = {"storage": {"existingClaim": "old"}}
    named = render({"milvus": {"enabled": True, **existing}, "kvcache": existing})
    for name in ("kvcache", "milvus"):
        spec = kept["StatefulSet"][name]["spec"]
        assert "persistentVolumeClaimRetentionPolicy" not in spec
        assert [claim["metadata"]["name"] for claim in spec["volumeClaimTemplates"]] == ["data"]
        assert "volumeClaimTemplates" not in named["StatefulSet"][name]["spec"]
        assert {"name": "data", "persistentVolumeClaim": {"claimName": "old"}} in named.pod(name)["volumes"]
    for more in ({"replicas": 2}, {"kind": "DaemonSet"}):
        with pytest.raises(ValueError, match=r"existingClaim is the volume of one"):
            render({"redis": {"enabled": True}, "kvcache": {**existing, **more}})


def test_corpora_are_encoded_one_an_index(render: Render) -> None:
    encode = {"corpora": ["a", "b c", "d"], "recipe": "fusionrag", "parallelism": 8, "secret": "worker-token"}
    clients = [{"podSelector": {"matchLabels": {"app": "shop"}}}]
    found = render({"encode": encode, "networkPolicy": {"clients": clients}})
    (job,) = found["Job"].values()
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 3, 3)
    encoding = container(job)
    args = parsed([word.replace("$(INDEX)", "2") for word in encoding["command"]])
    assert (args.corpora, args.index, args.recipe) == (["a", "b c", "d"], 2, "fusionrag")
    assert (args.gateway, args.wait) == ("rel-gateway:7072", 600)
    env = {e["name"]: e for e in encoding["env"]}
    at = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert env["INDEX"]["valueFrom"]["fieldRef"]["fieldPath"] == at
    assert env["FUSIONKV_TOKEN_FILE"]["value"] == "/etc/fusionkv/token"
    callers = found["NetworkPolicy"]["gateway"]["spec"]["ingress"][0]["from"]
    labels = spec["template"]["metadata"]["labels"]
    assert any(peer["podSelector"]["matchLabels"].items() <= labels.items() for peer in callers)


@pytest.fixture
def on_ray(render: Render) -> Render:
    """With encoders on Ray."""

    def run(values: dict[str, Any], version: str = VERSIONS[-1]) -> Objects:
        encode = {"corpora": ["a", "it's b"], "recipe": "prophetkv+similarity_guided(5)", "secret": "operator-token"}
        return render({**values, "encode": {**encode, "ray": {"enabled": True, "encoders": 3}}}, version)

    return run


@pytest.mark.parametrize(("gpus", "image"), [(0, "fusionkv-worker-ray:0.2.0"), (2, "fusionkv-worker-gpu-ray:0.2.0")])
@pytest.mark.parametrize("version", VERSIONS)
def test_encoders_on_ray_are_as_workers_are(on_ray: Render, root: Path, version: str, gpus: int, image: str) -> None:
    config = {"store": "int8", "signing_keys": "/etc/fusionkv/signing.keys"}
    worker = {"gpu": {"count": gpus}, "secret": "keys", "config": config, "model": {"uri": "pvc://m/q"}}
    found = on_ray({"worker": worker, "certManager": {"enabled": True}}, version)
    assert "Job" not in found
    (job,) = found["RayJob"].values()
    # What KubeRay refuses.
    assert len(job["metadata"]["name"]) <= 47
    args = parsed(shlex.split(job["spec"]["entrypoint"]))
    assert (args.corpora, args.recipe) == (["a", "it's b"], "prophetkv+similarity_guided(5)")
    assert (args.ray, args.encoders, args.model, args.cache) == ("auto", 3, "/models/q", "rel-kvcache-client:7070")
    assert (args.gateway, args.wait, args.index) == ("rel-gateway:7072", 600, None)
    cluster = job["spec"]["rayClusterSpec"]
    assert f"ray=={cluster['rayVersion']}\n" in (root / "constraints.txt").read_text()
    head, (encoders,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert head["rayStartParams"] == {"num-cpus": "0"}
    assert encoders["replicas"] == encoders["minReplicas"] == encoders["maxReplicas"] == 3
    commanding, encoding = container({"spec": head}), container({"spec": encoders})
    assert commanding["image"] == encoding["image"] == image
    assert commanding["env"] == [{"name": "FUSIONKV_TOKEN_FILE", "value": "/etc/fusionkv/token"}]
    assert "nvidia.com/gpu" not in commanding["resources"]["limits"]
    assert encoding["resources"]["limits"].get("nvidia.com/gpu", 0) == (gpus > 0)
    mounts = {mount["mountPath"]: mount for mount in encoding["volumeMounts"]}
    assert mounts["/models"]["readOnly"] is True
    # Those of the worker, and at the head only whom to trust.
    volumes = [{v["name"]: v for v in group["template"]["spec"]["volumes"]} for group in (head, encoders)]
    assert [v["secret"]["secret"]["secretName"] for v in volumes] == ["operator-token", "keys"]
    assert [v["certificates"]["secret"]["secretName"] for v in volumes] == ["rel-gateway-tls", "rel-worker-tls"]
    assert volumes[0]["certificates"]["secret"]["items"] == [{"key": "ca.crt", "path": "ca.crt"}]
    assert str(args.tls_ca).removesuffix("/ca.crt") in {mount["mountPath"] for mount in commanding["volumeMounts"]}
    pod = found.pod("worker")
    own = {f"FUSIONKV_WORKER_{name}" for name in ("LISTEN", "HEALTH_LISTEN", "MODEL", "CACHE", "TENSOR_PARALLEL")}
    (serving,) = pod["containers"]
    taken = {name: value for name, value in env_of(serving).items() if name.startswith("FUSIONKV_WORKER_")}
    assert env_of(encoding) == {name: value for name, value in taken.items() if name not in own}
    loaded = settings.load(CONFIGS["worker"], "worker", environ=env_of(encoding))
    assert (loaded.store, loaded.tls_ca) == ("int8", Path("/etc/fusionkv-tls/ca.crt"))


def test_nobody_but_its_operator_reaches_a_ray_cluster(on_ray: Render) -> None:
    found = on_ray({"networkPolicy": {"clients": [{"podSelector": {"matchLabels": {"app": "shop"}}}]}})
    (job,) = found["RayJob"].values()
    cluster = job["spec"]["rayClusterSpec"]
    own = found["NetworkPolicy"]["encode"]["spec"]["podSelector"]["matchLabels"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert own.items() <= group["template"]["metadata"]["labels"].items()
    callers, callees = found.traffic("encode")
    assert callers == {None: ["encode"], 8265: ["kuberay-operator"]}
    assert callees == {None: ["encode"], 7072: ["gateway"], 53: [], **called("kvcache", ["kvcache"])}
    assert found.traffic("kvcache")[0] == called("kvcache", ["worker", "encode"])
    assert "encode" in found.traffic("gateway")[0][7072]
    assert found.traffic("worker")[0] == {7071: ["gateway"]}
    assert cluster["authOptions"] == {"mode": "token"}, "where a network enforces no policies"


def test_workers_come_and_go_by_how_many_wait(render: Render) -> None:
    found = render({"worker": {"replicas": 2, "autoscaling": {"max": 5, "waiting": 3}}, "metrics": {"port": 9464}})
    (scaler,) = found["HorizontalPodAutoscaler"].values()
    spec = scaler["spec"]
    assert (spec["minReplicas"], spec["maxReplicas"]) == (2, 5)
    (metric,) = spec["metrics"]
    assert metric["pods"]["metric"]["selector"] == {"matchLabels": {"fusionkv_state": "waiting"}}
    worker = found["StatefulSet"]["worker"]
    assert spec["scaleTargetRef"]["name"] == worker["metadata"]["name"]
    assert "replicas" not in worker["spec"], "an upgrade would take workers away"
    with pytest.raises(ValueError, match=r"worker\.autoscaling needs metrics\.port"):
        render({"worker": {"autoscaling": {"max": 5}}})
    assert "HorizontalPodAutoscaler" not in render({})


def test_a_route_leads_to_the_gateway(render: Render) -> None:
    found = render({"gateway": {"route": {"enabled": True, "parents": [{"name": "gw"}], "hostnames": ["a.example"]}}})
    (route,) = found["GRPCRoute"].values()
    spec = route["spec"]
    assert route["apiVersion"] == "gateway.networking.k8s.io/v1"
    assert (spec["parentRefs"], spec["hostnames"]) == ([{"name": "gw"}], ["a.example"])
    (backend,) = spec["rules"][0]["backendRefs"]
    service = found["Service"][backend["name"].removeprefix("rel-")]
    assert backend["port"] in [port["port"] for port in service["spec"]["ports"]]
    with pytest.raises(ValueError, match="parents"):
        render({"gateway": {"route": {"enabled": True}}})
    # Without TLS it does not lead to a gateway with it.
    gateway = {"route": {"enabled": True, "parents": [{"name": "gw"}]}}
    for values in (
        {"certManager": {"enabled": True}, "gateway": gateway},
        {"gateway": {**gateway, "config": {"tls_cert": "/etc/fusionkv/tls.crt"}}},
    ):
        with pytest.raises(ValueError, match="BackendTLSPolicy"):
            render(values)


JWKS = {"auth_issuer": "https://login.example", "auth_audience": "rag"}


@pytest.mark.parametrize(
    ("setting", "url", "port"),
    [
        ("auth_jwks", "https://login.example/keys", {443}),
        ("auth_jwks", "https://login.example:8443/realms/x/keys", {8443}),
        ("auth_jwks", "/etc/fusionkv/keys.json", set()),
        ("embedder", "http://tei/v1/embeddings", {80}),
        ("embedder", "minilm", set()),
        ("reranker", "http://tei:8081/v1/rerank", {8081}),
    ],
)
def test_a_gateway_reaches_the_urls_of_its_settings(render: Render, setting: str, url: str, port: set[int]) -> None:
    found = render({"gateway": {"config": {setting: url, **(JWKS if setting == "auth_jwks" else {})}}})
    assert set(found.traffic("gateway")[1]) == {53, 7071, *port}
    assert set(found.traffic("worker")[1]) == {53, *called("kvcache", [])}
