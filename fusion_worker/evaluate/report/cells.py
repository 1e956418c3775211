"""Cells (a recipe at a ratio) and their results, stored immediately in a JSON-lines file."""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fusionkv.fusion_worker.evaluate.data.samples import Block
from fusionkv.protos.contract.recipes import Recipe
from fusionkv.protos.contract.selectors import SecondModel


@dataclass(frozen=True, slots=True)
class Cell:
    """A recipe at a ratio."""

    recipe: Recipe
    ratio: float

    @property
    def specification(self) -> str:
        """Identifies the recipe's options, without its description and default values."""
        slots = [(f.name, getattr(self.recipe, f.name), f.default) for f in dataclasses.fields(self.recipe)]
        options = {name: repr(value) for name, value, usual in slots if value != usual and name != "description"}
        return hashlib.sha256(json.dumps(options).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return f"{self.recipe.name} r={self.ratio:g}"


@dataclass(frozen=True, slots=True)
class Subject:
    """A model and its execution, which identify a measurement together with cell and samples.

    auxiliary: fingerprint of the auxiliary model, for recipes that use one.
    """

    model: str
    fingerprint: str
    dtype: str
    chunk_tokens: int
    auxiliary: str = ""


@dataclass(frozen=True, slots=True)
class Measured:
    """The results of a cell over a block of samples: by metric, one number per sample."""

    values: Mapping[str, Sequence[float]]


# The question without passages, which shows how much answers depend on the context.
NO_CONTEXT = Cell(Recipe("no_context", "the prompt without its passages", encode=None), 0.0)
Key = tuple[str, ...]


def key(subject: Subject, block: Block, cell: Cell) -> Key:
    """The key of a measurement."""
    by_auxiliary = cell.recipe.needs == SecondModel()
    how = (subject.fingerprint, subject.dtype, str(subject.chunk_tokens), *[subject.auxiliary] * by_auxiliary)
    task = block.task
    if (cell.recipe.neighbours or cell.recipe.primed) and task.library is not None:
        how = (*how, task.library.digest)
    return (*how, task.name, str(block.start), block.digest, cell.specification, repr(cell.ratio))


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps other processes from measuring into a folder, which is made if missing. Raises OSError if one does."""
    folder.mkdir(parents=True, exist_ok=True)
    file = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise OSError(f"{folder} is in use by another process: give each one an --out of its own") from None
    finally:
        os.close(file)


class Store:
    """Measurements in a file, one per line. Incomplete lines of interrupted runs are ignored."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[Key, Measured] = {}
        if path.exists():
            for line in path.read_text(encoding="utf-8").split("\n"):
                if (read := _read(line)) is not None:
                    self._found[read[0]] = read[1]

    def __contains__(self, key: Key) -> bool:
        return key in self._found

    def __getitem__(self, key: Key) -> Measured:
        return self._found[key]

    def append(self, subject: Subject, block: Block, measured: Iterable[tuple[Cell, Measured]]) -> None:
        """Stores a block's cells, and writes them immediately."""
        lines = []
        for cell, m in measured:
            name = key(subject, block, cell)
            self._found[name] = m
            about = {"model": subject.model, "recipe": cell.recipe.name}
            lines.append(json.dumps({"key": name, **about, **dataclasses.asdict(m)}) + "\n")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as stream:
            # Ends an incomplete line of a killed run first.
            stream.write("".join(["\n" * _torn(self._path), *lines]))


def _read(line: str) -> tuple[Key, Measured] | None:
    try:
        record = json.loads(line)
        return tuple(record["key"]), Measured(record["values"])
    except (json.JSONDecodeError, KeyError, TypeError):
        return None


def _torn(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as stream:
        stream.seek(-1, 2)
        return stream.read(1) != b"\n"


def table(
    subject: Subject, blocks: Sequence[Block], cells: Sequence[Cell], store: Store
) -> Iterator[tuple[Cell, Measured]]:
    """Yields complete cells, joined over all blocks, with samples in order."""
    for cell in cells:
        names = [key(subject, block, cell) for block in blocks]
        if all(name in store for name in names):
            parts = [store[name].values for name in names]
            # Lines of an earlier version may lack a metric, which then is dropped: its mean would have fewer samples.
            known = [metric for metric in parts[0] if all(metric in part for part in parts)]
            yield cell, Measured({metric: [value for part in parts for value in part[metric]] for metric in known})
