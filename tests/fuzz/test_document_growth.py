"""What documents of hostile shapes cost as they get larger, in the process that parses them for a gateway.

A shape says what is repeated, nested or left open; patterns are those of shapes.py.
"""

import asyncio
from collections.abc import Iterator, Mapping

import pytest

from fusionkv.gateway.config import GatewayConfig
from fusionkv.gateway.ingest.media_types import HTML, JSONL, MARKDOWN, PDF, PLAIN
from fusionkv.gateway.ingest.parsers import Parser
from fusionkv.protos.runtime.errors import InvalidArgument
from tests.fuzz import effort, growth, pdf_shapes
from tests.fuzz.growth import Cost, Measure
from tests.fuzz.shapes import Bytes, datas
from tests.gateway.test_tokens import vocabulary

_HTML = datas(
    "<p>a« »b</p>", "<p>a«\t\n»b</p>", "<pre>a«\n »b</pre>", "<pre>a« <b> </b>\n»b</pre>",
    "«<a»", "«<a»>", "«<a b='c' »", "«<a b='»>", "«</a»", "«<!--»", "«<?a»", "«<![CDATA[»", "«<»", "«&»", "«&#»",
    "<p« a=1»>x", "<p« a%d=1»>x", "<p a« »>x", "<p class='«a »'>x",
    "«<p>x</p>»", "«<p>x»", "«</p>x»", "«<b> x </b>»", "«<a href='/x' title='y'>x</a>»", "«<br>»x«</br>»",
    "<script>«</s»", "<title>t</title>«<h1>x</h1>»",
    "<ul>«<li>x»</ul>", "<ol>«<li>x</li>»</ol>", f"<ol start='{'9' * 4000}'>«<li>x<br>y</li>»</ol>", "«<ul></ul> »",
    "<table><tr>«<td>x</td>»", "<table><tr>«<td colspan=1000>x</td>»", "<table>«<tr><td colspan=1000>x</td></tr>»",
    "<table><tr>«<td rowspan=1000>x</td>»«<tr><td>x</td>»", "«<table><tr><td>x</td></tr></table>»",
    "<code>«`a»</code>",
    "<blockquote>" * 50 + "a« »b", "«<div>»x«</div>»", "«<blockquote>»x«</blockquote>»", "«<ul><li>»x«</li></ul>»",
    "<p style='«display:none;»'>x", "<b style='visibility:hidden'>«<p>y</p>»</b>", "<p><table>«<b>»«<p></p>»x",
    "<meta charset« »=utf-8><p>x", "<blockquote>" * 100 + "«x<br>»",
)  # fmt: skip
_MARKDOWN = {
    **datas(
        "«*»", "«*a_ »", "«[»", "«[a](»", "«![a](»", "«[»x«](b)»", "«[a%d]: /x\n»", "[a]: /x\n\n«[a] »",
        "«[^%d] \n\n[^0]: x\n»", "«> x\n»", "«>»", "«* x\n»", "«1. x\n»",
        "«![a][%d] »\n\n«[%d]: data:image/png;base64,AA\n»",
        "«#»", "«x\n=\n»", "«-»", "«`»", "«```\n»", "«a|»\n" + "-|" * 10, "|a|b|\n|-|-|\n«|a|b|\n»", "«<a »",
        "«<http://a »", "«\\»", "a« »b",
    ),
    "deep items": lambda size: "".join(" " * 2 * i + "* x\n" for i in range(int(size**0.5))).encode(),
    "growing backticks": lambda size: b"".join(b"`" * i + b"a" for i in range(int((2 * size) ** 0.5))),
}  # fmt: skip
_TEXT = {
    **datas(
        "«a»", "«word%d »", "«It is. »", "«e.g.»", "a« »b", "a«\n»b", "a«\r\n»b", "«1,234.5 »", "«'s»", "«/a»",
        "a«\u0301»", "«日本»", "«\U0001f468\u200d»\U0001f468", "«\u202eא»", "«\u2028»", "«<eos><|user|>»", "«ไทย»",
    ),
    "more and more empty lines": lambda size: b"".join(b"a" + b"\n" * i for i in range(int((2 * size) ** 0.5))),
}  # fmt: skip
_VALUES = ("«1»", "0.«1»", "[«1,»0]", "[«[],»0]", "«[»«]»", '«{"a":»1«}»')
_JSONL = {
    **datas(
        '«"a"\n»', '«{"title": "b", "text": "a"}\n»', '« \n»"a"', '"«a»', '"«\\ud83d\\ude00»"', '"«\\ud83d»"',
        '"«\\\\»"',
        *(f'{{"text": "a", "n": {value}}}' for value in _VALUES), '«[»', '«{"a":»', '{«"k%d": 0, »"text": "a"}',
        '{«"text": "a", »"text": "a"}', '«"a"\n»{',
    ),
    "a long title": lambda size: b'{"title": "%s", "text": "%s"}' % (b"a" * (size // 4) + b"b", b"a" * (size // 2)),
}  # fmt: skip
SHAPES: Mapping[str, Bytes] = {HTML: _HTML, MARKDOWN: _MARKDOWN, PLAIN: _TEXT, JSONL: _JSONL, PDF: pdf_shapes.SHAPES}
# Bytes of the smallest; the largest has four times as many. The square of these takes a second and more.
SIZE = 100_000 if effort.SECONDS else 4_000
CONFIG = GatewayConfig(parse_seconds=60 if effort.SECONDS else 20, max_document_chunks=10**6, max_text_bytes=16 << 20)
# What the gateway cuts a document off by; other refusals are answers as any other.
LIMITS = ("parsing took longer", "bytes of memory", "bytes of text")
BUGS = ("the parser crashed", "can't be parsed")


class Measured:
    """A parser that is replaced when it ends, and what each document costs it."""

    def __init__(self, config: GatewayConfig) -> None:
        self._runner = asyncio.Runner()
        self._vocabulary = vocabulary()
        self._config = config
        self._parser = Parser(config)

    def of(self, kind: str) -> Measure[bytes]:
        return lambda content: self._runner.run(self._measure(content, kind))

    async def _measure(self, content: bytes, kind: str) -> Cost:
        effort.done["document of growing size"] += 1
        await self._parser.use(self._vocabulary)
        pid, before, refused = self._parser.pid, growth.trim(self._parser.pid), ""
        try:
            await self._parser.parse(content, kind)
        except InvalidArgument as error:
            refused = str(error)
        assert not any(bug in refused for bug in BUGS), refused
        cut = any(limit in refused for limit in LIMITS)
        cost = Cost(self._parser.seconds, max(0, growth.peak(pid) - before) if self._parser.usable else 0, cut)
        if not self._parser.usable:
            await self._parser.end()
            self._parser = Parser(self._config)
        return cost

    def close(self) -> None:
        self._runner.run(self._parser.end())
        self._runner.close()


@pytest.fixture(scope="module")
def measured() -> Iterator[Measured]:
    made = Measured(CONFIG)
    yield made
    made.close()


# It takes 5 s.
LONGEST = (HTML, "<blockquote>" * 100 + "«x<br>»")
GROWING = [(kind, name) for kind, shapes in SHAPES.items() for name in shapes]


# Some of each kind, and in `make test-all` all of them.
@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(*case, marks=pytest.mark.slow) if number % 8 or case == LONGEST else case
        for number, case in enumerate(GROWING)
    ],
)
def test_costs_grow_with_a_document(measured: Measured, kind: str, name: str) -> None:
    growth.check(SHAPES[kind][name], measured.of(kind), SIZE, deadline=CONFIG.parse_seconds + 1)
