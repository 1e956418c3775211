"""What tenants may use and share: buckets, shares, and a real gateway that refuses and says when."""

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionkv.gateway.auth.tenants import Meter, Quota, Quotas, Shares, TokenBucket
from fusionkv.gateway.client.client import Client
from fusionkv.protos.gateway.v1 import gateway_pb2 as pb
from fusionkv.protos.gateway.v1 import gateway_pb2_grpc
from fusionkv.protos.runtime import rpc
from fusionkv.protos.runtime.errors import ResourceExhausted
from fusionkv.protos.runtime.watched import BadFile
from tests.examples import examples
from tests.gateway.conftest import Serve, Start, succeeds
from tests.services import token_entry, token_flags


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def refused(meter: Meter, match: str | None = None) -> float:
    """Seconds after which to try again."""
    with pytest.raises(ResourceExhausted, match=match) as raised:
        meter.admit()
    return raised.value.retry_after or 0.0


@given(st.integers(1, 10_000), st.lists(st.tuples(st.floats(0, 100), st.integers(1, 100)), min_size=1, max_size=50))
def test_no_more_than_a_minutes_worth_and_what_time_brings(per_minute: int, steps: list[tuple[float, int]]) -> None:
    clock = Clock()
    bucket = TokenBucket(clock)
    taken = last = 0
    for seconds, wanted in steps:
        clock.now += seconds
        wait = bucket.wait(per_minute, 1)
        if wait == 0:
            bucket.take(wanted)
            taken, last = taken + wanted, wanted
        else:
            # Exactly then, and not earlier, one is there.
            late, early = TokenBucket(clock), clock.now
            late._level, late._filled = bucket._level, bucket._filled
            clock.now = early + wait * (1 + 1e-9) + 1e-6
            assert late.wait(per_minute, 1) == 0
            clock.now = early
        # The last one taken may have left a debt.
        assert taken - last <= per_minute * (1 + clock.now / 60) + 1e-6


async def test_a_meter_counts_requests_tokens_and_bytes() -> None:
    clock = Clock()
    quota = Quota(requests_per_minute=3, tokens_per_minute=100, stored_bytes=1000)
    meter = Meter(lambda: quota, clock)
    for _ in range(3):
        meter.admit()
    assert refused(meter, "3 requests per minute") == pytest.approx(20)
    clock.now += 20
    meter.admit()
    meter.spend(250)  # 150 in debt, and one more is needed
    clock.now += 60
    assert refused(meter, "100 tokens per minute") == pytest.approx(51 / 100 * 60)
    clock.now += 31
    meter.admit()

    async def stored() -> int:
        return 300

    async with meter.storing(600, stored):
        with pytest.raises(ResourceExhausted, match="900 of the tenant's 1000") as raised:
            async with meter.storing(200, stored):
                pass
        assert raised.value.retry_after is None
        async with meter.storing(100, stored):
            pass
    async with meter.storing(700, stored):
        pass

    async def counted() -> int:
        raise AssertionError("it reads every corpus")

    quota = Quota()
    async with meter.storing(700, counted):
        pass


@settings(max_examples=examples(50))
@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 3), st.integers(0, 3), st.booleans()), max_size=12))
async def test_documents_that_arrive_together_keep_to_the_quota(documents: list[Any]) -> None:
    """Counting, storing and failing take some turns of the event loop each, as a retrieval engine far away does."""
    meter, kept = Meter(lambda: Quota(stored_bytes=100)), [0]

    async def turns(count: int) -> None:
        for _ in range(count):
            await asyncio.sleep(0)

    async def ingest(size: int, counting: int, storing: int, fails: bool) -> None:
        async def stored() -> int:
            found = kept[0]
            await turns(counting)
            return found

        with contextlib.suppress(ResourceExhausted, OSError):
            async with meter.storing(size, stored):
                await turns(storing)
                if fails:
                    raise OSError
                kept[0] += size
                await turns(storing)
        assert kept[0] <= 100

    await asyncio.gather(*(ingest(*document) for document in documents))
    # What failed, or was refused, holds no room.
    left = 100 - kept[0]
    if left:
        await ingest(left, 0, 0, False)
        assert kept[0] == 100


def test_what_is_given_back_is_there_again_and_no_more() -> None:
    clock = Clock()
    meter = Meter(lambda: Quota(tokens_per_minute=100), clock)
    meter.admit()
    meter.spend(100)
    refused(meter)
    meter.give_back(100)
    for _ in range(2):
        meter.admit()
        meter.give_back(1000)
        meter.admit()
        meter.spend(100)
        assert refused(meter) == pytest.approx(0.6)
        clock.now += 60


@pytest.mark.parametrize("used", [0, 5])
def test_a_quota_that_changes_holds_at_once(used: int) -> None:
    clock = Clock()
    quota = Quota(requests_per_minute=10)
    meter = Meter(lambda: quota, clock)
    for _ in range(used):
        meter.admit()
    quota = Quota(requests_per_minute=2)
    for _ in range(2):
        meter.admit()
    refused(meter)
    quota = Quota()
    meter.admit()


def test_the_file_names_a_default_and_tenants(tmp_path: Path) -> None:
    assert Quotas(None).of("acme") == Quota()
    file = tmp_path / "quotas"
    file.write_text('[default]\nrequests_per_minute = 5\n[tenants.acme]\nstored_bytes = "1KiB"\n')
    assert Quotas(file).of("acme") == Quota(requests_per_minute=5, stored_bytes=1024)
    assert Quotas(file).of("other") == Quota(requests_per_minute=5)
    for text, said in {
        "[default": "not valid TOML",
        "[acme]\nstored_bytes = 1": "only the tables .* are allowed",
        "[default]\nrequests = 1": "must be a table with no other keys than requests_per_minute",
        "[tenants]\nacme = 1": r"\[tenants.acme\] must be a table",
        "[default]\nrequests_per_minute = 0": "0 is not an integer of at least 1",
        "[default]\nrequests_per_minute = true": "True is not an integer",
        '[default]\nstored_bytes = "much"': "not a size",
    }.items():
        file.write_text(text)
        with pytest.raises(BadFile, match=said):
            Quotas(file)


