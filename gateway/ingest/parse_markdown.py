"""Markdown without what is not shown of it: comments and hidden elements of HTML."""

import re
from array import array
from bisect import bisect
from collections import defaultdict

from fusionkv.gateway.ingest.hidden import is_hidden
from fusionkv.gateway.ingest.text import attributes

_VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}
# Code of Markdown: indented, between fences (also in quotes and lists), and what begins inline code. Otherwise a
# comment, or a tag.
_TOKEN = re.compile(
    r"(?:\A|^[ \t]*\r?\n)(?:(?: {4}|\t)[^\n]*(?:\n|\Z))+"
    r"|^(?:[ \t>]|(?:[*+-]|\d{1,9}[.)])[ \t])*(?P<fence>`{3,}(?=[^`\n]*\n)|~{3,})[^\n]*\n"
    r"(?s:.*?)(?:^[ \t>]*(?P=fence)[`~]*[ \t\r]*$|\Z)"
    r"|(?P<ticks>`+)|(?P<comment><!--)|<(?P<end>/?)(?P<name>[a-z][\w:-]*+)(?P<attributes>[^<>]*)>",
    re.MULTILINE | re.IGNORECASE,
)
_EMPTY_LINE = re.compile(r"\n[ \t\r]*\n")


def visible(markdown: str) -> str:
    """Markdown without comments and hidden elements of HTML, except in its code."""
    if "<" not in markdown:
        return markdown
    shown, at = [], 0
    for start, end in sorted(_hidden(markdown)):
        if start >= at:
            shown.append(markdown[at:start])
        at = max(at, end)
    return "".join([*shown, markdown[at:]])


def _hidden(text: str) -> list[tuple[int, int]]:
    """Where hidden elements and comments are. Elements without an end tag are not among them."""
    spans: list[tuple[int, int]] = []
    opened: defaultdict[str, list[tuple[int, bool]]] = defaultdict(list)
    ticks: defaultdict[int, array[int]] = defaultdict(lambda: array("L"))  # the ends of backticks, by their number
    for run in re.finditer("`+", text):
        ticks[len(run[0])].append(run.end())
    at, last_comment = 0, text.rfind("-->")
    while token := _TOKEN.search(text, at):
        at = token.end()
        if token["ticks"]:
            ends = ticks[len(token["ticks"])]
            next_one = bisect(ends, at)
            if next_one < len(ends) and not _EMPTY_LINE.search(text, at, ends[next_one]):
                at = ends[next_one]
        elif token["comment"]:
            if at <= last_comment:
                at = text.index("-->", at) + 3
                spans.append((token.start(), at))
        elif name := (token["name"] or "").lower():
            if token["end"]:
                start, hidden = opened[name].pop() if opened[name] else (0, False)
                spans += [(start, at)] * hidden
            elif name not in _VOID and not token["attributes"].endswith("/"):
                opened[name].append((token.start(), is_hidden(name, attributes(token["attributes"]))))
    return spans
