"""Shortens documents before they are stored, for fewer tokens and less KV."""

import json

from fusionkv.gateway.ingest import parse
from fusionkv.gateway.ingest.document import Document
from fusionkv.gateway.ingest.media_types import JSONL, MARKDOWN, PLAIN
from fusionkv.protos.runtime.shorten import shorten


def document(name: str, content: bytes, given: str, omitted: float) -> tuple[str, str]:
    """Omits a share of a document's text, in whole sentences. Blocks: call it in a thread.

    Returns:
        The text and its media type: plain text, Markdown or JSON lines.

    Raises as `parse.media_type`, `parse.parse` and `shorten`.
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