@pytest.mark.system
def test_a_gateway_refuses_what_is_over_and_says_when(start: Start, serve: Serve, tmp_path: Path) -> None:
    tokens = token_flags(tmp_path, *(token_entry(tenant, "app", tenant) for tenant in ("acme", "other")))
    quotas = tmp_path / "quotas"
    quotas.write_text("[tenants.acme]\nstored_bytes = 100\n")
    acme, gateway = serve(start(), *tokens, "--quotas", str(quotas), token="acme")
    with Client(gateway.address, token="other") as other:
        acme.ingest("c", "a", b"x" * 60, media_type="text/plain")
        assert [(i.name, i.bytes) for i in acme.list("c")] == [("a", 60)]
        with pytest.raises(ResourceExhausted, match="has 41 bytes of text, and 60 of the tenant's 100") as raised:
            acme.ingest("c", "b", b"y" * 41, media_type="text/plain")
        assert raised.value.retry_after is None
        acme.ingest("d", "b", b"y" * 40, media_type="text/plain")
        other.ingest("c", "b", b"z" * 200, media_type="text/plain")
        quotas.write_text("[tenants.acme]\nrequests_per_minute = 1\n[tenants.other]\ntokens_per_minute = 50\n")
        # The one that has to wait longest comes last, since a minute may pass on a busy machine.
        for client, what in ((other, "50 tokens"), (acme, "1 requests")):
            with pytest.raises(ResourceExhausted, match=f"quota of {what} per minute") as raised:
                # The file is looked at once a second.
                _ = [client.ask("c", "What?", max_tokens=3) for _ in range(1000)]
            assert 0 < (raised.value.retry_after or 0) <= 3600
    # What any caller of any language reads: trailing metadata.
    with rpc.dial_sync(gateway.address) as channel, pytest.raises(grpc.RpcError) as refused:
        gateway_pb2_grpc.GatewayServiceStub(channel).List(
            pb.ListRequest(), metadata=[("authorization", "Bearer acme")], timeout=20
        )
    hint = dict(refused.value.trailing_metadata())["retry-after-ms"]  # type: ignore[attr-defined]
    assert 0 < int(hint) <= 60_000


@pytest.mark.slow
@pytest.mark.system
def test_calls_that_come_together_keep_to_every_quota(start: Start, serve: Serve, tmp_path: Path) -> None:
    tenants = ("requests", "bytes", "tokens")
    tokens = token_flags(tmp_path, *(token_entry(tenant, tenant=tenant) for tenant in tenants))
    (tmp_path / "quotas").write_text(
        "[tenants.requests]\nrequests_per_minute = 5\n"
        "[tenants.bytes]\nstored_bytes = 1000\n"
        "[tenants.tokens]\ntokens_per_minute = 4000\n"
    )
    worker = start("--max-requests", "1", "--max-queue", "0")
    requests, gateway = serve(worker, *tokens, "--quotas", str(tmp_path / "quotas"), token="requests")

    def together(calls: list[Callable[[], Any]]) -> int:
        """How many were not refused."""
        with ThreadPoolExecutor(len(calls)) as threads:
            return sum(threads.map(lambda call: succeeds(call, ResourceExhausted), calls))

    def document(client: Client, name: str, size: int) -> Callable[[], Any]:
        return lambda: client.ingest("c", name, b"x" * size, media_type="text/plain")

    with (
        Client(gateway.address, token="bytes", timeout=60) as stored,
        Client(gateway.address, token="tokens", timeout=60) as spent,
    ):
        began = time.monotonic()
        assert 5 <= together([requests.list] * 40) <= 5 + (time.monotonic() - began) * 5 / 60

        count = together([document(stored, f"d{n}", 70) for n in range(30)])
        (kept,) = stored.list()
        assert kept.bytes == 70 * count <= 1000
        # While a document is stored it may count twice, so the last that fit may have been refused, and fit now.
        for n in range(30):
            succeeds(document(stored, f"d{n}", 70), ResourceExhausted)
        (kept,) = stored.list()
        assert kept.bytes == 14 * 70

        # A prompt takes some 400 tokens. Those that the worker turned away cost nothing.
        document(spent, "a", 300)()
        ask = functools.partial(spent.ask, "c", "What is x?", max_tokens=200)
        assert 0 < together([ask] * 20) < 5
        ask()


def test_one_tenant_leaves_some_to_the_others_and_what_was_held_is_given_back() -> None:
    shares = Shares(3, spare=1)
    with contextlib.ExitStack() as held:
        with shares.holding("a"):
            assert [held.enter_context(shares.holding(name)) for name in "aabb"] == [True, False, True, False]
        assert (shares.held, held.enter_context(shares.holding("b"))) == (2, True)
    shares = Shares(10)
    with shares.holding("a", 8) as first, shares.holding("a", 3) as second:
        assert (first, second, shares.held) == (True, False, 8)
    assert shares.held == 0


@pytest.mark.parametrize(("total", "spare", "most"), [(3, 0, 3), (1, 1, 1), (2, 1, 1), (100, 60, 100), (100, 50, 50)])
def test_what_one_tenant_may_hold(total: int, spare: int, most: int) -> None:
    shares = Shares(total, spare=spare)
    with shares.holding("a", most) as first, shares.holding("a") as more, shares.holding("b", total - most) as rest:
        assert (first, more, rest) == (True, False, True)
