"""Markdown without what is not shown of it: comments and hidden elements of HTML."""

import re

from fusionkv.gateway.ingest.hidden import is_hidden
from fusionkv.gateway.ingest.text import attributes

# Code of Markdown: indented, between fences (also in quotes and lists), or inline in a paragraph. Otherwise the
# beginning of a comment or an element.
_TOKEN = re.compile(
    r"(?:\A|^[ \t]*\r?\n)(?:(?: {4}|\t)[^\n]*(?:\n|\Z))+"
    r"|^(?:[ \t>]|(?:[*+-]|\d{1,9}[.)])[ \t])*(?P<fence>`{3,}(?=[^`\n]*\n)|~{3,})[^\n]*\n"
    r"(?s:.*?)(?:^[ \t>]*(?P=fence)[`~]*[ \t\r]*$|\Z)"
    r"|(?P<ticks>`++)(?:(?:[^`\n]++|\n(?![ \t\r]*\n)|(?!(?P=ticks)(?!`))`++)*+(?P=ticks))?"
    r"|(?P<comment><!--)|<(?P<name>[a-z][\w:-]*+)(?P<attributes>[^<>]*)(?<!/)>",
    re.MULTILINE | re.IGNORECASE,
)


def visible(markdown: str) -> str:
    """Markdown without comments and hidden elements of HTML, except in its code.

    A hidden element ends at the first end tag of its name; without one, it stays.
    """
    shown, begin, at = [], 0, 0
    while token := _TOKEN.search(markdown, at):
        at, name = token.end(), token["name"]
        if token["comment"] or (name and is_hidden(name.lower(), attributes(token["attributes"]))):
            closing = "-->" if token["comment"] else f"</{name}>"
            if (end := markdown.find(closing, at)) >= 0:
                shown.append(markdown[begin : token.start()])
                begin = at = end + len(closing)
    return "".join([*shown, markdown[begin:]])
