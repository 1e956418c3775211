"""Documents of every media type to text, and what is refused."""

import contextlib
import io
import json
import time
from html.parser import HTMLParser

import matplotlib
import pytest
from matplotlib.figure import Figure
from pypdf import PdfWriter

from fusionkv.gateway.ingest import parse
from fusionkv.gateway.ingest.document import Document
from fusionkv.gateway.ingest.media_types import HTML, JSONL, MARKDOWN, PDF, PLAIN
from fusionkv.gateway.ingest.parse_pdf import in_logical_order
from fusionkv.gateway.ingest.text import normal
from fusionkv.protos.runtime.errors import InvalidArgument
from tests.fuzz.pdf_shapes import CATALOGUE, FONT, file, page, stream


def takes(markup: str) -> bool:
    """Whether this Python's parser finds nothing to refuse in it."""
    with contextlib.suppress(AssertionError):
        HTMLParser().feed(markup)
        return True
    return False


of_older_parsers = pytest.mark.skipif(takes("<![n["), reason="this Python's parser of HTML refuses no markup")


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


def drawn_pdf(*columns: tuple[float, float, list[str]], font_type: int = 42) -> bytes:
    """A PDF file as a program draws it: shaped, and in visual order; each column with its right side and its top."""
    figure, out = Figure(figsize=(8, 8)), io.BytesIO()
    for right, top, lines in columns:
        for number, line in enumerate(lines):
            figure.text(right, top - 0.1 * number, line, ha="right")
    with matplotlib.rc_context({"pdf.fonttype": font_type}):
        figure.savefig(out, format="pdf")
    return out.getvalue()


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
        (b"<meta charset=ISO-8859-1><p>\x935 \x80\x94", HTML, Document("“5 €”", markdown=True)),
        ("<meta charset=gb2312><p>朱镕基".encode("gbk"), HTML, Document("朱镕基", markdown=True)),
        ("<meta charset=x-sjis><p>① 日本".encode("cp932"), HTML, Document("① 日本", markdown=True)),
        ("<meta charset=iso-2022-kr><p>한글".encode("iso2022_kr"), HTML, Document("한글", markdown=True)),
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


def test_blocks_are_apart() -> None:
    html = "<header>a</header><main>b<fieldset><legend>c</legend>d</fieldset><select><option>e<option>f</select>"
    assert parse.parse(html.encode(), HTML)[0].text.split() == ["a", "b", "c", "d", "e", "f"]
    cells = "<table><tr><td><main>a</main>b</td></tr></table>"
    assert "| a b |" in " ".join(parse.parse(cells.encode(), HTML)[0].text.split())


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("<p>a<p hidden>no<p>b<div>c</div>d", "a\n\nb\n\nc\n\nd"),
        ("<ul><li>a<li hidden><p>no<li>b<ul><li>c<li>d</ul><li>e</ul>f", "* a\n* b\n  + c\n  + d\n* e\n\nf"),
        (
            "<table><tr><td>a<td>b<tr hidden><td>no<tr><th>c<td>d</table>",
            "|  |  |\n| --- | --- |\n| a | b |\n| c | d |",
        ),
        ("<select><option>a<option hidden>no<option>b</select>", "a\n\nb"),
        ("<ol>" + "<li>a" * 500 + "</ol>", "\n".join(f"{number}. a" for number in range(1, 501))),
        ("<p>a<table><tr><td>b<p>c</table>d", "a\n\n|  |\n| --- |\n| b c |\n\nd"),
    ],
)
def test_end_tags_may_be_missing(page: str, text: str) -> None:
    assert parse.parse(page.encode(), HTML) == [Document(text, markdown=True)]


@pytest.mark.parametrize(
    ("table", "rows"),
    [
        (
            "<thead><tr><th rowspan=2>a<th colspan=2>b<tr><th>c<th>d<tbody><tr><td>e<td>f<td>g",
            ["| a | b | |", "| --- | --- | --- |", "|  | c | d |", "| e | f | g |"],
        ),
        (
            "<tr><th>a<th>b<th>c<tr><td rowspan=2>d<td>e<td hidden rowspan=2>no<td>f<tr hidden><td>no<tr><td>g"
            "<td rowspan=99>h<tr><td>i<td>j",
            ["| a | b | c |", "| --- | --- | --- |", "| d | e | f |", "|  | g | h |", "| i | j |  |"],
        ),
        ("<tr><th colspan=2 rowspan=2>a<tr><tr><td>b<td>c", ["| a | |", "| --- | --- |", "|  |  |", "| b | c |"]),
    ],
)
def test_cells_that_span_rows_move_no_others_to_another_column(table: str, rows: list[str]) -> None:
    assert parse.parse(f"<table>{table}</table>".encode(), HTML)[0].text.split("\n") == rows


