"""`fusionkv ingest` against a gateway: other checkouts, --sync, odd names of files, JSON lines without text."""

import errno
import json
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fusionkv.gateway.cli import main as cli
from fusionkv.gateway.client.client import AsyncClient, Client
from fusionkv.gateway.client.requests import source_of
from fusionkv.gateway.client.results import Item
from tests.gateway.conftest import Stack

pytestmark = pytest.mark.system
Capsys = pytest.CaptureFixture[str]
Run = Callable[..., tuple[str, str]]


@pytest.fixture
def run(stack: Stack, capsys: Capsys) -> Run:
    """Runs a command; returns what it printed on standard output and on standard error."""

    def command(*argv: object, status: int = 0) -> tuple[str, str]:
        capsys.readouterr()
        code = cli.main([*map(str, argv), "--gateway", stack.gateway.address])
        said = capsys.readouterr()
        assert code == status, said
        return said.out, said.err

    return command


@pytest.fixture
def corpus() -> str:
    """A corpus of its own for each test."""
    return uuid.uuid4().hex


def names(stack: Stack, corpus: str) -> list[str]:
    return [item.name for item in stack.client.list(corpus)]


def folder(parent: Path, **texts: str) -> Path:
    """A folder `docs`; `__` in a name is a slash, and the last `_` the dot before the ending."""
    for name, text in texts.items():
        file = parent / "docs" / ".".join(name.replace("__", "/").rsplit("_", 1))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return parent / "docs"


@pytest.mark.parametrize(
    ("given", "source"),
    [
        (("docs", "a.md"), "docs/a.md"),
        (("./docs/", "sub/a.md"), "docs/sub/a.md"),
        (("/one/docs", "a.md"), "docs/a.md"),
        (("/two/docs/a.md",), "docs/a.md"),
        (("docs/a.md",), "docs/a.md"),
        ((".", "a.md"), "./a.md"),
        ((".", "sub/a.md"), "./sub/a.md"),
        (("a.md",), "./a.md"),
        (("/", "a.md"), "./a.md"),
        (("/", "sub/a.md"), "./sub/a.md"),
        (("b/docs", "a.md"), "b/docs/a.md"),
        (("docs/gr\udcfc.md",), r"docs/gr\xfc.md"),
    ],
)
def test_a_source_is_relative_to_what_is_given(given: tuple[str, ...], source: str) -> None:
    assert source_of(*given) == source


