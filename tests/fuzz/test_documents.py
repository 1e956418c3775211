"""Documents of any bytes and media type: text, or a refusal, and never for long."""

import contextlib
import time
from encodings.aliases import aliases

import pytest
from hypothesis import strategies as st

from fusionkv.gateway.ingest.media_types import HTML, JSONL, MARKDOWN, MEDIA_TYPES, PDF, PLAIN
from fusionkv.gateway.ingest.parse import media_type, parse
from fusionkv.protos.runtime.errors import InvalidArgument
from tests.fuzz.effort import fuzz
from tests.gateway.test_parse import encrypted_pdf, pdf

pytestmark = pytest.mark.hypothesis

# Of documents of some kilobytes, on a machine that others use.
MOST_SECONDS = 30.0
TAGS = [
    "html", "head", "title", "body", "p", "h1", "table", "tr", "td", "ul", "li", "pre", "a", "img", "svg", "script",
]  # fmt: skip


WHOLE = [pdf("hello", "two"), encrypted_pdf("")]
PIECES = st.one_of(
    st.sampled_from([f"<{tag}>" for tag in TAGS] + [f"</{tag}>" for tag in TAGS]),
    st.sampled_from(["<!--", "-->", "<![CDATA[", "<!DOCTYPE", "&#x110000;", "&#0;", "&#x41;", "<a href='", "<br/>"]),
    st.sampled_from(["<ol start='x'>", "<ol start='9999999999'>", "<td colspan=x>", "<td colspan='99999'>"]),
    st.text(max_size=10),
    st.integers(1, 2000).map(lambda n: "<div>" * n),
)  # fmt: skip
PAGES = st.lists(PIECES, max_size=12).map(lambda pieces: "".join(pieces).encode(errors="replace"))
DECLARED = st.tuples(st.sampled_from(sorted({*aliases, *aliases.values(), "undefined", "idna", "none"})), PAGES).map(
    lambda given: f"<meta charset='{given[0]}'><p>".encode() + given[1]
)
LINES = st.lists(
    st.one_of(
        st.sampled_from(['{"text": "a"}', '"a"', "{", "null", '{"contents": 1}', '{"text": "\\ud800"}', "[" * 5000]),
        st.text(max_size=20),
    ),
    max_size=5,
).map(lambda lines: "\n".join(lines).encode(errors="replace"))
# Some of the bytes are others; it ends early.
BROKEN = st.tuples(
    st.sampled_from(WHOLE),
    st.dictionaries(st.integers(0, 1000), st.integers(0, 255), max_size=30),
    st.none() | st.integers(0, 1200),
).map(lambda given: bytes(given[1].get(at, byte) for at, byte in enumerate(given[0][: given[2]])))
OF_KIND = {
    PLAIN: st.binary(max_size=200),
    MARKDOWN: st.text(max_size=200).map(lambda text: text.encode(errors="replace")),
    HTML: st.one_of(PAGES, DECLARED, st.binary(max_size=200)),
    PDF: st.one_of(BROKEN, st.binary(max_size=100)),
    JSONL: LINES,
}


@pytest.mark.parametrize("kind", MEDIA_TYPES)
def test_contents(kind: str) -> None:
    def read(content: bytes) -> None:
        began = time.monotonic()
        try:
            documents = parse(content, kind)
        except InvalidArgument:
            documents = []
        for document in documents:
            assert document.text.strip()
            document.text.encode()
        assert time.monotonic() - began < MOST_SECONDS

    if kind == HTML:
        for name in ("undefined", "idna", "punycode", "base64"):  # Python knows these, and they are no text
            read(f"<meta charset='{name}'><p>a..b".encode())
    fuzz(read, OF_KIND[kind], 60)


def test_names_and_media_types() -> None:
    def name_of_document(given: tuple[str, str]) -> None:
        with contextlib.suppress(InvalidArgument):
            assert media_type(*given) in MEDIA_TYPES

    fuzz(name_of_document, st.tuples(st.text(max_size=30), st.one_of(st.just(""), st.text(max_size=30))), 100)
