"""Who may import whom, what the gateway never loads, what every file must be, and what no source may hold."""

import ast
import runpy
from collections import Counter
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.commands import run_python

ROOT = Path(__file__).parent.parent
SETUP = runpy.run_path(str(ROOT / "setup.py"))
PRODUCT, CLONE, API = SETUP["PRODUCT"], SETUP["CLONE"], ROOT / SETUP["API"]
PACKAGES = (*PRODUCT, *CLONE)
# Beside itself and protos, which everything may use but kernels.
ALLOWED = {
    "protos": set(),
    "kvcache_service": {"fusionkv.protos"},
    # Which nothing imports but its engine.
    "kvcache_service/adapters": {
        "fusionkv.protos",
        "fusionkv.kvcache_service.blobs",
        # What tells whether an engine has the same weights.
        "fusionkv.fusion_worker.library",
    },
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
        # From tokens to text, also of those that vLLM decoded.
        "fusionkv.fusion_worker.decode.text",
        # From text to tokens, as the evaluation does it.
        "fusionkv.fusion_worker.decode.plain",
        # Where `fusionkv model get` puts a model of embeddings.
        "fusionkv.fusion_worker.library",
        # Which `fusionkv encode` starts.
        "fusionkv.fusion_worker.encode",
        # `fusionkv eval`, `check` and `size`, loaded by these commands alone.
        "fusionkv.fusion_worker.evaluate",
        # Which the package `fusionkv` offers to other engines.
        "fusionkv.kvcache_service.blobs",
        "fusionkv.kvcache_service.client",
        "fusionkv.kvcache_service.keys",
    },
    "vllm_connector": {
        "fusionkv.protos",
        # Its client, what tells whether vLLM has the worker's model, and the engine, which runs in vLLM's process.
        "fusionkv.fusion_worker",
        "fusionkv.kernels.segments",
        "fusionkv.kvcache_service.client",
        "fusionkv.kvcache_service.keys",
    },
    # The tasks that the reference models are trained on.
    "models": {"fusionkv.protos", "fusionkv.fusion_worker.evaluate.data"},
    # Measures all of them, and nothing imports it.
    "bench": {"fusionkv"},
}
MOST_FILES = 12  # of a folder


def sources() -> list[Path]:
    """All Python files that a person wrote."""
    folders = [*PACKAGES, "tests", "examples", "scripts"]
    found = [f for folder in folders for f in (ROOT / folder).rglob("*.py") if "_pb2" not in f.name]
    return sorted([*found, ROOT / "setup.py"])


@cache
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


def package_of(file: Path) -> str | None:
    """The folder of `ALLOWED` that a file is in."""
    above = [str(folder.relative_to(ROOT)) for folder in file.parents if folder.is_relative_to(ROOT)]
    return next((folder for folder in above if folder in ALLOWED), None)


def test_imports_run_one_way() -> None:
    wrong = [
        f"{file.relative_to(ROOT)} imports {name}"
        for file in sources()
        if (package := package_of(file)) is not None
        for name in imports_of(file)
        if within(name, "fusionkv")
        and not any(within(name, m) for m in (*ALLOWED[package], f"fusionkv.{package.replace('/', '.')}"))
    ]
    assert wrong == []
    assert set(PACKAGES) <= set(ALLOWED)


def test_only_their_engine_imports_adapters_and_only_they_import_vllm() -> None:
    adapters, beside = "fusionkv.kvcache_service.adapters", ROOT / "kvcache_service/adapters"
    others = [file for file in files_in(*PACKAGES) if not file.is_relative_to(beside)]
    assert [str(f) for f in others if any(within(name, adapters) for name in imports_of(f))] == []
    importing = {file.parent for file in sources() if any(within(name, "vllm") for name in imports_of(file))}
    assert importing == {ROOT / "vllm_connector", beside, ROOT / "tests/vllm"}


