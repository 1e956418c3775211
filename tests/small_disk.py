"""A file system of a few MiB, to be filled: a tmpfs in a mount namespace of its own."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class SmallDisk:
    """`inside` is its path for whoever is run by `before`, `outside` for everybody else."""

    inside: Path
    outside: Path
    before: tuple[str, ...]

    def fill(self, left: int = 0) -> None:
        """Takes all the room there is, but `left` bytes."""
        with self._ballast.open("wb", buffering=0) as file:
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(4096))
            file.truncate(max(0, file.tell() - left))

    def empty(self) -> None:
        """Gives the room back."""
        os.unlink(self._ballast)

    def read_only(self, folder: str = "") -> None:
        """Makes a folder read-only, whose files that are open stay as they are; or, without one, all of it."""
        target = str(self.inside / folder)
        if folder:
            subprocess.run([*self.before, "mount", "--bind", target, target], check=True)
        subprocess.run([*self.before, "mount", "-o", f"remount,ro{',bind' * bool(folder)}", target], check=True)

    def writable(self, folder: str = "") -> None:
        """Undoes `read_only`."""
        target = str(self.inside / folder)
        how = ("umount", target) if folder else ("mount", "-o", "remount,rw", target)
        subprocess.run([*self.before, *how], check=True)

    @property
    def _ballast(self) -> Path:
        return self.outside / "ballast"


@contextlib.contextmanager
def mounted(folder: Path, size: str) -> Iterator[SmallDisk]:
    """A disk at `folder`; the test is skipped where nothing can be mounted."""
    alone = ("unshare", "--map-root-user", "--mount")
    if not shutil.which("unshare") or subprocess.run([*alone, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no mounts: needs root, or user namespaces, and unshare (apt-get install util-linux)")
    # One process holds it open, so that it stays for the next ones.
    keeper = subprocess.Popen(
        [*alone, "sh", "-c", f"mount -t tmpfs -o size={size} none {folder} && echo mounted && exec sleep 600"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert keeper.stdout is not None
        if "mounted" not in keeper.stdout.readline():
            pytest.skip("a tmpfs can't be mounted here")
        before = ("nsenter", f"--target={keeper.pid}", "--user", "--mount")
        yield SmallDisk(folder, Path(f"/proc/{keeper.pid}/root{folder}"), before)
    finally:
        keeper.kill()
        keeper.wait()
