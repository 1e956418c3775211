"""`fusionkv serve` and the commands against it, each a process of its own."""

import argparse
import asyncio
import contextlib
import importlib.metadata
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGTERM, Signals
from typing import Any

import httpx2
import psutil
import pytest
from bs4 import BeautifulSoup

from fusionkv.fusion_worker import config as worker_config
from fusionkv.fusion_worker.config import configured
from fusionkv.fusion_worker.library.catalog import KNOWN
from fusionkv.gateway.cli import main as cli
from fusionkv.gateway.cli import supervisor
from fusionkv.gateway.cli.supervisor import Child, ChildEnded, _children
from fusionkv.gateway.client.client import Client
from fusionkv.gateway.config import GatewayConfig
from fusionkv.kvcache_service.config import Config
from fusionkv.protos.runtime import settings
from fusionkv.protos.runtime.errors import Unavailable
from fusionkv.protos.runtime.tls import ClientTLS
from tests.commands import fusionkv
from tests.gateway.conftest import Start
from tests.ports import free_port
from tests.processes import ended
from tests.services import Launch, start_cache, token_entry, token_flags
from tests.stopwatch import SLOWER
from tests.waiting import until, wait_until

pytestmark = pytest.mark.system
Run = Callable[..., "Done"]


def events(service: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in service.log.splitlines() if line.startswith("{")]


def serve(
    launch: Launch, model: Path, folder: Path, *more: str, before: Sequence[str] = (), listen: str = "127.0.0.1:0"
) -> tuple[Any, str]:
    """All three services; returns the process and the address of the gateway."""
    flags = ("serve", "--model", str(model), "--data-dir", str(folder), "--listen", listen, "--json", *more)
    service = launch(
        "fusionkv.gateway.cli.main", *flags, services=0, env={"FUSIONKV_WORKER_THREADS": "1"}, before=before
    )
    service.wait_for_line('"event": "ready"', timeout=120)
    up = {e["service"]: e["addresses"][0] for e in events(service) if e["event"] == "up"}
    assert list(up) == ["kvcache", "worker", "gateway"]
    return service, up["gateway"]


@pytest.fixture(scope="module")
def all_services(launch_module: Launch, tiny_model: Path, tmp_path_factory: Any) -> tuple[Any, str]:
    return serve(launch_module, tiny_model, tmp_path_factory.mktemp("all"), "--http-listen", "127.0.0.1:0")


@dataclass(frozen=True)
class Done:
    stdout: str
    stderr: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        """What a command with --json said."""
        return [json.loads(line) for line in self.stdout.splitlines()]


@pytest.fixture(scope="module")
def run(all_services: tuple[Any, str]) -> Run:
    """Runs a command against the gateway, in this process."""

    def command(*argv: object, status: int = 0, input: str = "") -> Done:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(input.encode())))
            code = cli.main([*map(str, argv), "--gateway", all_services[1]])
        assert code == status, out.getvalue() + err.getvalue()
        return Done(out.getvalue(), err.getvalue())

    return command


