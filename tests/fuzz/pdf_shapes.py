"""PDF files of any size, by what is repeated, nested or left open in them."""

import zlib
from collections.abc import Callable, Mapping

from tests.fuzz.repeating import Make, nested, repeated


def _file(objects: list[bytes], trailer: bytes = b"", xref: bool = True) -> bytes:
    """A PDF; the first object is its catalogue."""
    made, offsets = bytearray(b"%PDF-1.7\n"), []
    for number, body in enumerate(objects, 1):
        offsets.append(len(made))
        made += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table, size = len(made), len(objects) + 1
    if xref:
        made += b"xref\n0 %d\n0000000000 65535 f \n" % size + b"".join(b"%010d 00000 n \n" % o for o in offsets)
    made += b"trailer\n<< /Size %d /Root 1 0 R %s >>\n" % (size, trailer)
    return bytes(made) + (b"startxref\n%d\n%%%%EOF\n" % table if xref else b"")


def _stream(data: bytes, more: bytes = b"") -> bytes:
    return b"<< /Length %d %s >>\nstream\n%s\nendstream" % (len(data), more, data)


_CATALOGUE, _PAGES = b"<< /Type /Catalog /Pages 2 0 R >>", b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>"
_FONT = b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"


def _page(contents: bytes = b"5 0 R", resources: bytes = b"/Font << /F1 4 0 R >>") -> bytes:
    box = b"/Type /Page /Parent 2 0 R /MediaBox [0 0 612 792]"
    return b"<< %s /Contents %s /Resources << %s >> >>" % (box, contents, resources)


def _content(data: bytes, more: bytes = b"") -> bytes:
    return _file([_CATALOGUE, _PAGES, _page(), _FONT, _stream(data, more)])


def _drawn(unit: str, before: str = "BT /F1 12 Tf (x) Tj ", after: str = " ET") -> Make:
    inside = repeated(unit, before, after)
    return lambda size: _content(inside(size))


def _packed(unit: str, times: int) -> Make:
    """Compressed: `times` as long as the file may be."""
    inside = repeated(unit, "BT /F1 12 Tf (x) Tj ", " ET")
    return lambda size: _content(zlib.compress(inside(times * size), 9), b"/Filter /FlateDecode")


