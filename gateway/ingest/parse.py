"""A document's bytes to its text, by media type."""

import io
import mimetypes
import sys
from pathlib import PurePosixPath

from fusionkv.gateway.ingest import json_lines
from fusionkv.gateway.ingest.document import Document, check_text
from fusionkv.gateway.ingest.media_types import ENDINGS, HTML, JSONL, MARKDOWN, MEDIA_TYPES, PDF
from fusionkv.protos.runtime.errors import InvalidArgument

# A document's text may be so many times as long as the document, and this long in any case. A compressed PDF comes
# near it; whatever else grows so much was made to.
MOST_GROWTH, LEAST_TEXT = 50, 1 << 20


def media_type(name: str, given: str = "") -> str:
    """The media type of a document, from what was given or else from the ending of its name.

    Raises:
        InvalidArgument: it is none that can be parsed.
    """
    if given:
        kind = given.partition(";")[0].strip().lower()
        if kind not in MEDIA_TYPES:
            raise InvalidArgument(f"unknown media type {given!r}; known: {', '.join(MEDIA_TYPES)}")
        return kind
    ending = PurePosixPath(name).suffix.lower()
    if ending not in ENDINGS:
        guessed = mimetypes.guess_type(name)[0]
        what = f"the ending {ending!r} ({guessed or 'unknown'})" if ending else "no ending"
        raise InvalidArgument(
            f"document {name!r} has {what}: can't tell its media type; give one of {', '.join(MEDIA_TYPES)}"
        )
    return ENDINGS[ending]


def most_text(size: int, most: int) -> int:
    """Bytes of text that a document of `size` bytes may have, where `most` is the most of any."""
    return min(most, max(LEAST_TEXT, MOST_GROWTH * size))


def parse(content: bytes, kind: str, most: int = sys.maxsize, first_line: int = 1) -> list[Document]:
    """The documents of a file: one, or as many as it has JSON lines. HTML becomes Markdown.

    Blocks, and holds the interpreter's lock; a service calls it in a process of its own (parser.py). `most`: bytes of
    text together. `first_line`: the number of the content's first.

    Raises:
        InvalidArgument: the content is not of media type `kind`, or holds no text or too much.
    """
    if kind == JSONL:
        found = json_lines.documents(_utf8(content), first_line)
    elif kind == PDF:
        found = [Document(_pdf(content, most))]
    elif kind == HTML:
        found = [Document(_html(content, most), markdown=True)]
    else:
        found = [Document(_utf8(content), kind == MARKDOWN)]
    found = [document for document in found if document.text.strip()]
    if not found:
        hint = "; a scanned PDF must go through text recognition first" if kind == PDF else ""
        raise InvalidArgument(f"no text in the document{hint}")
    check_text(sum(len(document.text.encode()) for document in found), most)
    return found


def _utf8(content: bytes, encoding: str = "utf-8") -> str:
    try:
        text = content.decode(encoding).removeprefix("\ufeff")
    except (UnicodeError, LookupError) as error:
        raise InvalidArgument(f"the text is not {encoding.upper()}: {error}") from error
    if "\0" in text:
        raise InvalidArgument(f"the text holds a NUL character at {text.index(chr(0))}: is it a binary file?")
    return text


def _html(content: bytes, most: int) -> str:
    from bs4.dammit import EncodingDetector

    from fusionkv.gateway.ingest.parse_html import markdown

    declared = EncodingDetector.find_declared_encoding(content, is_html=True)
    return markdown(_utf8(content, declared or "utf-8"), most)


def _pdf(content: bytes, most: int) -> str:
    from pypdf import PdfReader
    from pypdf.errors import DependencyError, FileNotDecryptedError

    # The head may stand a little way in, but a file without it is no PDF, whatever pypdf can guess out of it.
    if b"%PDF-" not in content[:1024]:
        raise InvalidArgument("the content is not a PDF: it does not begin with %PDF-")
    try:
        reader = PdfReader(io.BytesIO(content))
        if reader.is_encrypted and not reader.decrypt(""):
            raise InvalidArgument("the PDF is encrypted: remove its password first")
        pages: list[str] = []
        size = 0
        for page in reader.pages:
            pages.append(page.extract_text())
            size += len(pages[-1])
            check_text(size, most)
        return "\n\n".join(pages).replace("\0", "")
    except (FileNotDecryptedError, DependencyError) as error:
        raise InvalidArgument("the PDF is encrypted: remove its password first") from error
    except (InvalidArgument, MemoryError):
        raise
    except Exception as error:
        # Broken files make pypdf raise whatever their numbers lead to, a division by zero among others.
        raise InvalidArgument(f"the PDF can't be read: {error or type(error).__name__}") from error
