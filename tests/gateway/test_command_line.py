"""Paths, flags and imports of the command line, and what `fusionkv check` asks a corpus, without any service."""

import asyncio
import fcntl
import io
import json
import os
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from fusionkv.fusion_worker.evaluate import check
from fusionkv.gateway.cli import check_corpus, console, files
from fusionkv.gateway.cli import main as cli
from fusionkv.gateway.cli.connect import UsageError
from fusionkv.gateway.cli.files import File, find, parts, skipped
from fusionkv.gateway.cli.launch import missing_package
from fusionkv.gateway.client import requests
from fusionkv.gateway.client.results import Item, Passage
from fusionkv.gateway.config import GatewayConfig
from fusionkv.protos.answer.v1.answer_pb2 import Summary, Token
from fusionkv.protos.gateway.v1 import gateway_pb2 as pb
from fusionkv.protos.gateway.v1.gateway_pb2_grpc import GatewayServiceServicer
from fusionkv.protos.runtime import rpc, settings
from fusionkv.protos.runtime.errors import InvalidArgument
from fusionkv.protos.runtime.settings import SettingsError
from tests.commands import fusionkv
from tests.services import listening
from tests.waiting import wait_until

SERVICE = pb.DESCRIPTOR.services_by_name["GatewayService"]
Capsys = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.md", "a.txt", "sub/c.PDF", ".hidden/d.txt", ".e.txt", "f.png"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    return tmp_path


def test_a_directory_is_searched_by_ending_and_files_go_by_their_own_names(folder: Path) -> None:
    assert list(find([str(folder)], "")) == ["a.txt", "b.md", "sub/c.PDF"]
    assert list(find([str(folder)], "text/plain")) == ["a.txt", "b.md", "f.png", "sub/c.PDF"]
    assert find([str(folder / "f.png")], "") == {"f.png": File(folder / "f.png", f"{folder.name}/f.png")}
    assert list(find([str(folder / "**/*.[tP]*")], "")) == ["a.txt", "c.PDF"]
    assert list(find([str(folder / "a.txt"), str(folder / "a.*")], "")) == ["a.txt"]
    assert find([str(folder / "a.txt")], "", "notes.md")["notes.md"].path == folder / "a.txt"
    assert find(["-"], "", "notes.md") == {"notes.md": File(Path("-"), "")}
    assert skipped([str(folder)], "") == [folder / "f.png"]
    assert skipped([str(folder), str(folder / "f.png"), "-"], "text/plain") == []


@pytest.mark.parametrize(
    ("paths", "name", "error"),
    [
        (["nothing"], "", "does not exist$"),
        (["*.doc"], "", "does not exist"),
        ([".hidden/x"], "", r"contains no documents \(known endings: .*\)$"),
        ([".", "sub"], "", "would both be document 'a.txt'"),
        (["-"], "", "standard input .* needs --name"),
        (["."], "notes.md", "would both be document 'notes.md': ingest them separately, with --name"),
        ([".", ""], "", "a PATH is empty"),
    ],
)
def test_paths_that_are_refused(folder: Path, paths: list[str], name: str, error: str) -> None:
    (folder / ".hidden/x").mkdir()
    (folder / "sub/a.txt").write_text("y")
    with pytest.raises(UsageError, match=error):
        find([path if path in ("-", "") else str(folder / path) for path in paths], "", name)


