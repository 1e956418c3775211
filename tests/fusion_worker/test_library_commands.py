"""Models by name, by commands and processes that end before they are done."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fusionkv.fusion_worker.library import cache, conversion
from fusionkv.fusion_worker.library.catalog import KNOWN
from tests.fusion_worker import gguf_files
from tests.waiting import wait_until

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_files.write(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of models."""
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "models"))
    return tmp_path / "models"


@pytest.mark.slow
def test_a_conversion_that_was_killed_leaves_no_model(root: Path, tiny: Path) -> None:
    code = f"from fusionkv.fusion_worker.library.resolve import resolve; print(resolve({str(tiny)!r}))"
    killed = subprocess.Popen([sys.executable, "-P", "-c", code])
    wait_until(lambda: [*root.rglob(".tiny.partial-*")])
    killed.kill()
    killed.wait()
    assert [*root.rglob("config.json")] == [] == [f for f in root.rglob("tiny") if f.is_dir()]
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120)
    assert (Path(done.stdout.strip()) / "model.safetensors").is_file(), done.stderr
    assert [*root.rglob(".tiny.partial-*")] == []


def test_a_download_that_is_ended_leaves_nothing(root: Path, tmp_path: Path) -> None:
    """An index that never answers, and SIGTERM to whoever waits for it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/simple"
        environment = {**os.environ, "PIP_INDEX_URL": url, "PIP_EXTRA_INDEX_URL": "", "PIP_FIND_LINKS": ""}
        getting = subprocess.Popen(
            [sys.executable, "-P", "-m", "fusionkv.fusion_worker.library", "get", "smollm2"],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        server.settimeout(60)
        asked, _ = server.accept()
        assert [f for f in root.iterdir() if f.is_dir()]
        getting.send_signal(signal.SIGTERM)
        told = getting.communicate(timeout=60)[1]
        # Nobody holds the other end any more: pip has ended as well.
        asked.settimeout(60)
        while asked.recv(1 << 16):
            pass
    assert (getting.returncode, told) == (130, "fusionkv model: interrupted; nothing is left behind\n")
    assert [f for f in root.iterdir() if f.is_dir()] == []


def test_a_hub_id(tiny: Path, tmp_path: Path) -> None:
    """From the cache of huggingface_hub, without a network; one that is not there, or not whole, is refused."""
    for name in ("whole", "part"):
        revision = tmp_path / f"hub/models--org--{name}/snapshots/{'a' * 40}"
        revision.mkdir(parents=True)
        conversion.convert(tiny, revision)
        refs = revision.parent.parent / "refs"
        refs.mkdir()
        (refs / "main").write_text("a" * 40)
    (revision / "model.safetensors").unlink()
    code = (
        "import sys\n"
        "from fusionkv.fusion_worker.library.cache import name_of\n"
        "from fusionkv.fusion_worker.library.resolve import resolve\n"
        "from fusionkv.protos.runtime.errors import FailedPrecondition\n"
        "for name in ('org/whole', 'org/part', 'org/none'):\n"
        "    try: print(name_of(resolve(name)), resolve(name))\n"
        "    except FailedPrecondition as error: print(error)\n"
    )
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_ENDPOINT": "http://127.0.0.1:9"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    whole, part, none = done.stdout.splitlines()
    assert whole == f"whole {tmp_path}/hub/models--org--whole/snapshots/{'a' * 40}"
    assert "snapshots/aaaa" in part
    assert "lacks config.json, tokenizer.json or some weights in safetensors: org/part has none, or could not" in part
    assert none.startswith(
        "org/none is no directory here and not in the Hugging Face cache, and can't be downloaded: "
    )


def test_the_command(root: Path) -> None:
    def fusionkv(*argv: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-P", "-m", "fusionkv.gateway.cli.main", "model", *argv]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    (root / "smollm2").mkdir(parents=True)
    rows = {row["name"]: row for row in json.loads(fusionkv("list", "--json").stdout)}
    assert [*rows] == [*KNOWN]
    assert rows["smollm2"]["directory"] == str(root / "smollm2")
    assert rows["gemma3-270m"]["directory"] is None
    assert "gemma3-270m" in fusionkv("list").stdout
    got = fusionkv("get", "smollm2", "--json")
    assert json.loads(got.stdout) == {"name": "smollm2", "directory": str(root / "smollm2")}
    unknown = fusionkv("get", "smollm3")
    assert (unknown.returncode, unknown.stdout) == (1, "")
    assert (
        unknown.stderr
        == "fusionkv model: there is no model 'smollm3' to fetch; known are smollm2, gemma3-270m, minilm\n"
    )
