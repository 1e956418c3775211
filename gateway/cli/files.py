"""Finds and reads the documents that command-line paths name."""

import contextlib
import functools
import glob
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from fusionkv.gateway.cli import shown
from fusionkv.gateway.cli.connect import UsageError
from fusionkv.gateway.client.requests import MAX_CONTENT, source_of
from fusionkv.gateway.client.results import Item
from fusionkv.gateway.ingest import parse
from fusionkv.gateway.ingest.document import json_lines
from fusionkv.gateway.ingest.media_types import ENDINGS, JSONL
from fusionkv.gateway.ingest.text import is_blank
from fusionkv.protos.runtime.errors import InvalidArgument

STDIN = "-"
# Bytes and number of JSON lines per call: enough to fill an embedder's batches, few enough for a smooth progress bar,
# and for the gateway's limit of 10,000 chunks.
_PART, _LINES = 1 << 20, 4096
# In a source, before the prefix of its documents' names.
_MARK = " --prefix "


class File(NamedTuple):
    """A file to store, and where its documents come from; empty for standard input."""

    path: Path
    source: str


@dataclass(frozen=True)
class Part:
    """A part of a file, not to be sent if it has no documents.

    Attributes:
        first_line: number of its first line in the file.
        documents: names of its documents that have text, without the prefix.
        without_text: names of those that have none.
    """

    first_line: int
    content: bytes
    documents: tuple[str, ...]
    without_text: tuple[str, ...] = ()


def find(
    paths: Sequence[str], media_type: str, name: str = "", on_error: Callable[[OSError], object] | None = None
) -> dict[str, File]:
    """Finds files by paths, globs and directories.

    Hidden files in directories are skipped, and without a media type also files with an unknown ending.

    Args:
        name: document name, for a single path; STDIN (standard input) requires it.
        on_error: is called for each folder in a directory that can't be read.

    Returns:
        Files by document name, in order. The name is the path below the directory given, or the file's own name;
        bytes that are no UTF-8 become escapes.

    Raises:
        UsageError: a path is empty, a path or glob matches nothing, two files have the same document name, or STDIN
            has no name.
    """
    files: dict[str, File] = {}
    if "" in paths:  # which pathlib takes for the current folder
        raise UsageError("a PATH is empty: name a file or a folder, such as . for the current one")
    for pattern in paths:
        count = 0
        for default, path in _expand(pattern, bool(media_type), on_error):
            if pattern == STDIN and not name:
                raise UsageError("standard input (-) needs --name")
            document = name or shown.name(default)
            # A file that two of the paths name comes from the first.
            file = files.setdefault(document, File(path, _source(pattern, default, path)))
            if file.path != path:
                raise UsageError(
                    f"{file.path} and {path} would both be document {document!r}: ingest them separately, with "
                    "--name or --prefix"
                )
            count += 1
        if not count:
            endings = "" if media_type else f" (known endings: {' '.join(ENDINGS)})"
            reason = f"contains no documents{endings}" if os.path.isdir(pattern) else "does not exist"
            raise UsageError(f"{pattern} {reason}")
    return files


def skipped(paths: Sequence[str], media_type: str) -> list[Path]:
    """Files in the given directories that `find` leaves out because their ending is unknown."""
    folders = [] if media_type else filter(os.path.isdir, paths)
    return [file for path in folders for _, file in _expand(path, True) if file.suffix.lower() not in ENDINGS]


def vanished(
    items: Iterable[Item], paths: Sequence[str], current: Mapping[str, set[str]], prefix: str, media_type: str
) -> list[str]:
    """Names of a corpus's documents that came from these paths, and are no longer there.

    Args:
        paths: files and folders, as `find` has taken them.
        current: the names of the documents that the paths have now, by source.
        prefix: of the documents' names. Documents that were stored with another one are kept.

    Raises:
        UsageError: a path is a glob or standard input, which do not say what has been there.
    """
    if unclear := [path for path in paths if path == STDIN or not os.path.exists(path)]:
        raise UsageError(f"--sync takes files and folders, and {unclear[0]} is neither")
    end = mark(prefix)
    folders = {source_of(path, " ").rstrip(" "): path for path in paths if os.path.isdir(path)}
    whole = {source_of(path) for path in paths}

    def gone(item: Item) -> bool:
        source, marked, other = item.source.partition(_MARK)
        if marked + other != end or not (source in whole or source.startswith((*folders,))):
            return False
        if item.source not in current:  # nor skipped this time, as hidden or for its ending
            inside = [(start, path) for start, path in folders.items() if source.startswith(start)]
            return not any(os.path.isfile(os.path.join(path, source.removeprefix(start))) for start, path in inside)
        # Of a file without text, all vanish. Otherwise, only of a file with many documents, one may vanish: any other
        # may have been stored with another --name.
        ending = os.path.splitext(source)[1].lower()
        has_many = JSONL in (media_type, ENDINGS.get(ending))
        return not current[item.source] or (has_many and item.name not in current[item.source])

    return [item.name for item in items if gone(item)]


