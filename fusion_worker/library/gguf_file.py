"""Reads GGUF files, whole or split: metadata and tensors, with every length bounded by the file's bytes."""

import hashlib
import mmap
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from fusionkv.fusion_worker.library.cache import check_fetched
from fusionkv.protos.runtime.errors import FailedPrecondition

_NAMED = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})")
# struct's formats of the metadata's value types; 8 is a string, 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LONGEST_NAME = 1000
_ALIGNMENT = "general.alignment"


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as it is stored.

    Attributes:
        shape: outermost dimension first, as in torch.
        kind: number of the ggml type.
        data: its bytes, `[rows, bytes of a row]`, or `[bytes]` of a vector; a view of the file.
    """

    shape: tuple[int, ...]
    kind: int
    data: np.ndarray


@dataclass(frozen=True, slots=True)
class GgufModel:
    """Metadata and tensors of all parts. Values are numbers, strings, lists of strings, and arrays of numbers."""

    metadata: dict[str, Any]
    tensors: dict[str, Tensor]


def name_of(file: Path) -> str:
    """The name of a file's model: without the number of a part."""
    named = _NAMED.fullmatch(file.stem)
    return named["stem"] if named else file.stem


def parts_of(file: Path) -> list[Path]:
    """All parts of the model that a file belongs to, in order, by the names that llama.cpp gives them.

    Raises FailedPrecondition if parts are missing.
    """
    if not file.is_file():
        raise FailedPrecondition(f"there is no file {file}")
    named = _NAMED.fullmatch(file.stem)
    if named is None:
        return [file]
    number, count = int(named["number"]), int(named["count"])
    if not 1 <= number <= count:
        raise FailedPrecondition(f"{file} can't be part {number} of {count}: parts are counted from 1")
    parts = [file.with_name(f"{named['stem']}-{each:05}-of-{count:05}{file.suffix}") for each in range(1, count + 1)]
    if missing := [part.name for part in parts if not part.is_file()]:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise FailedPrecondition(
            f"{file} is part {number} of {count}, and {file.parent} lacks {', '.join(missing[:3])}{more}: put all "
            "parts into one folder"
        )
    return parts


def digest(parts: Sequence[Path]) -> str:
    """SHA-256 of a file, or over the SHA-256 of each of several parts; hexadecimal."""
    digests = []
    for part in parts:
        with part.open("rb") as stream:
            digests.append(hashlib.file_digest(stream, "sha256"))
    return (digests[0] if len(digests) == 1 else hashlib.sha256(b"".join(d.digest() for d in digests))).hexdigest()


def read(parts: Sequence[Path]) -> GgufModel:
    """Reads all parts of a model, as `parts_of` returns them.

    Raises FailedPrecondition if a part is no GGUF file, is damaged, or is not the part that its name says; or tensors
    of other parts are missing.
    """
    metadata: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    stated: dict[Path, Any] = {}
    for index, part in enumerate(parts):
        check_fetched(part)
        with part.open("rb") as stream:
            mapped: Any = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) if stream.seek(0, 2) else b""
        try:
            parsed = parse(np.frombuffer(mapped, dtype=np.uint8))
        except ValueError as error:
            raise FailedPrecondition(f"{part} is not a GGUF file, or is damaged: {error}") from error
        _check_place(part, parsed.metadata, index, len(parts))
        described = {key: value for key, value in parsed.metadata.items() if not key.startswith("split.")}
        for key, value in described.items():
            if index and key != _ALIGNMENT and not np.array_equal(metadata.get(key, ""), value):
                raise FailedPrecondition(
                    f"{part} has another {key} than {parts[0].name}: they are of different models"
                )
        metadata = metadata or described
        if twice := tensors.keys() & parsed.tensors:
            raise FailedPrecondition(f"{part} holds tensor {min(twice)}, which an earlier part holds too")
        tensors |= parsed.tensors
        stated[part] = parsed.metadata.get("split.tensors.count")
    for part, count in stated.items():
        if count not in (None, len(tensors)):
            raise FailedPrecondition(
                f"{part} says that the model has {count} tensors (split.tensors.count), but there are {len(tensors)} "
                f"in its {len(parts)} part(s)"
            )
    return GgufModel(metadata, tensors)


def _check_place(part: Path, metadata: dict[str, Any], index: int, count: int) -> None:
    """Raises FailedPrecondition unless a part's metadata says what its name says."""
    stated, number = metadata.get("split.count", 0), metadata.get("split.no", 0)
    if not (isinstance(stated, int) and isinstance(number, int)):
        raise FailedPrecondition(
            f"{part} has split.count = {stated!r} and split.no = {number!r}, which are no numbers"
        )
    if (max(1, stated), number) == (count, index):
        return
    if stated in (0, 1):
        raise FailedPrecondition(f"{part} is named as part {index + 1} of {count}, but says that it is whole")
    raise FailedPrecondition(
        f"{part} holds part {number + 1} of {stated} (split.no, split.count), but is not named so: give all parts "
        f"their names, this one NAME-{number + 1:05}-of-{stated:05}.gguf, and put them into one folder"
    )


