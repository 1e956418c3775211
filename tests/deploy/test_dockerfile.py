"""The Dockerfile holds to hadolint's rules, and every image ends as it should."""

import contextlib
import importlib.metadata
import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from lock import LISTS
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from fusionkv.protos.runtime import settings
from tests.deploy.rendering import CONFIGS

SERVICES = ("kvcache", "kvcache-mooncake", "worker", "worker-ray", "worker-gpu", "worker-gpu-ray", "gateway")
TARGETS = (*SERVICES, "vllm-connector")
# What the connector uses, and vLLM 0.17 or later or (cryptography, cffi) a package that it requires brings along.
OF_VLLM = {"cffi", "cryptography", "numpy", "opentelemetry-api", "torch"}
# Prints what the connector imports. vLLM's own modules are as empty as they can be, and gRPC finds no compiler.
IMPORTED = """
import json, sys, types
name = "vllm"
for part in ("", ".distributed", ".kv_transfer", ".kv_connector", ".v1", ".base"):
    name += part
    module = sys.modules[name] = types.ModuleType(name)
module.KVConnectorBase_V1 = module.KVConnectorMetadata = module.KVConnectorRole = object
sys.modules["grpc_tools"] = None
import numpy, torch
there = set(sys.modules)
import fusionkv.vllm_connector.connector
print(json.dumps(sorted({name.partition(".")[0] for name in set(sys.modules) - there})))
"""


@pytest.fixture(scope="module")
def text(root: Path) -> str:
    return (root / "Dockerfile").read_text()


def stage(text: str, name: str) -> tuple[str, str]:
    """What a stage is built on, and its lines."""
    match = re.search(rf"^FROM (\S+) AS {name}\n(.*?)(?=^FROM |\Z)", text, re.DOTALL | re.MULTILINE)
    assert match, f"no stage {name}"
    return match[1], match[2]


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_runs_as_nobody_and_hears_sigterm(text: str, target: str) -> None:
    base, lines = stage(text, target)
    while not base.startswith("${"):
        base, earlier = stage(text, base)
        lines = earlier + lines
    users = re.findall(r"^USER (\S+)$", lines, re.MULTILINE)
    assert users[-1] == "10001:10001"
    assert set(users) <= {"10001:10001", "0:0"}
    assert "STOPSIGNAL SIGTERM" in lines
    assert {"title", "licenses"} <= set(re.findall(r"opencontainers\.image\.(\w+)=", lines))
    assert not re.search(r"^ARG ", lines, re.MULTILINE), "what differs in each build would run all that follows again"
    if target in SERVICES:
        assert re.search(r'^ENTRYPOINT \["tini", "--", "python", "-P", "-m", "fusionkv\.\w+"\]$', lines, re.MULTILINE)
        assert re.search(r"apt-get install .*\btini\b", lines)
    assert f"ARG {base[2:-1]}=" in text
    pinned = rf"^ARG {base[2:-1]}=\S+:\d\S+@sha256:[0-9a-f]{{64}}$"
    assert re.search(pinned, text, re.MULTILINE), "the base image is not pinned"


