"""Text of PDFs, in logical order: pages written from right to left are drawn in visual order."""

import io
import re
import unicodedata

from pypdf import PageObject, PdfReader
from pypdf._text_extraction._layout_mode._fixed_width_page import BTGroup, recurse_to_target_op, set_font_operation
from pypdf._text_extraction._layout_mode._text_state_manager import TextStateManager
from pypdf.errors import DependencyError, FileNotDecryptedError
from pypdf.generic import ContentStream

from fusionkv.gateway.ingest.document import check_text
from fusionkv.protos.runtime.errors import InvalidArgument

# Letters and marks of Hebrew, Arabic and their neighbours, without their digits, which run from left to right.
_RTL = r"\u0590-\u065f\u066d-\u06ef\u06fa-\u08ff\ufb1d-\ufdff\ufe70-\ufefe"
_LETTERS = re.compile(f"[{_RTL}]")
_OTHERS = re.compile(rf"[^\W\d_{_RTL}]")
_STRONG = re.compile(rf"[^\W\d_]|[{_RTL}]")
# In a reversed line: text from left to right, from its first letter or digit to its last, and a number.
_BEFORE, _AFTER = "[$€£¥₪%#]{0,3}", "[$€£¥₪%°]{0,3}"
_LTR = re.compile(rf"{_BEFORE}[^\W{_RTL}](?:[^{_RTL}]*[^\W{_RTL}])?{_AFTER}")
_NUMBER = re.compile(rf"{_BEFORE}\d+(?:[.,:/+\u066b\u066c-]\d+)*{_AFTER}")
# Text from right to left in a line from left to right.
_RUN = re.compile(rf"[{_RTL}](?:(?:[{_RTL}]|[\W\d_])*[{_RTL}])?")
# Shapes of Arabic letters, which some PDFs name instead of the letters.
_SHAPES = re.compile(r"[\ufb50-\ufdff\ufe70-\ufefc]+")
# What stands at the end of words only: final letters of Hebrew, the teh marbuta and the alef maksura of Arabic; and
# the Arabic article, at the beginning. At the other end, they show that words are in visual order.
_LOGICAL = re.compile(rf"[ךםןףץةى](?![{_RTL}])|(?<![{_RTL}])ال(?=[{_RTL}])")
_VISUAL = re.compile(rf"(?<![{_RTL}])[ךםןףץةى](?=[{_RTL}])|(?<=[{_RTL}])لا(?![{_RTL}])")
_MIRRORED = str.maketrans("()[]{}<>«»", ")(][}{><»«")
_BRACKET, _SPACES = re.compile(r"[()\[\]{}<>«»]"), re.compile(r"[ \t]+")
# Pieces of a line that are further apart, in heights of the font, are words.
_WORD_GAP = 0.15


def pdf(content: bytes, limit: int) -> str:
    """The text of a PDF, at most about `limit` characters.

    Raises InvalidArgument if the content is no PDF, is encrypted or damaged, or has too much text.
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
    # pypdf turns runs of such letters, but leaves the runs where they are drawn. Its pieces lack form objects.
    visual = _visual(page)
    if len(_LETTERS.findall(visual)) < 0.9 * letters:
        return plain
    return in_logical_order(visual)


def _visual(page: PageObject) -> str:
    """The lines of a page, each as it is seen from left to right; empty if only plain extraction can read it."""
    lines, end = list[str](), 0.0
    try:
        for line in _lines(page):
            text = ""
            for piece in sorted(line, key=lambda piece: piece["tx"]):
                is_apart = piece["tx"] - end > _WORD_GAP * piece["font_height"]
                text += " " * is_apart + piece["text"]
                end = piece["displaced_tx"]
            lines.append(text)
    except MemoryError:
        raise
    except Exception:
        return ""
    return "\n".join(lines)


def _lines(page: PageObject) -> list[list[BTGroup]]:
    """Pieces of text in the order in which lines are drawn. pypdf's own layout sorts them from top to bottom."""
    lines: list[list[BTGroup]] = []
    height = 0.0
    for piece in _pieces(page):
        if not lines or abs(piece["ty"] - height) > piece["font_height"] / 2:
            lines.append([])
        lines[-1].append(piece)
        height = piece["ty"]
    return lines


def _pieces(page: PageObject) -> list[BTGroup]:
    fonts = page._layout_mode_fonts()
    for font in fonts.values():
        # A ligature's letters are in logical order, and would be reversed with the line.
        font.character_map.update({c: t[::-1] for c, t in font.character_map.items() if _LETTERS.match(t)})
    operations = iter(ContentStream(page["/Contents"].get_object(), page.pdf, "bytes").operations)
    state, drawn = TextStateManager(), []
    for operands, operator in operations:
        if operator in (b"BT", b"q"):
            pieces, _ = recurse_to_target_op(operations, state, b"ET" if operator == b"BT" else b"Q", fonts, False)
            drawn += pieces
        elif operator == b"Tf":
            set_font_operation(state, fonts, operands)
        else:
            state.set_state_param(operator, operands)
    return [piece for piece in drawn if piece["text"]]


def in_logical_order(visual: str) -> str:
    """The text of lines that are in visual order, from left to right, unless their words show another order.

    Shapes of Arabic letters become the letters.
    """
    lines = [_SPACES.sub(" ", line).strip() for line in visual.split("\n")]
    words = _letters("\n".join(lines))
    if len(_LOGICAL.findall(words)) > len(_VISUAL.findall(words)):
        return words
    turned = len(_LETTERS.findall(words)) > len(_OTHERS.findall(words))
    return _letters("\n".join(_line(line, turned) for line in lines))


def _letters(text: str) -> str:
    return _SHAPES.sub(lambda shapes: unicodedata.normalize("NFKC", shapes[0]), text)


def _line(line: str, turned: bool) -> str:
    """A line in logical order; `turned`: whether its page is written from right to left."""
    letter_count, others = len(_LETTERS.findall(line)), _OTHERS.findall(line)
    if not letter_count:
        return line
    # On such a page, also a line with many foreign words, unless it begins and ends with them.
    letters = _STRONG.findall(line)
    outside = others and letters[0] == others[0] and letters[-1] == others[-1]
    if letter_count >= len(others) or (turned and not outside):
        return _turned(line)
    return _RUN.sub(lambda run: _turned(run[0]), line)


def _turned(line: str) -> str:
    """Text from right to left: words of other scripts and numbers in it keep their order."""

    def in_order(run: re.Match[str]) -> str:
        if _OTHERS.search(run[0]):
            return run[0][::-1]
        return _NUMBER.sub(lambda digits: digits[0][::-1], run[0])

    line = _LTR.sub(in_order, line[::-1])
    # Some PDFs hold brackets as they look, and others mirrored.
    bracket = _BRACKET.search(line)
    return line.translate(_MIRRORED) if bracket and bracket[0] in ")]}>»" else line
