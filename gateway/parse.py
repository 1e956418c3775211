"""A document's bytes to its text, by media type."""

import io
import json
import mimetypes
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from fusionkv.protos.errors import InvalidArgument

if TYPE_CHECKING:
    from bs4 import BeautifulSoup

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


def parse(content: bytes, kind: str) -> list[Section]:
    """The sections of a document; HTML becomes Markdown, and each line of JSONL a section of its own.

    Blocks; call it from a thread.

    Raises:
        InvalidArgument: the content is not of media type `kind`, or holds no text.
    """
    if kind == PDF:
        sections = [Section(_pdf(content), False)]
    elif kind == HTML:
        sections = [Section(_html(content), True)]
    elif kind == JSONL:
        sections = [Section(text, False) for text in _jsonl(_utf8(content))]
    else:
        sections = [Section(_utf8(content), kind == MARKDOWN)]
    sections = [s for s in sections if s.text.strip()]
    if not sections:
        hint = "; a scanned PDF must go through text recognition first" if kind == PDF else ""
        raise InvalidArgument(f"no text in the document{hint}")
    return sections


def _utf8(content: bytes, encoding: str = "utf-8") -> str:
    try:
        text = content.decode(encoding).removeprefix("\ufeff")
    except (UnicodeError, LookupError) as error:
        raise InvalidArgument(f"the text is not {encoding.upper()}: {error}") from error
    if "\0" in text:
        raise InvalidArgument(f"the text holds a NUL character at {text.index(chr(0))}: is it a binary file?")
    return text


def _html(content: bytes) -> str:
    from bs4 import BeautifulSoup, ParserRejectedMarkup
    from bs4.dammit import EncodingDetector

    declared = EncodingDetector.find_declared_encoding(content, is_html=True)
    text = _utf8(content, declared or "utf-8")
    try:
        return _markdown(BeautifulSoup(text, "html.parser"))
    except ParserRejectedMarkup as error:
        raise InvalidArgument("the HTML can't be read: its markup is broken") from error
    except RecursionError as error:
        raise InvalidArgument("the HTML can't be read: its elements are nested too deeply") from error


def _markdown(soup: "BeautifulSoup") -> str:
    from markdownify import MarkdownConverter

    title = soup.title.get_text(strip=True) if soup.title else ""
    for tag in soup(["head", "title", "script", "style", "noscript", "template", "svg"]):
        tag.decompose()
    if title and not soup.find("h1"):
        heading = soup.new_tag("h1")
        heading.string = title
        soup.insert(0, heading)
    return MarkdownConverter(heading_style="ATX").convert_soup(soup).strip()


def _pdf(content: bytes) -> str:
    from pypdf import PdfReader
    from pypdf.errors import DependencyError, FileNotDecryptedError

    # The head may stand a little way in, but a file without it is no PDF, whatever pypdf can guess out of it.
    if b"%PDF-" not in content[:1024]:
        raise InvalidArgument("the content is not a PDF: it does not begin with %PDF-")
    try:
        reader = PdfReader(io.BytesIO(content))
        if reader.is_encrypted and not reader.decrypt(""):
            raise InvalidArgument("the PDF is encrypted: remove its password first")
        return "\n\n".join(page.extract_text() for page in reader.pages).replace("\0", "")
    except (FileNotDecryptedError, DependencyError) as error:
        raise InvalidArgument("the PDF is encrypted: remove its password first") from error
    except InvalidArgument:
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
