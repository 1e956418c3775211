"""The folder of models that were fetched or converted: each appears in one step, whole, or not at all."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

# Moves the folder.
VARIABLE = "FUSIONKV_MODELS"


def root() -> Path:
    """$FUSIONKV_MODELS, or fusionkv/models in the user's data directory (XDG)."""
    if moved := os.environ.get(VARIABLE):
        return Path(moved)
    data = os.environ.get("XDG_DATA_HOME")
    return Path(data or Path.home() / ".local/share") / "fusionkv/models"


def make(target: Path, fill: Callable[[Path, Path], None], on_wait: Callable[[], None] = lambda: None) -> Path:
    """The directory `target`, filled first if it is not there.

    fill: called with a scratch folder and the folder that becomes `target` when it returns; whatever it raises leaves
        neither behind. on_wait: called when another process is filling it, before that one is waited for.

    Raises:
        OSError: the folder can't be written.
    """
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{target.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(lock, fcntl.LOCK_EX)
        if target.is_dir():
            return target
        # Of processes that were killed: whoever has the lock is alone.
        for left in target.parent.glob(f".{target.name}.partial-*"):
            shutil.rmtree(left)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
        try:
            made = scratch / "model"
            made.mkdir()
            fill(scratch, made)
            for file in made.rglob("*"):
                if file.is_file():
                    with file.open("rb") as written:
                        os.fsync(written.fileno())
            made.rename(target)
        finally:
            shutil.rmtree(scratch)
    return target


def name_of(directory: Path) -> str:
    """What people call the model of a directory."""
    absolute = directory.resolve()
    if absolute.parent.name == "snapshots":  # of the Hugging Face cache: models--ORG--NAME/snapshots/REVISION
        return absolute.parent.parent.name.split("--")[-1]
    return absolute.name
