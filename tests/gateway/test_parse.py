"""Documents of every media type to text, and what is refused."""

import io
import json

import pytest
from pypdf import PdfWriter

from fusionkv.gateway.ingest import parse
from fusionkv.gateway.ingest.document import Document
from fusionkv.gateway.ingest.media_types import HTML, JSONL, MARKDOWN, PDF, PLAIN
from fusionkv.protos.runtime.errors import InvalidArgument
from tests.fuzz.pdf_shapes import CATALOGUE, FONT, file, page, stream


def pdf(*pages: str) -> bytes:
    """A PDF file with one line of text a page, written by hand."""
    kids = b" ".join(b"%d 0 R" % (4 + 2 * i) for i in range(len(pages)))
    objects = [CATALOGUE, b"<< /Type /Pages /Kids [%s] /Count %d >>" % (kids, len(pages)), FONT]
    for i, text in enumerate(pages):
        drawn = stream(f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET".encode())
        objects += [page(b"%d 0 R" % (5 + 2 * i), b"/Font << /F1 3 0 R >>"), drawn]
    return file(objects)


def mapped_pdf(code: str) -> bytes:
    """A PDF file with one character, which its font maps to UTF-16 with this hexadecimal code."""
    unicode = stream(b"begincmap 1 beginbfchar <78> <%s> endbfchar endcmap" % code.encode())
    objects = [CATALOGUE, b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>", page(), FONT[:-2] + b"/ToUnicode 6 0 R >>"]
    return file([*objects, stream(b"BT /F1 12 Tf 72 720 Td (x) Tj ET"), unicode])


def encrypted_pdf(password: str) -> bytes:
    writer = PdfWriter(clone_from=io.BytesIO(pdf("secret")))
    writer.encrypt(password, algorithm="RC4-128")
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


@pytest.mark.parametrize(
    ("name", "kind"), [("a.txt", PLAIN), ("b/c.MD", MARKDOWN), ("x.htm", HTML), ("y.pdf", PDF), ("z.jsonl", JSONL)]
)
def test_the_ending_tells_the_media_type(name: str, kind: str) -> None:
    assert parse.media_type(name) == kind
    assert parse.media_type(name, "text/html; charset=utf-8") == HTML


@pytest.mark.parametrize(("name", "given"), [("a.docx", ""), ("README", ""), ("a.txt", "image/png")])
def test_an_unknown_media_type_is_refused_with_the_known_ones(name: str, given: str) -> None:
    with pytest.raises(InvalidArgument, match="application/jsonl"):
        parse.media_type(name, given)


@pytest.mark.parametrize(
    ("content", "kind", "document"),
    [
        ("ein Satz\r\n— ä".encode(), PLAIN, Document("ein Satz\r\n— ä")),
        (b"\xef\xbb\xbf# Head\n\n* x", MARKDOWN, Document("# Head\n\n* x", markdown=True)),
        (pdf("first page", "second page"), PDF, Document("first page\n\nsecond page")),
        (encrypted_pdf(""), PDF, Document("secret")),  # an empty user password opens it
        ('<meta charset="latin-1"><p>Größe</p>'.encode("latin-1"), HTML, Document("Größe", markdown=True)),
        ('<meta charset="utf-16"><p>Größe</p>'.encode(), HTML, Document("Größe", markdown=True)),
        ("<?xml version='1.0' encoding='UTF-16'?><html>ö</html>".encode(), HTML, Document("ö", markdown=True)),
        ('<meta charset="latin-1"><p>Größe</p>'.encode("utf-8-sig"), HTML, Document("Größe", markdown=True)),
        ("\ufeff<p>Größe</p>".encode("utf-16-le"), HTML, Document("Größe", markdown=True)),
        (mapped_pdf("D835DC00"), PDF, Document("\U0001d400")),
        (mapped_pdf("D835"), PDF, Document("\ufffd")),
    ],
)
def test_the_text_of_a_document(content: bytes, kind: str, document: Document) -> None:
    assert parse.parse(content, kind) == [document]


def test_html_becomes_markdown_without_scripts() -> None:
    html = b"""<html><head><title>The title</title><style>p {}</style></head><body><!-- no -->
        <script>alert(1)</script><h2>Part</h2><p>one <b>two</b> &amp; three</p><ul><li>x</li></ul></body></html>"""
    (document,) = parse.parse(html, HTML)
    assert document.markdown
    assert document.text.split() == ["#", "The", "title", "##", "Part", "one", "**two**", "&", "three", "*", "x"]


def test_an_xml_declaration_is_no_text() -> None:
    page = b'<?xml version="1.0"?><?style href="a.css"?><html><body><p>one &lt;?two?&gt;</p></body></html>'
    assert parse.parse(page, HTML) == [Document("one <?two?>", markdown=True)]


def test_each_json_line_is_a_document() -> None:
    lines = [
        {"id": 7, "title": " T\n", "text": "one", "metadata": {"year": 2020, "by": "x", "no": None}, "more": [1]},
        {"_id": "b/2", "contents": "two"},
        "three",
        {"title": None, "text": "a\u2028b", "metadata": {}},
    ]
    content = "\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines).encode()
    assert parse.parse(content, JSONL, first_line=11) == [
        Document("one", name="7", title="T", metadata=(("by", "x"), ("year", "2020")), line=11),
        Document("two", name="b/2", line=13),
        Document("three", line=15),
        Document("a\u2028b", line=17),
    ]


@pytest.mark.parametrize(
    ("content", "kind", "error"),
    [
        (b"caf\xe9", PLAIN, "not UTF-8 and must be converted first.*position 3"),
        (b"a\0b", PLAIN, "NUL character at 1"),
        (b" \n\t", PLAIN, "no text"),
        (b"", MARKDOWN, "no text"),
        (b"<p> </p><script>x</script>", HTML, "no text"),
        ("<p>Größe</p>".encode("latin-1"), HTML, "not UTF-8"),
        (b"<meta charset='utf\0'><p>x", HTML, "not UTF.*null character"),
        (b"hello", PDF, "does not begin with %PDF-"),
        (b"%PDF-1.4\ngarbage", PDF, "the PDF can't be read"),
        (pdf("x")[:200], PDF, "PDF can't be read|no text"),
        (pdf(""), PDF, "no text.*text recognition"),
        (encrypted_pdf("pass"), PDF, "the PDF is encrypted"),
        (b"<div>" * 5000 + b"x", HTML, "nested too deeply"),
        (b"<p>x</p><![n[", HTML, "markup is broken"),
        (b'{"text": "a"}\n\n{"text": "b"\n', JSONL, "line 3 is not JSON"),
        (b'{"text": "a"}\n[1]', JSONL, "line 2 must be a JSON object or a string"),
        (b'{"body": "a"}', JSONL, 'line 1 must have a non-empty string "text"'),
        (b'{"text": ' + b"[" * 100_000, JSONL, "line 1 is not JSON"),
        (b'{"text": " "}', JSONL, "line 1 must have a non-empty string .*"),
        (b'{"text": "a", "id": true}', JSONL, 'line 1 has an "id" that is neither'),
        (b'{"text": "a", "title": ["x"]}', JSONL, 'line 1 has a "title" that is not a string'),
        (b'{"text": "a", "metadata": "x"}', JSONL, 'line 1 has "metadata" that is not an object'),
        (b'{"text": "a", "metadata": {"a=b": "x"}}', JSONL, "line 1: a metadata key is empty or contains `=`"),
        (b'{"text": "a", "metadata": {"a": "%s"}}' % (b"x" * 5000), JSONL, "line 1: the metadata has more than 4096"),
        (b'{"text": "a", "title": "\\ud800"}', JSONL, "line 1 contains half of a surrogate pair"),
    ],
)
def test_content_that_is_not_of_its_type_is_refused(content: bytes, kind: str, error: str) -> None:
    with pytest.raises(InvalidArgument, match=error):
        parse.parse(content, kind)
