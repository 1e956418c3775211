"""compose.yaml fits the images and the services' settings; its services answer, as processes instead of images."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from fusionkv.gateway.client.client import Client
from fusionkv.protos.runtime import settings
from tests.deploy.rendering import CONFIGS, PORTS
from tests.services import HERE, Launch

MODULES = {"kvcache": "fusionkv.kvcache_service", "worker": "fusionkv.fusion_worker", "gateway": "fusionkv.gateway"}


@pytest.fixture(scope="module")
def services(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((root / "compose.yaml").read_text())["services"]
    assert found.keys() == MODULES.keys() == CONFIGS.keys()
    return found


@pytest.fixture(scope="module")
def told(root: Path, services: dict[str, Any]) -> dict[str, dict[str, str]]:
    """The environment of each service: its image's and its own."""
    stages = re.split(r"^FROM ", (root / "Dockerfile").read_text(), flags=re.MULTILINE)
    images = {
        name: next(s for s in stages if f"AS {name}\n" in s) for name in ("kvcache", "gateway", "worker-runtime")
    }
    images["worker"] = images.pop("worker-runtime")
    image = {name: dict(re.findall(r"(FUSIONKV_\w+)=(\S+)", stage)) for name, stage in images.items()}
    return {name: {**image[name], **service.get("environment", {})} for name, service in services.items()}


@pytest.mark.skipif(not shutil.which("docker-compose"), reason="docker-compose is missing: apt-get install it")
def test_docker_compose_takes_it(root: Path) -> None:
    subprocess.run(["docker-compose", "-f", "compose.yaml", "config", "-q"], cwd=root, check=True)


def test_images_are_those_that_make_images_builds(root: Path, services: dict[str, Any]) -> None:
    script = (root / "scripts/images.sh").read_text()
    assert '--tag "localhost/fusionkv-$image"' in script
    (built,) = re.findall(r"^for image in (.*); do build", script, re.MULTILINE)
    assert set(built.split()) == services.keys()
    for name, service in services.items():
        assert (service["image"], service["build"]["target"]) == (f"localhost/fusionkv-{name}", name)
        # Of the image, whose user writes nowhere else.
        assert not service.keys() & {"user", "entrypoint", "command"}
        assert (service["read_only"], service["tmpfs"]) == (True, ["/tmp"])


def test_every_address_and_folder_is_one_that_a_service_has(
    root: Path, services: dict[str, Any], told: dict[str, dict[str, str]]
) -> None:
    made = {name: settings.load(CONFIGS[name], name, environ=told[name]) for name in services}
    assert {name: config.listen for name, config in made.items()} == {n: (f"[::]:{p}",) for n, p in PORTS.items()}
    assert (made["worker"].cache, made["gateway"].workers) == ("kvcache:7070", ("worker:7071",))
    assert services["worker"]["depends_on"] == ["kvcache"]
    assert services["gateway"]["depends_on"] == ["worker"]
    http = made["gateway"].http_listen[0].rpartition(":")[2]
    assert services["gateway"]["ports"] == [f"127.0.0.1:{port}:{port}" for port in (PORTS["gateway"], http)]
    assert not any("ports" in services[name] for name in ("kvcache", "worker")), "they take calls from anyone"
    for name in ("kvcache", "gateway"):
        assert services[name]["volumes"] == [f"{name}:{made[name].data_dir}"]
    (mounted,) = services["worker"]["volumes"]
    assert re.fullmatch(rf"\$\{{FUSIONKV_MODEL:-\./models/eased-3\}}:{made['worker'].model}:ro", mounted)
    for name, config in made.items():
        assert config.drain_seconds < float(services[name]["stop_grace_period"].removesuffix("s"))


@pytest.mark.slow
@pytest.mark.system
def test_the_services_answer_with_these_environments(
    root: Path, services: dict[str, Any], told: dict[str, dict[str, str]], launch: Launch, tmp_path: Path
) -> None:
    """As processes of this machine: other ports, folders of the test, and the model where the volume comes from."""
    at: dict[str, str] = {"/models": str(root / "models/eased-3"), "[::]:8080": "[::]:0"}
    for name, module in MODULES.items():
        env = {key: at.get(value, value) for key, value in told[name].items()}
        own = () if name == "worker" else ("--data-dir", str(tmp_path / name))
        own += ("--threads", "1", "--pool-bytes", "64MiB") if name == "worker" else ()
        started = launch(module, *HERE, *own, env=env, services=2 if name == "gateway" else 1)
        at[f"{name}:{PORTS[name]}"] = started.address
    _, *check = services["gateway"]["healthcheck"]["test"]
    # By IPv4, as containers without IPv6 call it.
    url = f"127.0.0.1:{started.addresses['fusionkv-gateway-http'][0].rpartition(':')[2]}"
    words = [word.replace("localhost:8080", url) for word in check]
    assert words != check
    subprocess.run([sys.executable, "-P", *words[1:]], check=True, timeout=60)
    with Client(started.address, timeout=60) as client:
        client.ingest("notes", "a.md", "Report Velkorda. The lake is blue. The code of Bervek is 535.")
        assert client.ask("notes", "Report Velkorda: code of Bervek?", max_tokens=8).text.strip() == "535"
        again = client.ask("notes", "Report Velkorda: code of Bervek?", max_tokens=8).summary
    assert not again.degraded
    assert again.chunks_missed == 0
