"""Converts a document's bytes to text, by media type."""

import mimetypes
import re
import sys
from dataclasses import replace
from pathlib import PurePosixPath

from fusionkv.gateway.ingest.document import Document, check_text, json_lines
from fusionkv.gateway.ingest.media_types import ENDINGS, HTML, JSONL, MARKDOWN, MEDIA_TYPES, PDF
from fusionkv.gateway.ingest.text import normal, without_images
from fusionkv.protos.runtime.errors import InvalidArgument

# Maximum ratio of a document's text to its size, and the text that is allowed in any case. Compressed PDFs come near
# the ratio; other documents exceed it only by design.
MAX_GROWTH, MIN_TEXT = 50, 1 << 20
_WIDE = re.compile(r"utf[-_]?(16|32)", re.IGNORECASE)


def media_type(name: str, explicit: str = "") -> str:
    """The media type of a document: the given one, or its ending's. Raises InvalidArgument if there is none."""
    if explicit:
        kind = explicit.partition(";")[0].strip().lower()
        if kind not in MEDIA_TYPES:
            raise InvalidArgument(f"unknown media type {explicit!r}; known: {', '.join(MEDIA_TYPES)}")
        return kind
    ending = PurePosixPath(name).suffix.lower()
    if ending not in ENDINGS:
        guessed = mimetypes.guess_type(name)[0]
        reason = f"the ending {ending!r} ({guessed or 'unknown'})" if ending else "no ending"
        raise InvalidArgument(
            f"document {name!r} has {reason}: the media type is unknown; set it (--media-type) to one of "
            f"{', '.join(MEDIA_TYPES)}"
        )
    return ENDINGS[ending]


def max_text(size: int, limit: int) -> int:
    """Maximum bytes of text of a document of `size` bytes; `limit` is the maximum of any document."""
    return min(limit, max(MIN_TEXT, MAX_GROWTH * size))


def parse(content: bytes, kind: str, limit: int = sys.maxsize, first_line: int = 1) -> list[Document]:
    """The documents of a file: one, or one per JSON line, some of which may have no text. HTML becomes Markdown.

    Texts are in NFC and hold no inline images, and Markdown nothing that its readers do not see.

    Blocks and holds the GIL: a service calls it in a separate process (parser.py).

    Args:
        kind: media type.
        limit: maximum bytes of text of all documents.
        first_line: number of the content's first line.

    Raises:
        InvalidArgument: the content is not of media type `kind`, or has no text or too much.
    """
    if kind == JSONL:
        documents = json_lines(utf8(content), first_line)
    elif kind == PDF:
        from fusionkv.gateway.ingest.parse_pdf import pdf

        documents = [Document(pdf(content, limit))]
    elif kind == HTML:
        documents = [Document(_html(content, limit), markdown=True)]
    else:
        documents = [Document(utf8(content), kind == MARKDOWN)]
    documents = [_cleaned(document, kind) for document in documents]
    if not any(document.text.strip() for document in documents):
        hint = "; a scanned PDF needs text recognition first" if kind == PDF else ""
        raise InvalidArgument(f"the document contains no text{hint}")
    check_text(sum(len(document.text.encode()) for document in documents), limit)
    return documents


def _cleaned(document: Document, kind: str) -> Document:
    text = document.text
    if kind == MARKDOWN:
        from fusionkv.gateway.ingest.parse_markdown import visible

        text = visible(text)
    return replace(document, text=normal(without_images(text)), title=normal(document.title).strip())


def utf8(content: bytes, encoding: str = "utf-8") -> str:
    try:
        text = content.decode(encoding).removeprefix("\ufeff")
    except (ValueError, LookupError) as error:
        raise InvalidArgument(f"the text is not {encoding.upper()} and must be converted first: {error}") from error
    if "\0" in text:
        raise InvalidArgument(f"the text contains a NUL character at {text.index(chr(0))}: is it a binary file?")
    return text


def _html(content: bytes, limit: int) -> str:
    import webencodings
    from bs4.dammit import EncodingDetector

    from fusionkv.gateway.ingest.parse_html import markdown

    content, encoding = EncodingDetector.strip_byte_order_mark(content)
    if not encoding:
        encoding = EncodingDetector.find_declared_encoding(content, is_html=True) or "utf-8"
        # As browsers read it: ISO-8859-1 has the quotation marks of Windows, and GB2312 all characters of GBK.
        if (known := webencodings.lookup(encoding)) and known.name != "replacement":
            encoding = known.codec_info.name
        # Without a byte order mark, a text whose declaration can be read is not in UTF-16, whatever that says.
        if _WIDE.match(encoding):
            encoding = "utf-8"
    return markdown(utf8(content, encoding), limit)