class _Cursor:
    """Takes values from a file's bytes, front to back. Raises ValueError behind the end."""

    def __init__(self, data: np.ndarray) -> None:
        self._data, self.at = data, 0

    @property
    def left(self) -> int:
        return len(self._data) - self.at

    def take(self, size: int, what: str) -> np.ndarray:
        if size > self.left:
            raise ValueError(f"{what} at byte {self.at} takes {size} bytes, and the file ends after {self.left}")
        self.at += size
        return self._data[self.at - size : self.at]

    def number(self, form: str, what: str) -> Any:
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}"), what).data)[0]

    def count(self, form: str, size: int, what: str) -> int:
        """A number of things of at least `size` bytes each that follow."""
        number: int = self.number(form, what)
        if number * size > self.left:
            raise ValueError(f"{what} is {number}, and the file ends {self.left} bytes later")
        return number

    def text(self, what: str) -> str:
        taken = self.take(self.count("Q", 1, f"the length of {what}"), what).tobytes()
        try:
            return taken.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{what} is not UTF-8") from error

    def name(self, what: str) -> str:
        """Of a key or a tensor; errors show it in a terminal."""
        name = self.text(what)
        if not name.isprintable() or len(name) > _LONGEST_NAME:
            raise ValueError(f"{what} at byte {self.at} is no name: {name[:50]!r}")
        return name

    def value(self, kind: int, what: str) -> Any:
        if kind == _STRING:
            return self.text(what)
        if kind in _SCALARS:
            return self.number(_SCALARS[kind], what)
        if kind != _ARRAY:
            raise ValueError(f"{what} has the unknown type {kind}")
        kind = self.number("I", what)
        if kind == _STRING:
            return [self.text(what) for _ in range(self.count("Q", 8, f"the length of {what}"))]
        if kind not in _SCALARS:
            raise ValueError(f"{what} is an array of the unknown type {kind}")
        form = np.dtype(f"<{_SCALARS[kind]}" if kind != 7 else "?")
        size = self.count("Q", form.itemsize, f"the length of {what}")
        return self.take(size * form.itemsize, what).view(form)


def parse(data: np.ndarray) -> GgufModel:
    """Reads the bytes of one file, `[bytes]` of uint8. Raises ValueError if they make no sense."""
    cursor = _Cursor(data)
    if bytes(cursor.take(4, "the magic number")) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    version = cursor.number("I", "the version")
    if version not in (2, 3):
        raise ValueError(f"its version is {version}; versions 2 and 3 of little-endian machines can be read")
    # A tensor's name, shape, type and offset take at least 32 bytes, and a key with its value 13.
    tensor_count = cursor.count("Q", 32, "the number of tensors")
    metadata: dict[str, Any] = {}
    for _ in range(cursor.count("Q", 13, "the number of keys")):
        key = cursor.name("a key")
        if key in metadata:
            raise ValueError(f"it has {key} twice")
        metadata[key] = cursor.value(cursor.number("I", f"the type of {key}"), key)
    entries = [_entry(cursor) for _ in range(tensor_count)]
    alignment = metadata.get(_ALIGNMENT, 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & alignment - 1:
        raise ValueError(f"{_ALIGNMENT} is {alignment!r}, not a power of two")
    start = -(-cursor.at // alignment) * alignment
    return GgufModel(metadata, _tensors(entries, data[start:]))


def _entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape with the outermost dimension first, ggml type, and offset of a tensor."""
    name = cursor.name("the name of a tensor")
    dimensions = cursor.number("I", f"the number of dimensions of {name}")
    if not 1 <= dimensions <= 4:
        raise ValueError(f"{name} has {dimensions} dimensions")
    shape = tuple(cursor.number("Q", f"the shape of {name}") for _ in range(dimensions))
    return name, shape[::-1], cursor.number("I", f"the type of {name}"), cursor.number("Q", f"the offset of {name}")


def _tensors(entries: Sequence[tuple[str, tuple[int, ...], int, int]], data: np.ndarray) -> dict[str, Tensor]:
    from gguf import GGML_QUANT_SIZES

    sizes: dict[int, tuple[int, int]] = {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}
    tensors: dict[str, Tensor] = {}
    end = 0
    # In the order of their places: a few bytes that many tensors share could fill a disk.
    for name, shape, kind, offset in sorted(entries, key=lambda entry: entry[3]):
        if kind not in sizes:
            raise ValueError(f"{name} has the type {kind}, which this version of the package gguf does not know")
        block, block_bytes = sizes[kind]
        if not prod(shape) or shape[-1] % block:
            raise ValueError(f"{name} has the shape {list(shape)}, which its type can't have")
        size = prod(shape) // block * block_bytes
        if name in tensors or offset < end or offset + size > len(data):
            raise ValueError(
                f"the tensor {name} is there twice, overlaps another, or lies behind the end: the file ends early?"
            )
        end = offset + size
        tensors[name] = Tensor(shape, kind, data[offset:end].reshape(*shape[:-1], -1))
    return tensors
