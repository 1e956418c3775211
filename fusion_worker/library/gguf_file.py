"""Reads GGUF files, whole or split: metadata and tensors, with every length bounded by the file's bytes.

The reader of transformers 5.23 takes one file, ignores how RoPE is scaled, and lacks Q5_0 and Q5_1; that of gguf does
not bound lengths.
"""

import hashlib
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
    counts = list[int]()
    for index, part in enumerate(parts):
        check_fetched(part)
        try:
            parsed = parse(np.asarray(np.memmap(part, mode="r")))
            stated, number = (_number(parsed.metadata, f"split.{key}", 0) for key in ("count", "no"))
            counts.append(_number(parsed.metadata, "split.tensors.count", -1))
        except ValueError as error:
            raise FailedPrecondition(f"{part.name} is not a GGUF file, or is damaged: {error}") from error
        if (max(1, stated), number) != (len(parts), index):
            raise FailedPrecondition(
                f"{part.name} holds part {number + 1} of {max(1, stated)} (split.no, split.count), but is not named "
                "so: give all parts their names, NAME-00001-of-00003.gguf, and put them into one folder"
            )
        described = {key: value for key, value in parsed.metadata.items() if not key.startswith("split.")}
        for key, value in described.items():
            if index and key != _ALIGNMENT and not np.array_equal(metadata.get(key, ""), value):
                raise FailedPrecondition(
                    f"{part.name} has another {key} than {parts[0].name}: they are of different models"
                )
        metadata = metadata or described
        if twice := tensors.keys() & parsed.tensors:
            raise FailedPrecondition(f"{part.name} holds tensor {min(twice)}, which an earlier part holds too")
        tensors |= parsed.tensors
    if wrong := {*counts} - {-1, len(tensors)}:
        raise FailedPrecondition(
            f"a part says that the model has {min(wrong)} tensors (split.tensors.count), but all hold {len(tensors)}"
        )
    return GgufModel(metadata, tensors)


def _number(metadata: dict[str, Any], key: str, default: int) -> int:
    value = metadata.get(key, default)
    if type(value) is not int:
        raise ValueError(f"{key} is {value!r}, no number")
    return value


class _Cursor:
    """Takes values from a file's bytes, front to back. Raises ValueError behind the end, before it takes memory."""

    def __init__(self, data: memoryview) -> None:
        self._data, self.at = data, 0

    def take(self, form: str) -> tuple[Any, ...]:
        """Values in a format of struct."""
        try:
            found = struct.unpack_from(f"<{form}", self._data, self.at)
        except struct.error as error:
            raise ValueError(f"what begins at byte {self.at} ends behind the file") from error
        self.at += struct.calcsize(f"<{form}")
        return found

    def text(self) -> str:
        (size,) = self.take("Q")
        text: bytes = self.take(f"{size}s")[0]
        return text.decode()

    def value(self) -> Any:
        (kind,) = self.take("I")
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.take(_form(kind))[0]
        kind, size = self.take("IQ")
        if kind == _STRING:
            return [self.text() for _ in range(size)]
        return np.array(self.take(f"{size}{_form(kind)}"))


def _form(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"a value has the unknown type {kind}")
    return _SCALARS[kind]


def parse(data: np.ndarray) -> GgufModel:
    """Reads the bytes of one file, `[bytes]` of uint8. Raises ValueError if they make no sense."""
    cursor = _Cursor(data.data)
    magic, version, tensor_count, key_count = cursor.take("4sIQQ")
    if magic != b"GGUF" or version not in (2, 3):
        raise ValueError("it does not begin with GGUF and a version of 2 or 3")
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = cursor.text()
        if key in metadata:
            raise ValueError(f"it has {key} twice")
        metadata[key] = cursor.value()
    entries = []
    for _ in range(tensor_count):
        name, (dimensions,) = cursor.text(), cursor.take("I")
        shape = cursor.take(f"{dimensions}Q")
        entries.append((name, shape[::-1], *cursor.take("IQ")))
    if (alignment := _number(metadata, _ALIGNMENT, 32)) < 1:
        raise ValueError(f"{_ALIGNMENT} is {alignment}")
    start = -(-cursor.at // alignment) * alignment
    return GgufModel(metadata, _tensors(entries, data[start:]))


def _tensors(entries: Sequence[tuple[str, tuple[int, ...], int, int]], data: np.ndarray) -> dict[str, Tensor]:
    """entries: name, shape with the outermost dimension first, ggml type and offset of each tensor."""
    from gguf import GGML_QUANT_SIZES

    sizes: dict[int, tuple[int, int]] = {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}
    tensors: dict[str, Tensor] = {}
    end = 0
    # In the order of their places: a few bytes that many tensors share could fill a disk.
    for name, shape, kind, offset in sorted(entries, key=lambda entry: entry[3]):
        if kind not in sizes:
            raise ValueError(f"{name} has the type {kind}, which this version of the package gguf does not know")
        block, block_bytes = sizes[kind]
        if not shape or not prod(shape) or shape[-1] % block:
            raise ValueError(f"{name} has the shape {list(shape)}, which its type can't have")
        size = prod(shape) // block * block_bytes
        if name in tensors or offset < end or offset + size > len(data):
            raise ValueError(
                f"the tensor {name} is there twice, overlaps another, or lies behind the end: the file ends early?"
            )
        end = offset + size
        tensors[name] = Tensor(shape, kind, data[offset:end].reshape(*shape[:-1], -1))
    return tensors
