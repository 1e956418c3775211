"""The folder of fetched and converted models, and the name and fingerprint of a model's directory.

A directory appears atomically, once it is complete.
"""

import fcntl
import glob
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from fusionkv.fusion_worker.library.directory import shards
from fusionkv.protos.runtime import folders
from fusionkv.protos.runtime.errors import FailedPrecondition

# Environment variable that sets the folder.
VARIABLE = "FUSIONKV_MODELS"
# Files beside the weights that decide token ids, or what is computed of them.
_IDENTITY = (
    *("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    *("added_tokens.json", "special_tokens_map.json"),
)
_LFS = b"version https://git-lfs.github.com/spec/"


def root() -> Path:
    """$FUSIONKV_MODELS, or fusionkv/models in the user's data directory (XDG).

    Without a home directory that can be written to, as in a container with any uid: .fusionkv/models.
    """
    moved = os.environ.get(VARIABLE)
    return Path(moved) if moved else folders.models()


def make(target: Path, fill: Callable[[Path, Path], None], on_wait: Callable[[], None] = lambda: None) -> Path:
    """Fills a directory unless it exists, and returns it. Raises OSError.

    Args:
        fill: called with a scratch folder, and with the folder that becomes `target` when it returns. Both are
            removed if it raises.
        on_wait: called before waiting for another process that fills the same directory.
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
        for leftover in target.parent.glob(f".{glob.escape(target.name)}.partial-*"):
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


def check_fetched(file: Path) -> None:
    """Raises FailedPrecondition if a file is a pointer of Git LFS instead of what it points to."""
    with file.open("rb") as stream:
        if stream.read(len(_LFS)) == _LFS:
            raise FailedPrecondition(
                f"{file} is a pointer of Git LFS, not the file itself: run `git lfs pull` in its repository"
            )


def name_of(directory: Path) -> str:
    """The name of a directory's model: its last part, or the repository's name in the Hugging Face cache."""
    absolute = directory.resolve()
    if absolute.parent.name == "snapshots":  # in the Hugging Face cache: models--ORG--NAME/snapshots/REVISION
        return absolute.parent.parent.name.split("--")[-1]
    return absolute.name


def fingerprint(directory: Path) -> bytes:
    """SHA-256 over the names and bytes of configuration, weights and tokenizer files, in the order of their names."""
    hasher = hashlib.sha256()
    for file in sorted(_identity_files(directory)):
        hasher.update(json.dumps([str(file.relative_to(directory)), file.stat().st_size]).encode())
        with file.open("rb") as stream:
            hasher.update(hashlib.file_digest(stream, "sha256").digest())
    return hasher.digest()


def _identity_files(directory: Path) -> Iterator[Path]:
    weights = {*directory.glob("*.safetensors"), *filter(Path.is_file, shards(directory))}
    # Mistral's repositories hold all weights once more under this name, which transformers does not load, and not
    # every host has.
    yield from [file for file in weights if not file.name.startswith("consolidated")] or weights
    for name in _IDENTITY:
        if (directory / name).is_file():
            yield directory / name
