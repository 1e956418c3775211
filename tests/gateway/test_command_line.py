"""Paths, flags and imports of the command line, without any process of a service."""

import asyncio
import io
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from fusionkv.gateway.cli import main as cli
from fusionkv.gateway.cli.connect import UsageError
from fusionkv.gateway.cli.files import find, parts, source
from fusionkv.gateway.config import GatewayConfig
from fusionkv.protos.answer.v1.answer_pb2 import Summary, Token
from fusionkv.protos.gateway.v1 import gateway_pb2 as pb
from fusionkv.protos.gateway.v1.gateway_pb2_grpc import GatewayServiceServicer, add_GatewayServiceServicer_to_server
from fusionkv.protos.runtime import settings
from fusionkv.protos.runtime.errors import InvalidArgument
from fusionkv.protos.runtime.settings import SettingsError
from tests.commands import fusionkv


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.md", "a.txt", "sub/c.PDF", ".hidden/d.txt", ".e.txt", "f.png"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    return tmp_path


def test_a_directory_is_searched_by_ending(folder: Path) -> None:
    assert list(find([str(folder)], "")) == ["a.txt", "b.md", "sub/c.PDF"]
    assert list(find([str(folder)], "text/plain")) == ["a.txt", "b.md", "f.png", "sub/c.PDF"]


def test_files_and_globs_go_by_their_own_names(folder: Path) -> None:
    assert find([str(folder / "f.png")], "") == {"f.png": folder / "f.png"}
    assert list(find([str(folder / "**/*.[tP]*")], "")) == ["a.txt", "c.PDF"]
    assert list(find([str(folder / "a.txt"), str(folder / "a.*")], "")) == ["a.txt"]


def test_two_documents_of_one_name_are_an_error(folder: Path) -> None:
    (folder / "sub/a.txt").write_text("y")
    with pytest.raises(UsageError, match=r"would both be document 'a.txt'"):
        find([str(folder), str(folder / "sub")], "")


@pytest.mark.parametrize(
    ("path", "error"),
    [("nothing", "does not exist"), ("*.doc", "does not exist"), (".hidden/x", "contains no documents")],
)
def test_a_path_without_documents_is_an_error(folder: Path, path: str, error: str) -> None:
    (folder / ".hidden/x").mkdir(exist_ok=True)
    with pytest.raises(UsageError, match=error):
        find([str(folder / path)], "")


def test_standard_input_needs_a_name_and_a_name_is_for_one_file(folder: Path) -> None:
    assert find(["-"], "", "notes.md") == {"notes.md": Path("-")}
    assert find([str(folder / "a.txt")], "", "notes.md") == {"notes.md": folder / "a.txt"}
    with pytest.raises(UsageError, match=r"standard input .* needs --name"):
        find(["-"], "")
    with pytest.raises(UsageError, match=r"would both be document 'notes.md': ingest them separately, with --name"):
        find([str(folder)], "", "notes.md")


def lines(*records: object) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def test_json_lines_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = lines(*({"id": i, "text": "x" * 300_000} for i in range(8)))
    (tmp_path / "all.jsonl").write_bytes(content)
    found = [*parts("all.jsonl", tmp_path / "all.jsonl", "")]
    assert [line for line, _ in found] == [1, 4, 7]
    assert b"".join(part for _, part in found) == content
    (tmp_path / "all.jsonl").write_bytes(content + lines("no id", {"id": "2", "text": "again"}))
    with pytest.raises(InvalidArgument, match="lines 3 and 10 have the same id '2'"):
        _ = [*parts("all.jsonl", tmp_path / "all.jsonl", "")]
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"some text")))
    assert [*parts("notes.md", Path("-"), "")] == [(1, b"some text")]
    assert (source(Path("-")), source(tmp_path / "x")) == ("", str(tmp_path / "x"))


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["fly"],
        ["ask", "c"],
        ["ingest", "c"],
        ["ingest", "c", "p", "--concurrency", "0"],
        ["ingest", "c", "p", "--compress", "1"],
        ["ask", "c", "q", "--filter", "year"],
    ],
)
def test_wrong_usage_exits_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        cli.main(argv)
    assert exit.value.code == 2
    assert "usage: fusionkv" in capsys.readouterr().err


def test_wrong_paths_exit_with_2_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ingest", "c", "no/such/path"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_gateway_that_is_not_there_is_one_line_and_exit_1(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["list", "--gateway", f"unix:{tmp_path}/none.sock"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"fusionkv: gateway unix:{tmp_path}/none.sock: ")
    assert "is `fusionkv serve all` running?" in said
    assert said.count("\n") == 1


class Unexplained(GatewayServiceServicer):
    """A gateway that knows nothing of explanations."""

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        yield pb.GenerateResponse(token=Token(id=1, text="42"))
        yield pb.GenerateResponse(summary=Summary(finish_reason="end"))


async def test_an_answer_that_comes_without_its_explanation_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    server = grpc.aio.server()
    add_GatewayServiceServicer_to_server(Unexplained(), server)
    server.add_insecure_port(f"unix:{tmp_path}/g.sock")
    await server.start()
    argv = ["ask", "c", "q", "--explain", str(tmp_path / "page.html"), "--gateway", f"unix:{tmp_path}/g.sock"]
    try:
        assert await asyncio.to_thread(cli.main, argv) == 1
    finally:
        await server.stop(None)
    said = capsys.readouterr()
    assert said.out == "42"
    assert "page.html was not written" in said.err.splitlines()[-1]
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize("command", ["serve", "ingest", "encode", "ask", "move", "delete", "list", "stats"])
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        cli.main([command, "--help"])
    assert exit.value.code == 0
    assert "--json" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("command", ["eval", "check"])
def test_commands_that_are_processes_of_their_own_explain_themselves_too(command: str) -> None:
    assert "--json" in fusionkv(command, "--help").stdout


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ({"chunk_tokens": "100", "overlap_tokens": "100"}, "overlap_tokens .100. must be less than chunk_tokens"),
        ({"top_k": "300"}, "top_k .300. exceeds max_top_k"),
        ({"max_ingest_bytes": "1MiB"}, "max_document_bytes exceeds max_ingest_bytes"),
        ({"workers": ""}, "must name at least one fusion worker"),
        ({"dense_weight": "1.5"}, "--dense-weight"),
        ({"language": "klingon"}, "language 'klingon' is not one of arabic, "),
    ],
)
def test_settings_that_can_not_work_are_refused(flags: dict[str, str], error: str) -> None:
    with pytest.raises(SettingsError, match=error):
        settings.load(GatewayConfig, "gateway", environ={}, flags=flags)
