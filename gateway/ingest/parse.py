"""A document's bytes to its text, by media type."""

import io
import json
import mimetypes
import sys
from dataclasses import dataclass
from pathlib import PurePosixPath

from fusionkv.gateway.ingest.text_limit import check_text
from fusionkv.protos.runtime.errors import InvalidArgument

PLAIN, MARKDOWN, HTML, PDF, JSONL = (
    "text/plain",
    "text/markdown",
    "text/html",
    "application/pdf",
    "application/jsonl",
)
MEDIA_TYPES = (PLAIN, MARKDOWN, HTML, PDF, JSONL)
ENDINGS = {
    ".txt": PLAIN,
    ".text": PLAIN,
    ".md": MARKDOWN,
    ".markdown": MARKDOWN,
    ".html": HTML,
    ".htm": HTML,
    ".xhtml": HTML,
    ".pdf": PDF,
    ".jsonl": JSONL,
    ".ndjson": JSONL,
}
# A document's text may be so many times as long as the document, and this long in any case. A compressed PDF comes
# near it; whatever else grows so much was made to.
MOST_GROWTH, LEAST_TEXT = 50, 1 << 20


@dataclass(frozen=True)
class Section:
    """A piece of text that no chunk crosses the border of."""

    text: str
    markdown: bool


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


def parse(content: bytes, kind: str, most: int = sys.maxsize) -> list[Section]:
    """The sections of a document; HTML becomes Markdown, and each line of JSONL a section of its own.

    Blocks, and holds the interpreter's lock; a service calls it in a process of its own (parser.py). `most`: bytes of
    all sections together.

    Raises:
        InvalidArgument: the content is not of media type `kind`, or holds no text or too much.
    """
    if kind == PDF:
        sections = [Section(_pdf(content, most), False)]
    elif kind == HTML:
        sections = [Section(_html(content, most), True)]
    elif kind == JSONL:
        sections = [Section(text, False) for text in _jsonl(_utf8(content))]
    else:
        sections = [Section(_utf8(content), kind == MARKDOWN)]
    sections = [s for s in sections if s.text.strip()]
    if not sections:
        hint = "; a scanned PDF must go through text recognition first" if kind == PDF else ""
        raise InvalidArgument(f"no text in the document{hint}")
    check_text(sum(len(s.text.encode()) for s in sections), most)
    return sections


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


def _jsonl(text: str) -> list[str]:
    sections = []
    # Not splitlines: JSON strings may hold U+2028 unescaped.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(f"line {number} is not JSON: {error}") from error
        sections.append(_record(value, number))
    return sections


def _record(value: object, number: int) -> str:
    if isinstance(value, str):
        return _characters(value, number)
    if not isinstance(value, dict):
        raise InvalidArgument(f"line {number} is neither a JSON object nor a string")
    text = value.get("text", value.get("contents"))
    if not isinstance(text, str):
        raise InvalidArgument(f'line {number} has no string under "text" or "contents"')
    title = value.get("title")
    whole = f"{title}\n\n{text}" if isinstance(title, str) and title.strip() and title not in text else text
    return _characters(whole, number)


def _characters(text: str, number: int) -> str:
    """The text, unless it holds half a character: JSON may escape one, and nothing else can carry it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"line {number} holds half of a surrogate pair at {error.start}") from None
    return text