def _pages(size: int, kids: Callable[[int], bytes]) -> bytes:
    count = max(1, size // 40)
    tree = b"<< /Type /Pages /Kids [%s] /Count %d >>" % (b" ".join(map(kids, range(count))), count)
    return _file([_CATALOGUE, tree, *[_page()], _FONT, _stream(b"BT /F1 12 Tf (x) Tj ET"), *[_page()] * count])


def _tree(size: int) -> bytes:
    depth = max(1, size // 60)
    nodes = [b"<< /Type /Pages /Kids [%d 0 R] /Count 1 >>" % (i + 7) for i in range(depth)]
    objects = [_CATALOGUE, b"<< /Type /Pages /Kids [6 0 R] /Count 1 >>", b"null", _FONT, _stream(b"BT (x) Tj ET")]
    return _file([*objects, *nodes, _page()])


def _mapped(unit: str, before: str, after: str) -> Make:
    inside = repeated(unit, f"begincmap {before} ", f" {after} endcmap")
    font = _FONT[:-2] + b"/ToUnicode 6 0 R >>"
    return lambda size: _file(
        [_CATALOGUE, _PAGES, _page(), font, _stream(b"BT /F1 12 Tf (x) Tj ET"), _stream(inside(size))]
    )


def _forms(size: int) -> bytes:
    """Each draws the next one twice."""
    count = max(1, size // 120)
    forms = [
        _stream(b"/X Do /X Do", b"/Subtype /Form /Resources << /XObject << /X %d 0 R >> >>" % (i + 7))
        for i in range(count)
    ]
    resources = b"/Font << /F1 4 0 R >> /XObject << /X 6 0 R >>"
    last = _stream(b"BT /F1 12 Tf (x) Tj ET", b"/Subtype /Form")
    return _file([_CATALOGUE, _PAGES, _page(b"5 0 R", resources), _FONT, _stream(b"/X Do"), *forms, last])


SHAPES: Mapping[str, Make] = {
    "strings": _drawn("(x) Tj "),
    "arrays": _drawn("[(x) 1 (y)] TJ "),
    "one array": _drawn("(x) 1 ", "BT /F1 12 Tf [", "] TJ ET"),
    "a long string": _drawn("x", "BT /F1 12 Tf (", ") Tj ET"),
    "an open string": _drawn("x", "BT /F1 12 Tf ("),
    "a string in hexadecimal": _drawn("78", "BT /F1 12 Tf <", "> Tj ET"),
    "escapes": _drawn("\\(", "BT /F1 12 Tf (", ") Tj ET"),
    "deep parentheses": lambda size: _content(nested("(", ")", "x", "BT /F1 12 Tf (", ") Tj ET")(size)),
    "open parentheses": _drawn("(", "BT /F1 12 Tf "),
    "open arrays": _drawn("["),
    "open dictionaries": _drawn("<<"),
    "numbers": _drawn("1 "),
    "a long number": _drawn("1"),
    "names": _drawn("/a "),
    "a long name": _drawn("a", "BT /", " 1 Tf ET"),
    "comments": _drawn("%x\n"),
    "spaces": _drawn(" "),
    "saved states": _drawn("q "),
    "restored states": _drawn("Q "),
    "moves": _drawn("1 1 Td (x) Tj "),
    "matrices": _drawn("1 0 0 1 9 9 Tm (x) Tj "),
    "fonts": _drawn("/F1 12 Tf (x) Tj "),
    "texts": _drawn("BT /F1 12 Tf (x) Tj ET ", "", ""),
    "lines": _drawn("(x) ' "),
    "images": _drawn("BI /W 1 /H 1 ID x EI "),
    "open images": _drawn("BI ID "),
    "marks": _drawn("/P << /MCID 0 >> BDC "),
    "compressed strings": _packed("(x) Tj ", 4),
    "compressed spaces": _packed(" ", 100),
    "a compressed string": _packed("x", 40),
    "compressed twice": lambda size: _content(
        zlib.compress(zlib.compress(b"BT " + b"(x) Tj " * size + b" ET", 9), 9),
        b"/Filter [/FlateDecode /FlateDecode]",
    ),
    "hexadecimal stream": lambda size: _content(b"20" * (size // 2) + b">", b"/Filter /ASCIIHexDecode"),
    "base 85 stream": lambda size: _content(b"z" * size + b"~>", b"/Filter /ASCII85Decode"),
    "run lengths": lambda size: _content(b"\x81 " * (size // 2) + b"\x80", b"/Filter /RunLengthDecode"),
    "LZW": lambda size: _content(b"\x80\x0b\x60\x50" * (size // 4), b"/Filter /LZWDecode"),
    "filters": lambda size: _content(b"x", b"/Filter [%s]" % (b"/ASCIIHexDecode " * (size // 16))),
    "pages": lambda size: _pages(size, lambda i: b"%d 0 R" % (i + 6)),
    "one page many times": lambda size: _pages(size, lambda i: b"3 0 R"),
    "pages of themselves": lambda size: _pages(size, lambda i: b"2 0 R"),
    "a deep tree": _tree,
    "forms": _forms,
    "contents": lambda size: _file(
        [_CATALOGUE, _PAGES, _page(b"[%s]" % (b"5 0 R " * (size // 6))), _FONT, _stream(b"BT /F1 9 Tf (x) Tj ET")]
    ),
    "objects": lambda size: _content(b"BT /F1 12 Tf (x) Tj ET")[:-6] + b"9 0 obj null endobj\n" * (size // 20),
    "objects without a table": lambda size: _file(
        [_CATALOGUE, _PAGES, _page(), _FONT, _stream(b"BT /F1 12 Tf (x) Tj ET"), *[b"null"] * (size // 25)],
        xref=False,
    ),
    "bytes behind the end": lambda size: _content(b"BT /F1 12 Tf (x) Tj ET") + b"\n" * size,
    "an open file": lambda size: b"%PDF-1.7\n" + b"1 0 obj << " * (size // 11),
    "codes": _mapped("<41> <0042>\n", "1 beginbfchar", "endbfchar"),
    "ranges of codes": _mapped("<0000> <ffff> <0000>\n", "1 beginbfrange", "endbfrange"),
    "a wide range of codes": _mapped("<00000000> <00ffffff> <0000>\n", "1 beginbfrange", "endbfrange"),
}