@pytest.fixture(scope="module")
def pages(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of six documents, ingested as corpus "book"."""
    folder = tmp_path_factory.mktemp("pages")
    for i in range(6):
        (folder / f"page-{i}.md").write_text(f"Report Velnora. The code of Name{i} is {100 + i}.\n")
    assert run("ingest", "book", folder).stdout.startswith("book: 6 documents (0 replaced, 0 failed), 6 chunks")
    return folder


def test_ready_says_what_can_be_asked_where(all_services: tuple[Any, str], tiny_model: Path) -> None:
    (ready,) = [e for e in events(all_services[0]) if e["event"] == "ready"]
    assert (ready["model"], ready["recipe"]) == (tiny_model.name, "default")
    assert [*ready["endpoints"]] == ["grpc", "http"]
    assert ready["endpoints"]["grpc"] == [all_services[1]]
    assert ready["next"][0] == f"fusionkv ingest --gateway {all_services[1]} CORPUS FOLDER", "as it has to be typed"
    # As a probe, again: a worker that gets no core for 2 s counts as not ready.
    wait_until(lambda: httpx2.get(f"http://{ready['endpoints']['http'][0]}/health").status_code == 200)


def test_ask_prints_the_answer_alone_on_standard_output(run: Run, pages: Path) -> None:
    ask = ("ask", "book", "code of Name3?", "--max-tokens", "4", "--recipe", "prophetkv", "--ratio", "0.5")
    asked, (answer,) = run(*ask), run(*ask, "--json").rows
    assert asked.stdout == answer["text"] + "\n"
    assert "first token" in asked.stderr
    assert re.search(r"page-3\.md#0  \d\.\d{3}  Report Velnora\. The code of Name3", asked.stderr)
    summary = answer["summary"]
    assert (summary["ratio"], summary["tokens_generated"], len(answer["sources"])) == (0.5, 4, 6)


def test_a_page_explains_an_answer(run: Run, pages: Path, tmp_path: Path) -> None:
    question = ("ask", "book", "code of Name3?", "--max-tokens", "4", "--json")
    for recipe, ratio in (("prophetkv", "0.5"), ("full_reuse", "0"), ("full_attention", "1")):
        file = tmp_path / f"{recipe}.html"
        (answer,) = run(*question, "--recipe", recipe, "--ratio", ratio, "--explain", file).rows
        page = BeautifulSoup(file.read_text(), "html.parser")
        before, *context, behind = page.select(".tokens")
        tokens = [token for piece in context for token in piece.select("i")]
        states = Counter(token["class"][0] for token in tokens)
        summary = answer["summary"]
        assert len(tokens) == summary["context_tokens"] > 0
        assert all(states[state] == summary[f"tokens_{state}"] for state in ("lossless", "reused", "recomputed"))
        named = [each.text for each in page.select("details summary b")]
        chunks = [f"{s['document']}#{s['position']}" for s in answer["sources"]]
        assert named == ["system prompt", *chunks, "question"]
        assert len(page.select(".tokens i")) == summary["prompt_tokens"]
        assert {i["class"][0] for i in before.select("i")} == {"computed" if ratio == "1" else "lossless"}
        assert {i["class"][0] for i in behind.select("i")} == {"computed"}
        assert "code of Name3?" in "".join(i.text for i in behind.select("i"))
        shown = ["".join(i.text for i in each.select("i")) for each in context]
        assert all(source["text"] in text for source, text in zip(answer["sources"], shown, strict=True))
        assert page.select_one(".answers .text").text == answer["text"].strip()
        assert any("score" in piece["title"] for piece in tokens) == (recipe == "prophetkv")


def test_ingest_as_json_names_every_document(run: Run, pages: Path) -> None:
    files = (pages / "page-0.md", pages / "page-1.md")
    *documents, last = run("ingest", "book", *files, "--json", "--concurrency", "1").rows
    assert [(each["event"], each["name"]) for each in documents] == [("document", file.name) for file in files]
    assert {"event": "summary", "documents": 2, "replaced": 2, "failed": 0}.items() <= last.items()


def test_a_bad_file_is_named_and_the_others_are_stored(run: Run, tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "bad.pdf").write_text("bad")
    with (tmp_path / "huge.txt").open("wb") as huge:
        huge.truncate(65 << 20)  # more than gRPC sends
    done = run("ingest", "mixed", tmp_path, status=1)
    assert done.stderr.count("\n") == 2
    assert "bad.pdf: gateway: the content is not a PDF" in done.stderr
    assert "huge.txt: the document has more than 62914560 bytes" in done.stderr
    assert "1 documents (0 replaced, 2 failed)" in done.stdout


def test_json_lines_standard_input_and_prefixes(run: Run, tmp_path: Path) -> None:
    lines = [{"id": "lake", "title": "Waters", "text": "The lake is deep.", "metadata": {"year": "2020"}}, "A hill."]
    (tmp_path / "all.jsonl").write_text("\n".join(map(json.dumps, lines)))
    done = run("ingest", "lines", tmp_path / "all.jsonl", "--prefix", "set/")
    assert done.stdout.startswith("lines: 2 documents (0 replaced, 0 failed), 2 chunks"), done.stderr
    run("ingest", "lines", "-", input="Read from a pipe.", status=2)
    assert "(--media-type)" in run("ingest", "lines", "-", "--name", "piped", input="Read.", status=1).stderr
    run("ingest", "lines", "-", "--name", "piped.txt", input="Read from a pipe.")
    listed = [item["name"] for item in run("list", "lines", "--json").rows]
    assert listed == ["piped.txt", "set/all.jsonl#2", "set/lake"]
    ask = ("ask", "lines", "How deep is the lake?", "--max-tokens", "1", "--json")
    for year, found in (("2020", ["set/lake"]), ("2021", [])):
        (answer,) = run(*ask, "--filter", f"year={year}").rows
        assert [source["document"] for source in answer["sources"]] == found
    nothing = run(*ask[:-1], "--filter", "year=2021").stderr
    assert "passages: none was found, so the answer has no context" in nothing
    (tmp_path / "all.jsonl").write_text('"good"\n{"text"')
    wrong = run("ingest", "lines", tmp_path / "all.jsonl", status=1)
    assert wrong.stderr.count("\n") == 1
    assert "all.jsonl: line 2 is not JSON" in wrong.stderr


def test_two_files_of_one_name_never_replace_each_other_silently(run: Run, tmp_path: Path) -> None:
    for folder in (first := tmp_path / "a", second := tmp_path / "b"):
        folder.mkdir()
        (folder / "readme.md").write_text(f"of {folder.name}")
    for _ in range(2):
        run("ingest", "names", first)
    wrong = run("ingest", "names", second, status=1)
    assert "came from a/readme.md, but this one is from b/readme.md" in wrong.stderr
    assert "--prefix" in wrong.stderr
    run("ingest", "names", second, "--prefix", "b/")
    replaced = run("ingest", "names", second / "readme.md", "--name", "readme.md", "--replace")
    assert replaced.stdout.startswith("names: 1 documents (1 replaced"), replaced.stderr
    assert [item["name"] for item in run("list", "names", "--json").rows] == ["b/readme.md", "readme.md"]


def test_a_corpus_is_listed_with_what_it_was_made_with_and_moved(run: Run, pages: Path, tiny_model: Path) -> None:
    (book,) = [item for item in run("list", "--json").rows if item["name"] == "book"]
    assert {"documents": 6, "chunks": 6, "model": tiny_model.name, "embedder": ""}.items() <= book.items()
    assert book["bytes"] > 6
    header, *shown = run("list").stdout.splitlines()
    assert header.split() == ["corpus", "documents", "chunks", "tokens", "bytes", "model", "embedder"]
    assert [row.split()[5:] for row in shown if row.startswith("book")] == [[tiny_model.name, "none"]]
    assert run("move", "book").stdout == "book: 6 chunks moved\n"
    (answer,) = run("ask", "book", "code of Name3?", "--max-tokens", "1", "--json").rows
    assert len(answer["sources"]) == 6
    assert "no corpus 'none'" in run("move", "none", status=1).stderr


def test_precompute_encodes_once(run: Run, pages: Path) -> None:
    ingest = ("ingest", "book", pages / "page-0.md", "--precompute")
    first, again = (
        [each for each in run(*ingest, "fusionrag", "--json").rows if each["event"] == "precompute"] for _ in range(2)
    )
    begun = {"event": "precompute", "done": 0, "total": 6, "skipped": 0}
    assert (first[0], first[-1]) == (begun, {**begun, "done": 6})
    assert (again[-1]["done"], again[-1]["skipped"]) == (6, 6)
    wrong = run(*ingest, "full_attention", status=1)
    assert "recipe 'full_attention' reuses no chunks: there is nothing to encode ahead of time" in wrong.stderr


def test_encode_takes_corpora_that_are_there(run: Run, pages: Path) -> None:
    """All of them, or the one of a number, as a job asks that runs once for each."""
    run("ingest", "second", pages / "page-1.md")
    encode = ("encode", "book", "second", "--recipe", "fusionrag")
    assert run(*encode, "--index", "1", "--json").rows[-1]["total"] == 1
    assert run(*encode).stdout.splitlines()[1] == "second: 0 chunks encoded, 1 already stored"
    wrong = run("encode", "book", "second", "--index", "2", status=2)
    assert wrong.stderr == "fusionkv: --index is 2, but there are 2 corpora, numbered from 0\n"


def test_list_stats_and_delete(run: Run, pages: Path, all_services: tuple[Any, str]) -> None:
    run("ingest", "short", pages / "page-0.md")
    assert [item["name"] for item in run("list", "short", "--json").rows] == ["page-0.md"]
    assert "short" in run("list").stdout
    run("ask", "book", "code of Name3?", "--max-tokens", "1")
    (stats,) = run("stats", "--json").rows
    assert stats["gateway"]["documents"] >= 7
    assert stats["worker"]["family"] == "qwen2"
    assert "cacheclip" not in [recipe["name"] for recipe in stats["worker"]["recipes"]], "it needs a second model"
    cache = next(e["addresses"][0] for e in events(all_services[0]) if e.get("service") == "kvcache")
    assert stats["cache"]["address"] == cache, "wherever its data is"
    assert {tier["tier"] for tier in stats["cache"]["tiers"]} >= {"memory", "disk"}
    shown = run("stats", "--cache", cache).stdout
    assert re.search(r"hit rate +\d+% of \d+ chunks", shown)
    assert re.search(r"memory +\d+ entries, [\d.]+ [kM]?B(ytes)? of", shown)
    assert run("delete", "short", "page-0.md", "--json").rows == [{"documents": 1, "chunks": 1}]
    assert run("delete", "short").stdout == "short: 0 documents, 0 chunks deleted\n"
    missing = run("delete", "short", status=1)
    remedy = "list the corpora to see their names, or ingest a document to create it"
    assert missing.stderr == f"fusionkv: gateway: no corpus 'short': {remedy}\n"


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (("ask", "nowhere", "q?"), "no corpus 'nowhere'"),
        (("ask", "book", "q?", "--ratio", "nan"), "ratio is nan: it must be from 0 to 1"),
        (("ask", "book", "q?", "--recipe", "x"), "unknown recipe 'x'"),
        (("ask", "book", "q?", "--recipe", "full_reuse", "--ratio", "0.2"), "has the fixed ratio 0, not 0.2"),
    ],
)
def test_errors_are_one_line_and_exit_1(run: Run, pages: Path, args: tuple[str, ...], error: str) -> None:
    done = run(*args, status=1)
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)
    assert error in done.stderr


async def test_whatever_a_service_prints_is_json_beside_logs_in_json(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FUSIONKV_LOG_FORMAT", "json")
    child = Child("gateway", "fusionkv.gateway", ["--listen", "nowhere"])
    await child.start()
    assert child.ended is not None
    assert await child.ended == 1
    # gRPC, which other tests use in this process, may have something to say of its fork.
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "fusionkv" in line]
    record = json.loads(line)
    assert record["service"] == "fusionkv-gateway"
    assert "an address is host:port" in record["message"]


async def test_a_service_goes_on_where_its_output_finds_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a full disk: what is not read of it would fill the pipe, and the service would wait forever."""
    monkeypatch.setattr(supervisor, "_MAX_LINE", 8 << 10)
    child = Child("any", "calendar", ["--width", "200", "2026"])  # more than the pipe and the reader take
    with open("/dev/full", "w") as full:  # noqa: ASYNC230 - no disk
        monkeypatch.setattr(sys, "stderr", full)
        await child.start()
        assert child.ended is not None
        try:
            assert await asyncio.wait_for(asyncio.shield(child.ended), 3 * SLOWER) == 0
        finally:
            await child.stop()


@pytest.mark.slow
def test_a_service_that_ends_starts_again_and_none_is_left_behind(
    launch: Launch, tiny_model: Path, tmp_path: Path
) -> None:
    # Too deep for a unix socket, which then goes elsewhere.
    service, address = serve(launch, tiny_model, tmp_path / ("d" * 90), listen=f"127.0.0.1:{free_port()}")
    names = ("kvcache", "worker", "gateway")
    processes = dict(zip(names, psutil.Process(service.process.pid).children(), strict=True))
    with Client(address) as client:
        client.ingest("c", "a.txt", "A page.")
        for name, number in (("gateway", SIGKILL), ("kvcache", SIGTERM), ("worker", SIGKILL)):
            processes[name].send_signal(number)
            wait_until(
                lambda name=name: [e["service"] for e in events(service)[3:] if e["event"] == "up"][-1:] == [name],
                120,
            )
            (ended_,) = [e for e in events(service) if e["event"] == "ended" and e["service"] == name]
            assert (ended_["exit_code"], ended_["restart_seconds"]) == (0 if name == "kvcache" else -SIGKILL, 0.5)
            wait_until(lambda: answered(client), 60)
    services = psutil.Process(service.process.pid).children()
    assert len(services) == 3
    assert service.stop() == 0
    stopped = [line.split("|")[0].strip() for line in service.log.splitlines() if line.endswith(" stopped")]
    assert stopped[-3:] == ["gateway", "worker", "kvcache"], "in reverse order"
    assert all(map(ended, services))


def answered(client: Client) -> bool:
    """Whether a question is answered, with what the cache service has."""
    with contextlib.suppress(Unavailable):
        return not client.ask("c", "What?", max_tokens=1).summary.degraded
    return False


STEPS = """
import os, subprocess, sys, time
from pathlib import Path
step, *rest = Path(sys.argv[2]).read_text().split()
Path(sys.argv[2]).write_text(" ".join(rest))
print("step", step, flush=True)
if step == "serves":
    print("fusionkv-any serving on 127.0.0.1:7", flush=True)
if step == "leaves":  # a child that has the output open
    subprocess.Popen(["sleep", "5"])
if step == "stays":
    time.sleep(60)
os._exit(3) if step.isalpha() else os.kill(os.getpid(), int(step))
"""


@pytest.mark.parametrize(
    ("steps", "last"),
    [
        ("fails", "any ended with exit code 3; its last line: step fails"),
        ("36", "any was killed by signal 36; its last line: step 36"),
        ("serves 9 leaves serves stays", ""),
    ],
)
async def test_a_service_starts_again_unless_it_has_never_served(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str], steps: str, last: str
) -> None:
    monkeypatch.setattr(supervisor, "_WAIT_SECONDS", 0.004)
    monkeypatch.setattr(supervisor, "_LAST_LINES_SECONDS", 0.2)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "steps.py").write_text(STEPS)
    (todo := tmp_path / "todo").write_text(steps)
    child = Child("any", "steps", ["--todo", str(todo)], as_json=True)
    keeping = asyncio.create_task(child.keep())
    if last:
        with pytest.raises(ChildEnded, match=last):
            await asyncio.wait_for(keeping, 60)
    else:
        await until(lambda: child.last == "step stays")
        keeping.cancel()
        await child.stop()
    out, err = capfd.readouterr()
    assert re.findall("step (.*)", err) == steps.split()
    waits = [event["restart_seconds"] for event in map(json.loads, out.splitlines()) if event["event"] == "ended"]
    assert waits == [0.004 * 2**n for n in range(len(steps.split()) - 1)]


