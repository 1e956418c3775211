"""The documents that paths on a command line mean."""

import glob
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from fusionkv.gateway.ingest.parse import ENDINGS


class UsageError(Exception):
    """Paths that mean nothing, or two documents of one name."""


def find(paths: Sequence[str], media_type: str) -> dict[str, Path]:
    """Files by document name: their path below the directory that was given, or their own name, in order.

    Of a directory, files with a known ending are taken, or all when the media type is given; hidden ones never.

    Raises:
        UsageError: a path or glob that matches nothing, or two files with one document name.
    """
    found: dict[str, Path] = {}
    for given in paths:
        count = 0
        for name, path in _expand(given, bool(media_type)):
            if found.setdefault(name, path) != path:
                raise UsageError(f"{found[name]} and {path} would both be document {name!r}: ingest them separately")
            count += 1
        if not count:
            what = "holds no document" if os.path.isdir(given) else "does not exist"
            raise UsageError(f"{given} {what} (known endings: {' '.join(ENDINGS)})")
    return found


def _expand(given: str, everything: bool) -> Iterable[tuple[str, Path]]:
    path = Path(given)
    if path.is_dir():
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