def mark(prefix: str) -> str:
    """The end of the sources of documents that are stored with this prefix."""
    return f"{_MARK}{prefix}" if prefix else ""


def parts(name: str, path: Path, media_type: str) -> Iterator[Part]:
    """Reads a file: at once, or JSON lines in parts of at most about 1 MiB.

    Raises:
        InvalidArgument: a document is larger than any gateway accepts, a JSON line is malformed, two lines have the
            same id, or the media type is unknown.
        OSError: the file can't be read.
    """
    if parse.media_type(name, media_type) != JSONL:
        with _opened(path) as file:
            content = _of_length(file.read(MAX_CONTENT + 1))
        yield Part(1, content, (name,)) if content.strip() else Part(1, content, (), (name,))
        return
    ids: dict[str, int] = {}
    start, size, lines = 1, 0, list[bytes]()
    with _opened(path) as file:
        read = functools.partial(file.readline, MAX_CONTENT + 1)
        for number, line in enumerate(map(_of_length, iter(read, b"")), 1):
            if lines and (size + len(line) > _PART or len(lines) == _LINES):
                yield _checked(name, lines, start, ids)
                start, size, lines = number, 0, []
            lines.append(line)
            size += len(line)
    yield _checked(name, lines, start, ids)


def _source(pattern: str, inside: str, path: Path) -> str:
    if pattern == STDIN:
        return ""
    return source_of(pattern, inside) if os.path.isdir(pattern) else source_of(path)


def _opened(path: Path) -> AbstractContextManager[BinaryIO]:
    return contextlib.nullcontext(sys.stdin.buffer) if str(path) == STDIN else path.open("rb")


def _of_length(content: bytes) -> bytes:
    """What was read, if it is not too long: of a file of any size, no more is read into memory."""
    if len(content) > MAX_CONTENT:
        raise InvalidArgument(f"the document has more than {MAX_CONTENT} bytes; gateways accept no more")
    return content


def _checked(name: str, lines: Sequence[bytes], start: int, ids: dict[str, int]) -> Part:
    content = b"".join(lines)
    documents = json_lines(parse.utf8(content), start)
    for document in documents:
        if document.name and ids.setdefault(document.name, document.line) != document.line:
            raise InvalidArgument(
                f"lines {ids[document.name]} and {document.line} have the same id {document.name!r}"
            )
    named = [(document.name or f"{name}#{document.line}", not is_blank(document.text)) for document in documents]
    full, empty = (tuple(name for name, has_text in named if has_text is expected) for expected in (True, False))
    return Part(start, content, full, empty)


def _expand(
    pattern: str, everything: bool, on_error: Callable[[OSError], object] | None = None
) -> Iterable[tuple[str, Path]]:
    path = Path(pattern)
    if pattern == STDIN:
        yield "", path
    elif path.is_dir():
        for file in sorted(_walk(path, on_error)):
            if file.is_file() and (everything or file.suffix.lower() in ENDINGS):
                yield file.relative_to(path).as_posix(), file
    elif path.exists():
        yield path.name, path
    else:
        for match in sorted(glob.glob(pattern, recursive=True)):
            if os.path.isfile(match):
                yield Path(match).name, Path(match)


def _walk(folder: Path, on_error: Callable[[OSError], object] | None) -> Iterator[Path]:
    """What is in a folder and in those below it, but hidden files and folders, and links to folders."""
    for parent, folders, files in os.walk(folder, onerror=on_error):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(parent, name) for name in files if not name.startswith("."))
