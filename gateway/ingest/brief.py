"""Documents shortened before they are stored: fewer tokens, and so less KV, of the same document."""

import json

from fusionkv.gateway.ingest import parse
from fusionkv.gateway.ingest.document import Document
from fusionkv.gateway.ingest.media_types import JSONL, MARKDOWN, PLAIN
from fusionkv.protos.runtime.shorten import shorten


def document(name: str, content: bytes, given: str, left_out: float) -> tuple[str, str]:
    """A document's text without the share `left_out`, and its media type: text, Markdown, or JSON lines as before.

    Blocks; call it from a thread.

    Raises:
        InvalidArgument: as `parse.media_type` and `parse.parse`.
        FailedPrecondition: as `shorten`.
    """
    kind = parse.media_type(name, given)
    found = parse.parse(content, kind)
    if kind != JSONL:
        return shorten(found[0].text, left_out), MARKDOWN if found[0].markdown else PLAIN
    lines = {document.line: _line(document, shorten(document.text, left_out)) for document in found}
    # In their places: a line without an id is called by its number.
    return "\n".join(lines.get(number, "") for number in range(1, max(lines) + 1)), kind


def _line(document: Document, text: str) -> str:
    known = {"id": document.name, "title": document.title, "metadata": dict(document.metadata)}
    return json.dumps({**{key: value for key, value in known.items() if value}, "text": text})
