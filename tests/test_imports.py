"""Who may import whom, what the gateway never loads, and what every file and package must be."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("protos", "kvcache_service", "fusion_worker", "kernels", "gateway", "models")
# Beside itself and protos, which everything may use but kernels.
ALLOWED = {
    "protos": set(),
    "kvcache_service": {"fusionkv.protos"},
    "kernels": set(),
    "fusion_worker": {
        "fusionkv.protos",
        "fusionkv.kernels",
        "fusionkv.kvcache_service.client",
        "fusionkv.kvcache_service.keys",
    },
    "gateway": {
        "fusionkv.protos",
        "fusionkv.fusion_worker.client",
        "fusionkv.kvcache_service.client",
        "fusionkv.kvcache_service.keys",
    },
    "models": {"fusionkv.protos"},
}
# What judges all methods brings the reference models and their tasks with it; a worker has none of them.
BESIDES = {"fusion_worker/evaluation": {"fusionkv.models.tasks", "fusionkv.models.shipped"}}


def sources() -> list[Path]:
    """All Python files that a person wrote."""
    folders = [*PACKAGES, "bench", "tests", "examples", "scripts"]
    found = [f for folder in folders for f in (ROOT / folder).rglob("*.py") if "_pb2" not in f.name]
    return sorted([*found, ROOT / "setup.py"])


def imports_of(file: Path) -> set[str]:
    """Full names of all modules that a file imports anywhere; of `from a import b` both `a` and `a.b`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import; write the full name"
            assert node.module is not None
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def within(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


def allowed(file: Path, package: str) -> set[str]:
    besides = (names for folder, names in BESIDES.items() if file.is_relative_to(ROOT / folder))
    return ALLOWED[package].union({f"fusionkv.{package}"}, *besides)


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_run_one_way(package: str) -> None:
    wrong = [
        f"{file.relative_to(ROOT)} imports {name}"
        for file in sources()
        if file.is_relative_to(ROOT / package)
        for name in imports_of(file)
        if within(name, "fusionkv") and not any(within(name, module) for module in allowed(file, package))
    ]
    assert wrong == []


def test_nobody_imports_a_bare_package_of_ours() -> None:
    """`import kernels` would work from the repository's folder and nowhere else."""
    wrong = [
        f"{file.relative_to(ROOT)} imports {name}"
        for file in sources()
        for name in imports_of(file)
        if name.partition(".")[0] in PACKAGES
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("fusionkv.gateway.cli", {"torch", "transformers", "lmdb"}),
        ("fusionkv.gateway.client", {"torch", "transformers", "lancedb", "pyarrow"}),
        ("fusionkv.kvcache_service.__main__", {"torch", "transformers", "lancedb"}),
        ("fusionkv.kvcache_service.client", {"torch", "lmdb"}),
    ],
)
def test_a_light_module_loads_nothing_heavy(module: str, forbidden: set[str]) -> None:
    code = f"import sys, {module}; print(*sorted({forbidden!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_every_package_is_in_the_wheel() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    folders = {f.parent for package in PACKAGES for f in (ROOT / package).rglob("*.py")}
    # The version folders of the protos hold generated files only and need no __init__.py of their own.
    assert {f"fusionkv.{'.'.join(f.relative_to(ROOT).parts)}" for f in folders} <= listed
    for name in listed:
        assert (ROOT.joinpath(*name.split(".")[1:])).is_dir(), f"pyproject lists {name}, which is no folder"


@pytest.mark.parametrize("file", sources(), ids=lambda f: str(f.relative_to(ROOT)))
def test_a_file_says_what_it_is(file: Path) -> None:
    text = file.read_text()
    if file.name != "__init__.py" or text.strip():
        assert ast.get_docstring(ast.parse(text)), f"{file.name} opens with no docstring"
