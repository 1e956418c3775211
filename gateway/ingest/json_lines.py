"""JSON lines: each is a document, with a text and perhaps an id, a title and metadata."""

import json

from fusionkv.gateway.ingest.document import Document, metadata_pairs
from fusionkv.protos.runtime.errors import InvalidArgument

# Under these names data sets have them.
_IDS, _TEXTS = ("id", "_id"), ("text", "contents")


def documents(text: str, first_line: int = 1) -> list[Document]:
    """Of all lines that hold something; `first_line` is the number of the first.

    Raises:
        InvalidArgument: a line is not JSON, or not of this form; it names the line.
    """
    found = []
    # Not splitlines: JSON strings may hold U+2028 unescaped.
    for number, line in enumerate(text.split("\n"), first_line):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(f"line {number} is not JSON: {error}") from error
        found.append(_document(value, number))
    return found


def _document(value: object, number: int) -> Document:
    if isinstance(value, str):
        return Document(_characters(value, number), line=number)
    if not isinstance(value, dict):
        raise InvalidArgument(f"line {number} is neither a JSON object nor a string")
    text = next((value[name] for name in _TEXTS if value.get(name) is not None), None)
    if not isinstance(text, str) or not text.strip():
        raise InvalidArgument(f'line {number} has no string under "text" or "contents", or an empty one')
    id = next((value[name] for name in _IDS if value.get(name) is not None), "")
    title = value.get("title") or ""
    metadata = value.get("metadata") or {}
    if isinstance(id, bool) or not isinstance(id, str | int):
        raise InvalidArgument(f'line {number} has an "id" that is neither a string nor a whole number')
    if not isinstance(title, str):
        raise InvalidArgument(f'line {number} has a "title" that is no string')
    if not isinstance(metadata, dict):
        raise InvalidArgument(f'line {number} has "metadata" that is no object')
    told = {key: v if isinstance(v, str) else json.dumps(v) for key, v in metadata.items() if v is not None}
    try:
        pairs = metadata_pairs(told)
    except InvalidArgument as error:
        raise InvalidArgument(f"line {number}: {error}") from None
    title = " ".join(title.split())
    _characters("".join([text, str(id), title, *map("".join, pairs)]), number)
    return Document(text, False, str(id), title, pairs, number)


def _characters(text: str, number: int) -> str:
    """The text, unless it holds half a character: JSON may escape one, and nothing else can carry it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"line {number} holds half of a surrogate pair at {error.start}") from None
    return text