def test_readings_split_no_words() -> None:
    page = "<p><ruby>東<rt>とう</rt>京<rt>きょう</rt></ruby>へ<ruby>行<rp>[<rt>い<rp>]</ruby>く<ruby>。</ruby></p>"
    assert parse.parse(page.encode(), HTML) == [Document("東京(とうきょう)へ行(い)く。", markdown=True)]


def test_an_xml_declaration_is_no_text() -> None:
    page = b'<?xml version="1.0"?><?style href="a.css"?><html><body><p>one &lt;?two?&gt;</p></body></html>'
    assert parse.parse(page, HTML) == [Document("one <?two?>", markdown=True)]


def test_each_json_line_is_a_document() -> None:
    lines = [
        {"id": 7, "title": " T\n", "text": "one", "metadata": {"year": 2020, "by": ["Zoë"], "no": None}, "more": [1]},
        {"_id": "b/2", "contents": "two"},
        "three",
        {"title": None, "text": "a\u2028b", "metadata": {}},
    ]
    content = "\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines).encode()
    assert parse.parse(content, JSONL, first_line=11) == [
        Document("one", name="7", title="T", metadata=(("by", '["Zoë"]'), ("year", "2020")), line=11),
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
        pytest.param(b"<p>x</p><![n[", HTML, "markup is broken", marks=of_older_parsers),
        (b'{"text": "a"}\n\n{"text": "b"\n', JSONL, "line 3 is not JSON"),
        (b'{"text": "a"}\n[1]', JSONL, "line 2 must be a JSON object or a string"),
        (b'{"body": "a"}', JSONL, 'line 1 must have a string "text"'),
        (b'{"text": ' + b"[" * 100_000, JSONL, "line 1 is not JSON"),
        (b'{"text": " "}', JSONL, "no text"),
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


PNG = "iVBORw0KGgoAAAANSUhEUg" + "Az09+/" * 200 + "=="
IMAGE = f"data:image/png;base64,{PNG}"
SVG = "data:image/svg+xml;utf8,<svg xmlns='a'><text>secret</text></svg>"


@pytest.mark.parametrize(
    ("page", "text"),
    [
        (f"<p>a<p><img alt=pump src={IMAGE}><p>b", "a\n\npump\n\nb"),
        (f"<img alt='a pump' src='{IMAGE}'>", "a pump"),
        (f"<img src=p.png alt=p srcset='{IMAGE} 1x, {IMAGE} 2x'>", "![p](p.png)"),
        (f'<img alt=drawing src="{SVG}">', "drawing"),
        (f"<a href='data:application/pdf;base64,{PNG}'>paper</a> <a href='javascript:f(1)'>more</a>", "paper more"),
        (f"<video poster='{IMAGE}' src='data:video/mp4;base64,{PNG}'>film</video>", "film"),
        (f"<style>p {{ background: url({IMAGE}) }}</style><p style='background: url({IMAGE})'>a", "a"),
        (f"<pre>a {IMAGE} b</pre>", "```\na  b\n```"),
        ("<p hidden>no</p><p hidden=''>no</p><p hidden=until-found>a</p>", "a"),
        (
            "<p style='color: red; DISPLAY : None !important'>no</p><p style='content-visibility: hidden'>a</p>",
            "a",
        ),
        ("<style>p {display: none}</style><p class=x>a", "a"),
        ("<details><summary>a</summary>b</details><p aria-hidden=true>c</p><p inert>d", "a\n\nb\n\nc\n\nd"),
        ("<dialog>no</dialog><dialog open>a</dialog><div popover>no</div>", "a"),
        ("<template>no</template><template shadowrootmode=open>a</template>", "a"),
        ("<p>a</p><iframe src=/x>no</iframe><datalist><option>no</option></datalist><noframes>no</noframes>", "a"),
        ("<div style=visibility:hidden>no <b>no</b></div><p style='visibility: collapse'>no</p><p>a", "a"),
        ("<nav><a href=/>no</a></nav><div role='Navigation menu'>no</div><template>no</template><p>a", "a"),
        ("<!-- no --><noscript>no</noscript><svg><text>no</text></svg><script>no</script><p>a", "a"),
        ("<title>T</title><h1><img src=a alt=A></h1><p>a", "# T\n\n# A\n\na"),
        ("<title>T</title><h1 hidden>no</h1><nav><h1>no</h1></nav><p>a", "# T\n\na"),
        ("<svg><title>no</title></svg><p>a", "a"),
        ("<svg><title>no</title></svg><title>T</title><p>a", "# T\n\na"),
        ("<p>max_tokens = 2 * <b>x_y</b> **", "max_tokens = 2 * **x_y** **"),
        ("<p>&lt;nav&gt;a&lt;/nav&gt; &lt;!-- b --&gt;", "<nav>a</nav> <!-- b -->"),
    ],
)
def test_a_page_is_what_is_shown_of_it(page: str, text: str) -> None:
    assert parse.parse(page.encode(), HTML) == [Document(text, markdown=True)]


@pytest.mark.parametrize(
    ("markdown", "text"),
    [
        (f"a ![pump [1]]({IMAGE}) b", "a pump [1] b"),
        (f'a ![pump](<{IMAGE}> "a pump") b', "a pump b"),
        (f"a [![pump]({IMAGE})](https://pumps) b", "a [pump](https://pumps) b"),
        (f"![pump][1]\n\n[1]: {IMAGE}\n[2]: <{IMAGE}> 'a pump'\nend", "pump\n\nend"),
        (
            f"![a [1]][Fig  1] ![b] [fig 1][] [c][d] [![e][b]](/f) [x]\n\n[FIG 1]: {IMAGE}\n[b]: {IMAGE}\n[d]: /d",
            "a [1] b fig 1 [c][d] [e](/f) [x]\n\n[d]: /d",
        ),
        (f"> ![a][b]\n>\n> [b]: {IMAGE}\n\n* [b]\n\n  [b]: {IMAGE}\n", "> a\n>\n\n* b\n\n"),
        (f"a <img alt='a pump' src='{IMAGE}'/> b", "a a pump b"),
        (f'<picture><source srcset="{IMAGE} 1x, {IMAGE} 2x"><img src={IMAGE}></picture>a', "<picture></picture>a"),
        (f"<style>\np {{ background: url({IMAGE}) }}\n</style>a", "a"),
        (f"[paper](data:application/pdf;name=a%20b.pdf;base64,{PNG})", "paper"),
        (f"a\n<!-- no\n\n{IMAGE} --> <nav>no <b>no</b></nav>\nb", "a\n \nb"),
        ("a <div hidden>no <p>no</p>\n\n```\nno\n```\n</div>b", "a b"),
        (
            "```html\n<nav>a</nav> <!-- b -->\n```\n`<nav>c</nav>`",
            "```html\n<nav>a</nav> <!-- b -->\n```\n`<nav>c</nav>`",
        ),
        ("a\n\n    <nav>b</nav>\n\n1 < 2 <!-- c <p hidden>d", "a\n\n    <nav>b</nav>\n\n1 < 2 <!-- c <p hidden>d"),
        ("a\r\n```\r\n<nav>b</nav>\r\n```\r\n<!-- no -->c\r\n", "a\r\n```\r\n<nav>b</nav>\r\n```\r\nc\r\n"),
        ("a\r\n\r\n    <nav>b</nav>\r\n \r\n\t<nav>c</nav>\r\n", None),
        ("* a\n  - b\n    ```html\n    <nav>c</nav> <!-- d -->\n    ```\n", None),
        ("1) > ~~~\n   > <!-- a -->\n   > ~~~\n   > <!-- no -->b", "1) > ~~~\n   > <!-- a -->\n   > ~~~\n   > b"),
        ("```a``` and\n\n<!-- no -->b\n```", "```a``` and\n\nb\n```"),
        ("`` a ` <!-- b -->\n<nav>c</nav> `` ` <!-- no -->", "`` a ` <!-- b -->\n<nav>c</nav> `` ` "),
        ("`a\n \n<!-- no -->b`", "`a\n \nb`"),
        ('"data: the new oil" and `data:text/plain;base64,SGVsbG8=`', None),
        ("[data]: the new oil\n![empty]() [x](data.csv) data:none", None),
    ],
)
def test_markdown_is_what_is_shown_of_it(markdown: str, text: str | None) -> None:
    assert parse.parse(markdown.encode(), MARKDOWN) == [Document(text or markdown, markdown=True)]


def test_inline_images_are_no_text_of_other_documents() -> None:
    assert parse.parse(f"a {IMAGE} b".encode(), PLAIN) == [Document("a  b")]
    line = json.dumps({"text": f"a ![pump]({IMAGE}) b"}).encode()
    assert parse.parse(line, JSONL) == [Document("a pump b", line=1)]


def test_texts_are_composed() -> None:
    apart, one = "Cafe\u0301 \u1112\u1161\u11ab \u304b\u3099", "Café 한 が"
    assert normal(apart) == normal(one) == one
    assert normal("か" * 500 + "\u304b\u3099" * 500) == "か" * 500 + "が" * 500
    for kind in (PLAIN, MARKDOWN, HTML):
        assert parse.parse(apart.encode(), kind)[0].text == one
    line = json.dumps({"title": apart, "text": apart}).encode()
    assert parse.parse(line, JSONL) == [Document(one, title=one, line=1)]


def test_words_are_found_as_they_look() -> None:
    seen = "Donau\u00addampf\u00ad\r\nschiff, Internet\u200bExplorer: \ufeffe\ufb03cient\u2060 \ufb02ights"
    looks = "Donaudampfschiff, InternetExplorer: efficient flights"
    for kind in (PLAIN, MARKDOWN, HTML):
        assert parse.parse(seen.encode(), kind)[0].text == looks
    line = json.dumps({"title": "\u200b T\u00adT", "text": seen}).encode()
    assert parse.parse(line, JSONL) == [Document(looks, title="TT", line=1)]
    with pytest.raises(InvalidArgument, match="no text"):
        parse.parse("\u200b \u00ad".encode(), PLAIN)


RIGHT_TO_LEFT = [
    "שלום עולם, זה מסמך בדיקה.",
    'המחיר הוא 1,250 שקלים (כולל מע"מ) לשנת 2024.',
    "הספרייה NumPy 2.0 פועלת במהירות גבוהה.",
    "مرحبا بالعالم، هذه وثيقة اختبار.",
    "السعر هو 1250 دولار في سنة 2024 مع NumPy.",
    "English with שלום עולם inside 12 words.",
]


@pytest.mark.parametrize("font_type", [3, 42])
def test_pdfs_from_right_to_left_are_in_logical_order(font_type: int) -> None:
    (document,) = parse.parse(drawn_pdf((0.95, 0.9, RIGHT_TO_LEFT), font_type=font_type), PDF)
    assert document.text.split("\n") == RIGHT_TO_LEFT


FIRST = ["הטור הראשון מתחיל כאן ונמשך", "בשורה השנייה של הטור הימני", "ומסתיים בשורה שלישית לגמרי"]
SECOND = ["הטור השני מתחיל לאחר מכן", "والسطر الثاني باللغة العربية", "העמוד עד סופו של הטקסט"]
ENGLISH = ["The first column begins here", "with the word שלום in its text", "and ends in the third line."]
HEADING = ["כותרת רחבה של המסמך כולו שנפרשת על פני שני הטורים בעמוד הזה לכל רוחבו"]


@pytest.mark.parametrize(
    ("drawn", "lines"),
    [
        ([(0.95, 0.6, FIRST), (0.63, 0.6, ENGLISH), (0.3, 0.6, SECOND)], FIRST + ENGLISH + SECOND),
        (
            [(0.95, 0.9, FIRST), (0.45, 0.9, SECOND), (0.95, 0.6, HEADING), (0.95, 0.5, SECOND), (0.48, 0.5, FIRST)],
            FIRST + SECOND + HEADING + SECOND + FIRST,
        ),
        (  # a table
            [(x, 0.6 - 0.1 * row, [cells[row]]) for row in range(3) for x, cells in ((0.95, FIRST), (0.45, SECOND))],
            [" ".join(row) for row in zip(FIRST, SECOND, strict=True)],
        ),
    ],
)
def test_lines_of_pdfs_are_read_as_they_are_drawn(
    drawn: list[tuple[float, float, list[str]]], lines: list[str]
) -> None:
    (document,) = parse.parse(drawn_pdf(*drawn), PDF)
    assert document.text.split("\n") == lines


@pytest.mark.parametrize(
    ("seen", "text"),
    [
        ("םולש 2024", "2024 שלום"),
        ('(מ"עמ ללוכ) םילקש 1,250 ריחמה', 'המחיר 1,250 שקלים (כולל מע"מ)'),  # mirrored already
        ("50% - 10 :םירפסמ", "מספרים: 10 - 50%"),
        ("ﺭﻻﻭﺩ 1250 ﺮﻌﺴﻟﺍ", "السعر 1250 دولار"),  # shapes of letters
        ("١٢٣\u066b٤ ةنس", "سنة ١٢٣\u066b٤"),
        ('(ח"ש ןוילימ 3-כ) $12.5 לש 2023/24 ח"וד', 'דו"ח 2023/24 של $12.5 (כ-3 מיליון ש"ח)'),
        ("וישומישו Machine Learning-ל אובמ - 3.2 קרפ", "פרק 3.2 - מבוא ל-Machine Learning ושימושיו"),
        ("שלום עולם 12", "שלום עולם 12"),  # in logical order already
        ("A  page\nof English.", "A page\nof English."),
    ],
)
def test_lines_from_right_to_left(seen: str, text: str) -> None:
    assert in_logical_order(seen) == text


def test_readings_in_words_without_end_take_time_for_each_alone() -> None:
    began = time.process_time()
    words = parse.parse(b"<ruby>a<rt>b</rt>" * 12_000, HTML)[0].text
    assert words == "a(b)" * 12_000
    assert time.process_time() - began < 5