@pytest.mark.long
@pytest.mark.slow
def test_serve_in_a_folder_of_any_name_behind_a_proxy(
    launch: Launch, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    monkeypatch.delenv("HOME", raising=False)
    folder, temporary = tmp_path / "a b, c%2F é", tmp_path / "t m, p"
    monkeypatch.setenv("TMPDIR", str(temporary))
    for made in (folder, temporary):
        made.mkdir()
        os.chown(made, uid := 12345 if os.getuid() == 0 else os.getuid(), -1)
    # It may read all that root may, as the Python of these tests is in root's home here and there, and write nothing.
    reads = ("--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search")
    before = ("setpriv", "--reuid", "12345", *reads) if os.getuid() == 0 else ()
    service, address = serve(launch, tiny_model, folder, before=before)
    assert psutil.Process(service.process.pid).uids().real == uid
    with Client(address) as client:
        client.ingest("c", "a.txt", "A page.")
        assert client.ask("c", "What?", max_tokens=1).summary.tokens_generated == 1
    began = time.monotonic()
    assert service.stop() == 0
    assert time.monotonic() - began < 5 * SLOWER
    assert {file.name for file in folder.iterdir()} == {"gateway", "kvcache"}
    assert not [*temporary.iterdir()]


@pytest.mark.long
@pytest.mark.slow
def test_serve_with_a_model_that_is_none_says_so_and_exits_1(tmp_path: Path) -> None:
    done = fusionkv("serve", "--model", tmp_path, "--data-dir", tmp_path / "d", status=1)
    said = "^fusionkv: worker ended with exit code 1; its last line: fusionkv-worker: .*holds no config.json"
    assert re.search(said, done.stdout + done.stderr, re.M)


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        (("serve",), "--listen"),
        (("serve", "worker"), "--listen"),
        (("serve", "worker"), "--health-listen"),
        (("serve", "gateway"), "--listen"),
    ],
)
def test_a_taken_port_is_told_before_anything_is_loaded(command: tuple[str, ...], flag: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        # No model: whoever loads one before says that instead.
        flags = ["--model", tmp_path] if command != ("serve", "gateway") else []
        done = fusionkv(*command, flag, address, *flags, cwd=tmp_path, status=1)
    assert f"{address} is in use by another program: stop it, or set another address with {flag}" in done.stderr


@pytest.mark.parametrize("name", ["data", "a b, c%2F é", "d" * 90])
def test_sockets_of_a_folder_of_any_name_are_this_users_alone(tmp_path: Path, name: str) -> None:
    args = argparse.Namespace(data_dir=tmp_path / name, config=None, model=None, json=False)
    with contextlib.ExitStack() as stack:
        children = asyncio.run(_made(args, stack))
        flags = [child._argv[child._argv.index("--listen") + 1] for child in children[:2]]
        for flag in flags:
            assert re.fullmatch(r"unix:[\w./-]+", flag, re.ASCII)
            assert Path(flag.removeprefix("unix:")).parent.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("given", [False, True])
def test_data_is_where_the_settings_say_unless_a_flag_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    flag = tmp_path / "all" if given else None
    args = argparse.Namespace(data_dir=flag, config=tmp_path / "settings.toml", model=None, json=False)
    args.config.write_text('[kvcache]\ndata_dir = "kv"\n[gateway]\ndata_dir = "corpora"\n')
    with contextlib.ExitStack() as stack:
        cache, _, gateway = asyncio.run(_made(args, stack))
    for child, kind in ((cache, Config), (gateway, GatewayConfig)):
        parser = argparse.ArgumentParser()
        settings.add_flags(parser, kind)
        flags = vars(parser.parse_known_args(child._argv)[0])
        used = settings.load(kind, child.name, file=args.config, flags=flags).data_dir
        assert used == (flag / child.name if flag else Path({"kvcache": "kv", "gateway": "corpora"}[child.name]))
    assert cli._parser().parse_args(["serve"]).data_dir is None


def test_an_empty_flag_disables_the_http_endpoint_of_the_settings(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('[gateway]\nlisten = "127.0.0.1:0"\nhttp_listen = "127.0.0.1:0"\n')
    args = cli._parser().parse_args(
        ["serve", "--http-listen", "", "--config", str(file), "--data-dir", str(tmp_path / "data")]
    )
    with contextlib.ExitStack() as stack:
        *_, gateway = asyncio.run(_made(args, stack, supervisor._gateway(args)))
    parser = argparse.ArgumentParser()
    settings.add_flags(parser, GatewayConfig)
    used = settings.load(GatewayConfig, "gateway", file=file, flags=vars(parser.parse_known_args(gateway._argv)[0]))
    assert (used.listen, used.http_listen) == (("127.0.0.1:0",), ())


async def _made(
    args: argparse.Namespace, stack: contextlib.ExitStack, config: GatewayConfig | None = None
) -> list[Child]:
    return _children(args, config or GatewayConfig(), stack)


@pytest.mark.parametrize(("umask", "mode"), [(0o000, 0o770), (0o022, 0o750)])
def test_sockets_of_a_single_service_are_closed_to_others(
    launch: Launch, tmp_path: Path, umask: int, mode: int
) -> None:
    folder = Path(tempfile.mkdtemp())  # short enough for sockets
    before = ("sh", "-c", f'umask {umask:03o}; exec "$@"', "sh")
    kvcache, gateway = (f"unix:{folder}/{name}" for name in ("kvcache", "gateway"))
    try:
        launch(
            "fusionkv.kvcache_service", "--listen", kvcache, "--data-dir", str(tmp_path / "kvcache"), before=before
        )
        http = ("--http-listen", f"{gateway}.http", "--workers", "127.0.0.1:9")
        data = ("--data-dir", str(tmp_path / "gateway"))
        launch("fusionkv.gateway", "--listen", gateway, *http, *data, before=before)
        sockets = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
        assert sockets == dict.fromkeys(
            ("kvcache", "kvcache.arena", "kvcache.data", "kvcache.segments", "gateway", "gateway.http"), mode
        )
    finally:
        shutil.rmtree(folder)


def test_a_data_directory_that_cannot_be_is_named(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "file").write_text("")
    command = ("serve", "all", "--model", str(tiny_model), "--data-dir", str(tmp_path / "file/data"))
    assert re.search(
        r"--data-dir \S+/file/data can't be created: Not a directory; choose", fusionkv(*command, status=1).stderr
    )


def test_without_a_clone_the_fetched_model_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FUSIONKV_MODELS", str(tmp_path / "fetched"))
    fetched = KNOWN["smollm2"].directory
    assert fetched.is_relative_to(tmp_path / "fetched")
    fetched.mkdir(parents=True)
    assert configured(None, {}).model == fetched
    other = tmp_path / "models/eased-3"
    other.mkdir(parents=True)
    assert configured(None, {}).model == Path("models/eased-3")


@pytest.mark.parametrize(
    ("command", "address"),
    [
        (("gateway",), ":8080"), (("gateway",), "localhost"), ((), "8080"), (("worker",), "8080"),
    ],
)  # fmt: skip
def test_an_address_that_is_none_is_told_before_anything_is_loaded(command: tuple[str, ...], address: str) -> None:
    done = fusionkv("serve", *command, "--listen", address, status=1)
    assert f"--listen {address}: an address is host:port, such as 127.0.0.1:8080, or unix:/path" in done.stderr
    assert "up on" not in done.stdout


def test_the_command_tells_its_version() -> None:
    assert fusionkv("--version").stdout == f"fusionkv {importlib.metadata.version('fusionkv')}\n"


def test_a_worker_finds_the_cache_of_its_machine(
    launch: Launch, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "no cache service at 127.0.0.1:7070" in start().log
    folder = tmp_path / ".fusionkv/run"
    folder.mkdir(parents=True)
    start_cache(launch, tmp_path, "--listen", f"unix:{folder}/kvcache.sock")
    assert "using the cache service on this machine" in start().log


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process as another user")
def test_a_worker_trusts_no_cache_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    reads = ("--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search")
    code = "import socket, time; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); "
    for uid, trusted in (("12345", False), ("0", True)):
        command = ("setpriv", "--reuid", uid, *reads, sys.executable, "-c", f"{code} time.sleep(600)")
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None
            address = f"127.0.0.1:{int(other.stdout.readline())}"
            monkeypatch.setattr(worker_config, "_CACHE", address)
            try:
                assert worker_config.cache_address("") == (address if trusted else "")
                assert worker_config.cache_address(address) == address, "as it was set"
            finally:
                other.kill()
    assert "belongs to another user" in caplog.text


@pytest.mark.parametrize("name", ["kvcache_service", "fusion_worker", "gateway"])
def test_process_1_of_a_container_ends_while_it_starts(tmp_path: Path, name: str) -> None:
    alone = ["unshare", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if subprocess.run([*alone, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no process namespaces: needs root or user namespaces, and unshare")
    os.mkfifo(tmp_path / "config")
    command = [*alone, sys.executable, "-P", "-m", f"fusionkv.{name}", "--config", str(tmp_path / "config")]
    # The file opens once the service reads it, which then waits.
    with subprocess.Popen(command) as outer, (tmp_path / "config").open("w"):
        (service,) = psutil.Process(outer.pid).children()
        service.terminate()
        try:
            assert outer.wait(2 * SLOWER) == 128 + SIGTERM
        finally:
            outer.kill()


@pytest.mark.parametrize("number", [SIGINT, SIGTERM])
def test_a_signal_ends_a_worker_that_loads(tmp_path: Path, number: Signals) -> None:
    (tmp_path / "torch.py").write_text("import time\nprint('loading', flush=True)\ntime.sleep(60)\n")
    argv = [sys.executable, "-P", "-m", "fusionkv.fusion_worker", "--model", str(tmp_path), "--listen", "127.0.0.1:0"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"loading\n"
        worker.send_signal(number)
        try:
            assert worker.wait(2 * SLOWER) == -number
        finally:
            worker.kill()


@pytest.mark.parametrize("name", ["kvcache", "worker", "gateway"])
def test_serve_runs_one_service_with_its_own_flags(name: str) -> None:
    wrong = fusionkv("serve", name, "--config", "/none.toml", status=None)
    assert wrong.returncode != 0
    assert "can't read the configuration /none.toml" in wrong.stderr


@pytest.mark.long
@pytest.mark.slow
def test_serve_all_with_tls_and_tokens(launch: Launch, authority: Any, tiny_model: Path, tmp_path: Path) -> None:
    """Only the gateway has a port; between the three are unix sockets, which need no certificates."""
    ours, token = authority("ours"), "a-token"
    cert, key = ours.issue("gateway")
    _, tokens = token_flags(tmp_path, token_entry(token))
    config = f'[gateway]\ntls_cert = "{cert}"\ntls_key = "{key}"\nauth_tokens = "{tokens}"\n'
    (tmp_path / "config").write_text(config)
    service, address = serve(launch, tiny_model, tmp_path / "data", "--config", str(tmp_path / "config"))
    with Client(address, token=token, tls=ClientTLS(ours.ca)) as client:
        client.ingest("c", "a.txt", "A page.")
        assert client.ask("c", "What?", max_tokens=1).summary.tokens_generated == 1
    services = psutil.Process(service.process.pid).children()
    service.kill9()
    wait_until(lambda: all(map(ended, services)))
