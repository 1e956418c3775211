"""Shortens documents before they are stored, for fewer tokens and less KV."""

import json

from fusionkv.gateway.ingest import parse
from fusionkv.gateway.ingest.document import Document
from fusionkv.gateway.ingest.media_types import JSONL, MARKDOWN, PLAIN
from fusionkv.protos.runtime.shorten import shorten


def document(name: str, content: bytes, given: str, omitted: float) -> tuple[str, str]:
    """Shortens a document's text by whole sentences.

    Blocks: call it in a thread.

    Args:
        given: media type; empty derives it from the name.
        omitted: share of the text to omit.

    Returns:
        The text and its media type: plain text, Markdown or JSON lines.

    Raises:
        InvalidArgument: as `parse.media_type` and `parse.parse`.
        FailedPrecondition: as `shorten`.
    """
    kind = parse.media_type(name, given)
    documents = parse.parse(content, kind)
    if kind != JSONL:
        return shorten(documents[0].text, omitted), MARKDOWN if documents[0].markdown else PLAIN
    lines = {document.line: _line(document, shorten(document.text, omitted)) for document in documents}
    # Keep the line numbers, which name documents without an id.
    return "\n".join(lines.get(number, "") for number in range(1, max(lines) + 1)), kind


def _line(document: Document, text: str) -> str:
    values = {"id": document.name, "title": document.title, "metadata": dict(document.metadata)}
    return json.dumps({**{key: value for key, value in values.items() if value}, "text": text})
