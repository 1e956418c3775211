"""Converts HTML to Markdown with markdownify, and limits input that would take too much time or memory."""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from bs4 import BeautifulSoup, NavigableString, ParserRejectedMarkup, ProcessingInstruction, Tag
from bs4.builder._htmlparser import BeautifulSoupHTMLParser, HTMLParserTreeBuilder
from bs4.element import PageElement
from markdownify import MarkdownConverter

from fusionkv.gateway.ingest.document import check_text
from fusionkv.gateway.ingest.hidden import hidden
from fusionkv.gateway.ingest.text import is_inline
from fusionkv.protos.runtime.errors import InvalidArgument

_SPACES = re.compile(r"[\t \r\n]+")
_BLANK = re.compile(r"[ \n]+")
# Not a marked section of a name that html.parser refuses.
_OPENED = re.compile(r"<(?!!\[(?!(?:temp|cdata|ignore|include|rcdata|if|else|endif)\b))", re.IGNORECASE)
_LINE = re.compile(r"^(?=.)", re.MULTILINE)
# Consecutive blanks kept in <pre>: markdownify's time is quadratic in them.
_MAX_BLANKS = 100
# Columns that a cell may span, and columns that all cells together may span beyond their first: markdownify writes
# every one of them.
_MAX_SPAN, _MAX_SPANS = 50, 2_000
# Cells of a page that are written empty because one of an earlier row spans them.
_MAX_SPANNED = 10_000
# Rows of a table's head: at each of them, markdownify counts all. A longer head becomes part of the body.
_MAX_HEAD = 20
# Blocks whose text markdownify would join with the text beside them.
_BLOCKS = [
    *("address", "aside", "center", "details", "dialog", "fieldset", "figure", "footer", "form", "header", "hgroup"),
    *("legend", "main", "optgroup", "option", "search", "summary"),
]
# What start tags end if it is open, which html.parser leaves to its users; and elements that hold on to what is open
# around them.
_PARAGRAPH, _TERMS, _CELLS, _ROWS = {"p"}, {"dt", "dd", "p"}, {"td", "th"}, {"tr", "td", "th"}
_PARTS = {"thead", "tbody", "tfoot", *_ROWS}
_ENDS = {
    **dict.fromkeys([*_BLOCKS, "article", "blockquote", "div", "dl", "figcaption", "hr", "menu", "nav"], _PARAGRAPH),
    **dict.fromkeys(["h1", "h2", "h3", "h4", "h5", "h6", "ol", "p", "pre", "section", "table", "ul"], _PARAGRAPH),
    **dict.fromkeys(["dt", "dd"], _TERMS),
    **dict.fromkeys(["td", "th"], _CELLS),
    **dict.fromkeys(["thead", "tbody", "tfoot"], _PARTS),
    "tr": _ROWS,
    "li": {"li", "p"},
    "option": {"option"},
    "optgroup": {"option", "optgroup"},
    "a": {"a"},
    "button": {"button"},
}
_SCOPES = {
    *("article", "aside", "blockquote", "button", "caption", "details", "dialog", "dl", "fieldset", "figure"),
    *("footer", "form", "header", "main", "math", "menu", "nav", "object", "ol", "section", "select", "svg"),
    *("table", "tbody", "td", "template", "tfoot", "th", "thead", "tr", "ul"),
}
# Open elements that are searched at a start tag.
_MAX_OPEN = 32
# Attributes that markdownify writes as addresses.
_URLS = ("src", "href", "poster")
# Levels of nested quotes and lists that are indented: each level adds a mark to every line.
_MAX_DEPTH = 8
# CSS's limit; each item and its indentation would be as wide as a longer number.
_MAX_START = (1 << 31) - 1


def markdown(text: str, limit: int) -> str:
    """Converts a page's visible text to Markdown of at most `limit` characters, headed by its title.

    Raises:
        InvalidArgument: the markup is broken or nested too deeply, or the Markdown exceeds the limit.
    """
    # Behind the last `>`, `<` opens no tag, but html.parser would search the whole rest at each.
    end = text.rfind(">") + 1
    text = text[:end] + _OPENED.sub("&lt;", text[end:])
    try:
        soup = BeautifulSoup(text, builder=_Builder())
        titles = (title.get_text(strip=True) for title in soup("title") if not title.find_parent("svg"))
        title = next(titles, "")
        unseen = hidden(soup)
        if title and all(_is_in(h1, unseen) or not h1.get_text(strip=True) for h1 in soup("h1")):
            heading = soup.new_tag("h1")
            heading.string = title
            soup.insert(0, heading)
        for block in soup(_BLOCKS):
            block.name = "div"
        _clamp_tables(soup)
        return _Converter(limit, unseen, _spanned(soup, unseen)).convert_soup(soup).strip()
    except ParserRejectedMarkup as error:
        raise InvalidArgument("the HTML can't be read: its markup is broken") from error
    except RecursionError as error:
        raise InvalidArgument("the HTML can't be read: its elements are nested too deeply") from error