def lines(*records: object) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def test_json_lines_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = lines(*({"id": i, "text": "x" * 300_000} for i in range(8)))
    (tmp_path / "all.jsonl").write_bytes(content)
    found = [*parts("all.jsonl", tmp_path / "all.jsonl", "")]
    assert [part.first_line for part in found] == [1, 4, 7]
    assert b"".join(part.content for part in found) == content
    (tmp_path / "short.jsonl").write_bytes(lines(*(f"{i}" for i in range(12_000))))
    found = [*parts("short.jsonl", tmp_path / "short.jsonl", "")]
    assert sum(len(part.documents) for part in found) == 12_000
    assert max(len(part.documents) for part in found) < GatewayConfig.max_document_chunks / 2
    (tmp_path / "all.jsonl").write_bytes(content + lines("no id", {"id": "2", "text": "again"}))
    with pytest.raises(InvalidArgument, match="lines 3 and 10 have the same id '2'"):
        _ = [*parts("all.jsonl", tmp_path / "all.jsonl", "")]
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"some text")))
    assert [part.content for part in parts("notes.md", Path("-"), "")] == [b"some text"]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_no_more_of_a_file_is_read_than_gateways_accept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless(io.RawIOBase):
        taken = 0

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            self.taken += len(buffer)
            assert self.taken < 4 << 20
            buffer[:] = bytes(len(buffer))
            return len(buffer)

    monkeypatch.setattr(files, "MAX_CONTENT", 1 << 20)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BufferedReader(Endless())))
    with pytest.raises(InvalidArgument, match="has more than 1048576 bytes"):
        _ = [*parts(name, Path("-"), "")]


def test_a_client_refuses_half_of_a_surrogate_pair() -> None:
    with pytest.raises(InvalidArgument, match=r"invalid option: content: .* surrogates not allowed"):
        requests.ingest("c", "a.txt", "a\ud800")


def test_parts_of_json_lines_without_text_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "all.jsonl"
    blank = b"\n" * (1 << 20)
    file.write_bytes(b"\n" + blank + b'{"text": "one"}\n' + blank + b'""\n')
    found = [*parts("all.jsonl", file, "")]
    (part,) = [part for part in found if part.documents]
    line = part.first_line + part.content[: part.content.index(b"{")].count(b"\n")
    assert part.documents == (f"all.jsonl#{line}",) == (f"all.jsonl#{(1 << 20) + 2}",)
    assert [name for part in found for name in part.without_text] == [f"all.jsonl#{(2 << 20) + 3}"]
    file.write_bytes(b"\n \n")
    assert [part.documents for part in parts("all.jsonl", file, "")] == [()]
    file.write_bytes(b'\xef\xbb\xbf{"text": "behind a byte order mark"}')
    assert [part.documents for part in parts("all.jsonl", file, "")] == [("all.jsonl#1",)]


@pytest.mark.parametrize(
    "argv",
    [
        [], ["fly"], ["ask", "c"], ["ingest", "c"], ["ingest", "c", "p", "--concurrency", "0"],
        ["ask", "c", "q", "--filter", "year"],
        ["serve", "--config", "no.toml", "worker"],
        *(["list", "--timeout", seconds] for seconds in ("0", "nan", "soon")),
    ],
)  # fmt: skip
def test_wrong_usage_exits_with_2(argv: list[str], capsys: Capsys) -> None:
    with pytest.raises(SystemExit) as exit:
        cli.main(argv)
    assert exit.value.code == 2
    assert "usage: fusionkv" in capsys.readouterr().err


