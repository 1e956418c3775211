"""The folder of fetched and converted models. A model's directory appears atomically, once it is complete."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

# Environment variable that sets the folder.
VARIABLE = "FUSIONKV_MODELS"


def root() -> Path:
    """$FUSIONKV_MODELS, or fusionkv/models in the user's data directory (XDG)."""
    if moved := os.environ.get(VARIABLE):
        return Path(moved)
    data = os.environ.get("XDG_DATA_HOME")
    return Path(data or Path.home() / ".local/share") / "fusionkv/models"


def make(target: Path, fill: Callable[[Path, Path], None], on_wait: Callable[[], None] = lambda: None) -> Path:
    """Fills a directory unless it exists.

    Args:
        target: the directory.
        fill: called with a scratch folder, and with the folder that becomes `target` when it returns. Both are
            removed if it raises.
        on_wait: called before waiting for another process that fills the same directory.

    Returns:
        `target`.

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
        # Left by processes that were killed: with the lock held, no other process is filling this directory.
        for leftover in target.parent.glob(f".{target.name}.partial-*"):
            shutil.rmtree(leftover)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
        try:
            model_folder = scratch / "model"
            model_folder.mkdir()
            fill(scratch, model_folder)
            for file in model_folder.rglob("*"):
                if file.is_file():
                    with file.open("rb") as written:
                        os.fsync(written.fileno())
            model_folder.rename(target)
        finally:
            shutil.rmtree(scratch)
    return target


def name_of(directory: Path) -> str:
    """The name of a directory's model: its last part, or the repository's name in the Hugging Face cache."""
    absolute = directory.resolve()
    if absolute.parent.name == "snapshots":  # in the Hugging Face cache: models--ORG--NAME/snapshots/REVISION
        return absolute.parent.parent.name.split("--")[-1]
    return absolute.name
