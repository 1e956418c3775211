"""Text as it is stored, searched and named: as it looks, without inline images; names that act on no terminal."""

import re
import unicodedata

# Characters that are not shown, with a line end behind a soft hyphen; and letters that are drawn together.
_UNSEEN, _LIGATURES = re.compile("\u00ad(?:\r?\n)?|[\u200b\u2060\ufeff]"), re.compile("[\ufb00-\ufb06]")
_SHOWN = re.compile(r"[^\s\u00ad\u200b\u2060\ufeff]")
# Characters beyond ASCII with the one before them. unicodedata takes quadratic time for a row of combining marks,
# 33 s for 65,536 of them, so longer rows are cut, if possible before no mark, kana mark or Hangul vowel.
_COMPOSED = re.compile(r"[\x00-\x7f]?[^\x00-\x7f]{1,32}[\u0300-\u036f\u3099\u309a\u1161-\u11ff]{0,8}")
# Other characters of category Cf join letters, or mark a single direction, as names in Arabic or Hindi need.
_FORMATS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
# Scripts that are written without spaces, or with endings on the words.
_SINGLE = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17d3\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\U00020000-\U0003ffff"
WORD = re.compile(rf"[{_SINGLE}]|(?:[^\W{_SINGLE}]|[\u0900-\u0963\u0966-\u0dff])+")
"""A word with the vowel signs of India's scripts; of Chinese, Japanese, Korean, Thai and the like, a character."""
_MARK = "\ufdd0"  # in place of an image; Unicode reserves it for such use inside a program
# Content in Base64 that is too long to be an example in a text.
_INLINE = re.compile(
    r"data:[\w.+/-]{0,128}(?:;[\w.+=%-]{1,64}){0,4};base64,\s*(?:[A-Za-z0-9+/=_-]|%[0-9A-Fa-f]{2}){40,}",
    re.IGNORECASE,
)
_TITLE = r"""(?:\s+(?:"[^"]*"|'[^']*'|\([^()]*\)))?"""
_TEXT = r"\[((?:[^\[\]]|\[[^\[\]]*\])*)\]"
_LINKED = re.compile(rf"!?{_TEXT}\(\s*<?{_MARK}>?{_TITLE}\s*\)")
# In quotes and lists, too.
_DEFINITION = re.compile(rf"^[ \t>]*\[([^\[\]\n]+)\]:\s*<?{_MARK}>?[^\n]*\n?", re.MULTILINE)
# Images first, which may be the text of links.
_REFERENCES = [re.compile(rf"{mark}{_TEXT}(?:\[([^\[\]]*)\])?") for mark in ("!", "")]
_ELEMENT = re.compile(rf"<[a-z][^<>{_MARK}]*{_MARK}[^<>]*>", re.IGNORECASE)
_ATTRIBUTE = re.compile(r"""([^\s=/"'<>]+)(?:\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"'<>]+)))?""")


def acts(char: str) -> bool:
    """Whether a terminal may take a character for a command, or shows text after it in another order."""
    return unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") or char in _FORMATS


def is_blank(text: str) -> bool:
    """Whether nothing of a text is shown."""
    return _SHOWN.search(text) is None


def normal(text: str) -> str:
    """The text in NFC, without what is not shown: what looks the same is the same, to the search and to the model."""
    if text.isascii():
        return text
    text = _LIGATURES.sub(lambda match: unicodedata.normalize("NFKC", match[0]), _UNSEEN.sub("", text))
    return _COMPOSED.sub(lambda match: unicodedata.normalize("NFC", match[0]), text)


def without_images(text: str) -> str:
    """The text without inline images (`data:`), of which the description stays."""
    without = _INLINE.sub(_MARK, text)
    if without == text:
        return text
    without = _LINKED.sub(r"\1", without)
    if labels := {_label(label) for label in _DEFINITION.findall(without)}:

        def described(match: re.Match[str]) -> str:
            return match[1] if _label(match[2] or match[1]) in labels else match[0]

        without = _DEFINITION.sub("", without)
        for reference in _REFERENCES:
            without = reference.sub(described, without)
    without = _ELEMENT.sub(lambda element: attributes(element[0]).get("alt", ""), without)
    return without.replace(_MARK, "")


def _label(text: str) -> str:
    """A label of Markdown as it is compared."""
    return " ".join(text.split()).casefold()


def is_inline(url: str) -> bool:
    """Whether a URL holds its content itself, or a script, in place of an address."""
    return url.lstrip()[:64].lower().startswith(("data:", "javascript:"))


def attributes(tag: str) -> dict[str, str]:
    """The attributes of a tag, by their names in lower case."""
    return {name.lower(): "".join(values) for name, *values in _ATTRIBUTE.findall(tag)}
