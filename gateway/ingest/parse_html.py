"""Converts HTML to Markdown with markdownify, and limits input that would take too much time or memory."""

import re
from collections import defaultdict
from typing import Any

from bs4 import BeautifulSoup, NavigableString, ParserRejectedMarkup, ProcessingInstruction, Tag
from bs4.builder._htmlparser import BeautifulSoupHTMLParser, HTMLParserTreeBuilder
from markdownify import MarkdownConverter

from fusionkv.gateway.ingest.document import check_text
from fusionkv.gateway.ingest.hidden import is_hidden
from fusionkv.gateway.ingest.text import is_inline
from fusionkv.protos.runtime.errors import InvalidArgument

_SPACES = re.compile(r"[\t \r\n]+")
_BLANK = re.compile(r"[ \n]+")
# Not a marked section of a name that html.parser refuses.
_OPENED = re.compile(r"<(?!!\[(?!(?:temp|cdata|ignore|include|rcdata|if|else|endif)\b))", re.IGNORECASE)
_LINE = re.compile(r"^(?=.)", re.MULTILINE)
# Consecutive blanks kept in <pre>: markdownify's time is quadratic in them.
_MAX_BLANKS = 100
# Rows of a table's head: at each of them, markdownify counts all. A longer head becomes part of the body.
_MAX_HEAD = 20
# Levels of nested quotes and lists that are indented: each level adds a mark to every line.
_MAX_DEPTH = 8
# CSS's limit; each item and its indentation would be as wide as a longer number.
_MAX_START = (1 << 31) - 1
# Cells of a page that are added because one of an earlier row spans their rows.
_MAX_SPANNED = 10_000
# Blocks whose text markdownify would join with the text beside them.
_BLOCKS = [
    *("address", "aside", "center", "details", "dialog", "fieldset", "figure", "footer", "form", "header", "hgroup"),
    *("legend", "main", "optgroup", "option", "search", "summary"),
]
# End tags that pages may leave out, which html.parser leaves to its users: the elements that a start tag ends, up to
# the list or table in which it is.
_ROW = ("tr", "td", "th")
_PART = ("thead", "tbody", "tfoot", *_ROW)
_ENDS = {
    **{name: (name,) for name in ("p", "li", "option", "ruby")},
    **dict.fromkeys(("dt", "dd"), ("dt", "dd")),
    **dict.fromkeys(("td", "th"), ("td", "th")),
    **dict.fromkeys(("rt", "rp"), ("rt", "rp")),
    **dict.fromkeys(("thead", "tbody", "tfoot"), _PART),
    "tr": _ROW,
}
_LISTS = {"ul", "ol", "menu", "dl", "table", "select"}
# Attributes that markdownify writes as addresses.
_URLS = ("src", "href", "poster")


def markdown(text: str, limit: int) -> str:
    """Converts a page's visible text to Markdown of at most `limit` characters, headed by its title.

    Raises InvalidArgument if the markup is broken or nested too deeply, or the Markdown exceeds the limit.
    """
    # Behind the last `>`, `<` opens no tag, but html.parser would search the whole rest at each.
    end = text.rfind(">") + 1
    text = text[:end] + _OPENED.sub("&lt;", text[end:])
    try:
        soup = BeautifulSoup(text, builder=_Builder())
        titles = (title.get_text(strip=True) for title in soup("title") if not title.find_parent("svg"))
        title = next(titles, "")
        if title and not any(map(_is_shown, soup("h1"))):
            heading = soup.new_tag("h1")
            heading.string = title
            soup.insert(0, heading)
        for block in soup(_BLOCKS):
            if not is_hidden(block.name, block.attrs):
                block.name = "div"
        for head in soup("thead"):
            if len(head.find_all("tr", limit=_MAX_HEAD + 1)) > _MAX_HEAD:
                head.name = "tbody"
        _fill_rows(soup)
        _move_readings(soup)
        return _Converter(limit).convert_soup(soup).strip()
    except ParserRejectedMarkup as error:
        raise InvalidArgument("the HTML can't be read: its markup is broken") from error
    except RecursionError as error:
        raise InvalidArgument("the HTML can't be read: its elements are nested too deeply") from error


class _Parser(BeautifulSoupHTMLParser):
    def handle_starttag(self, tag: str, attrs: Any, handle_empty_element: bool = True) -> None:
        ended = ""
        for one in reversed(self.soup.tagStack if tag in _ENDS else ()):
            if one.name in _ENDS[tag]:
                ended = one.name
            elif one.name in _LISTS:
                break
        if ended:
            self.soup.handle_endtag(ended)
        super().handle_starttag(tag, attrs, handle_empty_element)
        # bs4 searches it at each end tag: with many `<br>`, the time would be quadratic.
        self.already_closed_empty_element.clear()


class _Builder(HTMLParserTreeBuilder):
    def feed(self, markup: Any, _parser_class: type[BeautifulSoupHTMLParser] = _Parser) -> None:
        super().feed(markup, _parser_class)


