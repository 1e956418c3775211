"""A parsed document, limits on its text and metadata, and documents in JSON lines."""

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fusionkv.protos.runtime.errors import InvalidArgument

# Characters of all keys and values.
_MAX_METADATA = 4096
# Field names in common data sets.
_IDS, _TEXTS = ("id", "_id"), ("text", "contents")
Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Document:
    """A document's text; name, title, metadata (sorted by key) and line are set for JSON lines only.

    A JSON line's text may be empty; then nothing of it is stored.
    """

    text: str
    markdown: bool = False
    name: str = ""
    title: str = ""
    metadata: Pairs = ()
    line: int = 0


def check_text(size: int, limit: int) -> None:
    """Raises InvalidArgument if a text of `size` characters or bytes exceeds the limit."""
    if size > limit:
        raise InvalidArgument(f"the document has more than {limit} bytes of text: split it, or raise max_text_bytes")


def metadata_pairs(metadata: Mapping[str, str]) -> Pairs:
    """Metadata as stored with chunks: pairs sorted by key. Raises InvalidArgument."""
    many = len(metadata) > _MAX_METADATA  # which need not be listed
    if many or sum(map(len, (*metadata.keys(), *metadata.values()))) > _MAX_METADATA:
        raise InvalidArgument(f"the metadata has more than {_MAX_METADATA} characters")
    if any(not key or "=" in key for key in metadata):
        raise InvalidArgument("a metadata key is empty or contains `=`")
    return tuple(sorted(metadata.items()))


def strings_of(metadata: Mapping[str, object]) -> dict[str, str]:
    """Metadata without null; values that are no strings as JSON, with letters as they are: filters compare it."""
    given = {key: value for key, value in metadata.items() if value is not None}
    return {key: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for key, v in given.items()}


@contextlib.contextmanager
def of_line(line: int) -> Iterator[None]:
    """Errors raised inside name the line of the document; 0: it is no line."""
    try:
        yield
    except InvalidArgument as error:
        raise InvalidArgument(f"line {line}: {error}" if line else str(error)) from None


def json_lines(text: str, first_line: int = 1) -> list[Document]:
    """The documents of JSON lines that are not blank; `first_line` is the number of the first line.

    Raises InvalidArgument if a line is not JSON, or does not have this form; the message names the line.
    """
    documents = []
    # Not splitlines: JSON strings may contain an unescaped U+2028.
    for number, line in enumerate(text.split("\n"), first_line):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(f"line {number} is not JSON: {error}") from error
        documents.append(_of_line(value, number))
    return documents


def _of_line(value: object, number: int) -> Document:
    if isinstance(value, str):
        return Document(_check_encodable(value, number), line=number)
    if not isinstance(value, dict):
        raise InvalidArgument(f"line {number} must be a JSON object or a string")
    text = next((value[name] for name in _TEXTS if value.get(name) is not None), None)
    if text is None and not value.keys().isdisjoint(_TEXTS):
        text = ""  # data sets write null for a text that is missing
    if not isinstance(text, str):
        raise InvalidArgument(f'line {number} must have a string "text" or "contents"')
    id = next((value[name] for name in _IDS if value.get(name) is not None), "")
    title = value.get("title") or ""
    metadata = value.get("metadata") or {}
    if isinstance(id, bool) or not isinstance(id, str | int | float) or id in (math.inf, -math.inf) or id != id:
        raise InvalidArgument(f'line {number} has an "id" that is neither a string nor a number')
    if not isinstance(title, str):
        raise InvalidArgument(f'line {number} has a "title" that is not a string')
    if not isinstance(metadata, dict):
        raise InvalidArgument(f'line {number} has "metadata" that is not an object')
    with of_line(number):
        pairs = metadata_pairs(strings_of(metadata))
    title = " ".join(title.split())
    _check_encodable("".join([text, str(id), title, *map("".join, pairs)]), number)
    return Document(text, False, str(id), title, pairs, number)


def _check_encodable(text: str, number: int) -> str:
    """The text, if it can be encoded: JSON escapes may contain half of a surrogate pair, which UTF-8 can't."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"line {number} contains half of a surrogate pair at {error.start}") from None
    return text
