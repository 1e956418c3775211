"""Text of PDFs, in logical order: pages written from right to left are drawn in visual order."""

import io
import re
import unicodedata

from pypdf import PageObject, PdfReader
from pypdf.errors import DependencyError, FileNotDecryptedError

from fusionkv.gateway.ingest.document import check_text
from fusionkv.protos.runtime.errors import InvalidArgument

# Letters and marks of Hebrew, Arabic and their neighbours, without their digits, which run from left to right.
_RTL = r"\u0590-\u065f\u066d-\u06ef\u06fa-\u08ff\ufb1d-\ufdff\ufe70-\ufefe"
_LETTERS = re.compile(f"[{_RTL}]")
_OTHERS = re.compile(rf"[^\W\d_{_RTL}]")
_STRONG = re.compile(rf"[^\W\d_]|[{_RTL}]")
_ARABIC = re.compile(r"[\u0600-\u06ff\u0750-\u08ff\ufb50-\ufefc]")


def _patterns(separators: str, before: str = "", after: str = "") -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Text from left to right in a reversed line, between its outer letters or digits; and a number in it."""
    text = rf"{before}[^\W{_RTL}](?:[^{_RTL}]*[^\W{_RTL}])?{after}"
    return re.compile(text), re.compile(rf"{before}\d+(?:{separators}\d+)*{after}")


# What Unicode's bidirectional algorithm keeps with a number: signs of currencies not among Arabic.
_AMONG_ARABIC = _patterns("[.,:/\u066b\u066c]")
_AMONG_OTHERS = _patterns("[.,:/+-]", "[$€£¥₪%#]{0,3}", "[$€£¥₪%°]{0,3}")
# Text from right to left in a line from left to right.
_RUN = re.compile(rf"[{_RTL}](?:(?:[{_RTL}]|[\W\d_])*[{_RTL}])?")
# Shapes of Arabic letters, which some PDFs name instead of the letters.
_SHAPES = re.compile(r"[\ufb50-\ufdff\ufe70-\ufefc]+")
# What stands at the end of words only: final letters of Hebrew, the teh marbuta and the alef maksura of Arabic; and
# the Arabic article, at the beginning. At the other end, they show that words are in visual order.
_LOGICAL = re.compile(rf"[ךםןףץةى](?![{_RTL}])|(?<![{_RTL}])ال(?=[{_RTL}])")
_VISUAL = re.compile(rf"(?<![{_RTL}])[ךםןףץةى](?=[{_RTL}])|(?<=[{_RTL}])لا(?![{_RTL}])")
_MIRRORED = str.maketrans("()[]{}<>«»", ")(][}{><»«")
_SPACES = re.compile(r"[ \t]+")


def pdf(content: bytes, limit: int) -> str:
    """The text of a PDF, at most about `limit` characters.

    Raises:
        InvalidArgument: the content is no PDF, is encrypted or damaged, or has too much text.
    """
    # The header may be preceded by other bytes. Without it, pypdf would guess; the file is not a PDF.
    if b"%PDF-" not in content[:1024]:
        raise InvalidArgument("the content is not a PDF: it does not begin with %PDF-")
    try:
        reader = PdfReader(io.BytesIO(content))
        if reader.is_encrypted and not reader.decrypt(""):
            raise InvalidArgument("the PDF is encrypted: remove its password first")
        pages: list[str] = []
        size = 0
        for page in reader.pages:
            # A font may map a character to the two halves of a surrogate pair, each as a character.
            halves = _text(page).encode("utf-16", "surrogatepass")
            pages.append(halves.decode("utf-16", "replace"))
            size += len(pages[-1])
            check_text(size, limit)
        return "\n\n".join(pages).replace("\0", "")
    except (FileNotDecryptedError, DependencyError) as error:
        raise InvalidArgument("the PDF is encrypted: remove its password first") from error
    except (InvalidArgument, MemoryError):
        raise
    except Exception as error:
        # Broken files make pypdf raise any error, such as ZeroDivisionError.
        raise InvalidArgument(f"the PDF can't be read: {error or type(error).__name__}") from error


def _text(page: PageObject) -> str:
    plain = page.extract_text()
    if not (letters := len(_LETTERS.findall(plain))):
        return plain
    # pypdf turns each run of such letters, but leaves the runs where they are drawn. By its layout, a line is in the
    # order in which it is seen; but it lacks text of form objects.
    seen = _by_layout(page)
    if len(_LETTERS.findall(seen)) < 0.9 * letters:
        return plain
    return in_logical_order(seen)


def _by_layout(page: PageObject) -> str:
    fonts = page._layout_mode_fonts()
    for font in fonts.values():
        # A ligature's letters are in logical order, and would be reversed with the line.
        font.character_map.update({c: t[::-1] for c, t in font.character_map.items() if _LETTERS.match(t)})
    page._layout_mode_fonts = lambda: fonts  # type: ignore[method-assign]
    try:
        return page.extract_text(
            extraction_mode="layout", layout_mode_space_vertically=False, layout_mode_strip_rotated=False
        )
    except MemoryError:
        raise
    except Exception:  # of a page that only plain extraction can read
        return ""


def in_logical_order(seen: str) -> str:
    """The text of lines that are in visual order, from left to right, unless their words show another order.

    Shapes of Arabic letters become the letters.
    """
    lines = [_SPACES.sub(" ", line).strip() for line in seen.split("\n")]
    words = _letters("\n".join(lines))
    if len(_LOGICAL.findall(words)) > len(_VISUAL.findall(words)):
        return words
    turned = len(_LETTERS.findall(words)) > len(_OTHERS.findall(words))
    return _letters("\n".join(_line(line, turned) for line in lines))


def _letters(text: str) -> str:
    return _SHAPES.sub(lambda shapes: unicodedata.normalize("NFKC", shapes[0]), text)


def _line(line: str, turned: bool) -> str:
    """A line in logical order; `turned`: whether its page is written from right to left."""
    own, others = len(_LETTERS.findall(line)), _OTHERS.findall(line)
    if not own:
        return line
    # On such a page, also a line with many foreign words, unless it begins and ends with them.
    letters = _STRONG.findall(line)
    outside = others and letters[0] == others[0] and letters[-1] == others[-1]
    if own >= len(others) or (turned and not outside):
        return _turned(line)
    return _RUN.sub(lambda run: _turned(run[0]), line)


def _turned(line: str) -> str:
    """Text from right to left: words of other scripts and numbers in it keep their order."""
    text, number = _AMONG_ARABIC if _ARABIC.search(line) else _AMONG_OTHERS

    def kept(found: re.Match[str]) -> str:
        if _OTHERS.search(found[0]):
            return found[0][::-1]
        return number.sub(lambda digits: digits[0][::-1], found[0])

    line = text.sub(kept, line[::-1])
    mirrored = line.translate(_MIRRORED)
    return mirrored if _unopened(line) > _unopened(mirrored) else line


def _unopened(line: str) -> int:
    """Brackets that are closed before they are opened: some PDFs hold mirrored brackets as they look."""
    depth = unopened = 0
    for character in line:
        if character in "([{<«":
            depth += 1
        elif character in ")]}>»":
            unopened += depth == 0
            depth = max(0, depth - 1)
    return unopened
