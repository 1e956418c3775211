"""Text of PDFs, in logical order: pages written from right to left are drawn in visual order."""

import io
import re
import unicodedata
from itertools import pairwise

from pypdf import PageObject, PdfReader
from pypdf._text_extraction._layout_mode import fixed_char_width, fixed_width_page, y_coordinate_groups
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
# A column has lines of so many characters on average; the longer one of two so many lines beside the other.
_MIN_WIDTH, _MIN_LINES = 12, 2
# Times that drawing may go up on a page whose columns are looked for: each takes time for the pieces before it.
_MAX_RUNS = 100


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
    visual = _by_layout(page)
    if len(_LETTERS.findall(visual)) < 0.9 * letters:
        return plain
    return in_logical_order(visual)


def _by_layout(page: PageObject) -> str:
    """The lines of a page, column by column, as they are seen; empty if only plain extraction can read the page."""
    try:
        return "\n".join(_lines(block) for block in _blocks(_drawn(page)))
    except MemoryError:
        raise
    except Exception:
        return ""


def _drawn(page: PageObject) -> list[BTGroup]:
    """Pieces of text in the order in which they are drawn. pypdf's own layout sorts them from top to bottom."""
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


def _lines(block: list[BTGroup]) -> str:
    left = min(piece["tx"] for piece in block)
    moved: list[BTGroup] = []
    for piece in sorted(block, key=lambda piece: (-_height(piece), piece["tx"])):
        moved.append({**piece, "tx": piece["tx"] - left, "displaced_tx": piece["displaced_tx"] - left})
    return fixed_width_page(y_coordinate_groups(moved), fixed_char_width(moved), False, 1)


def _blocks(drawn: list[BTGroup]) -> list[list[BTGroup]]:
    """Blocks of pieces of text in the order in which they are read: columns, and what is above and below them.

    Columns are drawn one after another, while a table, which may look alike, is drawn row by row.
    """
    runs = [drawn[:1]]
    for before, piece in pairwise(drawn):
        if _height(piece) - _height(before) > piece["font_height"]:
            runs.append([])
        runs[-1].append(piece)
    if len(runs) > _MAX_RUNS:
        return [drawn]
    blocks: list[list[BTGroup]] = []
    columns, below = runs[:1], list[BTGroup]()
    for run in runs[1:]:
        last = columns[-1]
        if _is_beside(run, last):
            above, inside, rest = _around(last, run)
            if above:
                blocks += [*_in_order([*columns[:-1], above]), below]
                columns, below = [], []
            columns = [*columns[:-1], inside, run]
            below += rest
        elif len(columns) == 1 or _top(run) <= _top(last):
            columns[-1] = last + run
        else:  # such as a heading that is drawn after all columns
            blocks += [*_in_order(columns), below]
            columns, below = [run], []
    return [block for block in [*blocks, *_in_order(columns), below] if block]


def _is_beside(run: list[BTGroup], other: list[BTGroup]) -> bool:
    """Whether both are columns of text at the same height: not such as bullets beside their items."""
    top, bottom = min(_top(run), _top(other)), max(_bottom(run), _bottom(other))
    parts = [[piece for piece in part if bottom <= _height(piece) <= top] for part in (run, other)]
    if not all(parts):
        return False
    lines = [len({int(_height(piece)) for piece in part}) for part in parts]
    characters = [sum(len(piece["text"].strip()) for piece in part) for part in parts]
    are_wide = all(many >= _MIN_WIDTH * count for many, count in zip(characters, lines, strict=True))
    return are_wide and max(lines) >= _MIN_LINES and _are_apart(*map(_sides, parts))


def _around(column: list[BTGroup], next_column: list[BTGroup]) -> tuple[list[BTGroup], list[BTGroup], list[BTGroup]]:
    """Of what is drawn before the second column: what is above it, the first column, and what is below both."""
    top, bottom = _top(next_column), _bottom(next_column)
    sides, next_sides = _sides([piece for piece in column if bottom <= _height(piece) <= top]), _sides(next_column)
    above, inside, below = [], [], []
    for piece in column:
        piece_sides = _sides([piece])
        if _height(piece) > top:
            above.append(piece)
        elif _height(piece) < bottom and (_are_apart(piece_sides, sides) or not _are_apart(piece_sides, next_sides)):
            below.append(piece)
        else:
            inside.append(piece)
    return above, inside, below


def _in_order(columns: list[list[BTGroup]]) -> list[list[BTGroup]]:
    text = "".join(piece["text"] for column in columns for piece in column)
    is_rtl = len(_LETTERS.findall(text)) > len(_OTHERS.findall(text))
    return sorted(columns, key=lambda column: column[0]["tx"], reverse=is_rtl)


def _height(piece: BTGroup) -> float:
    return piece["ty"] * piece["flip_sort"]


def _top(block: list[BTGroup]) -> float:
    return max(map(_height, block)) + block[0]["font_height"] / 2


def _bottom(block: list[BTGroup]) -> float:
    return min(map(_height, block)) - block[0]["font_height"] / 2


def _sides(block: list[BTGroup]) -> tuple[float, float]:
    return min(piece["tx"] for piece in block), max(piece["displaced_tx"] for piece in block)


def _are_apart(sides: tuple[float, float], others: tuple[float, float]) -> bool:
    return sides[1] <= others[0] or others[1] <= sides[0]


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
    text, number = _AMONG_ARABIC if _ARABIC.search(line) else _AMONG_OTHERS

    def in_order(run: re.Match[str]) -> str:
        if _OTHERS.search(run[0]):
            return run[0][::-1]
        return number.sub(lambda digits: digits[0][::-1], run[0])

    line = text.sub(in_order, line[::-1])
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
