"""The folder of the embedded retrieval engine: a table for each corpus, and those that are rebuilt or deleted."""

import fcntl
import os
import shutil
import uuid
from pathlib import Path

from fusionkv.protos.runtime.process import data_folder

# Corpora may have the names "." and "..".
_PREFIX = "corpus-"


def table_name(corpus: str) -> str:
    return _PREFIX + corpus


class CorpusFolder:
    """Owned by one process until it is closed. Tables come and go by being renamed, which is atomic."""

    def __init__(self, path: Path) -> None:
        """Locks the folder, which is created if necessary.

        Raises OSError if the folder can't be written, or another gateway has it open.
        """
        data_folder(path, "lock")
        self._lock = (path / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise OSError(f"{path} is in use by another gateway: stop it, or set another data_dir") from error
        # Absolute, because LanceDB takes some relative paths for names in its cloud.
        path = path.absolute()
        self.corpora, self._deleted = path / "corpora", path / "deleted"
        # A corpus that is rebuilt is in _moving; once complete, it waits in _moved to replace the old one.
        self._moving, self._moved = path / "moving", path / "moved"

    def close(self) -> None:
        self._lock.close()

    def tables(self) -> list[tuple[str, Path]]:
        """The corpora with their tables."""
        return [(table.stem.removeprefix(_PREFIX), table) for table in _tables(self.corpora)]

    def clean(self) -> None:
        """Finishes or removes what interrupted changes left."""
        self._finish_moves()
        _remove(*_in(self._deleted), *_in(self._moving))
        for table in _tables(self.corpora):
            # Its first commit, which has no rows, did not finish.
            if not any(table.glob("_versions/*")) and not any(table.glob("data/*")):
                shutil.rmtree(table)

    def discard(self, corpus: str) -> None:
        """Deletes a corpus's table."""
        self._set_aside(self.corpora / f"{table_name(corpus)}.lance")
        _remove(*_in(self._deleted))  # leftovers are removed with the next one, or at the next start

    def staging(self) -> Path:
        """A folder for a table that is rebuilt; it is not created."""
        return self._moving / uuid.uuid4().hex

    def unstage(self, staging: Path) -> None:
        """Removes what a rebuilding has left."""
        _remove(staging, *_in(self._deleted))

    def place(self, staged: Path, corpus: str) -> None:
        """Puts a table in the place of a corpus's."""
        moved = self._moved / f"{table_name(corpus)}.lance"
        moved.parent.mkdir(exist_ok=True)
        os.rename(staged, moved)
        try:
            self._finish_moves()
        except OSError:
            _remove(moved)  # otherwise the next start would finish the move
            raise

    def _finish_moves(self) -> None:
        """Finishes moves, also those that a gateway left when it ended before their last step."""
        for moved in _tables(self._moved):
            place = self.corpora / moved.name
            if place.exists():
                self._set_aside(place)
            os.rename(moved, place)

    def _set_aside(self, table: Path) -> None:
        self._deleted.mkdir(exist_ok=True)
        os.rename(table, self._deleted / uuid.uuid4().hex)


def _tables(folder: Path) -> list[Path]:
    """The tables in a folder. Other files are not touched."""
    return [table for table in folder.glob(f"{_PREFIX}*.lance") if table.is_dir()]


def _in(folder: Path) -> list[Path]:
    return [*folder.iterdir()] if folder.is_dir() else []


def _remove(*folders: Path) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
