"""The documents that paths on a command line mean."""

import contextlib
import glob
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

from fusionkv.gateway.ingest import json_lines, parse
from fusionkv.gateway.ingest.media_types import ENDINGS, JSONL
from fusionkv.protos.runtime.errors import InvalidArgument

STDIN = "-"
# Bytes of JSON lines that are sent together: enough for full batches of an embedder, and few for a progress bar.
_PART = 1 << 20


class UsageError(Exception):
    """Paths that mean nothing, or two documents of one name."""


def find(paths: Sequence[str], media_type: str, name: str = "") -> dict[str, Path]:
    """Files by document name: their path below the directory that was given, or their own name, in order.

    Of a directory, files with a known ending are taken, or all when the media type is given; hidden ones never.
    name: of the one file that there is. STDIN stands for standard input.

    Raises:
        UsageError: a path or glob that matches nothing, two files with one document name, or no name for what has
            none.
    """
    found: dict[str, Path] = {}
    for given in paths:
        count = 0
        for own, path in _expand(given, bool(media_type)):
            if given == STDIN and not name:
                raise UsageError("what is read from standard input (-) needs a --name")
            called = name or own
            if found.setdefault(called, path) != path:
                raise UsageError(
                    f"{found[called]} and {path} would both be document {called!r}: ingest them separately, "
                    "with --name or --prefix"
                )
            count += 1
        if not count:
            what = "holds no document" if os.path.isdir(given) else "does not exist"
            raise UsageError(f"{given} {what} (known endings: {' '.join(ENDINGS)})")
    return found


def parts(name: str, path: Path, media_type: str) -> Iterator[tuple[int, bytes]]:
    """What a file holds, with the number of the first line: whole, or JSON lines in parts of a megabyte.

    Raises:
        InvalidArgument: a JSON line is malformed, or two have the same id; or the media type is not known.
        OSError: it can't be read.
    """
    if parse.media_type(name, media_type) != JSONL:
        yield 1, read(path)
        return
    ids: dict[str, int] = {}
    number, start, size, lines = 1, 1, 0, list[bytes]()
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            if lines and size + len(line) > _PART:
                yield start, _checked(lines, start, ids)
                start, size, lines = number, 0, []
            lines.append(line)
            size += len(line)
    yield start, _checked(lines, start, ids)


def read(path: Path) -> bytes:
    with _opened(path) as file:
        return file.read()


def source(path: Path) -> str:
    """What tells a file from another one of its name; standard input has none."""
    return "" if str(path) == STDIN else str(path.resolve())


def _opened(path: Path) -> AbstractContextManager[BinaryIO]:
    return contextlib.nullcontext(sys.stdin.buffer) if str(path) == STDIN else path.open("rb")


def _checked(lines: Sequence[bytes], start: int, ids: dict[str, int]) -> bytes:
    content = b"".join(lines)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"the text is not UTF-8: {error}") from error
    for document in json_lines.documents(text, start):
        if document.name and ids.setdefault(document.name, document.line) != document.line:
            raise InvalidArgument(
                f"lines {ids[document.name]} and {document.line} have the same id {document.name!r}"
            )
    return content


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