@pytest.fixture(scope="module")
def lists(root: Path, text: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What the images install, by the names of the lists that the Dockerfile makes of the lock."""
    _, lines = stage(text, "requirements")
    folder = tmp_path_factory.mktemp("requirements")
    shutil.copy(root / "requirements.lock", folder)
    subprocess.run(lines.partition("RUN ")[2], shell=True, cwd=folder, check=True)
    return {file.stem: re.findall(r"^[^#\s]\S*", file.read_text(), re.MULTILINE) for file in folder.glob("*.txt")}


def required(requirements: list[str]) -> set[str]:
    """Names of what is installed here, and is required by these requirements, directly or indirectly."""
    found: set[tuple[str, str]] = set()
    waiting = [(line, "") for line in requirements]
    while waiting:
        requirement, extra = Requirement(waiting[-1][0]), waiting.pop()[1]
        name = canonicalize_name(requirement.name)
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        for extra in {"", *requirement.extras} - {known for other, known in found if other == name}:
            found.add((name, extra))
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                waiting += [(line, extra) for line in importlib.metadata.requires(name) or []]
    return {name for name, _ in found}


def test_images_install_what_the_lock_has_hashes_of(text: str, lists: dict[str, list[str]]) -> None:
    installs = re.findall(r"^RUN (?:.*\\\n)*.*pip .*install (?:.*\\\n)*.*\n", text, re.MULTILINE)
    installs = [line for line in installs if "apt-get" not in line and "/wheels" not in line]
    names = [re.search(r" --require-hashes -r (\w+)\.txt\n", line) for line in installs]
    assert all(names)
    assert {name[1] for name in names if name} == set(lists) == set(LISTS)


def test_the_lock_agrees_with_the_constraints(root: Path, lists: dict[str, list[str]]) -> None:
    pinned = dict(re.findall(r"^([^#\s]\S*)==(\S+)", (root / "constraints.txt").read_text(), re.MULTILINE))
    pinned = {canonicalize_name(name): version for name, version in pinned.items()}
    for name, requirements in lists.items():
        locked = dict(requirement.split("==") for requirement in requirements)
        # Of CUDA, which only PyPI's torch requires.
        rest = {package for package in locked if package not in pinned}
        assert all(package.startswith(("cuda-", "nvidia-")) for package in rest)
        assert bool(rest) == (name == "gpu")
        build = "+cpu" if name == "worker" else ""
        expected = {package: pinned[package] + build * (package == "torch") for package in locked.keys() - rest}
        assert locked == expected | {package: locked[package] for package in rest}, "run scripts/lock.py"
    entry = r"(?:[a-z0-9-]+==\S+(?: \\\n    --hash=sha256:[0-9a-f]{64})+\n)+"
    assert re.fullmatch(rf"# .+\n(?:\n# .+\n{entry})+", (root / "requirements.lock").read_text())


@pytest.mark.parametrize("name", LISTS)
def test_the_lock_has_all_that_a_list_requires(lists: dict[str, list[str]], name: str) -> None:
    locked = {requirement.partition("==")[0] for requirement in lists[name]}
    wanted = {canonicalize_name(Requirement(line).name) for line in LISTS[name]}
    if name != "connector":
        wanted = required(LISTS[name])
    if name == "worker":  # torch for CPUs; the one here may be PyPI's, which requires these
        wanted = {
            package for package in wanted if package != "triton" and not package.startswith(("cuda-", "nvidia-"))
        }
    assert wanted <= locked, "run scripts/lock.py"
    here = {canonicalize_name(found.name) for found in importlib.metadata.distributions()}
    assert name in ("mooncake", "ray") or locked & here <= wanted


@pytest.mark.slow
def test_the_connector_finds_what_it_imports_in_vllms_image(text: str) -> None:
    _, lines = stage(text, "vllm-connector-packages")
    assert "-r connector.txt" in lines
    brought = {"fusionkv", *LISTS["connector"]}
    # Generated code refuses a gRPC or protobuf that is older than what it was generated with.
    assert {"grpcio", "protobuf"} <= brought
    done = subprocess.run([sys.executable, "-P", "-c", IMPORTED], capture_output=True, text=True, check=True)
    owners = importlib.metadata.packages_distributions()
    # Modules of no distribution are Python's, or made by compiled ones.
    wanted = {name: {owner.lower() for owner in owners[name]} for name in json.loads(done.stdout) if name in owners}
    assert {"grpc", "grpc_health", "grpc_reflection", "xxhash"} <= set(wanted)
    assert {module for module, names in wanted.items() if not names & (brought | OF_VLLM)} == set()


def test_the_product_and_what_builds_it_are_copied_and_let_in(root: Path, text: str) -> None:
    let_in = {line[1:] for line in (root / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {s for line in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE) for s in line.split()}
    product = {*runpy.run_path(str(root / "setup.py"))["PRODUCT"]}
    assert copied == let_in == {"requirements.lock", "pyproject.toml", "setup.py", "README.md", "LICENSE", *product}
    assert [name for name in copied if not (root / name).exists()] == []


def test_what_a_service_is_told_in_its_image_it_knows(text: str) -> None:
    told = dict(re.findall(r"(FUSIONKV_\w+)=(\S+)", text))
    for name, config in CONFIGS.items():
        assert settings.load(config, name, environ=told).listen[0].startswith("[::]:70")