def test_what_is_not_there_is_one_line(capsys: Capsys, tmp_path: Path) -> None:
    assert cli.main(["ingest", "c", "no/such/path"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    gateway = f"unix:{tmp_path}/none.sock"
    assert cli.main(["list", "--gateway", gateway]) == 1
    said = rf"fusionkv: gateway {gateway}: .*is `fusionkv serve all` running\?.*; --gateway sets the address\n"
    assert re.fullmatch(said, capsys.readouterr().err)
    assert cli.main(["ask", "c", "q", "--explain", f"{tmp_path}/none/a.html"]) == 2
    said = f"fusionkv: --explain {tmp_path}/none/a.html: there is no folder {tmp_path}/none\n"
    assert capsys.readouterr().err == said
    assert cli.main(["ask", "c", "q", "--explain", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"fusionkv: --explain {tmp_path}: it is a folder\n"
    assert cli.main(["ask", "c", "q", "--filter", "year=1", "--filter", "year=2"]) == 2
    assert capsys.readouterr().err == "fusionkv: --filter gives a key two values: no document has both\n"
    assert cli.main(["delete", "c", ""]) == 2
    assert capsys.readouterr().err.startswith("fusionkv: DOCUMENT is empty: ")
    assert cli.main(["list", "--gateway", "no-such-host.invalid:7072"]) == 1
    assert re.search(r"is `fusionkv serve all` running\?.*; --gateway sets the address\n$", capsys.readouterr().err)


@pytest.mark.parametrize("address", ["", "7072", "http://localhost:7072", "a:65536"])
def test_an_address_of_a_gateway_that_is_none_is_one_line(address: str, capsys: Capsys) -> None:
    assert cli.main(["list", "--gateway", address]) == 2
    remedy = "give host:port, such as 127.0.0.1:7072, or unix:/path"
    assert capsys.readouterr().err == f"fusionkv: {address!r} is not a gateway's address: {remedy}\n"


@pytest.mark.parametrize("command", ["ask c", "delete", "encode", "list", "move"])
def test_arguments_that_are_no_text_are_one_line(command: str, capsys: Capsys) -> None:
    assert cli.main([*command.split(), "\udcff"]) == 1
    assert re.fullmatch(r"fusionkv: invalid option: .* surrogates not allowed\n", capsys.readouterr().err)


class Unexplained(GatewayServiceServicer):
    """As vLLM, which answers alone while no worker prefills, and says why; or as a gateway of an earlier version."""

    reason = ""

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        yield pb.GenerateResponse(token=Token(id=1, text="42"))
        yield pb.GenerateResponse(summary=Summary(finish_reason="end", degraded_reason=self.reason))


class Deleting(GatewayServiceServicer):
    async def Delete(self, request: pb.DeleteRequest, context: Any) -> pb.DeleteResponse:
        return pb.DeleteResponse(documents=1, chunks=2)


@pytest.mark.parametrize("reason", ["", "no worker prefilled the prompt in time"])
async def test_an_answer_without_its_explanation_is_told(capsys: Capsys, tmp_path: Path, reason: str) -> None:
    page, gateway = tmp_path / "page.html", Unexplained()
    gateway.reason = reason
    async with listening(rpc.handlers(SERVICE, gateway), f"unix:{tmp_path}/g.sock") as address:
        argv = ["ask", "c", "q", "--explain", str(page), "--gateway", address]
        assert await asyncio.to_thread(cli.main, argv) == 1
    said = capsys.readouterr()
    assert (said.out, page.exists()) == ("42\n", False)
    why = reason or "upgrade gateway and workers to the version of this command"
    assert said.err.endswith(f"page.html was not written: {why}\n")


# What would colour, move, hide or reorder text in a terminal, and rich's own markup.
NASTY = "\x1b[31mred\x1b]0;title\x07\x9b2J\r\x08\x00\x7f\u202eback\u2066\u2028[bold red]:skull:markup[/]"
ACTS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


class Nasty(GatewayServiceServicer):
    """Answers everything with text of the worst kind."""

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        where = pb.Passage(document=f"d\n{NASTY}", text=f"t\n{NASTY}", title=NASTY, metadata={NASTY: NASTY})
        yield pb.GenerateResponse(sources=pb.Sources(passages=[where]))
        for char in f"line\n\t{NASTY}":  # an escape sequence may come in several tokens
            yield pb.GenerateResponse(token=Token(id=1, text=char))
        notes = {"degraded": True, "degraded_reason": NASTY, "ratio_raised": NASTY, "recipe_replaced": NASTY}
        yield pb.GenerateResponse(summary=Summary(finish_reason=NASTY, recipe=NASTY, **notes))

    async def List(self, request: pb.ListRequest, context: Any) -> pb.ListResponse:
        return pb.ListResponse(items=[pb.Item(name=f"d\n{NASTY}", model=NASTY, embedder=NASTY, source=NASTY)])

    async def Stats(self, request: pb.StatsRequest, context: Any) -> pb.StatsResponse:
        return pb.StatsResponse(version=NASTY, model=NASTY, worker="")

    async def Ingest(self, request: pb.IngestRequest, context: Any) -> pb.IngestResponse:
        return pb.IngestResponse(documents=1, without_text=[f"d\n{NASTY}"])

    async def Move(self, request: pb.MoveRequest, context: Any) -> AsyncIterator[pb.MoveResponse]:
        yield pb.MoveResponse(done=1, total=2)
        await context.abort(grpc.StatusCode.NOT_FOUND, f"no corpus\n{NASTY}".encode(errors="replace").decode())

    async def Delete(self, request: pb.DeleteRequest, context: Any) -> pb.DeleteResponse:
        return pb.DeleteResponse(documents=1)


COMMANDS = ["ask c q", "list", "list c", "stats", "move c", "delete c", "ingest c FILE --sync", "ask c q --explain X"]


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
@pytest.mark.parametrize("command", COMMANDS)
async def test_text_of_others_moves_and_colours_nothing(
    command: str, as_json: bool, capsys: Capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if command.startswith("ask"):  # in a terminal; another program gets the answer as it is
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    (tmp_path / "lines.jsonl").write_text(json.dumps({"id": f"e{NASTY}", "text": ""}) + '\n"text"')
    async with listening(rpc.handlers(SERVICE, Nasty()), f"unix:{tmp_path}/g.sock") as address:
        words = {"FILE": f"{tmp_path}/lines.jsonl", "X": f"{tmp_path}/x.html"}
        argv = [words.get(word, word) for word in command.split()]
        await asyncio.to_thread(cli.main, [*argv, "--gateway", address, *["--json"] * as_json])
    said = capsys.readouterr()
    assert said.out or said.err
    assert not (found := ACTS.search(said.out + said.err)), found
    if as_json:
        _ = [json.loads(line) for line in said.out.splitlines()]
    elif command == "ask c q":
        assert said.out.startswith(r"line" + "\n\t" + r"\x1b[31mred\x1b]0;title\x07\x9b2J\r")
        assert "[bold red]:skull:markup[/]" in said.out
        assert said.err.count(":markup[/]") >= 4


class Encoding(GatewayServiceServicer):
    async def Precompute(self, request: pb.PrecomputeRequest, context: Any) -> AsyncIterator[pb.PrecomputeResponse]:
        for done in (0, 2, 6):
            yield pb.PrecomputeResponse(done=done, total=6)


async def test_progress_without_a_terminal_is_plain_lines(
    capsys: Capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(console, "_LINE_SECONDS", 0.0)
    async with listening(rpc.handlers(SERVICE, Encoding()), f"unix:{tmp_path}/g.sock") as address:
        assert await asyncio.to_thread(cli.main, ["encode", "c", "--gateway", address]) == 0
        lines = [f"fusionkv: c: encoding: {done} of 6" for done in (0, 2, 6)]
        assert capsys.readouterr().err.splitlines() == lines
        assert await asyncio.to_thread(cli.main, ["encode", "c", "--gateway", address, "--json"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("output", "status", "said"), [("full", 1, "No space left on device"), ("closed", 141, "")])
async def test_output_that_nobody_takes_is_told_once(output: str, status: int, said: str, tmp_path: Path) -> None:
    async with listening(rpc.handlers(SERVICE, Deleting()), f"unix:{tmp_path}/g.sock") as address:
        reader, writer = os.pipe()
        os.close(reader)
        if output == "full":
            os.close(writer)
            writer = os.open("/dev/full", os.O_WRONLY)
        argv = ["-P", "-m", "fusionkv.gateway.cli.main", "delete", "c", "--gateway", address]
        env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        running = await asyncio.create_subprocess_exec(sys.executable, *argv, stdout=writer, stderr=-1, env=env)
        os.close(writer)
        _, error = await running.communicate()
    assert (running.returncode, error.decode().count("\n")) == (status, int(bool(said)))
    assert said in error.decode()


@pytest.mark.parametrize("command", ["--version", "model list", "serve kvcache --help"])
def test_commands_end_well_whose_output_is_closed(command: str) -> None:
    argv = ["sh", "-c", f'"$0" -P -m fusionkv.gateway.cli.main {command} <&- >&-', sys.executable]
    assert subprocess.run(argv, check=False, capture_output=True).stderr == b""


def test_what_the_locale_has_no_letters_for_is_escaped(tmp_path: Path) -> None:
    (tmp_path / "Łódź" / "minilm").mkdir(parents=True)
    argv = [sys.executable, "-P", "-m", "fusionkv.gateway.cli.main", "model", "list"]
    env = os.environ | {"PYTHONIOENCODING": "iso-8859-1", "FUSIONKV_MODELS": f"{tmp_path}/Łódź"}
    running = subprocess.run(argv, check=False, capture_output=True, env=env)
    assert (running.returncode, running.stderr) == (0, b"")
    assert f"minilm is in {tmp_path}/\\u0141ód\\u017a" in running.stdout.decode("iso-8859-1")


def test_ctrl_c_ends_a_command_that_reads_standard_input() -> None:
    argv = [sys.executable, "-P", "-m", "fusionkv.gateway.cli.main", "ingest", "c", "-", "--name", "x.txt"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdin is not None
        assert running.stderr is not None
        os.write(running.stdin.fileno(), b"some text")
        wait_until(lambda: not struct.unpack("i", fcntl.ioctl(running.stdin, termios.FIONREAD, bytes(4)))[0])
        running.send_signal(signal.SIGINT)
        try:
            assert running.wait(20) == 130
        finally:
            running.kill()
        assert running.stderr.read() == b""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("command", ["eval", "check"])
def test_commands_that_need_no_gateway_explain_themselves(command: str) -> None:
    assert "--json" in fusionkv(command, "--help").stdout


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ({"chunk_tokens": "100", "overlap_tokens": "100"}, "overlap_tokens .100. must be less than chunk_tokens"),
        ({"top_k": "300"}, "top_k .300. exceeds max_top_k"),
        ({"max_top_k": "256"}, r"--max-top-k: 256 is outside 1\.\.255"),
        ({"max_ingest_bytes": "1MiB"}, "max_document_bytes exceeds max_ingest_bytes"),
        ({"workers": ""}, "--workers: name at least one address"),
        ({"workers": "dns:7071"}, "workers: 'dns:7071' is not host:port"),
        ({"dense_weight": "1.5"}, "--dense-weight"),
        ({"language": "klingon"}, "language 'klingon' is not one of arabic, "),
        ({"milvus_url": "there:19530"}, "milvus_url must begin with http:// or https://"),
        ({"milvus_token": "file"}, "milvus_token needs milvus_url"),
        ({"decode": "sglang"}, "decode must be worker or vllm"),
        ({"decode": "vllm"}, "decode = vllm needs vllm_url"),
        ({"recipe": "deeplayer+prime"}, "recipe: unknown recipe modifier 'prime'"),
        ({"recipe": "ape", "decode": "vllm", "vllm_url": "http://a"}, "recipe: only the fusion worker can decode"),
    ],
)
def test_settings_that_can_not_work_are_refused(flags: dict[str, str], error: str) -> None:
    with pytest.raises(SettingsError, match=error):
        settings.load(GatewayConfig, "gateway", environ={}, flags=flags)


_HIDES = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "{0}":
            raise ModuleNotFoundError("No module named '{0}'", name=name)

sys.meta_path.insert(0, Hidden())
"""


def _without(folder: Path, package: str) -> dict[str, str]:
    (folder / "sitecustomize.py").write_text(_HIDES.format(package))
    paths = [str(folder), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


@pytest.mark.parametrize(
    ("command", "arguments", "package"),
    [("serve kvcache", ["--listen", "127.0.0.1:0"], "lmdb"), ("size", ["some-model"], "torch"), ("list", [], "grpc")],
)
def test_a_missing_package_is_one_line(tmp_path: Path, command: str, arguments: list[str], package: str) -> None:
    done = fusionkv(*command.split(), *arguments, status=1, env=_without(tmp_path, package), cwd=tmp_path)
    line = f'fusionkv {command} needs {package}, which is not installed: pip install "fusionkv[all]"\n'
    assert done.stderr == line


def test_other_failed_imports_are_raised() -> None:
    for name in ("asyncio.gone", "numpy.gone", None):
        with pytest.raises(ModuleNotFoundError, match="gone"):
            missing_package("size", ModuleNotFoundError("gone", name=name))


TEXTS = [
    f"Of the {name} it is told that nobody ever counted them. They live in the {place} beyond the second hill." * 2
    for name, place in (("herons", "reeds"), ("otters", "river"), ("toads", "cellar"))
]


class Corpus:
    """A gateway's client, as far as it is asked here."""

    def __init__(self, texts: list[str]) -> None:
        self.asked: list[str] = []
        self.orders: list[str] = []
        self.passages = tuple(Passage("d", i, text, 1.0, 40) for i, text in enumerate(texts))

    async def list(self, corpus: str) -> list[Item]:
        return [Item("d", 1, len(self.passages), 100, 1000)] * bool(self.passages)

    async def retrieve(self, corpus: str, question: str, order: str = "rank") -> tuple[Passage, ...]:
        self.asked.append(question)
        self.orders.append(order)
        return self.passages


async def test_questions_join_two_sentences() -> None:
    corpus = Corpus(TEXTS)
    found = await check_corpus.questions(corpus, "c", 5, 10.0)  # type: ignore[arg-type]
    assert found == await check_corpus.questions(Corpus(TEXTS), "c", 5, 10.0)  # type: ignore[arg-type]
    assert len({record["question"] for record in found}) == len(found) == 5
    for record in found:
        assert [context["text"] for context in record["ctxs"]] == TEXTS
        begun = record["question"].split('"')[1::2]
        assert len(begun) == 2
        assert all(len(words.split()) == 6 and any(words in text for text in TEXTS) for words in begun)
        assert all(words in record["answers"][0] for words in begun)
    assert {*corpus.orders[1::2]} == {"ends"}, "the order in which the gateway puts passages into a prompt"
    assert corpus.asked[::2] == ["d"] * (len(corpus.asked) // 2)
    assert all(any(question in text for text in TEXTS) for question in corpus.asked[1::2])


async def test_corpora_without_two_passages_or_sentences() -> None:
    for texts in ([], TEXTS[:1]):
        with pytest.raises(UsageError, match="no two passages of corpus 'c' are retrieved together"):
            await check_corpus.questions(Corpus(texts), "c", 5, 10.0)  # type: ignore[arg-type]
    (record, *_) = await check_corpus.questions(Corpus(["7 8 9", "\u4e2d" * 900]), "c", 1, 10.0)  # type: ignore[arg-type]
    assert len(record["question"]) < 600


def test_the_check_is_given_the_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [{"question": "q", "answers": ["a"], "ctxs": [{"text": "t"}]}]
    ran: list[tuple[Any, ...]] = []

    async def fetch(args: Any) -> list[dict[str, Any]]:
        assert (args.corpus, args.n, args.gateway, args.token) == ("papers", 7, "unix:/g", "t")
        return asked

    monkeypatch.setattr(check_corpus, "_fetch", fetch)
    monkeypatch.setattr(check, "main", lambda *given: ran.append(given) or 3)
    flags = ["--corpus", "papers", "--n", "7", "--gateway", "unix:/g", "--token", "t", "--json"]
    assert cli.main(["check", "smollm2", *flags]) == 3
    assert ran == [(["smollm2", "--json", "--n", "7"], asked)]


def test_flags_of_the_check_that_exclude_each_other(capsys: Capsys) -> None:
    with pytest.raises(SystemExit):
        cli.main(["check", "m", "--corpus=c", "--data", "f"])
    assert "--data and --corpus can't be combined" in capsys.readouterr().err
    assert cli.main(["check", "m", "--corpus", "c", "--tls-cert", "f"]) == 2


def test_a_check_without_a_corpus_needs_no_gateway(tmp_path: Path, capsys: Capsys) -> None:
    assert cli.main(["check", str(tmp_path / "none")]) == 1
    assert capsys.readouterr().err.startswith("fusionkv check: ")
