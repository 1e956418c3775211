"""Editors find definitions and references in the files of a clone, by the language server of pyright."""

import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SERVER = Path(sys.executable).parent / "pyright-langserver"
# Enough of the project to ask about; the less there is, the sooner pyright answers.
FOLDERS = ("gateway/api", "gateway/client", "protos/runtime")
EXAMPLE, ERRORS = "examples/python_client.py", "protos/runtime/errors.py"


class Editor:
    """Asks a language server about the files below `root`."""

    def __init__(self, root: Path, server: "subprocess.Popen[bytes]") -> None:
        self._root, self._server, self._numbers = root, server, itertools.count(1)
        folder = {"uri": root.as_uri(), "name": root.name}
        self._ask("initialize", processId=None, rootUri=root.as_uri(), workspaceFolders=[folder], capabilities={})
        self._send(method="initialized", params={})

    def places(self, method: str, file: str, word: str, **more: Any) -> set[str]:
        """Paths below the root, with line numbers, that answer a question about the first `word` of a file."""
        path = self._root / file
        before, _, _ = path.read_text().partition(word)
        document = {"uri": path.as_uri(), "languageId": "python", "version": 1, "text": path.read_text()}
        self._send(method="textDocument/didOpen", params={"textDocument": document})
        position = {"line": before.count("\n"), "character": len(before.rpartition("\n")[2]) + 1}
        found = self._ask(f"textDocument/{method}", textDocument=document, position=position, **more)
        prefix = f"{self._root.as_uri()}/"
        return {f"{p['uri'].removeprefix(prefix)}:{p['range']['start']['line'] + 1}" for p in found}

    def _ask(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        self._send(id=number, method=method, params=params)
        while True:
            message = self._receive()
            if message.get("id") == number and "method" not in message:
                return message["result"]
            if "id" in message:  # the server asks for settings, and is given none
                self._send(id=message["id"], result=None)

    def _send(self, **message: Any) -> None:
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        assert self._server.stdin is not None
        self._server.stdin.write(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        self._server.stdin.flush()

    def _receive(self) -> Any:
        assert self._server.stdout is not None
        size = 0
        while line := self._server.stdout.readline().strip():
            name, _, value = line.partition(b":")
            size = int(value) if name == b"Content-Length" else size
        return json.loads(self._server.stdout.read(size))


@contextmanager
def editor(root: Path) -> Iterator[Editor]:
    with subprocess.Popen([SERVER, "--stdio"], cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        try:
            yield Editor(root, server)
        finally:
            server.kill()


def line_of(file: Path, text: str) -> int:
    return file.read_text().partition(text)[0].count("\n") + 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fusionkv", "another"])
def test_definitions_and_references_are_files_of_the_clone(root: Path, tmp_path: Path, name: str) -> None:
    clone = tmp_path / name
    for folder in FOLDERS:
        shutil.copytree(root / folder, clone / folder)
    for file in ("pyproject.toml", EXAMPLE):
        (clone / file).parent.mkdir(exist_ok=True)
        shutil.copy(root / file, clone / file)
    opened = clone
    if name != "fusionkv":  # as `make setup` links it
        opened = clone / "build/paths/fusionkv"
        opened.parent.mkdir(parents=True)
        opened.symlink_to("../..")
    defined = f"{ERRORS}:{line_of(root / ERRORS, 'class NotFound')}"
    imported = f"{EXAMPLE}:{line_of(root / EXAMPLE, 'NotFound')}"
    with editor(opened) as asked:
        assert asked.places("definition", EXAMPLE, "NotFound") == {defined}
        client = line_of(root / "gateway/client/client.py", "class Client(")
        assert asked.places("definition", EXAMPLE, "Client,") == {f"gateway/client/client.py:{client}"}
        used = asked.places("references", ERRORS, "NotFound", context={"includeDeclaration": True})
        assert {defined, imported} <= used


def test_make_setup_links_the_clone_by_its_packages_name(root: Path) -> None:
    assert (root / "build/paths/fusionkv").samefile(root)