class _Closed(Counter[str]):
    """Replaces a list of names, which bs4 searches at each end tag: with many `<br>`, the time would be quadratic."""

    def append(self, name: str) -> None:
        self[name] += 1

    def remove(self, name: str) -> None:
        self[name] -= 1

    def __contains__(self, name: object) -> bool:
        return self.get(str(name), 0) > 0


class _Parser(BeautifulSoupHTMLParser):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.already_closed_empty_element = _Closed()  # type: ignore[assignment]

    def handle_starttag(self, tag: str, attrs: Any, handle_empty_element: bool = True) -> None:
        ended = ""
        for one in reversed(self.soup.tagStack[-_MAX_OPEN:] if tag in _ENDS else ()):
            if one.name in _ENDS[tag]:
                ended = one.name
            elif one.name in _SCOPES:
                break
        if ended:
            self.soup.handle_endtag(ended)
        super().handle_starttag(tag, attrs, handle_empty_element)


class _Builder(HTMLParserTreeBuilder):
    def feed(self, markup: Any, _parser_class: type[BeautifulSoupHTMLParser] = _Parser) -> None:
        super().feed(markup, _parser_class)


def _clamp_tables(soup: BeautifulSoup) -> None:
    for head in soup("thead"):
        if len(head.find_all("tr", limit=_MAX_HEAD + 1)) > _MAX_HEAD:
            head.name = "tbody"
    remaining = _MAX_SPANS
    for cell in soup(["td", "th"], colspan=True):
        span = min(_number(cell["colspan"]) or 1, _MAX_SPAN, remaining + 1)
        remaining -= span - 1
        cell["colspan"] = str(span)


def _spanned(soup: BeautifulSoup, unseen: Mapping[int, PageElement]) -> Counter[int]:
    """How many cells of earlier rows reach down before a cell, or to the end of a row, by its id()."""
    spanned: Counter[int] = Counter()
    remaining = _MAX_SPANNED
    for part in soup(["table", "thead", "tbody", "tfoot"]):
        until: dict[int, int] = {}  # by column, the first row that no cell of an earlier one reaches
        rows = (row for row in part("tr", recursive=False) if id(row) not in unseen)
        for number, row in enumerate(rows):
            cells = (cell for cell in row(["td", "th"], recursive=False) if id(cell) not in unseen)
            column = 0
            for element in (*cells, row):
                while remaining and until.get(column, 0) > number:
                    spanned[id(element)] += 1
                    remaining -= 1
                    column += 1
                for _ in range(_number(element.get("colspan")) or 1):
                    until[column] = number + (_number(element.get("rowspan")) or 1)
                    column += 1
    return spanned


def _number(value: object) -> int | None:
    """The value of an attribute; None unless it is a number in HTML's syntax with fewer than 12 digits."""
    text = str(value).strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 12 else None


class _Converter(MarkdownConverter):
    """Converts within the limit: each step checks the length, and adds little to its input."""

    def __init__(self, limit: int, unseen: Mapping[int, PageElement], spanned: Counter[int]) -> None:
        # The text is read by models and searched, and not rendered: a backslash would only change its words.
        super().__init__(heading_style="ATX", escape_asterisks=False, escape_underscores=False)
        self._limit = limit
        self._unseen = unseen
        self._spanned = spanned
        self._items: dict[int, int] = {}

    def process_tag(self, node: Tag, parent_tags: set[str] | None = None) -> str:
        if id(node) in self._unseen:
            return ""
        for name in _URLS:
            if is_inline(str(node.attrs.get(name, ""))):
                del node[name]
        text: str = super().process_tag(node, parent_tags)  # type: ignore[misc]
        check_text(len(text), self._limit)
        return text

    def process_text(self, el: NavigableString, parent_tags: set[str] | None = None) -> str:
        if id(el) in self._unseen or isinstance(el, ProcessingInstruction):  # of XHTML: <?xml version="1.0"?>
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

    def convert_td(self, el: Tag, text: str, parent_tags: set[str]) -> str:
        return "  |" * self._spanned[id(el)] + str(super().convert_td(el, text, parent_tags))  # type: ignore[misc]

    def convert_th(self, el: Tag, text: str, parent_tags: set[str]) -> str:
        return "  |" * self._spanned[id(el)] + str(super().convert_th(el, text, parent_tags))  # type: ignore[misc]

    def convert_tr(self, el: Tag, text: str, parent_tags: set[str]) -> str:
        text += "  |" * self._spanned[id(el)]
        return str(super().convert_tr(el, text, parent_tags))  # type: ignore[misc]

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
            start = _number(el.parent.get("start"))
            self._items[items] = 1 if start is None else min(start, _MAX_START)
        bullet = f"{self._items[items]}. "
        self._items[items] += 1
        if not (text := text.strip()):
            return "\n"
        return bullet + _LINE.sub(" " * len(bullet), text)[len(bullet) :] + "\n"


def _is_in(el: Tag, elements: Mapping[int, PageElement]) -> bool:
    return any(id(one) in elements for one in (el, *el.parents))


def _is_deep(el: Tag) -> bool:
    return len(el.find_parents(el.name, limit=_MAX_DEPTH)) == _MAX_DEPTH


def _newline_or_space(match: re.Match[str]) -> str:
    return "\n" if "\n" in match[0] or "\r" in match[0] else " "
