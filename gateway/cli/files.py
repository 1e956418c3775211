"""Finds and reads the documents that command-line paths name."""

import contextlib
import glob
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

from fusionkv.gateway.cli.connect import UsageError
from fusionkv.gateway.ingest import parse
from fusionkv.gateway.ingest.document import json_lines
from fusionkv.gateway.ingest.media_types import ENDINGS, JSONL
from fusionkv.protos.runtime.errors import InvalidArgument

STDIN = "-"
# Bytes of JSON lines per call: enough to fill an embedder's batches, few enough for a smooth progress bar.
_PART = 1 << 20


def find(paths: Sequence[str], media_type: str, name: str = "") -> dict[str, Path]:
    """Finds files by paths, globs and directories.

    Hidden files in directories are skipped, and without a media type also files with an unknown ending.

    Args:
        name: document name, for a single path; STDIN (standard input) requires it.

    Returns:
        Files by document name, in order. The name is the path below the directory given, or the file's own name.

    Raises:
        UsageError: a path or glob matches nothing, two files have the same document name, or STDIN has no name.
    """
    found: dict[str, Path] = {}
    for pattern in paths:
        count = 0
        for default, path in _expand(pattern, bool(media_type)):
            if pattern == STDIN and not name:
                raise UsageError("standard input (-) needs --name")
            document = name or default
            if found.setdefault(document, path) != path:
                raise UsageError(
                    f"{found[document]} and {path} would both be document {document!r}: ingest them separately, "
                    "with --name or --prefix"
                )
            count += 1
        if not count:
            endings = "" if media_type else f" (known endings: {' '.join(ENDINGS)})"
            reason = f"contains no documents{endings}" if os.path.isdir(pattern) else "does not exist"
            raise UsageError(f"{pattern} {reason}")
    return found


def skipped(paths: Sequence[str], media_type: str) -> list[Path]:
    """Files in the given directories that `find` leaves out because their ending is unknown."""
    folders = [] if media_type else filter(os.path.isdir, paths)
    return [file for path in folders for _, file in _expand(path, True) if file.suffix.lower() not in ENDINGS]


def parts(name: str, path: Path, media_type: str) -> Iterator[tuple[int, bytes]]:
    """Reads a file: at once, or JSON lines in parts of about 1 MiB.

    Yields:
        The number of the first line, and the content; no parts without text, unless the file has none.

    Raises:
        InvalidArgument: a JSON line is malformed, two lines have the same id, or the media type is unknown.
        OSError: the file can't be read.
    """
    if parse.media_type(name, media_type) != JSONL:
        with _opened(path) as file:
            yield 1, file.read()
        return
    ids: dict[str, int] = {}
    start, size, lines, sent = 1, 0, list[bytes](), False
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            if lines and size + len(line) > _PART:
                if content := _checked(lines, start, ids):
                    yield start, content
                    sent = True
                start, size, lines = number, 0, []
            lines.append(line)
            size += len(line)
    content = _checked(lines, start, ids)
    if content or not sent:
        yield start, content


def source(path: Path) -> str:
    """The absolute path, which distinguishes files of the same name; empty for standard input."""
    return "" if str(path) == STDIN else str(path.resolve())


def _opened(path: Path) -> AbstractContextManager[BinaryIO]:
    return contextlib.nullcontext(sys.stdin.buffer) if str(path) == STDIN else path.open("rb")


def _checked(lines: Sequence[bytes], start: int, ids: dict[str, int]) -> bytes:
    """The content of these lines; empty if they have no text, which a gateway refuses."""
    content = b"".join(lines)
    documents = json_lines(parse.utf8(content), start)
    for document in documents:
        if document.name and ids.setdefault(document.name, document.line) != document.line:
            raise InvalidArgument(
                f"lines {ids[document.name]} and {document.line} have the same id {document.name!r}"
            )
    return content if any(document.text.strip() for document in documents) else b""


def _expand(given: str, everything: bool) -> Iterable[tuple[str, Path]]:
    path = Path(given)
    if given == STDIN:
        yield "", path
    elif path.is_dir():
        for file in sorted(path.rglob("*")):
            inside = file.relative_to(path)
            hidden = any(part.startswith(".") for part in inside.parts)
            if file.is_file() and not hidden and (everything or file.suffix.lower() in ENDINGS):
                yield inside.as_posix(), file
    elif path.exists():
        yield path.name, path
    else:
        for match in sorted(glob.glob(given, recursive=True)):
            if os.path.isfile(match):
                yield Path(match).name, Path(match)