def test_no_service_or_command_starts_what_only_a_clone_has() -> None:
    """By a module's name in a string, which no import shows."""
    named = [
        f"{file.relative_to(ROOT)} names {node.value}"
        for file in files_in(*PRODUCT)
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if any(within(node.value, f"fusionkv.{folder}") for folder in CLONE)
    ]
    assert named == []


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
        (
            "fusionkv.gateway.cli.main",
            {"torch", "transformers", "lmdb", "grpc", "google.protobuf", "rich", "asyncio"},
        ),
        ("fusionkv.gateway.__main__, fusionkv.gateway.retrieval.embedded", {"torch", "transformers"}),
        ("fusionkv.gateway.cli.files", {"torch", "transformers", "bs4", "pypdf"}),
        ("fusionkv.gateway.cli.supervisor, fusionkv.gateway.cli.commands", {"torch", "transformers"}),
        (
            "fusionkv.gateway.client.client, fusionkv.fusion_worker.client",
            {"torch", "transformers", "lmdb", "lancedb", "pyarrow", "tokenizers"},
        ),
        ("fusionkv.kvcache_service.__main__", {"torch", "transformers", "lancedb"}),
        ("fusionkv.kvcache_service.client", {"torch", "lmdb"}),
        ("fusionkv.protos.contract.requests", {"torch", "numpy", "transformers", "tokenizers"}),
        ("fusionkv", {"grpc", "google.protobuf", "numpy", "asyncio"}),
    ],
)
def test_a_light_module_loads_nothing_heavy(module: str, forbidden: set[str]) -> None:
    code = f"import sys, {module}; print(*sorted({forbidden!r} & set(sys.modules)))"
    assert run_python("-c", code).stdout.strip() == ""


def modules() -> dict[str, Path]:
    """All modules of the packages by their import names, packages themselves left out."""
    inside = [f for f in sources() if f.relative_to(ROOT).parts[0] in PACKAGES and f.name != "__init__.py"]
    names = {f: f.relative_to(API if f.is_relative_to(API) else ROOT).with_suffix("").parts for f in inside}
    return {".".join(("fusionkv", *parts)): f for f, parts in names.items()}


def test_folders_are_small() -> None:
    counts = Counter(file.parent for file in modules().values())
    assert {str(folder.relative_to(ROOT)): count for folder, count in counts.items() if count > MOST_FILES} == {}


def test_no_circle_of_files() -> None:
    """Also none of imports within functions, or for types alone."""
    known = modules()
    graph = {
        module: {m for name in imports_of(file) for m in (name, name.rpartition(".")[0]) if m in known} - {module}
        for module, file in known.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle: {' - '.join(error.args[1])}")


def test_every_file_says_what_it_is() -> None:
    """An empty __init__.py need not."""
    texts = {str(file.relative_to(ROOT)): file.read_text() for file in sources()}
    written = {name: text for name, text in texts.items() if text.strip() or not name.endswith("__init__.py")}
    assert len(written) > 300
    assert [name for name, text in written.items() if not ast.get_docstring(ast.parse(text))] == []


def files_in(*folders: str) -> list[Path]:
    return sorted(f for folder in folders for f in (ROOT / folder).rglob("*.py") if "_pb2" not in f.name)


ASKING = {f"Auto{kind}.from_config" for kind in ("Model", "ModelForCausalLM", "ModelForSequenceClassification")}


def faults(text: str) -> list[str]:
    """Calls of a file that could run code from what they read, beside those that ruff finds."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        given = {k.arg: ast.unparse(k.value) for k in node.keywords}
        if called == "torch.load":
            found.append(f"{node.lineno}: torch.load")
        if called in ("np.load", "np.save") and given.get("allow_pickle") != "False":
            found.append(f"{node.lineno}: {called} without allow_pickle=False")
        if called.endswith(".from_pretrained") and "Model" in called and given.get("use_safetensors") != "True":
            found.append(f"{node.lineno}: {called} without use_safetensors=True")
        # Without it, transformers asks the terminal whether to run code of a model's directory.
        asks = called.endswith(".from_pretrained") or called in ASKING
        if given.get("trust_remote_code", "True" if asks else "False") != "False":
            found.append(f"{node.lineno}: trust_remote_code")
    return found


def test_nothing_reads_what_can_run_code() -> None:
    found = {str(file.relative_to(ROOT)): faults(file.read_text()) for file in files_in(*PRODUCT)}
    assert len(found) > 100
    assert {name: what for name, what in found.items() if what} == {}
    for text in (
        "np.load('x')",
        "AutoModel.from_pretrained('x', trust_remote_code=False)",
        "AutoModel.from_config(x)",
    ):
        assert faults(text)
