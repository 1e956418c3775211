"""What the chart brings beside the services: certificates, a Redis, a Milvus, and the question of `helm test`."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.rendering import COMPONENT, CONFIGS, VERSIONS, Render, config_of, notes, pod_of
from tests.services import start_cache, start_gateway, start_worker
from tests.system.redis_process import RedisServer

pytestmark = pytest.mark.slow


def policy_of(found: dict[str, dict[str, Any]], name: str) -> Any:
    return found["NetworkPolicy"][name]["spec"]


def callers(policy: Any) -> list[str]:
    (incoming,) = policy["ingress"]
    return [peer["podSelector"]["matchLabels"][COMPONENT] for peer in incoming["from"]]


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
        "worker": {address.partition(":")[0] for address in config_of(found, "gateway").workers},
        "kvcache": {config_of(found, "worker").cache.partition(":")[0]},
        "gateway": {"rel-gateway", "rel-gateway.ns.svc", "localhost", "rag.example.com"},
    }
    assert len(dialled["worker"]) == 3
    for name, names in dialled.items():
        certificate = certificates[name]["spec"]
        assert names <= set(certificate["dnsNames"])
        assert {"server auth", "client auth"} <= set(certificate["usages"])
        pod = pod_of(found, name)
        (volume,) = [v for v in pod["volumes"] if v.get("secret", {}).get("secretName") == certificate["secretName"]]
        (mount,) = [m for m in pod["containers"][0]["volumeMounts"] if m["name"] == volume["name"]]
        config, at = config_of(found, name), Path(mount["mountPath"])
        assert (config.tls_cert, config.tls_key) == (at / "tls.crt", at / "tls.key")
        assert getattr(config, "tls_ca", None) == (None if name == "kvcache" else at / "ca.crt"), "it calls nobody"
        # Applications have tokens and no certificates.
        assert config.tls_client_ca == (None if name == "gateway" else at / "ca.crt")
        assert "tcpSocket" in pod["containers"][0]["readinessProbe"]


def test_a_release_has_a_ca_of_its_own_unless_it_names_another(render: Render) -> None:
    found = render(SECURED)
    ca = found["Certificate"]["ca"]["spec"]
    assert ca["isCA"] is True
    assert found["Issuer"][ca["issuerRef"]["name"].removeprefix("rel-")]["spec"] == {"selfSigned": {}}
    issuers = {found["Certificate"][name]["spec"]["issuerRef"]["name"] for name in CONFIGS}
    (issuer,) = issuers
    assert found["Issuer"][issuer.removeprefix("rel-")]["spec"]["ca"]["secretName"] == ca["secretName"]

    named = {"enabled": True, "issuer": {"kind": "ClusterIssuer", "name": "inner"}}
    found = render({"certManager": named})
    assert "Issuer" not in found
    assert set(found["Certificate"]) == set(CONFIGS)
    for certificate in found["Certificate"].values():
        assert certificate["spec"]["issuerRef"] == {
            "group": "cert-manager.io",
            "kind": "ClusterIssuer",
            "name": "inner",
        }
    with pytest.raises(ValueError, match=r"certManager sets tls_cert itself: take it out of worker\.config"):
        render({"certManager": {"enabled": True}, "worker": {"config": {"tls_cert": "/etc/fusionkv/tls.crt"}}})
    assert not {"Issuer", "Certificate"} & set(render({}))


def test_who_calls_the_gateway_trusts_its_ca_and_learns_no_key(render: Render) -> None:
    found = render(SECURED)
    pods = [found["Pod"]["test"]["spec"], found["Job"]["encode-1"]["spec"]["template"]["spec"]]
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
    env = {e["name"]: e["value"] for e in container["env"]}
    assert env["FUSIONKV_TOKEN_FILE"] == "/etc/fusionkv/token"
    assert {"name": "secret", "secret": {"secretName": "operator", "defaultMode": 0o440}} in plain["volumes"]


@pytest.mark.parametrize("version", VERSIONS)
def test_caches_share_the_charts_own_redis(render: Render, version: str) -> None:
    found = render({"redis": {"enabled": True}, "kvcache": {"replicas": 3}}, version)
    assert config_of(found, "kvcache").remote_url == "redis://rel-redis:6379"
    assert found["Service"]["redis"]["spec"]["ports"][0]["port"] == 6379
    assert callers(policy_of(found, "redis")) == ["kvcache"]
    assert policy_of(found, "redis")["egress"] == []
    assert 6379 in {rule["ports"][0]["port"] for rule in policy_of(found, "kvcache")["egress"]}
    with pytest.raises(ValueError, match="choose one"):
        render({"redis": {"enabled": True}, "kvcache": {"config": {"remote_url": "redis://other"}}})
    assert "redis" not in render({})["Deployment"]


@pytest.mark.parametrize("version", VERSIONS)
def test_caches_share_a_mooncake_store(render: Render, version: str) -> None:
    found = render({"mooncake": {"enabled": True}, "kvcache": {"kind": "DaemonSet"}}, version)
    assert config_of(found, "kvcache").remote_url == "mooncake://rel-mooncake:50051?host=$(K8S_POD_IP)"
    (container,) = pod_of(found, "kvcache")["containers"]
    names = [each["name"] for each in container["env"]]
    assert names.index("K8S_POD_IP") < names.index("FUSIONKV_KVCACHE_REMOTE_URL"), "or it is not replaced"
    (master,) = pod_of(found, "mooncake")["containers"]
    assert container["image"] == master["image"]
    assert container["image"].startswith("fusionkv-kvcache-mooncake:")
    assert master["command"][0] == "mooncake_master"
    assert callers(policy_of(found, "mooncake")) == ["kvcache"]
    policy = policy_of(found, "kvcache")
    for way, peers in (("ingress", "from"), ("egress", "to")):
        (between,) = [rule for rule in policy[way] if "ports" not in rule]
        (own,) = between[peers]
        assert own["podSelector"]["matchLabels"][COMPONENT] == "kvcache"
    assert 50051 in {rule["ports"][0]["port"] for rule in policy["egress"] if "ports" in rule}
    with pytest.raises(ValueError, match="choose one"):
        render({"mooncake": {"enabled": True}, "kvcache": {"config": {"remote_url": "redis://other"}}})


def test_that_redis_takes_its_command_line(render: Render, tmp_path: Path) -> None:
    """A real one, started as the pod starts it."""
    (container,) = pod_of(render({"redis": {"enabled": True, "megabytes": 64}}), "redis")["containers"]
    program, *flags = container["command"]
    assert program == "redis-server"
    assert container["resources"]["limits"]["memory"] == "80Mi"
    wanted = {"maxmemory": str(64 << 20), "maxmemory-policy": "volatile-ttl", "save": "", "appendonly": "no"}
    wanted |= {"protected-mode": "no"}
    server, told = RedisServer(tmp_path, *flags), dict[str, str]()
    try:
        with server.client() as client:
            for name in wanted:
                told |= client.config_get(name)
    finally:
        server.kill9()
    assert {name: told[name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("own", "policy", "told"),
    [
        ((), False, None),
        (("redis", "milvus"), True, None),
        (("redis",), False, "Redis,"),
        (("milvus",), False, "Milvus,"),
        (("mooncake",), False, "Mooncake Store,"),
        (("redis", "milvus"), False, "Redis and Milvus,"),
    ],
)
def test_who_installs_them_without_policies_is_told_that_they_are_open(
    helm: str, tmp_path: Path, own: tuple[str, ...], policy: bool, told: str | None
) -> None:
    flags = [f"--set=networkPolicy.enabled={str(policy).lower()}", *(f"--set={name}.enabled=true" for name in own)]
    found = notes(helm, tmp_path, *flags)
    assert "fusionkv stats --gateway localhost:7072" in found
    assert ("every pod" in found) == (told is not None)
    assert told is None or f"change what is in {told} which" in found


@pytest.mark.parametrize("version", VERSIONS)
def test_gateways_share_the_charts_own_milvus(render: Render, version: str) -> None:
    found = render({"milvus": {"enabled": True}, "gateway": {"replicas": 2}}, version)
    assert config_of(found, "gateway").milvus_url == "http://rel-milvus:19530"
    assert found["Service"]["milvus"]["spec"]["ports"][0]["port"] == 19530
    assert found["Deployment"]["gateway"]["spec"]["replicas"] == 2
    assert "PersistentVolumeClaim" not in found
    assert callers(policy_of(found, "milvus")) == ["gateway"]
    assert 19530 in {rule["ports"][0]["port"] for rule in policy_of(found, "gateway")["egress"]}
    pod = pod_of(found, "milvus")
    assert pod["securityContext"]["runAsNonRoot"] is True
    (container,) = pod["containers"]
    env = {e["name"]: e["value"] for e in container["env"]}
    mounts = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
    assert env["ETCD_DATA_DIR"].startswith(f"{mounts['data']}/")
    (key,) = found["ConfigMap"]["milvus"]["data"]
    assert env["ETCD_CONFIG_PATH"] == f"{mounts['etcd']}/{key}"
    with pytest.raises(ValueError, match="choose one"):
        render({"milvus": {"enabled": True}, "gateway": {"config": {"milvus_url": "http://other:19530"}}})


@pytest.mark.system
def test_helm_test_has_a_question_answered(
    render: Render, launch: Any, reference_model: Path, tmp_path: Path
) -> None:
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
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"text": " 535"' in done.stdout or '"text": "535"' in done.stdout
    cache.kill9()
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1, done.stdout + done.stderr
    assert '"degraded": true' in done.stdout
