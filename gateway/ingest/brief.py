"""Documents shortened before they are stored: fewer tokens, and so less KV, of the same document."""

import json
from collections.abc import Callable

from fusionkv.gateway.ingest import parse
from fusionkv.protos.runtime.shorten import shorten


def document(name: str, read: Callable[[], bytes], given: str, left_out: float) -> tuple[str, str]:
    """A document's text without the share `left_out`, and its media type: text, Markdown, or JSON lines as before.

    Blocks; call it from a thread.

    Raises:
        InvalidArgument: as `parse.media_type` and `parse.parse`.
        FailedPrecondition: as `shorten`.
    """
    kind = parse.media_type(name, given)
    sections = parse.parse(read(), kind)
    texts = [shorten(section.text, left_out) for section in sections]
    if kind == parse.JSONL:
        return "\n".join(map(json.dumps, texts)), kind
    return "\n\n".join(texts), parse.MARKDOWN if sections[0].markdown else parse.PLAIN
