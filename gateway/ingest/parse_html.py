"""HTML to Markdown, by markdownify; what would make a small page large or slow is cut before it gets there."""

import re

from bs4 import BeautifulSoup, NavigableString, ParserRejectedMarkup, Tag
from markdownify import MarkdownConverter

from fusionkv.gateway.ingest.document import check_text
from fusionkv.protos.runtime.errors import InvalidArgument

_UNSEEN = ("head", "title", "script", "style", "noscript", "template", "svg")
_SPACES = re.compile(r"[\t \r\n]+")
_BLANK = re.compile(r"[ \n]+")
_OPENED = re.compile(r"<(?!!\[)")
_LINE = re.compile(r"^(?=.)", re.MULTILINE)
# Blanks in a row that <pre> keeps: markdownify takes the square of them.
_MOST_BLANKS = 100
# Columns that a cell may span, and all cells together beyond one each: markdownify writes each of them out.
_MOST_SPAN, _MOST_SPANS = 50, 2_000
# Rows of a table's head: at each of them markdownify counts all. A head of more is none.
_MOST_HEAD = 20
# Quotes and items within each other that are indented: each line takes as many marks as it is deep.
_MOST_DEPTH = 8
# As in CSS; a longer number would be written at every item, and indent each of its lines.
_MOST_START = (1 << 31) - 1


def markdown(text: str, most: int) -> str:
    """A page's text without what nobody sees, under its title. `most`: characters.

    Raises:
        InvalidArgument: its markup is broken or nested too deeply, or the Markdown would be longer.
    """
    # Where no tag ends any more none begins; html.parser looks through the whole rest at each.
    end = text.rfind(">") + 1
    text = text[:end] + _OPENED.sub("&lt;", text[end:])
    try:
        soup = BeautifulSoup(text, "html.parser")
        title = soup.title.get_text(strip=True) if soup.title else ""
        if title and not any(h1.find_parent(_UNSEEN) is None for h1 in soup("h1")):
            heading = soup.new_tag("h1")
            heading.string = title
            soup.insert(0, heading)
        _clamp_tables(soup)
        return _Converter(most).convert_soup(soup).strip()
    except ParserRejectedMarkup as error:
        raise InvalidArgument("the HTML can't be read: its markup is broken") from error
    except RecursionError as error:
        raise InvalidArgument("the HTML can't be read: its elements are nested too deeply") from error


def _clamp_tables(soup: BeautifulSoup) -> None:
    for head in soup("thead"):
        if len(head.find_all("tr", limit=_MOST_HEAD + 1)) > _MOST_HEAD:
            head.name = "tbody"
    left = _MOST_SPANS
    for cell in soup(["td", "th"], colspan=True):
        span = min(_number(cell["colspan"]) or 1, _MOST_SPAN, left + 1)
        left -= span - 1
        cell["colspan"] = str(span)


def _number(value: object) -> int | None:
    """Of an attribute; None unless it is a number as HTML writes it, of no absurd length."""
    text = str(value).strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 12 else None


class _Converter(MarkdownConverter):
    """Ends once the text is too long; each step adds little to what it was given."""

    def __init__(self, most: int) -> None:
        super().__init__(heading_style="ATX")
        self._most = most
        self._items: dict[int, int] = {}

    def process_tag(self, node: Tag, parent_tags: set[str] | None = None) -> str:
        if node.name in _UNSEEN:
            return ""
        text: str = super().process_tag(node, parent_tags)  # type: ignore[misc]
        check_text(len(text), self._most)
        return text

    def process_text(self, el: NavigableString, parent_tags: set[str] | None = None) -> str:
        # Here and not in the library, whose expression for this takes the square of a row of spaces.
        if "pre" not in (parent_tags or ()) and (text := _SPACES.sub(_newline_or_space, el)) != el:
            replaced = type(el)(text)
            el.replace_with(replaced)
            el = replaced
        found: str = super().process_text(el, parent_tags)  # type: ignore[misc]
        return found

    def convert_pre(self, el: Tag, text: str, parent_tags: set[str]) -> str:
        text = _BLANK.sub(lambda blanks: blanks[0][:_MOST_BLANKS], text)
        found: str = super().convert_pre(el, text, parent_tags)  # type: ignore[misc]
        return found

    def convert_blockquote(self, el: Tag, text: str, parent_tags: set[str]) -> str:
        if _is_deep(el):
            return f"\n{text.strip()}\n\n"
        found: str = super().convert_blockquote(el, text, parent_tags)  # type: ignore[misc]
        return found

    def convert_li(self, el: Tag, text: str, parent_tags: set[str]) -> str:
        """As the library's, which counts all items before each item of a numbered list."""
        if _is_deep(el):
            return text.strip() + "\n"
        if el.parent is None or el.parent.name != "ol":
            found: str = super().convert_li(el, text, parent_tags)  # type: ignore[misc]
            return found
        items = id(el.parent)
        if items not in self._items:
            start = _number(el.parent.get("start"))
            self._items[items] = 1 if start is None else min(start, _MOST_START)
        bullet = f"{self._items[items]}. "
        self._items[items] += 1
        if not (text := text.strip()):
            return "\n"
        return bullet + _LINE.sub(" " * len(bullet), text)[len(bullet) :] + "\n"


def _is_deep(el: Tag) -> bool:
    return len(el.find_parents(el.name, limit=_MOST_DEPTH)) == _MOST_DEPTH


def _newline_or_space(match: re.Match[str]) -> str:
    return "\n" if "\n" in match[0] or "\r" in match[0] else " "
