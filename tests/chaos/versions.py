"""Another version of the services: an earlier commit of this repository, to run beside what is here."""

import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

# What the three services import; tests and bench stay those that are here.
_PACKAGES = ("protos", "kvcache_service", "fusion_worker", "kernels", "gateway")
_CONTRACT = "protos/*/v1/*.proto"
_ROOT = Path(__file__).parents[2]
_WHERE = "import fusionkv.kvcache_service as made; print(*made.__path__)"
_FORMAT = """
from fusionkv.gateway.retrieval.base import ModelIdentity
from fusionkv.gateway.retrieval.table import schema_of
print(schema_of(ModelIdentity(b"", b""), 0).metadata[b"fusionkv.form"].decode())
"""


@dataclass(frozen=True)
class Version:
    """A commit whose packages lie below `folder`."""

    commit: str
    folder: Path

    @classmethod
    def made(cls, root: Path, folder: Path, revision: str = "") -> "Version":
        """Takes it out of the history of `root`: by default what was there before the protocol was last changed.

        Raises:
            RuntimeError: there is no such commit, as in a shallow clone, or it can't be used; the message says why.
        """
        try:
            if not revision:
                last = _git(root, "log", "-1", "--no-merges", "--format=%H", "--", _CONTRACT).decode().strip()
                if not last:
                    raise RuntimeError("no commit in this history has changed the protocol")
                revision = f"{last}^"
            commit = _git(root, "rev-parse", "--short", "--verify", f"{revision}^{{commit}}").decode().strip()
            packages = _git(root, "archive", "--prefix=fusionkv/", commit, *_PACKAGES)
            with tarfile.open(fileobj=io.BytesIO(packages)) as archive:
                archive.extractall(folder, filter="data")
            found = cls(commit, folder)
            found._generate()
            where = _run(folder, found.environment, sys.executable, "-P", "-c", _WHERE).decode().strip()
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", b"") or b""
            raise RuntimeError(f"no other version: {said.decode(errors='replace').strip() or error}") from error
        if where != str(folder / "fusionkv/kvcache_service"):
            raise RuntimeError(f"another version would not be imported: {where} comes first")
        return found

    @property
    def environment(self) -> Mapping[str, str]:
        """What makes a process import it, and not what is here."""
        return {"PYTHONPATH": str(self.folder)}

    def takes(self, module: str, flags: Iterable[str]) -> bool:
        """Whether its service has all of these settings."""
        known = _run(self.folder, self.environment, sys.executable, "-P", "-m", module, "--help").decode()
        return all(flag in known for flag in flags if flag.startswith("--"))

    def shares_corpora(self) -> bool:
        """Whether its gateway reads the corpora that this one writes, and this one its."""
        theirs = _run(self.folder, self.environment, sys.executable, "-P", "-c", _FORMAT)
        return theirs == _run(_ROOT, {}, sys.executable, "-P", "-c", _FORMAT)

    def _generate(self) -> None:
        """Its gRPC stubs, from its own protos."""
        code = "import pathlib, setup; setup.generate_stubs(pathlib.Path('fusionkv/protos'))"
        _run(self.folder, {"PYTHONPATH": str(_ROOT)}, sys.executable, "-P", "-c", code)


def _git(root: Path, *command: str) -> bytes:
    return _run(root, {}, "git", *command)


def _run(folder: Path, environment: Mapping[str, str], *command: str) -> bytes:
    return subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, check=True, capture_output=True
    ).stdout
