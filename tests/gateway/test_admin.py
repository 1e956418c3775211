"""A gateway's pages for operators: whose they are, what they show, and how a real browser shows it."""

import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import browser
import httpx2
import pytest
from bs4 import BeautifulSoup

from fusionkv.gateway import explain
from fusionkv.gateway.client.client import Client
from fusionkv.gateway.client.results import Explanation
from fusionkv.gateway.config import GatewayConfig
from fusionkv.gateway.history import History, Record
from fusionkv.gateway.http.admin import AdminServer
from fusionkv.protos.answer.v1.answer_pb2 import Summary
from fusionkv.protos.gateway.v1 import gateway_pb2 as pb
from tests.services import Launch, start_cache, start_gateway, start_worker, token_entry, token_flags

ADMIN = "fusionkv-gateway-admin"
TOKENS = {name: secrets.token_urlsafe(32) for name in ("operator-acme", "app-acme", "operator-other")}
QUESTION = "Which colour has the <em>lake</em>?"


@pytest.fixture(scope="module")
def gateway(launch_module: Launch, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Shows the last three answers of every tenant; an app of one of them has asked four questions."""
    folder = tmp_path_factory.mktemp("admin")
    worker = start_worker(launch_module, tiny_model, cache=start_cache(launch_module, folder))
    tokens = token_flags(folder, *(token_entry(token, *name.split("-")) for name, token in TOKENS.items()))
    flags = ("--admin-listen", "127.0.0.1:0", "--chunk-tokens", "64", "--admin-answers", "3")
    made = start_gateway(launch_module, folder, worker, *tokens, *flags, services=2)
    with Client(made.address, token=TOKENS["app-acme"], timeout=60) as client:
        text = "".join(f"The lake is blue and deep at shore {number}. " for number in range(8))
        client.ingest("notes", "lake.txt", text)
        for question in ("one?", "two?", "three?", QUESTION):
            events = list(client.stream("notes", question, recipe="prophetkv", ratio=0.3, max_tokens=8, top_k=3))
            assert not [e for e in events if isinstance(e, Explanation)], "nobody asked for it"
    return made


def get(gateway: Any, path: str, who: str = "operator-acme", **options: Any) -> httpx2.Response:
    url = f"http://{gateway.addresses[ADMIN][0]}{path}"
    return httpx2.request(options.pop("method", "GET"), url, auth=("any", TOKENS[who]), timeout=60, **options)


def home(gateway: Any, who: str = "operator-acme") -> BeautifulSoup:
    return BeautifulSoup(get(gateway, "/", who).text, "html.parser")


def listed(gateway: Any, who: str = "operator-acme") -> list[str]:
    return [f"/{link['href']}" for link in home(gateway, who).select("li a")]


def test_operators_see_the_last_answers_of_their_tenant(gateway: Any) -> None:
    assert [q.text for q in home(gateway).select(".q")] == [QUESTION, "three?", "two?"]
    assert listed(gateway, "operator-other") == []
    for path in listed(gateway):
        assert get(gateway, path).status_code == 200
        assert get(gateway, path, "operator-other").status_code == 404
        assert get(gateway, f"{path}/full", "operator-other", method="POST").status_code == 404


def test_nobody_else_sees_anything(gateway: Any) -> None:
    address = f"http://{gateway.addresses[ADMIN][0]}"
    for path in ("/", *listed(gateway)):
        assert get(gateway, path, "app-acme").status_code == 403
        for headers in ({}, {"Authorization": "Basic !"}, {"Authorization": "Bearer wrong"}):
            refused = httpx2.get(address + path, headers=headers)
            assert refused.status_code == 401
            assert refused.headers["WWW-Authenticate"].startswith("Basic ")
            assert "lake" not in refused.text
        page = httpx2.get(address + path, headers={"Authorization": f"Bearer {TOKENS['operator-acme']}"})
        assert page.status_code == 200
        assert page.headers["Content-Security-Policy"].startswith("default-src 'none'; style-src 'unsafe-inline'")
        assert page.headers["Cache-Control"] == "no-store"
        soup = BeautifulSoup(page.text, "html.parser")
        assert not soup.select("script, link, img, iframe, object, [src], [onclick]")
        assert not soup.select("em"), "the question is text"
    assert get(gateway, "/explain/none").status_code == 404


HERE, EVIL = "http://{}", "https://evil.example"
# Values of Origin (https is behind a proxy that ends TLS) and of Sec-Fetch-Site; a program sends neither.
FROM_HERE = [(None, None), (HERE, None), ("https://{}", None), (None, "same-origin"), (None, "none")]
FROM_ELSEWHERE = [
    *((None, site) for site in ("cross-site", "same-site", "anything")), (HERE, "cross-site"), (EVIL, "same-origin"),
    *((origin, None) for origin in (EVIL, HERE + ".evil.example", "http://user@{}", "ftp://{}", "{}", "", "null")),
    *((origin, None) for origin in ("http://127.0.0.1:1", "http://[evil", "http://")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("origin", "site", "status"),
    [*((*given, 303) for given in (*FROM_HERE, (HERE, "same-origin"))), *((*given, 403) for given in FROM_ELSEWHERE)],
)
def test_a_question_is_asked_from_the_page_itself_or_by_a_program(
    gateway: Any, origin: str | None, site: str | None, status: int
) -> None:
    address = gateway.addresses[ADMIN][0]
    headers = {"Origin": origin, "Sec-Fetch-Site": site, "Host": "" if origin == "http://" else None}
    given = {name: value.format(address) for name, value in headers.items() if value is not None}
    path = f"{listed(gateway)[1]}/full"
    assert get(gateway, path, method="POST", headers=given).status_code == status
    if status == 303:
        refused = httpx2.post(f"http://{address}{path}", headers=given)
        assert refused.status_code == 401, "nobody is let in without a token"


def test_a_question_is_repeated_once_however_often_it_is_asked_for(gateway: Any) -> None:
    path = f"{listed(gateway)[2]}/full"
    with Client(gateway.address, token=TOKENS["operator-acme"]) as client, ThreadPoolExecutor() as clicks:
        before = client.stats().requests
        pages = [*clicks.map(lambda _: get(gateway, path, method="POST"), range(2))]
        assert [page.status_code for page in pages] == [303, 303]
        assert client.stats().requests == before + 1


async def test_pages_are_rendered_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    history, threads, render = History(limit=1), set(), explain.render

    def rendered(*args: Any, **more: Any) -> str:
        threads.add(threading.current_thread())
        return render(*args, **more)

    async def salt() -> str:
        return "a"

    monkeypatch.setattr(explain, "render", rendered)
    record = kept("a")
    record.add(pb.GenerateResponse(explanation=Explanation()))
    history.keep(record)
    config = GatewayConfig(admin_listen=("127.0.0.1:0",))
    server = AdminServer(config, SimpleNamespace(history=history, tenant_salt=salt), None)
    (address,) = await server.start()
    async with httpx2.AsyncClient() as browsing:
        assert (await browsing.get(f"http://{address}/explain/{record.id}")).status_code == 200
    await server.stop(1)
    assert threads
    assert threading.current_thread() not in threads


MEASURE = """({width: document.documentElement.scrollWidth, room: document.documentElement.clientWidth,
  answers: [...document.querySelectorAll(".answers section")].map((s) => s.getBoundingClientRect().left),
  small: [...document.querySelectorAll("button")].filter((b) => b.getBoundingClientRect().height < 44).length,
  tokens: document.querySelectorAll(".tokens .recomputed").length})"""


async def test_the_pages_in_a_browser(gateway: Any, chromium: str) -> None:
    """On a phone and on a desk: the list, an answer, and the same by full attention at the press of a button."""
    found: dict[str, Any] = {}
    async with browser.browsing(chromium) as page:
        await page.size(390, 844)
        await page.open(f"http://any:{TOKENS['operator-acme']}@{gateway.addresses[ADMIN][0]}/")
        found["list"] = await page.value(MEASURE)
        await page.click("li a")
        found["phone"] = await page.value(MEASURE)
        await page.click("button")
        found["compared"] = await page.value(MEASURE)
        text = await page.value("document.body.innerText")
        await page.size(1200, 900, dark=True)
        found["desk"] = await page.value(MEASURE)
        ground = await page.value("getComputedStyle(document.body).backgroundColor")
    for name in ("list", "phone", "compared", "desk"):
        assert found[name]["width"] == found[name]["room"], f"{name}: it sticks out"
        assert found[name]["small"] == 0
    assert found["phone"]["tokens"] > 0
    # The answer and what could be asked, one below the other; then the two answers side by side.
    assert len(found["phone"]["answers"]) == 2
    assert len(set(found["phone"]["answers"])) == 1
    assert len(set(found["desk"]["answers"])) == 2
    for said in (QUESTION, "full_attention, ratio 1", "Full attention answered afterwards, over the same chunks."):
        assert said in text
    assert ground == "rgb(16, 21, 27)"
    assert len(listed(gateway)) == 3, "the comparison is no answer of its own"
    assert home(gateway).select(".q")[0].text == QUESTION


def test_pages_need_an_address_alone(launch: Launch, tmp_path: Path) -> None:
    """Without tokens they are open, as all else; without the setting there are none."""
    made = start_gateway(launch, tmp_path, None, "--admin-listen", "127.0.0.1:0", services=2)
    page = httpx2.get(f"http://{made.addresses[ADMIN][0]}/")
    assert page.status_code == 200
    assert "None yet." in page.text
    assert made.stop() == 0
    assert ADMIN not in start_gateway(launch, tmp_path, None).addresses


def kept(tenant: str, size: int = 100) -> Record:
    made = Record(tenant, pb.GenerateRequest(question="x" * size))
    made.add(pb.GenerateResponse(summary=Summary(recipe="prophetkv")))
    return made


def test_a_history_is_bounded_by_tenant_and_in_bytes() -> None:
    history = History(limit=2, max_bytes=10_000)
    first, second, third, other = kept("a"), kept("a"), kept("a"), kept("b")
    for each in (first, second, other, third):
        history.keep(each)
    assert (history.of("a"), history.of("b")) == ([third, second], [other])
    assert history.get("a", first.id) is history.get("b", second.id) is None
    assert history.get("a", second.id) is second
    large = kept("a", 9_800)
    history.keep(large)
    assert history.of("a") == [large, third]
    assert history.of("b") == [], "the oldest goes first, whosever it is"
    history.keep(kept("b", 20_000))
    assert history.of("a") == history.of("b") == []


def test_answers_by_full_attention_count() -> None:
    history = History(limit=2, max_bytes=10_000)
    gone, first, second = kept("a"), kept("b"), kept("a")
    for each in (first, second):
        history.keep(each)
    history.compare(gone, kept("a"))
    history.compare(second, kept("a", 300))
    history.compare(second, kept("a", 200))
    assert gone.full is None
    assert history._bytes == first.bytes + second.bytes > 400
    history.compare(second, kept("a", 9_800))
    assert history.of("b") == []
    assert history.of("a") == [second]
