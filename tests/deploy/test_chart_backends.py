"""What the chart brings beside the services: certificates, a Redis, a Milvus, and the question of `helm test`."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.deploy.rendering import CONFIGS, VERSIONS, Render, env_of
from tests.services import start_cache, start_gateway, start_worker
from tests.system.redis_process import RedisServer

pytestmark = pytest.mark.slow


SECURED = {
    "certManager": {"enabled": True, "names": ["rag.example.com"]},
    "redis": {"enabled": True},
    "kvcache": {"replicas": 2},
    "worker": {"autoscaling": {"max": 3}},
    "metrics": {"port": 9464},
    "encode": {"corpora": ["notes"]},
}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_service_has_a_certificate_for_the_names_it_is_called_by(render: Render, version: str) -> None:
    found = render(SECURED, version)
    certificates = found["Certificate"]
    dialled: dict[str, set[str]] = {
        "worker": {address.split(":")[1] for address in found.config("gateway").workers},
        "kvcache": {found.config("worker").cache.partition(":")[0]},
        "gateway": {"rel-gateway", "rel-gateway.ns.svc", "localhost", "rag.example.com"},
    }
    for name, names in dialled.items():
        certificate = certificates[name]["spec"]
        assert names <= set(certificate["dnsNames"])
        assert {"server auth", "client auth"} <= set(certificate["usages"])
        config, at = found.config(name), found.secret(name, certificate["secretName"])
        assert (config.tls_cert, config.tls_key) == (at / "tls.crt", at / "tls.key")
        assert getattr(config, "tls_ca", None) == (None if name == "kvcache" else at / "ca.crt"), "it calls nobody"
        # Applications have tokens and no certificates.
        assert config.tls_client_ca == (None if name == "gateway" else at / "ca.crt")


def test_a_release_has_a_ca_of_its_own_unless_it_names_another(render: Render) -> None:
    found = render(SECURED)
    ca = found["Certificate"]["ca"]["spec"]
    assert ca["isCA"] is True
    assert ca["privateKey"]["rotationPolicy"] == "Never", "what it signed is trusted after it was renewed"
    assert found["Issuer"][ca["issuerRef"]["name"].removeprefix("rel-")]["spec"] == {"selfSigned": {}}
    (issuer,) = {found["Certificate"][name]["spec"]["issuerRef"]["name"] for name in CONFIGS}
    assert found["Issuer"][issuer.removeprefix("rel-")]["spec"]["ca"]["secretName"] == ca["secretName"]

    named = {"kind": "ClusterIssuer", "name": "inner"}
    found = render({"certManager": {"enabled": True, "issuer": named}})
    assert "Issuer" not in found
    assert set(found["Certificate"]) == set(CONFIGS)
    for certificate in found["Certificate"].values():
        assert certificate["spec"]["issuerRef"] == {"group": "cert-manager.io", **named}
    with pytest.raises(ValueError, match=r"certManager sets tls_cert itself: take it out of worker\.config"):
        render({"certManager": {"enabled": True}, "worker": {"config": {"tls_cert": "/etc/fusionkv/tls.crt"}}})
    assert not {"Issuer", "Certificate"} & set(render({}))


def test_services_and_callers_may_trust_several_cas(render: Render) -> None:
    trusting = {
        "certManager": {"enabled": True, "trust": "cas"},
        "vllm": {"enabled": True},
        "redis": {"enabled": False},
    }
    found = render({**SECURED, "kvcache": {}, **trusting})
    ca = {"name": "cas", "items": [{"key": "ca.crt", "path": "ca.crt"}]}
    for name in (*CONFIGS, "vllm"):
        (volume,) = [v for v in found.pod(name)["volumes"] if v["name"] == "certificates"]
        own, cas = volume["projected"]["sources"]
        assert own["secret"]["name"] == found["Certificate"][name]["spec"]["secretName"]
        assert [item["path"] for item in own["secret"]["items"]] == ["tls.crt", "tls.key"]
        assert cas == {"configMap": ca}
    (job,) = found["Job"].values()
    for pod in (found["Pod"]["test"]["spec"], job["spec"]["template"]["spec"]):
        assert {"name": "certificates", "configMap": ca} in pod["volumes"]


def test_who_calls_the_gateway_trusts_its_ca_and_learns_no_key(render: Render) -> None:
    found = render(SECURED)
    (job,) = found["Job"].values()
    pods = [found["Pod"]["test"]["spec"], job["spec"]["template"]["spec"]]
    for pod in pods:
        (container,) = pod["containers"]
        (flag,) = [word for word in container["command"] if word.startswith("--tls-ca=")]
        (mount,) = [m for m in container["volumeMounts"] if flag == f"--tls-ca={m['mountPath']}/ca.crt"]
        (volume,) = [v for v in pod["volumes"] if v["name"] == mount["name"]]
        secret = found["Certificate"]["gateway"]["spec"]["secretName"]
        assert volume["secret"] == {"secretName": secret, "items": [{"key": "ca.crt", "path": "ca.crt"}]}
    plain = render({"test": {"secret": "operator"}})["Pod"]["test"]["spec"]
    (container,) = plain["containers"]
    assert not [word for word in container["command"] if "tls" in word]
    assert env_of(container)["FUSIONKV_TOKEN_FILE"] == "/etc/fusionkv/token"
    assert {"name": "secret", "secret": {"secretName": "operator", "defaultMode": 0o440}} in plain["volumes"]


@pytest.mark.parametrize(
    ("backend", "user", "more", "url"),
    [
        ("redis", "kvcache", {}, "redis://rel-redis:6379"),
        ("mooncake", "kvcache", {"kind": "DaemonSet"}, "mooncake://rel-mooncake:50051?host=$(K8S_POD_IP)"),
        ("milvus", "gateway", {}, "http://rel-milvus:19530"),
    ],
)
def test_services_share_a_backend(render: Render, backend: str, user: str, more: Any, url: str) -> None:
    found = render({backend: {"enabled": True}, user: {"replicas": 2, **more}})
    setting, port = "milvus_url" if user == "gateway" else "remote_url", urlsplit(url).port
    assert getattr(found.config(user), setting) == url
    assert found["Service"][backend]["spec"]["ports"][0]["port"] == port
    assert found.workloads[user]["spec"].get("replicas", 2) == 2
    callers, _ = found.traffic(backend)
    assert list(callers.values()) == [[user]]
    _, reached = found.traffic(user)
    assert port in reached
    assert backend not in render().workloads
    # Where an operator has it run, and under the operator's labels.
    placed = {"nodeSelector": {"disk": "ssd"}, "tolerations": [{"key": "a", "operator": "Exists"}]}
    placed |= {"affinity": {"nodeAffinity": {}}, "priorityClassName": "high"}
    told = {"podLabels": {"team": "a"}, "podAnnotations": {"note": "b"}}
    made = render({backend: {"enabled": True, **placed, **told}}).workloads[backend]["spec"]["template"]
    assert placed.items() <= made["spec"].items()
    assert made["metadata"]["labels"].items() >= told["podLabels"].items()
    assert made["metadata"]["annotations"] == told["podAnnotations"]
    other = "http://other:19530" if user == "gateway" else "redis://other"
    with pytest.raises(ValueError, match="choose one"):
        render({backend: {"enabled": True}, user: {"config": {setting: other}}})


def test_caches_of_a_mooncake_store_reach_each_other(render: Render) -> None:
    found = render({"mooncake": {"enabled": True}, "kvcache": {"kind": "DaemonSet"}})
    (container,) = found.pod("kvcache")["containers"]
    names = [each["name"] for each in container["env"]]
    assert names.index("K8S_POD_IP") < names.index("FUSIONKV_KVCACHE_REMOTE_URL"), "or it is not replaced"
    (master,) = found.pod("mooncake")["containers"]
    assert container["image"] == master["image"]
    assert container["image"].startswith("fusionkv-kvcache-mooncake:")
    assert master["command"][0] == "mooncake_master"
    assert [way[None] for way in found.traffic("kvcache")] == [["kvcache"]] * 2


def test_that_redis_takes_its_command_line(render: Render, tmp_path: Path) -> None:
    """A real one, started as the pod starts it."""
    found = render({"redis": {"enabled": True, "megabytes": 64}})
    (container,) = found.pod("redis")["containers"]
    program, *flags = container["command"]
    assert program == "redis-server"
    assert found.traffic("redis")[1] == {}, "it calls nobody"
    assert container["resources"]["limits"]["memory"] == "80Mi"
    wanted = {"maxmemory": str(64 << 20), "maxmemory-policy": "volatile-ttl", "save": "", "appendonly": "no"}
    wanted |= {"protected-mode": "no"}
    server = RedisServer(tmp_path, *flags)
    try:
        with server.client() as client:
            assert {name: client.config_get(name)[name] for name in wanted} == wanted
    finally:
        server.kill9()


def test_a_milvus_keeps_its_data_in_its_volume(render: Render) -> None:
    found = render({"milvus": {"enabled": True}, "gateway": {"replicas": 2}})
    assert "PersistentVolumeClaim" not in found
    assert found.pod("milvus")["securityContext"]["runAsNonRoot"] is True
    (container,) = found.pod("milvus")["containers"]
    env = env_of(container)
    mounts = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
    assert env["ETCD_DATA_DIR"].startswith(f"{mounts['data']}/")
    (key,) = found["ConfigMap"]["milvus"]["data"]
    assert env["ETCD_CONFIG_PATH"] == f"{mounts['etcd']}/{key}"


@pytest.mark.long
@pytest.mark.system
def test_helm_test_asks_a_question(render: Render, launch: Any, reference_model: Path, tmp_path: Path) -> None:
    """The command of its pod, against real services; then without a cache, which it has to notice."""
    (container,) = render({})["Pod"]["test"]["spec"]["containers"]
    cache = start_cache(launch, tmp_path)
    gateway = start_gateway(launch, tmp_path, start_worker(launch, reference_model, cache=cache))
    (address,) = [word for word in container["command"] if word.startswith("--gateway=")]
    assert address == "--gateway=rel-gateway:7072"
    (tmp_path / "tmp").mkdir()
    words = [w.replace("/tmp/", f"{tmp_path}/tmp/") for w in container["command"]]
    words[words.index(address)] = f"--gateway={gateway.address}"
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for status, said in ((0, r'"text": " ?535"'), (1, '"degraded": true')):
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=200)
        assert done.returncode == status, done.stdout + done.stderr
        assert re.search(said, done.stdout)
        cache.kill9()
