"""Where the services and their libraries keep files of a user, also for a user without a home directory."""

import os
import pwd
from pathlib import Path

# In the default folder of all data.
_HOMELESS = Path(".fusionkv")


def models() -> Path:
    """$XDG_DATA_HOME/fusionkv/models, or that in the home directory.

    Without a home directory that can be written to, as in a container with any uid, .fusionkv/models.
    """
    if data := os.environ.get("XDG_DATA_HOME"):
        return Path(data) / "fusionkv/models"
    return _below(".local/share/fusionkv/models") or (_HOMELESS / "models").absolute()


def settle() -> None:
    """Sets the variables of libraries that would use a home directory which is not there, or can't be written to.

    They are those of XDG, Triton and torch's compiler, which fails for a uid without an entry in passwd; Hugging Face
    follows XDG, as the tile shapes of our kernels do. Call it before these are imported.
    """
    kept = _below(".cache")
    if kept and _is_known():
        return
    cache = os.environ.setdefault("XDG_CACHE_HOME", str(kept or (_HOMELESS / "cache").absolute()))
    os.environ.setdefault("TRITON_CACHE_DIR", f"{cache}/triton")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{cache}/torchinductor")


def _below(path: str) -> Path | None:
    """A folder below the home directory; None without one, or if the folder is not there and can't be made."""
    try:
        folder = Path.home() / path
    except RuntimeError:  # HOME is not set, and the uid has no entry in passwd
        return None
    # Not `Path.exists`, which fails in another user's folder, as HOME may still be after a change of users.
    existing = next(each for each in (folder, *folder.parents) if os.path.exists(each))
    return folder if existing == folder or os.access(existing, os.W_OK) else None


def _is_known() -> bool:
    """Whether the uid has a name."""
    try:
        return bool(pwd.getpwuid(os.getuid()))
    except KeyError:
        return False
