"""What of a page is hidden by its elements, attributes and style sheets."""

import time

import pytest

from fusionkv.gateway.ingest import parse
from fusionkv.gateway.ingest.media_types import HTML


def text(page: str) -> str:
    (document,) = parse.parse(page.encode(), HTML)
    return " ".join(document.text.split())


X, SHOWN = "{display: none}", "{display: block}"


@pytest.mark.parametrize(
    ("css", "body"),
    [
        (f".x{X}", "<p class='y x'>no</p>"),
        (f"#x{X}", "<p id=x>no</p>"),
        (f"aside, p.x{X}", "<p class=x>no</p><aside>no <b>no</b></aside>"),
        (f"[x]{X} [lang=xx]{X}", "<p x>no</p><p lang=xx>no</p>"),
        (f"/* a */ div.a > p[x='1 2']{X}", "<div class=a><p x='1 2'>no</p><div><p x='1 2'>a</p></div></div>"),
        (f".a .b p{X}", "<div class=a><p>a</p><div><div class=b><u><p>no</p></u></div></div></div>"),
        (f".a > .b .c{X}", "<div class=a><p class=b><u><u class=c>no</u></u></p><u class=c>a</u></div>"),
        (f".\\78{X}", "<p class=x>no</p>"),
        (f"<!-- .x{X} -->", "<p class=x>no</p>"),
        (".x{visibility: hidden} .y{visibility: COLLAPSE !important}", "<p class=x>no</p><p class=y>no</p>"),
        (".x{visibility: hidden} u{visibility: visible}", "<p class=x>no <u>a</u> no <i>no</i></p>"),
        (f"@media screen{{.x{X}}} @media only all, print{{.y{X}}}", "<p class=x>no</p><p class=y>no</p>"),
        (f".x{SHOWN} p.x{X}", "<p class=x>no</p>"),
        (f"p.x{X} .x{SHOWN}", "<p class=x>no</p>"),
        (".x{display: none !important} p.x{display: block}", "<p class=x style='display: block'>no</p>"),
        (".x{color: red; display: block; display: none}", "<p class=x>no</p>"),
        (f"@media print{{.x{SHOWN}}} .x{X}", "<p class=x>no</p>"),
        (f".x::before{SHOWN} .x:after{SHOWN} .x{X}", "<p class=x>no</p>"),
        (f"}} {{ ; .y{X} p{{a: {'9' * 5000}}} .x{X}", "<p style='display: none; x: (;:\"'>no</p>"),
    ],
)
def test_a_style_sheet_hides(css: str, body: str) -> None:
    assert text(f"<style>{css}</style>{body}<p>a").replace("a ", "") == "a"


@pytest.mark.parametrize(
    ("css", "body"),
    [
        (f"@media print{{.x{X}}} @media (max-width: 9em){{.x{X}}}", "<p class=x>a"),
        (f"@supports (display: grid){{.x{X}}} @media not screen{{.x{X}}} @layer b{{.x{X}}}", "<p class=x>a"),
        ("@keyframes b{from{visibility: hidden}} p{animation: b}", "<p class=x>a"),
        (f".x{X} .x{SHOWN}", "<p class=x>a"),
        (f".x{X} p.x{SHOWN} .x{X}", "<p class=x>a"),
        (f"#x p.x[x]{X} #x #y{SHOWN}", "<div id=x><p id=y class=x x>a</div>"),
        (".x{display: none} .x{display: block !important} p.x{display: none}", "<p class=x>a"),
        (f".x{X}", "<p class=x style='display: block'>a"),
        (f".x{X} @media (min-width: 9em){{.x{SHOWN}}}", "<p class=x>a"),
        (f".x{X} #y:checked ~ .x{SHOWN}", "<input id=y type=radio><p class=x>a"),
        (f".x{X} .y:hover > .x{SHOWN}", "<div class=y><p class=x>a</div>"),
        (f".x{{display: none; &.y{SHOWN}}}", "<p class='x y'>a"),
        (f".x::before{X} p:not(.y){X} i + p{X} p:hover{X} [x^=b]{X}", "<p x=b class=x>a"),
        (f".y p{X} .y > p{X} > p{X} p >{X} b|p{X}", "<p class=x>a"),
        (f"p{{x: y; {SHOWN}}} .x{X} p#x{SHOWN}", "<p id=x class=x>a"),
        (f"@media {X}", "<p>a"),
        (f"body{X}", "<body><p>a"),
        (f"[v-cloak]{X}", "<body v-cloak><h1>a</h1>"),
        (".x{content-visibility: auto; display: var(--none)}", "<p class=x>a"),
        ("details{display: block}", "<details><summary>a</summary></details>"),
    ],
)
def test_a_style_sheet_leaves_what_readers_may_see(css: str, body: str) -> None:
    assert text(f"<style>{css}</style>{body}").lstrip("# ") == "a"


@pytest.mark.parametrize(
    ("page", "shown"),
    [
        (f"<style media=print>p{X}</style><style type=text/x>p{X}</style><p>a", "a"),
        (f"<noscript><style>p{X}</style></noscript><template><style>p{X}</style></template><p>a", "a"),
        (f"<head><style media='screen, print'>.x{X}</style></head><p class=x>no</p><p>a", "a"),
        (f"<p class=x>no</p><p>a</p><svg><style>.x{X}</style></svg>", "a"),
        (f"<title>T</title><style>.x{X}</style><div class=x><h1>no</h1></div><p>a", "# T a"),
        (f"<style>.y{X} .x{{display: flex}}</style><p class=x hidden>a</p><p hidden>no</p>", "a"),
        ("<p style='/* b */ display: none'>no</p><p style='background: url(\";display:none\")'>a", "a"),
        ("<div style='visibility: hidden'>no <p style='visibility: visible'>a</p></div>", "a"),
    ],
)
def test_where_a_style_stands(page: str, shown: str) -> None:
    assert text(page) == shown


@pytest.mark.parametrize(
    ("page", "shown"),
    [
        ("<details><summary>a</summary>b</details>", "a b"),
        ("<dialog>no</dialog><dialog open>a</dialog><div popover>no</div>", "a"),
        ("<p aria-hidden=true>a</p><p inert>b</p>", "a b"),
        ("<p>a</p><template>no</template><template shadowrootmode=open>b</template>", "a b"),
        ("<p>a</p><iframe src=/x>no</iframe><datalist><option>no</option></datalist><noframes>no</noframes>", "a"),
        ("<input type=hidden value=no><input value=no><p>a</p><object data='data:text/plain,no'>b</object>", "a b"),
    ],
)
def test_elements_are_shown_as_browsers_show_them(page: str, shown: str) -> None:
    assert text(page) == shown


@pytest.mark.parametrize(
    "css", ["x" * (1 << 19) + f"{{}} p{X}", "".join(f"p.x{i}, p{X}\n" for i in range(201))], ids=["long", "many"]
)
def test_style_sheets_beyond_a_limit_are_not_read(css: str) -> None:
    began = time.process_time()
    assert text(f"<style>{css}</style>" + "<p>a</p>" * 1000 + "<div>b</div>").startswith("a a")
    assert time.process_time() - began < 2
