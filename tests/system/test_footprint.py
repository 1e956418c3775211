"""What processes take of the machine: CPU seconds until they are ready, memory when they have answered."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from fusionkv.gateway.client.client import Client
from tests.processes import cpu_seconds
from tests.services import HERE
from tests.stopwatch import SLOWER
from tests.system.cache_process import flags, get, payload, put

pytestmark = pytest.mark.system
ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "eased-3"
POOL = 64 << 20
MB = 1_000_000


def memory(pid: int) -> dict[str, int]:
    """Bytes by kind: Anon, File and Shmem, which is what others map as well."""
    status = Path(f"/proc/{pid}/status").read_text()
    return {kind: 1024 * int(size) for kind, size in re.findall(r"^Rss(\w+):\s+(\d+) kB", status, re.MULTILINE)}


def test_services_start_soon_and_stay_small(launch: Any, tmp_path: Path) -> None:
    """4 seconds on two idle cores are 8 of both; clocks of a busy machine say more, and CPU seconds a little more.

    The first start after an installation compiles what it imports: the second one counts.
    """
    own = ("--model", str(MODEL), "--data-dir", str(tmp_path / "data"), *HERE, "--json")
    took = []
    for _ in range(2):
        pool = {"FUSIONKV_WORKER_POOL_BYTES": str(POOL)}
        service = launch("fusionkv.gateway.cli.main", "serve", *own, services=0, env=pool)
        service.wait_for_line('"event": "ready"', timeout=120)
        told = [json.loads(line) for line in service.log.splitlines() if line.startswith("{")]
        address = next(event["addresses"][0] for event in told if event.get("service") == "gateway")
        kvcache, worker, gateway = pids = [child.pid for child in psutil.Process(service.process.pid).children()]
        took.append(sum(map(cpu_seconds, [service.process.pid, *pids])))
        if took[-1] <= 9 or len(took) == 2:
            break
        service.stop()
    assert min(took) <= 9 * SLOWER
    with Client(address, timeout=60) as client:
        for i in range(8):
            client.ingest("book", f"{i}.md", f"Chapter {i}. The code of Name{i} is {100 + i}. ".encode() * 40)
        for i in range(4):
            assert client.ask("book", f"What is the code of Name{i}?", max_tokens=2).sources
    weights = sum(file.stat().st_size for file in MODEL.glob("*.safetensors"))
    # Libraries of CUDA are mapped where there is no GPU, too.
    cuda = 0 if importlib.metadata.version("torch").endswith("+cpu") else 400 * MB
    assert sum(memory(worker).values()) <= weights + POOL + 500 * MB + cuda
    assert sum(memory(gateway).values()) <= 300 * MB
    assert memory(kvcache)["Anon"] + memory(kvcache)["File"] <= 150 * MB


async def test_a_cache_service_stays_small(launch: Any, cache_client: Any, tmp_path: Path) -> None:
    service = launch(*flags(tmp_path / "data", memory="32MiB"))
    client = cache_client(service)
    for i in range(64):
        assert await put(client, i, payload(i, 2 << 20))
    for i in range(64):
        assert await get(client, i) == payload(i, 2 << 20)
    found = memory(service.process.pid)
    assert found["Anon"] + found["File"] <= 150 * MB
    assert sum(found.values()) <= 150 * MB + (32 << 20) + 64 * 300


def test_the_help_is_there_at_once() -> None:
    """CPU seconds, of which other load makes no more: the best of three."""
    argv = [sys.executable, "-P", "-m", "fusionkv.gateway.cli.main", "--help"]
    seconds = []
    for _ in range(3):
        before = os.times()
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
        after = os.times()
        seconds.append(after.children_user + after.children_system - before.children_user - before.children_system)
    assert min(seconds) <= 0.3


def test_a_worker_and_an_embedder_load_no_compiler() -> None:
    """torch's, which a model is loaded without; whoever wants it afterwards has it, and the model is the same."""
    code = """
import sys
from fusionkv.fusion_worker.library import lean
with lean.uncompiled():
    import fusionkv.fusion_worker.servicer
    import transformers.models.auto.modeling_auto
    from transformers import Qwen2Config, Qwen2ForCausalLM
    import torch
    made = Qwen2ForCausalLM(Qwen2Config(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                        num_attention_heads=1, num_key_value_heads=1))
# From 2.14 on, torch's own attention loads sympy.
sympy = ["sympy"] if torch.torch_version.TorchVersion(torch.__version__) < "2.14" else []
for heavy in (*sympy, "triton", "torch.distributed.tensor", "torch._dynamo"):
    assert heavy not in sys.modules, heavy
assert torch.distributed.is_available()
with lean.uncompiled():
    assert torch._dynamo.eval_frame.__name__ == "torch._dynamo.eval_frame"
assert torch._dynamo.config.__name__ == "torch._dynamo.config"
"""
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