def _is_shown(heading: Tag) -> bool:
    elements = (heading, *heading.parents)
    return bool(heading.get_text(strip=True)) and not any(is_hidden(el.name, el.attrs) for el in elements)


def _fill_rows(soup: BeautifulSoup) -> None:
    """Adds empty cells to rows where cells of earlier rows reach down to them, so that columns stay columns."""
    remaining = _MAX_SPANNED
    for part in soup(["table", "thead", "tbody", "tfoot"]):
        until: dict[int, int] = {}  # by column, the first row that no cell of an earlier one reaches
        rows = (row for row in part("tr", recursive=False) if not is_hidden(row.name, row.attrs))
        for number, row in enumerate(rows):
            cells = [cell for cell in row(["td", "th"], recursive=False) if not is_hidden(cell.name, cell.attrs)]
            column = 0
            for cell in (*cells, None):
                while remaining and until.get(column, 0) > number:
                    empty = soup.new_tag("td")
                    if cell is None:
                        row.append(empty)
                    else:
                        cell.insert_before(empty)
                    remaining -= 1
                    column += 1
                if cell is not None:
                    for _ in range(_span(cell, "colspan")):
                        until[column] = number + _span(cell, "rowspan")
                        column += 1


def _move_readings(soup: BeautifulSoup) -> None:
    """Puts readings of Japanese or Chinese behind the words above which they are shown: each would split its word."""
    readings = defaultdict[int, list[Tag]](list)
    for part in soup(["rt", "rp"]):
        if part.parent is not None and part.parent.name == "ruby":
            readings[id(part.parent)].append(part)
    for parts in readings.values():
        reading = "".join(part.get_text(strip=True) for part in parts if part.name == "rt")
        parts.pop().replace_with(f"({reading})" if reading else "")
        for part in parts:
            part.extract()


def _span(cell: Tag, name: str) -> int:
    match = re.match(r"\s*([1-9]\d{0,3})", str(cell.get(name)))
    return int(match[1]) if match else 1


class _Converter(MarkdownConverter):
    """Converts within the limit: each step checks the length, and adds little to its input."""

    def __init__(self, limit: int) -> None:
        # The text is read by models and searched, and not rendered: a backslash would only change its words.
        super().__init__(heading_style="ATX", escape_asterisks=False, escape_underscores=False)
        self._limit = limit
        self._items: dict[int, int] = {}

    def process_tag(self, node: Tag, parent_tags: set[str] | None = None) -> str:
        if is_hidden(node.name, node.attrs):
            return ""
        for name in _URLS:
            if is_inline(str(node.attrs.get(name, ""))):
                del node[name]
        text: str = super().process_tag(node, parent_tags)  # type: ignore[misc]
        check_text(len(text), self._limit)
        return text

    def process_text(self, el: NavigableString, parent_tags: set[str] | None = None) -> str:
        if isinstance(el, ProcessingInstruction):  # of XHTML: <?xml version="1.0"?>
            return ""
        # The regular expression of markdownify takes quadratic time for a row of spaces.
        if "pre" not in (parent_tags or ()) and (text := _SPACES.sub(_newline_or_space, el)) != el:
            replaced = type(el)(text)
            el.replace_with(replaced)
            el = replaced
        return str(super().process_text(el, parent_tags))  # type: ignore[misc]

    def convert_img(self, el: Tag, text: str, parent_tags: set[str]) -> str:
        if not el.get("src"):  # the image was in the page
            return str(el.get("alt") or "")
        return str(super().convert_img(el, text, parent_tags))  # type: ignore[misc]

    def convert_pre(self, el: Tag, text: str, parent_tags: set[str]) -> str:
        text = _BLANK.sub(lambda blanks: blanks[0][:_MAX_BLANKS], text)
        return str(super().convert_pre(el, text, parent_tags))  # type: ignore[misc]

    def convert_blockquote(self, el: Tag, text: str, parent_tags: set[str]) -> str:
        if _is_deep(el):
            return f"\n{text.strip()}\n\n"
        return str(super().convert_blockquote(el, text, parent_tags))  # type: ignore[misc]

    def convert_li(self, el: Tag, text: str, parent_tags: set[str]) -> str:
        """As markdownify's, which would count all items before each item of a numbered list."""
        if _is_deep(el):
            return text.strip() + "\n"
        if el.parent is None or el.parent.name != "ol":
            return str(super().convert_li(el, text, parent_tags))  # type: ignore[misc]
        items = id(el.parent)
        if items not in self._items:
            start = str(el.parent.get("start"))
            is_number = start.isascii() and start.isdigit() and len(start) < 12
            self._items[items] = min(int(start), _MAX_START) if is_number else 1
        bullet = f"{self._items[items]}. "
        self._items[items] += 1
        if not (text := text.strip()):
            return "\n"
        return bullet + _LINE.sub(" " * len(bullet), text)[len(bullet) :] + "\n"


def _is_deep(el: Tag) -> bool:
    return len(el.find_parents(el.name, limit=_MAX_DEPTH)) == _MAX_DEPTH


def _newline_or_space(match: re.Match[str]) -> str:
    return "\n" if "\n" in match[0] or "\r" in match[0] else " "
