"""Page tokens of List: good for the tenant and the listing that they were given for, and for nothing else."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusionkv.gateway.client.client import Client
from fusionkv.gateway.retrieval import page_tokens
from fusionkv.gateway.retrieval.embedded import EmbeddedRetrieval
from fusionkv.protos.gateway.v1 import gateway_pb2 as pb
from fusionkv.protos.gateway.v1 import gateway_pb2_grpc
from fusionkv.protos.runtime import rpc
from fusionkv.protos.runtime.errors import InvalidArgument
from tests.gateway.test_retrieval import put
from tests.services import Launch, start_gateway, token_entry, token_flags

List = Callable[..., pb.ListResponse]
TENANTS = ("acme", "other")


@given(st.text(st.characters(codec="utf-8"), min_size=1, max_size=100), st.integers(0, 10_000), st.integers(1, 255))
def test_a_token_is_good_unchanged_alone(name: str, place: int, change: int) -> None:
    token = page_tokens.encode("acme", "c", name)
    assert page_tokens.decode("acme", "c", token) == name
    other = bytearray.fromhex(token)
    other[place % len(other)] ^= change
    changed = [("acme", "c", tried) for tried in (other.hex(), token[:-2], token + "00")]
    of_others = [("other", "c", token), ("", "c", token), ("acme", "d", token), ("acme", "", token)]
    for tenant, corpus, tried in (*changed, *of_others):
        with pytest.raises(InvalidArgument, match="bad page token"):
            page_tokens.decode(tenant, corpus, tried)


@pytest.fixture
async def gateway(launch: Launch, tmp_path: Path) -> str:
    """The address of one for two tenants, of the same corpora with documents of other names."""
    for tenant in TENANTS:
        engine = await EmbeddedRetrieval.open(tmp_path / "gateway" / "tenants" / tenant)
        for corpus in "cd":
            for n in range(4):
                await put(engine, corpus, f"{tenant} {corpus}{n}", "text")
        await engine.close()
    tokens = token_flags(tmp_path, *(token_entry(tenant, tenant=tenant) for tenant in TENANTS))
    return str((await asyncio.to_thread(start_gateway, launch, tmp_path, None, *tokens)).address)


@pytest.fixture
def listing(gateway: str) -> Iterator[List]:
    with rpc.dial_sync(gateway) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)

        def ask(tenant: str, corpus: str, token: str = "", size: int = 2) -> pb.ListResponse:
            request = pb.ListRequest(corpus=corpus, page_size=size, page_token=token)
            return stub.List(request, metadata=[("authorization", f"Bearer {tenant}")], timeout=20)

        yield ask


def names(page: pb.ListResponse) -> list[str]:
    return [item.name for item in page.items]


@pytest.mark.system
def test_a_token_of_another_tenant_or_listing_is_refused(listing: List) -> None:
    first = listing("acme", "c")
    token, rest = first.next_page_token, listing("acme", "c", first.next_page_token)
    assert (names(first), names(rest)) == (["acme c0", "acme c1"], ["acme c2", "acme c3"])
    assert rest.next_page_token == ""
    corpora = listing("acme", "", size=1).next_page_token
    assert names(listing("acme", "", corpora)) == ["d"]
    of_others = [("other", "c", token), ("other", "", token), ("other", "", corpora)]
    of_listings = [("acme", "d", token), ("acme", "", token), ("acme", "c", corpora)]
    made_up = [("acme", "c", tried) for tried in (token[:-1] + "01"[token[-1] == "0"], b"acme c1".hex(), "zz")]
    for tenant, corpus, tried in (*of_others, *of_listings, *made_up):
        with pytest.raises(grpc.RpcError) as refused:
            listing(tenant, corpus, tried)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
        assert "acme" not in refused.value.details().replace(tried, "")  # type: ignore[attr-defined]


@pytest.mark.system
def test_a_listing_goes_on_behind_what_was_deleted(listing: List, gateway: str) -> None:
    token = listing("acme", "c").next_page_token
    with Client(gateway, token="acme") as client:
        client.delete("c", "acme c1")
        client.delete("c", "acme c2")
        assert names(listing("acme", "c", token)) == ["acme c3"]
        client.delete("c")
    with pytest.raises(grpc.RpcError) as gone:
        listing("acme", "c", token)
    assert gone.value.code() is grpc.StatusCode.NOT_FOUND  # type: ignore[attr-defined]
