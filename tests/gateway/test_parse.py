"""Documents of every media type to text, and what is refused."""

import io
import json
import random

import pytest
from pypdf import PdfWriter

from fusionkv.gateway.ingest import parse
from fusionkv.gateway.ingest.document import Document
from fusionkv.gateway.ingest.media_types import HTML, JSONL, MARKDOWN, PDF, PLAIN
from fusionkv.protos.runtime.errors import InvalidArgument


def pdf(*pages: str) -> bytes:
    """A PDF 1.4 file with one line of text a page, written by hand."""
    bodies = ["<< /Type /Catalog /Pages 2 0 R >>"]
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(len(pages)))
    bodies.append(f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>")
    bodies.append("<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>")
    for i, text in enumerate(pages):
        stream = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET"
        page = f"/Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {5 + 2 * i} 0 R"
        bodies.append(f"<< {page} /Resources << /Font << /F1 3 0 R >> >> >>")
        bodies.append(f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream")
    made, offsets = b"%PDF-1.4\n", []
    for number, body in enumerate(bodies, 1):
        offsets.append(len(made))
        made += f"{number} 0 obj\n{body}\nendobj\n".encode()
    table = "".join(f"{offset:010} 00000 n \n" for offset in offsets)
    count = len(bodies) + 1
    trailer = f"trailer\n<< /Size {count} /Root 1 0 R >>\nstartxref\n{len(made)}\n%%EOF\n"
    return made + f"xref\n0 {count}\n0000000000 65535 f \n{table}{trailer}".encode()


def encrypted_pdf(password: str) -> bytes:
    writer = PdfWriter(clone_from=io.BytesIO(pdf("secret")))
    writer.encrypt(password, algorithm="RC4-128")
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


def texts(content: bytes, kind: str) -> list[str]:
    return [s.text for s in parse.parse(content, kind)]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.txt", PLAIN), ("b/c.MD", MARKDOWN), ("x.htm", HTML), ("y.pdf", PDF), ("z.jsonl", JSONL)],
)
def test_the_ending_tells_the_media_type(name: str, kind: str) -> None:
    assert parse.media_type(name) == kind
    assert parse.media_type(name, "text/html; charset=utf-8") == HTML


@pytest.mark.parametrize(("name", "given"), [("a.docx", ""), ("README", ""), ("a.txt", "image/png")])
def test_an_unknown_media_type_is_refused_with_the_known_ones(name: str, given: str) -> None:
    with pytest.raises(InvalidArgument, match="application/jsonl"):
        parse.media_type(name, given)


def test_text_and_markdown_stay_as_they_are() -> None:
    assert parse.parse("ein Satz\r\n— ä".encode(), PLAIN) == [Document("ein Satz\r\n— ä")]
    assert parse.parse(b"\xef\xbb\xbf# Head\n\n* x", MARKDOWN) == [Document("# Head\n\n* x", markdown=True)]


def test_html_becomes_markdown_without_scripts() -> None:
    html = b"""<html><head><title>The title</title><style>p {}</style></head><body><!-- no -->
        <script>alert(1)</script><h2>Part</h2><p>one <b>two</b> &amp; three</p><ul><li>x</li></ul></body></html>"""
    (document,) = parse.parse(html, HTML)
    assert document.markdown
    assert document.text.split() == ["#", "The", "title", "##", "Part", "one", "**two**", "&", "three", "*", "x"]


def test_html_may_declare_its_encoding() -> None:
    assert "Größe" in texts('<meta charset="latin-1"><p>Größe</p>'.encode("latin-1"), HTML)[0]
    with pytest.raises(InvalidArgument, match="not UTF-8"):
        texts("<p>Größe</p>".encode("latin-1"), HTML)


def test_pdf_pages_are_read_in_order() -> None:
    assert texts(pdf("first page", "second page"), PDF) == ["first page\n\nsecond page"]


def test_pdf_with_an_empty_user_password_is_readable() -> None:
    assert texts(encrypted_pdf(""), PDF) == ["secret"]


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
        (b"caf\xe9", PLAIN, "not UTF-8.*position 3"),
        (b"a\0b", PLAIN, "NUL character at 1"),
        (b" \n\t", PLAIN, "no text"),
        (b"", MARKDOWN, "no text"),
        (b"<p> </p><script>x</script>", HTML, "no text"),
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
        (
            b'{"text": "a", "metadata": {"a": "' + b"x" * 5000 + b'"}}',
            JSONL,
            "line 1: the metadata has more than 4096",
        ),
        (b'{"text": "a", "title": "\\ud800"}', JSONL, "line 1 contains half of a surrogate pair"),
    ],
)
def test_content_that_is_not_of_its_type_is_refused(content: bytes, kind: str, error: str) -> None:
    with pytest.raises(InvalidArgument, match=error):
        parse.parse(content, kind)


@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        (PDF, pdf("hello", "two")),
        (PDF, encrypted_pdf("")),
        (HTML, b"<title>T</title><h1>x</h1><table><tr><td>a</table><ul><li>b<![CDATA[x]]><!-- c --><p>&amp;&#x41;"),
        (JSONL, b'{"text": "a", "title": "t"}\n"b"\n'),
    ],
)
def test_broken_content_is_parsed_or_refused_and_never_worse(kind: str, seed: bytes) -> None:
    rng = random.Random(0)
    refused = 0
    for _ in range(150):
        content = bytearray(seed)
        for _ in range(rng.randint(1, 6)):
            at, length = rng.randrange(len(content)), rng.randrange(20)
            content[at : at + rng.choice([0, length])] = bytes(
                rng.choices(b"<>![]()/&;-{}0123456789abc obj R", k=length)
            )
        try:
            parse.parse(bytes(content), kind)
        except InvalidArgument:
            refused += 1
    assert refused or kind == HTML
