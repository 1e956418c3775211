"""The wheel holds everything and nothing else, and each service imports only what its extra installs."""

import ast
import importlib.metadata
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.commands import run_python

EXTRAS = {
    "protos": {"prometheus"},
    "kernels": {"worker", "gpu"},
    "kvcache_service": {"cache", "kv-events", "mooncake", "object-store"},
    "fusion_worker": {"worker", "gguf", "gpu", "gds", "ray"},
    "gateway": {"embed", "gateway", "http", "langchain", "llama-index", "milvus"},
    "vllm_connector": {"vllm", "worker"},
    "models": {"worker"},
    "bench": {"worker", "cache", "gateway", "gguf", "gpu", "gds", "http", "mooncake"},
}
# Owners of modules that setup leaves out where the system lacks a library.
OPTIONAL = {"mooncake": ["mooncake-transfer-engine-non-cuda"]}
# All that a wheel and the images hold: neither benchmarks nor the reference models.
SHIPPED = {"protos", "kernels", "kvcache_service", "fusion_worker", "gateway", "vllm_connector"}


@pytest.fixture(scope="module")
def project(root: Path) -> dict[str, Any]:
    return tomllib.loads((root / "pyproject.toml").read_text())["project"]


def names(requirements: list[str]) -> set[str]:
    """Of distributions; without the CUDA that they are for, which no module is named by."""
    found = {re.split(r"[<>=!~\[; ]", r)[0].lower().replace("_", "-") for r in requirements}
    return {re.sub(r"-cu\d+$", "", name) for name in found}


def imported(file: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(file.read_text())))
    whole = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return whole | {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}


@pytest.mark.parametrize("package", EXTRAS)
def test_a_package_imports_only_what_its_extra_installs(root: Path, project: dict[str, Any], package: str) -> None:
    allowed = names(project["dependencies"])
    for extra in EXTRAS[package]:
        allowed |= names(project["optional-dependencies"][extra])
    owners = importlib.metadata.packages_distributions()
    wrong = set()
    for file in (root / package).rglob("*.py"):
        if "_pb2" in file.name:
            continue
        # An adapter is loaded by its engine, whose name it has, and which brings torch.
        engine = {file.stem, "torch"} if file.parent.name == "adapters" else set()
        for module in imported(file):
            top = module.partition(".")[0]
            if top == "fusionkv" or top in sys.stdlib_module_names or top == "google":
                continue
            if not names(owners.get(top, OPTIONAL.get(top, [top]))) & (allowed | engine):
                wrong.add(f"{file.name}: {module}")
    assert wrong == set()


def test_stubs_run_with_the_lowest_versions_that_are_allowed(root: Path, project: dict[str, Any]) -> None:
    build = tomllib.loads((root / "pyproject.toml").read_text())["build-system"]
    (tools,) = [requirement for requirement in build["requires"] if "grpc" in requirement]
    _, _, generated = tools.partition("==")
    lowest = [r.partition(">=")[2].partition(",")[0] for r in project["dependencies"] if r.startswith("grpcio")]
    assert [f"{version}.0" for version in lowest] == [generated] * 3


def test_services_load_with_health_stubs_that_lack_a_call() -> None:
    lacks = "from grpc_health.v1 import health_pb2 as h; del h.HealthListRequest, h.HealthListResponse"
    run_python("-c", f"{lacks}; import fusionkv.protos.runtime.rpc")


def test_all_holds_what_the_known_models_need(project: dict[str, Any]) -> None:
    extras = project["optional-dependencies"]
    (everything,) = extras["all"]
    held = set(everything.removeprefix("fusionkv[").removesuffix("]").split(","))
    assert {"cache", "worker", "gateway", "gguf", "embed"} <= held <= extras.keys()


def test_the_wheel_holds_the_product_alone(root: Path) -> None:
    setup = runpy.run_path(str(root / "setup.py"))
    packages = setup["packages"]()
    assert {name.split(".")[1] for name in packages if "." in name} == {*setup["PRODUCT"]} == SHIPPED
    assert {*setup["PRODUCT"], *setup["CLONE"]} == EXTRAS.keys()
    wanted = {
        "fusionkv",
        "fusionkv.fusion_worker.evaluate.report",
        "fusionkv.gateway.pages",
        "fusionkv.protos.kvcache.v1",
    }
    assert wanted <= {*packages}
    assert not [name for name in packages if "api" in name], "it is imported as fusionkv"


@pytest.mark.slow
def test_the_wheel(root: Path, project: dict[str, Any], tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in [*EXTRAS, "pyproject.toml", "setup.py", "README.md", "LICENSE"]:
        if (root / name).is_dir():
            ignore = shutil.ignore_patterns("__pycache__", "*_pb2*", "*.safetensors")
            shutil.copytree(root / name, source / name, ignore=ignore)
        else:
            shutil.copy(root / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    wheel = zipfile.ZipFile(next(tmp_path.glob("*.whl")))
    held = set(wheel.namelist())
    assert {parts[1] for name in held if len(parts := name.split("/")) > 2 and parts[0] == "fusionkv"} == SHIPPED
    api = root / "gateway/api/fusionkv"
    for file in (file for folder in SHIPPED for file in (root / folder).rglob("*.py")):
        where = file.relative_to(api if file.is_relative_to(api) else root)
        assert f"fusionkv/{where}" in held
    for proto in (root / "protos").glob("*/v1/*.proto"):
        stem = f"fusionkv/{proto.relative_to(root).with_suffix('')}"
        assert {f"{stem}.proto", f"{stem}_pb2.py", f"{stem}_pb2.pyi", f"{stem}_pb2_grpc.py"} <= held
    assert "fusionkv/py.typed" in held
    quality = root / "fusion_worker/evaluate"
    for page in (*(root / "gateway/pages").iterdir(), quality / "report/report.html", quality / "data/passages.json"):
        assert f"fusionkv/{page.relative_to(root)}" in held
    assert not [name for name in held if name.startswith("fusionkv/tests") or name.endswith(".safetensors")]
    scripts = next(name for name in held if name.endswith("entry_points.txt"))
    assert "fusionkv = fusionkv.gateway.cli.main:main" in wheel.read(scripts).decode()
