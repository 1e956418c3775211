"""What the source must not hold: ways to run code that data brings along."""

import ast
from collections.abc import Set
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# pickle, and what reads pickles or runs what it reads.
FORBIDDEN = {
    *("pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "jsonpickle", "copyreg"),
    *("multiprocessing", "concurrent.futures.process", "concurrent.futures.ProcessPoolExecutor"),
}
_PROCESSES = {"multiprocessing", "concurrent.futures.ProcessPoolExecutor", "concurrent.futures.process"}
ALLOWED = {
    # Commands, and no services, which hand jobs to their own children through pipes that nobody else can write to.
    "bench/quality/jobs.py": _PROCESSES,
    "fusion_worker/encode/encoders.py": _PROCESSES,
    # A worker sends its other ranks, its children, what they run, through sockets that nobody else can write to.
    "fusion_worker/tensor_parallel/channel.py": {"pickle"},
}
SHIPPED = ("protos", "kvcache_service", "fusion_worker", "kernels", "gateway", "vllm_connector")


def sources(*folders: str) -> list[Path]:
    return sorted(f for folder in folders for f in (ROOT / folder).rglob("*.py") if "_pb2" not in f.name)


def faults(text: str, shipped: bool, allowed: Set[str] = frozenset()) -> list[str]:
    """What is wrong with a file, by line."""
    forbidden = FORBIDDEN - allowed
    found = []
    for node in ast.walk(ast.parse(text)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        found += [f"{node.lineno}: imports {n}" for n in names if n in forbidden or n.split(".")[0] in forbidden]
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        given = {k.arg: ast.unparse(k.value) for k in node.keywords}
        if called == "torch.load" and (shipped or given.get("weights_only") != "True"):
            found.append(f"{node.lineno}: torch.load")
        if called in ("np.load", "numpy.load", "np.save", "pd.read_pickle") and given.get("allow_pickle") != "False":
            found.append(f"{node.lineno}: {called} without allow_pickle=False")
        if called.endswith(".from_pretrained") and "Model" in called and given.get("use_safetensors") != "True":
            found.append(f"{node.lineno}: {called} without use_safetensors=True")
        if shipped and given.get("trust_remote_code") not in (None, "False"):
            found.append(f"{node.lineno}: trust_remote_code")
        if shipped and (called in ("eval", "exec", "yaml.load", "os.system") or given.get("shell") == "True"):
            found.append(f"{node.lineno}: {called}")
    return found


@pytest.mark.parametrize("shipped", [True, False], ids=["services", "the rest"])
def test_nothing_reads_what_can_run_code(shipped: bool) -> None:
    folders = SHIPPED if shipped else ("models", "bench", "examples", "scripts")
    files = {str(file.relative_to(ROOT)): file.read_text() for file in sources(*folders)}
    assert len(files) > 5
    found = {name: faults(text, shipped, ALLOWED.get(name, frozenset())) for name, text in files.items()}
    assert {name: what for name, what in found.items() if what} == {}


def test_the_check_finds_it() -> None:
    wrong = (
        "import pickle",
        "import pickle as p",
        "from pickle import loads",
        "from concurrent.futures import process",
        "from concurrent.futures import ProcessPoolExecutor",
        "import torch\ntorch.load('x')",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "AutoModelForCausalLM.from_pretrained('x')",
        "AutoConfig.from_pretrained('x', trust_remote_code=True)",
        "exec('1')",
        "import subprocess\nsubprocess.run('x', shell=True)",
    )
    assert [text for text in wrong if not faults(text, shipped=True)] == []
