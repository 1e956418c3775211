"""Text as it is stored and searched: in NFC, without inline images, and Markdown without what is not shown of it."""

import re
import unicodedata
from collections import defaultdict
from collections.abc import Mapping

# Elements that are not shown, or that lead to other pages.
INVISIBLE = ("head", "title", "script", "style", "noscript", "template", "svg", "nav")
# Characters beyond ASCII with the one before them. unicodedata takes quadratic time for a row of combining marks,
# 33 s for 65,536 of them, so longer rows are cut, if possible before no mark, kana mark or Hangul vowel.
_COMPOSED = re.compile(r"[\x00-\x7f]?[^\x00-\x7f]{1,32}[\u0300-\u036f\u3099\u309a\u1161-\u11ff]{0,8}")
_MARK = "\ufdd0"  # in place of an image; Unicode reserves it for such use inside a program
_BASE64 = r"(?:[A-Za-z0-9+/=_-]|%[0-9A-Fa-f]{2})"
_WRAPPED = rf"(?:(?:\s+{_BASE64}{{40,}})+(?:\s+{_BASE64}+(?=\s*[\"')>]))?)?"
_PARAMETERS = r"(?:;[\w.+=%-]{1,64}){0,4}"
# An image in any encoding, and anything else in Base64 that is too long to be an example in a text.
_INLINE = re.compile(
    rf"data:image/[\w.+-]{{1,64}}{_PARAMETERS};base64,\s*{_BASE64}*{_WRAPPED}"
    rf"|data:(?:[\w.+-]{{1,64}}/[\w.+-]{{1,64}})?{_PARAMETERS};base64,\s*{_BASE64}{{40,}}{_WRAPPED}"
    + "".join(
        rf"|(?<={before})data:image/[\w.+-]{{1,64}}{_PARAMETERS},{inside}"
        for before, inside in {
            '"': '[^"]*',
            "'": "[^']*",
            "<": "[^<>]*",
            r"\(": r"(?:[^\s()<>]|\([^\s()<>]*\))*",
            "": r"[^\s\"<>]*",
        }.items()
    ),
    re.IGNORECASE,
)
_TITLE = r"""(?:\s+(?:"[^"]*"|'[^']*'|\([^()]*\)))?"""
_LINKED = re.compile(rf"!?\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(\s*<?{_MARK}>?{_TITLE}\s*\)")
_DEFINITION = re.compile(rf"^ {{0,3}}\[[^\[\]\n]+\]:\s*<?{_MARK}>?[^\n]*\n?", re.MULTILINE)
_ELEMENT = re.compile(rf"<[a-z][^<>{_MARK}]*{_MARK}[^<>]*>", re.IGNORECASE)
_ATTRIBUTE = re.compile(r"""([^\s=/"'<>]+)(?:\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"'<>]+)))?""")
_VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}
# Code of Markdown: between fences, inline and indented. Otherwise a comment, or a tag.
_TOKEN = re.compile(
    r"^ {0,3}(?P<fence>`{3,}|~{3,})[^\n]*\n(?s:.*?)(?:^ {0,3}(?P=fence)[`~]*[ \t]*$|\Z)"
    r"|(?P<ticks>`+)[^`\n]+(?P=ticks)(?!`)"
    r"|(?:\A|(?<=\n\n))(?:(?: {4}|\t)[^\n]*(?:\n|\Z))+"
    r"|(?P<comment><!--)|<(?P<end>/?)(?P<name>[a-z][\w:-]*)(?P<attributes>[^<>]*)>",
    re.MULTILINE | re.IGNORECASE,
)


def nfc(text: str) -> str:
    """The text in NFC: what looks the same is then the same, to the search and to the model."""
    if text.isascii():
        return text
    return _COMPOSED.sub(lambda found: unicodedata.normalize("NFC", found[0]), text)


def without_images(text: str) -> str:
    """The text without inline images (`data:`), of which the description stays."""
    without = _INLINE.sub(_MARK, text)
    if without == text:
        return text
    without = _DEFINITION.sub("", _LINKED.sub(r"\1", without))
    without = _ELEMENT.sub(lambda element: _attributes(element[0]).get("alt", ""), without)
    return without.replace(_MARK, "")


def is_inline(url: str) -> bool:
    """Whether a URL holds its content itself, or a script, in place of an address."""
    # Browsers ignore white space around a URL, and line ends and tabs inside.
    start = re.sub(r"[\t\r\n]", "", url[:64]).strip().lower()
    return start.startswith(("data:", "javascript:"))


def is_hidden(name: str, attributes: Mapping[str, object]) -> bool:
    """Whether an element of HTML is navigation, or not shown, by itself: style sheets are not read."""
    if name in INVISIBLE or "navigation" in str(attributes.get("role", "")).lower().split():
        return True
    if "hidden" in attributes and attributes["hidden"] != "until-found":
        return True
    declarations = (declaration.partition(":") for declaration in str(attributes.get("style", "")).lower().split(";"))
    styles = {key.strip(): value.replace("!important", "").strip() for key, _, value in declarations}
    return styles.get("display") == "none" or styles.get("visibility") in ("hidden", "collapse")


def visible(markdown: str) -> str:
    """Markdown without comments and hidden elements of HTML, except in its code."""
    if "<" not in markdown:
        return markdown
    kept, at = [], 0
    for start, end in sorted(_hidden(markdown)):
        if start >= at:
            kept.append(markdown[at:start])
        at = max(at, end)
    return "".join([*kept, markdown[at:]])


def _hidden(text: str) -> list[tuple[int, int]]:
    """Where hidden elements and comments are. Elements without an end tag are not among them."""
    found: list[tuple[int, int]] = []
    opened: defaultdict[str, list[tuple[int, bool]]] = defaultdict(list)
    at, last_comment = 0, text.rfind("-->")
    while token := _TOKEN.search(text, at):
        at = token.end()
        if token["comment"]:
            if at <= last_comment:
                at = text.index("-->", at) + 3
                found.append((token.start(), at))
        elif name := (token["name"] or "").lower():
            if token["end"]:
                start, hidden = opened[name].pop() if opened[name] else (0, False)
                found += [(start, at)] * hidden
            elif name not in _VOID and not token["attributes"].endswith("/"):
                opened[name].append((token.start(), is_hidden(name, _attributes(token["attributes"]))))
    return found


def _attributes(tag: str) -> dict[str, str]:
    return {name.lower(): "".join(values) for name, *values in _ATTRIBUTE.findall(tag)}