def test_the_same_folder_of_another_checkout_replaces_its_documents(
    run: Run, stack: Stack, corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (folder(tmp_path / n, a_md=f"of {n}", sub__b_md=f"of {n}") for n in ("one", "two"))
    run("ingest", corpus, first)
    assert "2 documents (2 replaced, 0 failed)" in run("ingest", corpus, second)[0]
    for checkout in (first.parent, second.parent):
        monkeypatch.chdir(checkout)
        assert "2 documents (2 replaced, 0 failed)" in run("ingest", corpus, "docs/")[0]
        assert "1 documents (1 replaced, 0 failed)" in run("ingest", corpus, "docs/a.md")[0]
    assert {item.source for item in stack.client.list(corpus)} == {"docs/a.md", "docs/sub/b.md"}
    stack.client.ingest(corpus, "a.md", Path("docs/a.md"))  # as the command does
    with pytest.raises(Exception, match=r"came from docs/a\.md"):
        stack.client.ingest(corpus, "a.md", b"x", source="elsewhere/a.md")


def test_sync_deletes_what_vanished_from_these_paths_alone(
    run: Run, stack: Stack, corpus: str, tmp_path: Path
) -> None:
    docs = folder(tmp_path, keep_md="k", gone_md="g", sub__gone_txt="s", renamed_md="r")
    other = folder(tmp_path / "elsewhere", alike_md="of another folder").rename(tmp_path / "other")
    run("ingest", corpus, docs)
    run("ingest", corpus, other)
    run("ingest", corpus, docs, "--prefix", "v1/")
    run("ingest", corpus, docs / "renamed.md", "--name", "another.md")
    stack.client.ingest(corpus, "own.md", "of no file")
    stack.client.ingest(corpus, "deeper.md", "of a file that looks alike", source="docs-2/x.md")
    for name in ("gone.md", "sub/gone.txt"):
        (docs / name).unlink()
    before = names(stack, corpus)
    said, _ = run("ingest", corpus, docs, "--sync", "--dry-run")
    would = [f"{corpus}: would delete {name}" for name in ("gone.md", "sub/gone.txt")]
    assert (said.splitlines()[:-1], names(stack, corpus)) == (would, before)
    said, _ = run("ingest", corpus, docs, "--sync")
    assert said.splitlines()[:-1] == [f"{corpus}: deleted {name}" for name in ("gone.md", "sub/gone.txt")]
    assert "2 deleted" in said
    assert [*{*before} - {*names(stack, corpus)}] in (["gone.md", "sub/gone.txt"], ["sub/gone.txt", "gone.md"])
    said, _ = run("ingest", corpus, docs, "--sync", "--prefix", "v1/", "--json")
    events = [json.loads(line) for line in said.splitlines()]
    assert [e["name"] for e in events if e["event"] == "deleted"] == ["v1/gone.md", "v1/sub/gone.txt"]
    assert events[-1]["deleted"] == 2


def test_sync_keeps_documents_of_files_that_it_skips(run: Run, stack: Stack, corpus: str, tmp_path: Path) -> None:
    docs = folder(tmp_path, a_md="a")
    for name in ("LICENSE", ".hidden.md", "sub.d/NOTICE"):
        (docs / name).parent.mkdir(exist_ok=True)
        (docs / name).write_text(name)
    run("ingest", corpus, docs, "--media-type", "text/plain")
    run("ingest", corpus, docs / ".hidden.md")
    run("ingest", corpus, docs, "--sync")
    assert names(stack, corpus) == [".hidden.md", "LICENSE", "a.md", "sub.d/NOTICE"]
    (docs / "LICENSE").unlink()
    run("ingest", corpus, docs, "--sync")
    assert names(stack, corpus) == [".hidden.md", "a.md", "sub.d/NOTICE"]


def test_sync_of_the_current_folder_reaches_folders_in_it(
    run: Run, stack: Stack, corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docs = folder(tmp_path, gone_md="g", sub__gone_md="s", sub__keep_md="k")
    monkeypatch.chdir(docs)
    run("ingest", corpus, ".")
    stack.client.ingest(corpus, "alike.md", "of another folder", source="sub/alike.md")
    for name in ("gone.md", "sub/gone.md"):
        (docs / name).unlink()
    run("ingest", corpus, ".", "--sync")
    assert names(stack, corpus) == ["alike.md", "sub/keep.md"]


def test_sync_deletes_lines_that_vanished_from_a_file(run: Run, stack: Stack, corpus: str, tmp_path: Path) -> None:
    lines, docs = [{"id": str(i), "text": f"text {i}"} for i in range(3)], folder(tmp_path, a_md="a")
    file = docs / "all.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    run("ingest", corpus, docs)
    file.write_text(json.dumps(lines[0]) + '\n{"id": "1", "text": ""}')
    run("ingest", corpus, file, "--sync")
    assert names(stack, corpus) == ["0", "a.md"]


@pytest.mark.parametrize("path", ["none", "docs/none.md", "docs/*.md", "-", "empty"])
def test_sync_refuses_paths_that_it_can_not_compare(
    path: str, run: Run, stack: Stack, corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    docs = folder(tmp_path, a_md="a", b_md="b")
    (tmp_path / "empty").mkdir()
    run("ingest", corpus, "docs")
    (docs / "b.md").unlink()
    more = ("--name", "x.txt") if path == "-" else ()
    for paths in ([path], [path] if path == "-" else ["docs", path]):
        run("ingest", corpus, *paths, *more, "--sync", status=2)
    assert names(stack, corpus) == ["a.md", "b.md"]
    assert "--dry-run needs --sync" in run("ingest", corpus, "docs", "--dry-run", status=2)[1]


def test_sync_goes_on_if_another_has_deleted_a_document(
    run: Run, stack: Stack, corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docs = folder(tmp_path, a_md="a", b_md="b", c_md="c")
    run("ingest", corpus, docs)
    for name in ("a.md", "b.md"):
        (docs / name).unlink()
    listed = AsyncClient.list

    async def late(client: AsyncClient, corpus: str) -> list[Item]:
        items = await listed(client, corpus)
        await client.delete(corpus, "a.md")
        return items

    monkeypatch.setattr(AsyncClient, "list", late)
    run("ingest", corpus, docs, "--sync")
    assert names(stack, corpus) == ["c.md"]


def test_sync_deletes_nothing_after_a_failure(run: Run, stack: Stack, corpus: str, tmp_path: Path) -> None:
    docs = folder(tmp_path, a_md="a", b_md="b")
    run("ingest", corpus, docs)
    (docs / "b.md").unlink()
    (docs / "bad.pdf").write_text("bad")
    _, said = run("ingest", corpus, docs, "--sync", status=1)
    assert "nothing is deleted, since 1 files or folders could not be read or stored" in said
    assert names(stack, corpus) == ["a.md", "b.md"]


def test_sync_deletes_nothing_if_a_folder_can_not_be_read(
    run: Run, stack: Stack, corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docs = folder(tmp_path, a_md="a", sub__b_md="b")
    run("ingest", corpus, docs)
    scan = os.scandir

    def scanned(path: str) -> Any:
        if Path(path).name == "sub":
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", scanned)
    _, said = run("ingest", corpus, docs, "--sync", status=1)
    assert said.startswith(f"fusionkv: {docs}/sub: Permission denied\nfusionkv: nothing is deleted")
    assert names(stack, corpus) == ["a.md", "sub/b.md"]


def test_files_of_any_name_are_stored_listed_and_deleted(run: Run, stack: Stack, corpus: str, tmp_path: Path) -> None:
    """Per cent signs, wide and narrow spaces, letters that are joined, and two names of bytes that are no UTF-8."""
    plain = ["100%.txt", "a%2Fb%00.txt", "%s %(x)d {0} [bold]x.txt", "gr\u00fcn \u00e9.txt"]
    plain += ["\u5831\u544a\u3000\u66f8.txt", "at 9.41\u202fAM.txt", "\u0645\u06cc\u200c\u062e.txt"]
    odd = {os.fsdecode(b"gr\xfc\xdfe.txt"): r"gr\xfc\xdfe.txt", os.fsdecode(b"gr\xfd\xdfe.txt"): r"gr\xfd\xdfe.txt"}
    known = {**{name: name for name in plain}, **odd}
    for name in known:
        (tmp_path / name).write_text("text")
    said, _ = run("ingest", corpus, tmp_path)
    assert "9 documents (0 replaced, 0 failed)" in said
    stored = sorted(known.values())
    assert names(stack, corpus) == stored
    said, _ = run("ingest", corpus, tmp_path, "--json", "--sync")
    assert json.loads(said.splitlines()[-1])["replaced"] == 9
    listed = [line.split("  ")[0] for line in run("list", corpus)[0].splitlines()[1:]]
    assert listed == stored
    for name in stored:
        run("delete", corpus, name)


def test_a_file_whose_name_is_refused_is_named_on_one_line(run: Run, corpus: str, tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "bad\n\x1b[31mred.txt").write_text("bad")
    said, error = run("ingest", corpus, tmp_path, status=1)
    assert "1 documents (0 replaced, 1 failed)" in said
    assert error.count("\n") == 1
    assert r"bad\n\x1b[31mred.txt: gateway: invalid document name" in error


def test_lines_without_text_are_named_and_the_others_stored(
    run: Run, stack: Stack, corpus: str, tmp_path: Path
) -> None:
    texts = ["", "  ", None, "one", "two"]
    records = [*({"id": f"n{i}", "text": text} for i, text in enumerate(texts)), "", {"contents": ""}, "three"]
    file = tmp_path / "all.jsonl"
    file.write_text("\n".join(map(json.dumps, records)))
    said, error = run("ingest", corpus, file)
    assert "3 documents (0 replaced, 0 failed)" in said
    assert f"{file}: without text, so not stored: n0, n1, n2, all.jsonl#6, all.jsonl#7" in error
    assert names(stack, corpus) == ["all.jsonl#8", "n3", "n4"]
    done = stack.client.ingest(corpus, "more.jsonl", '{"id": "x", "text": ""}\n"text"', prefix="p/")
    assert (done.documents, done.without_text) == (1, ("p/x",))
    (summary,) = (json.loads(line) for line in run("ingest", corpus, file, "--json")[0].splitlines()[-1:])
    assert (summary["documents"], summary["without_text"]) == (3, 5)


@pytest.mark.parametrize("text", ["", " \n"])
def test_an_empty_file_is_named_and_not_stored(
    run: Run, stack: Stack, corpus: str, tmp_path: Path, text: str
) -> None:
    docs = folder(tmp_path, empty_txt="once full", good_txt="good")
    run("ingest", corpus, docs)
    (docs / "empty.txt").write_text(text)
    said, error = run("ingest", corpus, docs)
    assert "1 documents (1 replaced, 0 failed)" in said
    assert error == f"fusionkv: {docs / 'empty.txt'}: without text, so not stored: empty.txt\n"
    assert names(stack, corpus) == ["empty.txt", "good.txt"]
    run("ingest", corpus, docs, "--sync")
    assert names(stack, corpus) == ["good.txt"]


@pytest.mark.parametrize(("id", "name"), [("1.0", "1.0"), ("7", "7"), ("-2.5", "-2.5"), ("0", "0"), ('"1"', "1")])
def test_ids_are_numbers_or_strings(id: str, name: str, stack: Stack, corpus: str) -> None:
    stack.client.ingest(corpus, "a.jsonl", f'{{"id": {id}, "text": "x"}}')
    assert names(stack, corpus) == [name]


@pytest.mark.parametrize("id", ["true", "[1]", "{}", "NaN", "Infinity", "1e999"])
def test_other_ids_are_refused(id: str, stack: Stack, corpus: str) -> None:
    with pytest.raises(Exception, match='line 1 has an "id" that is neither a string nor a number'):
        stack.client.ingest(corpus, "a.jsonl", f'{{"id": {id}, "text": "x"}}')


def test_the_address_may_come_from_the_environment(
    stack: Stack, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSIONKV_GATEWAY", stack.gateway.address)
    assert cli.main(["list", "--json"]) == 0
    assert cli.main(["list", "--gateway", "unix:/nowhere"]) == 1, "a flag takes precedence"
    monkeypatch.setenv("FUSIONKV_GATEWAY", "")
    with pytest.raises(SystemExit):
        cli.main(["list", "--help"])
    assert "FUSIONKV_GATEWAY, else 127.0.0.1:7072" in " ".join(capsys.readouterr().out.split())
    monkeypatch.setenv("FUSIONKV_GATEWAY", "nonsense")
    assert cli.main(["list"]) == 2
    assert "'nonsense' is not a gateway's address" in capsys.readouterr().err
    with Client(stack.gateway.address) as client:
        assert os.fspath(client.address) == stack.gateway.address
