"""Documents of any size, by kind: what is repeated, nested or left open in them. Patterns are those of shapes.py."""

from collections.abc import Mapping

from fusionkv.gateway.ingest.media_types import HTML, JSONL, MARKDOWN, PDF, PLAIN
from tests.fuzz import pdf_shapes
from tests.fuzz.shapes import Bytes, datas

# The Markdown splitter takes the square of a list or a quote of many lines: the deadline alone bounds these.
SQUARES: Mapping[str, Bytes] = {
    HTML: datas("<blockquote>" * 100 + "«x<br>»", "<ul><li>" * 60 + "«x<br>»"),
    MARKDOWN: {"deep items": lambda size: "".join(" " * 2 * i + "* x\n" for i in range(int(size**0.5))).encode()},
}
_HTML = datas(
    "<p>a« »b</p>", "<p>a«\t\n»b</p>", "<pre>a«\n »b</pre>", "<pre>\n« »b</pre>", "<pre>a« <b> </b>\n»b</pre>",
    # Tags, comments and references that are left open, or end nothing.
    "«<a»", "«<a»>", "«<a b='c' »", "«<a b='»>", "«</a»", "«<!--»", "«<!a»", "«<?a»", "«<![CDATA[»", "«<»", "«&»",
    "«&#»", "«&amp;&#65;&#x41;»", "«&aaaaa»", "<p« a=1»>x", "<p« a%d=1»>x", "<p a« »>x", "<p class='«a »'>x",
    "«<p>x</p>»", "«<p>x»", "«</p>x»", "«<b> x </b>»", "«<a href='/x' title='y'>x</a>»", "«<img src='x' alt='y'>»",
    "«x<br>»", "«<!-- x -->»", "«<p>x</p><script>y</script>»", "<script>«</s»", "<title>t</title>«<h1>x</h1>»",
    "<title>t</title><template>«<h1>x</h1>»",
    # Lists and tables.
    "<ul>«<li>x»</ul>", "<ul>«<li>x</li>»</ul>", "<ol>«<li>x</li>»</ol>",
    f"<ol start='{'9' * 4000}'>«<li>x<br>y</li>»</ol>", "«<li>x</li>»", "«<ul></ul> »",
    "<dl>«<dt>x</dt><dd>y</dd>»</dl>", "<table><tr>«<td>x</td>»", "<table><tr>«<td colspan=1000>x</td>»",
    "<table>«<tr><td colspan=1000>x</td></tr>»", "<table><tr>«<td rowspan=1000>x</td>»",
    "<table>«<tr><td>x</td></tr>»</table>", "<table><thead>«<tr><td>x</td></tr>»</thead></table>",
    "«<table><tr><td>x</td></tr></table>»", "<code>«`a»</code>",
    # Elements within elements.
    "<blockquote>" * 50 + "a« »b", "«<div>»x«</div>»", "«<blockquote>»x«</blockquote>»", "«<ul><li>»x«</li></ul>»",
    "«<table><tr><td>»x«</td></tr></table>»", "«<svg>»x«</svg>»<p>y", "«<meta charset=latin-1»",
    "<meta charset« »=utf-8><p>x",
)  # fmt: skip
_MARKDOWN = {
    **datas(
        "«*»", "«*a_ »", "«_a_»", "«[»", "«[a](»", "«![a](»", "«[a](b) »", "«[»x«](b)»", "«[a%d]: /x\n»",
        "[a]: /x\n\n«[a] »", "«[^%d] \n\n[^0]: x\n»", "«> »", "«> x\n»", "«>»", "«* x\n»", "«1. x\n»", "«# x\n\n»",
        "«#»", "«x\n=\n»", "«---\n»", "«-»", "«`»", "«```\n»", "«~~~x\n»", "«a|»\n" + "-|" * 10,
        "|a|b|\n|-|-|\n«|a|b|\n»", "«<a>»", "«<a »", "«<!--»", "«<!A»", "«<?»", "«<![CDATA[»", "«<http://a »", "«a@»",
        "«&amp;&#»", "«\\»", "«$a$$»", "«\n»", "a« »b", "«a  \n»",
    ),
    "growing backticks": lambda size: b"".join(b"`" * i + b"a" for i in range(int((2 * size) ** 0.5))),
}  # fmt: skip
_TEXT = {
    **datas(
        "«a»", "«word »", "«word%d »", "«It is. »", "«.»", "«e.g.»", "a« »b", "«a\n»", "«a\n\n»", "a«\n»b",
        "a«\r\n»b", "a«\t»b", "«0»", "«1,234.5 »", "«!?»", "«'s»", '«"»', "«a-»", "«/a»", "a«\u0301»", "«ä»",
        "«日本»", "«\U0001f600»", "«\U0001f468\u200d»\U0001f468", "«\U0001f1e6»", "«\u202eא»", "«\u200b»", "«\u3000»",
        "«\u2028»", "a«\ufeff»", "«<eos><|user|>»", "«<|user»", "«한글 »", "«ไทย»",
    ),
    "more and more empty lines": lambda size: b"".join(b"a" + b"\n" * i for i in range(int((2 * size) ** 0.5))),
}  # fmt: skip
_VALUES = ("«1»", "0.«1»", "1e«1»", "[«1,»0]", "[«true,»0]", "[«[],»0]", "«[»x«]»", '«{"a":»1«}»')
_JSONL = {
    **datas(
        '«"a"\n»', '«{"text": "a"}\n»', '«{"title": "b", "text": "a"}\n»', '«\n»"a"', '« »"a"', '« \n»"a"',
        '«\r\n»"a"', '"«a»"', '"«a»', '"«\\n»"', '"«\\u00e4»"', '"«\\ud83d\\ude00»"', '"«\\ud83d»"', '"«\\\\»"',
        '"«\u2028»"', '"«\t»"', '«1»', *(f'{{"text": "a", "n": {value}}}' for value in _VALUES), '«[»', '«{"a":»',
        '{«"k%d": 0, »"text": "a"}', '{«"k": 0, »"text": "a"}', '{«"text": "a", »"text": "a"}', '«"a"\n»{',
    ),
    "a long title": lambda size: b'{"title": "%s", "text": "%s"}' % (b"a" * (size // 4) + b"b", b"a" * (size // 2)),
    "a title in pieces": lambda size: b'{"title": "%sa", "text": "%s"}' % (b"ab" * (size // 8), b"ab" * (size // 4)),
}  # fmt: skip
SHAPES: Mapping[str, Bytes] = {HTML: _HTML, MARKDOWN: _MARKDOWN, PLAIN: _TEXT, JSONL: _JSONL, PDF: pdf_shapes.SHAPES}
