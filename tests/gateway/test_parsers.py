"""Processes that parse documents: what they answer, what they may use, and that each can be ended at any moment."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from fusionkv.gateway.auth.tenants import Meter, Quota, Tenant
from fusionkv.gateway.config import GatewayConfig
from fusionkv.gateway.ingest import parse
from fusionkv.gateway.ingest.document import Document
from fusionkv.gateway.ingest.media_types import HTML, JSONL, MARKDOWN, PDF, PLAIN
from fusionkv.gateway.ingest.parsers import TOKENS_A_SECOND, ParsedDocument, Parsers, Piece
from fusionkv.gateway.tokens import Vocabulary
from fusionkv.protos.runtime.errors import InvalidArgument, ResourceExhausted, Unavailable
from tests.gateway.test_parse import pdf
from tests.gateway.test_tokens import vocabulary
from tests.processes import cpu_seconds
from tests.waiting import until

pytestmark = pytest.mark.system
# A token for each byte: about a minute of splitting.
SLOW = b"some words " * 1_400_000
TOKENS = Vocabulary(vocabulary().model)
AUTOGROUPS = Path("/proc/self/autogroup").exists()


def tenant(name: str = "a", tokens: int = 10**9) -> Tenant:
    made: Any = None
    found = Tenant(name, made, Meter(lambda: Quota(tokens_per_minute=tokens)))
    found.meter.check_tokens()
    return found


def spent(of: Tenant) -> float:
    return 10**9 - of.meter._tokens._level  # type: ignore[operator]


@contextlib.asynccontextmanager
async def parsers(**settings: Any) -> AsyncIterator[Parsers]:
    made = Parsers(GatewayConfig(**{"parsers": 1, "max_document_chunks": 10**6, **settings}))
    try:
        yield made
    finally:
        await made.close()


def told(pid: int, what: str) -> str:
    return Path(f"/proc/{pid}/{what}").read_text()


def pieces(parsed: tuple[list[ParsedDocument], int]) -> list[Piece]:
    ((document,), _) = parsed
    return document.pieces


def children() -> set[int]:
    """Parsers of this process that run, and not of services that tests share."""
    found = set()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended, and nobody has waited for it yet
            if "fusionkv.gateway.ingest.parser" in child.cmdline():
                found.add(child.pid)
    return found


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        (PLAIN, "Ein Satz \U0001f600. ".encode() * 200),
        (MARKDOWN, b"# Head\n\n* x\n\n" * 50),
        (HTML, b"<title>t</title><p>one <b>two</b>" * 20),
        (PDF, pdf("first page", "second page")),
        (JSONL, b'{"id": 1, "text": "a", "title": "t", "metadata": {"k": "v"}}\n\n"b"\n'),
    ],
)
async def test_a_document_is_parsed_as_in_this_process(kind: str, content: bytes) -> None:
    documents = parse.parse(content, kind)
    expected = [TOKENS.chunks(document, 64, 8) for document in documents]
    async with parsers(chunk_tokens=64, overlap_tokens=8) as made:
        for _ in range(2):
            parsed, _ = await made.parse(tenant(), content, kind, TOKENS)
            assert [found.pieces for found in parsed] == expected
            for name in ("name", "title", "metadata", "line"):
                assert [getattr(found, name) for found in parsed] == [getattr(d, name) for d in documents]
            (pid,) = children()
        other = vocabulary(chunk="[{text}]")
        assert pieces(await made.parse(tenant(), b"x", PLAIN, other)) == other.chunks(Document("x"), 64, 8)
        assert children() == {pid}
    assert children() == set()


async def test_what_is_wrong_with_a_document_is_told_and_costs_its_time() -> None:
    who = tenant()
    async with parsers(max_document_chunks=3, chunk_tokens=16, max_text_bytes=5000) as made:
        with pytest.raises(InvalidArgument, match=r"not UTF-8.*position 3"):
            await made.parse(who, b"caf\xe9", PLAIN, TOKENS)
        assert 0 < spent(who) < TOKENS_A_SECOND
        with pytest.raises(InvalidArgument, match="the maximum is 3"):
            await made.parse(who, b"many words " * 90, PLAIN, TOKENS)
        with pytest.raises(InvalidArgument, match="more than 5000 bytes of text: split it"):
            await made.parse(who, b"many words " * 900, PLAIN, TOKENS)
        assert len(pieces(await made.parse(who, b"few", PLAIN, TOKENS))) == 1


async def test_a_parser_has_nothing_of_the_gateway(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FUSIONKV_TEST_SECRET", "s3cr3t")
    with (tmp_path / "secret").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        async with parsers() as made:
            await made.parse(tenant(), b"<p>x</p>", HTML, TOKENS)
            (pid,) = children()
            with os.scandir(f"/proc/{pid}/fd") as files:
                opened = {os.readlink(file).partition(":")[0] for file in files}
            # libffi keeps its own file open from 3.4 on, where it may not make code.
            assert {name for name in opened if "/libffi.so" not in name} <= {"pipe", "/dev/null"}
            assert "s3cr3t" not in told(pid, "environ")
            mapped = told(pid, "maps")
            assert "tokenizers" in mapped
            assert not [name for name in ("torch", "lancedb", "lmdb") if name in mapped]
            assert f"Max address space         {1 << 30}" in told(pid, "limits")
            assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)
            if AUTOGROUPS:
                assert told(pid, "autogroup").split()[1:] == ["nice", "10"]


async def quick(made: Parsers, who: Tenant) -> int:
    return len(pieces(await made.parse(who, b"quick", PLAIN, TOKENS)))


async def test_a_document_that_takes_too_long_ends_with_its_process() -> None:
    who = tenant()
    async with parsers(parse_seconds=2) as made:

        async def parsed() -> bool:
            """On a busy machine a small document may be late as well."""
            with contextlib.suppress(InvalidArgument, ResourceExhausted):
                return await quick(made, who) == 1
            return False

        await until(parsed)
        before, cost, began = children(), spent(who), time.monotonic()
        with pytest.raises(InvalidArgument, match="parsing took longer than 2 s"):
            await made.parse(who, SLOW, PLAIN, TOKENS)
        assert time.monotonic() - began < 20
        assert spent(who) - cost > TOKENS_A_SECOND / 10  # of a CPU that others use

        await until(parsed)
        assert len(children()) == 1
        assert children() != before


async def test_a_document_that_takes_too_much_memory_is_refused() -> None:
    who = tenant()
    limits = {"parse_memory_bytes": 512 << 20, "parse_seconds": 500, "max_text_bytes": 64 << 20}
    async with parsers(**limits) as made:
        with pytest.raises(InvalidArgument, match=r"more than 536870912 bytes of memory"):
            # With four bytes for each character: the decoding alone is too much.
            await made.parse(who, b"a" * (110 << 20) + "\U0001f600".encode(), PLAIN, TOKENS)
        assert spent(who) > 0
        assert await quick(made, who) == 1


@pytest.mark.parametrize(
    ("number", "error", "says"),
    [
        (signal.SIGSEGV, InvalidArgument, r"crashed \(SIGSEGV\) on this document"),
        (signal.SIGABRT, InvalidArgument, "more than .* bytes of memory"),
        (signal.SIGKILL, Unavailable, "killed from outside by SIGKILL; try again"),
    ],
)
async def test_a_parser_that_ends_is_replaced(number: signal.Signals, error: type[Exception], says: str) -> None:
    who = tenant()
    async with parsers() as made:
        await quick(made, who)
        (pid,) = children()
        slow = asyncio.create_task(made.parse(who, SLOW, PLAIN, TOKENS))
        await until(lambda: made._idle == [])
        os.kill(pid, number)
        with pytest.raises(error, match=says):
            await slow
        assert await quick(made, who) == 1
        # While nobody uses it: the next document meets it.
        (pid,) = children()
        os.kill(pid, number)
        await until(lambda: pid not in children())
        with contextlib.suppress(error):
            await quick(made, who)
        assert await quick(made, who) == 1


async def test_a_caller_that_leaves_ends_its_parser_and_pays() -> None:
    who = tenant()
    async with parsers() as made:
        await quick(made, who)
        before, cost = children(), spent(who)
        (pid,) = before
        slow = asyncio.create_task(made.parse(who, SLOW, PLAIN, TOKENS))
        began = cpu_seconds(pid)
        await until(lambda: cpu_seconds(pid) > began + 0.2)
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow
        assert spent(who) - cost > TOKENS_A_SECOND / 10
        await until(lambda: not before & children())
        assert await quick(made, who) == 1


async def test_one_tenant_does_not_hold_all_parsers() -> None:
    first, other = tenant("a"), tenant("b")
    async with parsers(parsers=2, auth_tokens=Path("tokens"), parse_seconds=300) as made:
        slow = [asyncio.create_task(made.parse(first, SLOW, PLAIN, TOKENS)) for _ in range(3)]
        await asyncio.sleep(0)
        assert await quick(made, other) == 1
        assert not any(task.done() for task in slow)
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)


async def test_tenants_that_wait_go_in_turn_and_who_gives_up_takes_nothing() -> None:
    order = []
    async with parsers(auth_tokens=Path("tokens"), parse_seconds=300) as made:

        async def parsed(name: str) -> None:
            await quick(made, tenant(name))
            order.append(name)

        waiting = [asyncio.create_task(parsed(name)) for name in "aaaabbcd"]
        await asyncio.sleep(0)
        for gives_up in (waiting[1], waiting[-1]):  # one waits for its tenant's first, one for the parser
            gives_up.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert "".join(order) == "abcaba"


async def test_what_waited_is_refused_when_those_before_it_used_up_the_quota() -> None:
    who = tenant(tokens=100)
    async with parsers(parse_seconds=300) as made:
        await quick(made, who)
        first = asyncio.create_task(made.parse(who, b"<p>x" * 3000, HTML, TOKENS))
        second = asyncio.create_task(quick(made, who))
        done = await asyncio.gather(first, second, return_exceptions=True)
        assert isinstance(done[1], ResourceExhausted), done
        assert "100 tokens per minute" in str(done[1])


async def test_without_python_nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    async with parsers() as made:
        for _ in range(2):
            with pytest.raises(Unavailable, match="can't start a parser"):
                await quick(made, tenant())
    assert children() == set()
