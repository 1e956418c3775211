"""PDF files of any size, by what is repeated, nested or left open in them."""

import zlib
from collections.abc import Callable

from tests.fuzz.shapes import Bytes, data


def file(objects: list[bytes]) -> bytes:
    """A PDF; the first object is its catalogue."""
    made, offsets = bytearray(b"%PDF-1.7\n"), []
    for number, body in enumerate(objects, 1):
        offsets.append(len(made))
        made += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table, size = len(made), len(objects) + 1
    made += b"xref\n0 %d\n0000000000 65535 f \n" % size + b"".join(b"%010d 00000 n \n" % o for o in offsets)
    return bytes(made) + b"trailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (size, table)


def stream(data: bytes, more: bytes = b"") -> bytes:
    return b"<< /Length %d %s >>\nstream\n%s\nendstream" % (len(data), more, data)


CATALOGUE, _PAGES = b"<< /Type /Catalog /Pages 2 0 R >>", b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>"
FONT, _DRAWN = b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>", b"BT /F1 12 Tf (x) Tj ET"


def page(contents: bytes = b"5 0 R", resources: bytes = b"/Font << /F1 4 0 R >>") -> bytes:
    box = b"/Type /Page /Parent 2 0 R /MediaBox [0 0 612 792]"
    return b"<< %s /Contents %s /Resources << %s >> >>" % (box, contents, resources)


def _content(data: bytes, more: bytes = b"") -> bytes:
    return file([CATALOGUE, _PAGES, page(), FONT, stream(data, more)])


def _drawn(pattern: str) -> Callable[[int], bytes]:
    return lambda size: _content(data(pattern)(size))


def _packed(unit: str, times: int) -> Callable[[int], bytes]:
    """Compressed: `times` as long as the file may be."""
    inside = data(f"BT /F1 12 Tf (x) Tj «{unit}» ET")
    return lambda size: _content(zlib.compress(inside(times * size), 9), b"/Filter /FlateDecode")


def _pages(size: int, kids: Callable[[int], bytes]) -> bytes:
    count = max(1, size // 40)
    tree = b"<< /Type /Pages /Kids [%s] /Count %d >>" % (b" ".join(map(kids, range(count))), count)
    return file([CATALOGUE, tree, page(), FONT, stream(_DRAWN), *[page()] * count])


def _mapped(pattern: str) -> Callable[[int], bytes]:
    inside, font = data(f"begincmap 1 {pattern} endcmap"), FONT[:-2] + b"/ToUnicode 6 0 R >>"
    return lambda size: file([CATALOGUE, _PAGES, page(), font, stream(_DRAWN), stream(inside(size))])


def _turned(pattern: str) -> Callable[[int], bytes]:
    """A text in Hebrew: of the letter for x."""
    inside, font = data(f"BT /F1 12 Tf {pattern} ET"), FONT[:-2] + b"/ToUnicode 6 0 R >>"
    letter = stream(b"begincmap 1 beginbfchar <78> <05d0> endbfchar endcmap")
    return lambda size: file([CATALOGUE, _PAGES, page(), font, stream(inside(size)), letter])


SHAPES: Bytes = {
    # Behind a text, within one, or instead of it.
    **{
        f"behind: {unit}": _drawn(f"BT /F1 12 Tf (x) Tj «{unit}» ET")
        for unit in ("(x) Tj ", "[(x) 1 (y)] TJ ", "[", "<<", "1 ", "1", " ", "q ", "1 1 Td (x) Tj ", "BI ID ")
    },
    **{
        f"within: {pattern}": _drawn(f"BT /F1 12 Tf {pattern}")
        for pattern in ("[«(x) 1 »] TJ ET", "(«x») Tj ET", "(«x» ET", "<«78»> Tj ET", "(«(»x«)») Tj ET", "«(» ET")
    },
    # From right to left: lines, lines that go up, many on a line, a long line, and columns.
    **{
        f"turned: {pattern}": _turned(pattern)
        for pattern in (
            *("«0 -20 Td (xx) Tj »", "«0 20 Td (xx) Tj »", "«1 0 0 1 9 9 Tm (xx) Tj »", "(«x a 1 ») Tj"),
            "«0 -20 Td (xxxxxxxxxxxx) Tj »200 400 Td «0 -20 Td (xxxxxxxxxxxx) Tj »",
        )
    },
    **{f"packed: {unit}": _packed(unit, times) for unit, times in (("(x) Tj ", 4), (" ", 100), ("x", 40))},
    "run lengths": lambda size: _content(b"\x81 " * (size // 2) + b"\x80", b"/Filter /RunLengthDecode"),
    "LZW": lambda size: _content(b"\x80\x0b\x60\x50" * (size // 4), b"/Filter /LZWDecode"),
    "filters": lambda size: _content(b"x", b"/Filter [%s]" % (b"/ASCIIHexDecode " * (size // 16))),
    "pages": lambda size: _pages(size, lambda i: b"%d 0 R" % (i + 6)),
    "one page many times": lambda size: _pages(size, lambda i: b"3 0 R"),
    "pages of themselves": lambda size: _pages(size, lambda i: b"2 0 R"),
    "objects": lambda size: _content(_DRAWN)[:-6] + b"9 0 obj null endobj\n" * (size // 20),
    "bytes behind the end": lambda size: _content(_DRAWN) + b"\n" * size,
    "codes": _mapped("beginbfchar «<41> <0042>\n» endbfchar"),
    "ranges of codes": _mapped("beginbfrange «<0000> <ffff> <0000>\n» endbfrange"),
    "a wide range of codes": _mapped("beginbfrange «<00000000> <00ffffff> <0000>\n» endbfrange"),
}
