"""What tenants share: nobody gets all of it, and waiting goes round."""

import asyncio

import pytest

from fusionkv.gateway.auth.quotas import Shares
from tests.waiting import until


def test_one_tenant_leaves_some_to_the_others() -> None:
    shares = Shares(3, spare=1)
    assert [shares.take("a") for _ in range(3)] == [True, True, False]
    assert shares.take("b")
    assert not shares.take("b")
    shares.release("a")
    assert shares.held == 2
    assert shares.take("b")


@pytest.mark.parametrize(("total", "spare", "most"), [(3, 0, 3), (1, 1, 1), (2, 1, 1), (100, 60, 100), (100, 50, 50)])
def test_what_one_tenant_may_hold(total: int, spare: int, most: int) -> None:
    shares = Shares(total, spare=spare)
    assert shares.take("a", most)
    assert not shares.take("a")
    assert shares.take("b", total - most) or most == total


def test_what_was_held_is_given_back() -> None:
    shares = Shares(10)
    with shares.holding("a", 8) as first, shares.holding("a", 3) as second:
        assert (first, second) == (True, False)
        assert shares.held == 8
    assert shares.held == 0


async def test_tenants_that_wait_go_in_turn() -> None:
    shares, order = Shares(1, spare=1), []

    async def call(tenant: str) -> None:
        await shares.wait(tenant)
        order.append(tenant)

    await shares.wait("a")
    waiting = [asyncio.create_task(call(t)) for t in "aaaabbc"]
    await asyncio.sleep(0)
    for number, tenant in enumerate("abcabaa", 1):
        shares.release(order[-1] if order else "a")
        await until(lambda number=number: len(order) == number)
        assert order[-1] == tenant
    await asyncio.gather(*waiting)


async def test_a_tenant_with_all_that_it_may_have_keeps_nobody_waiting() -> None:
    shares = Shares(2, spare=1)
    await shares.wait("a")
    waiting = asyncio.create_task(shares.wait("a"))
    await asyncio.sleep(0)
    await asyncio.wait_for(shares.wait("b"), 10)
    assert not waiting.done()
    shares.release("a")
    await asyncio.wait_for(waiting, 10)


async def test_who_gives_up_waiting_takes_nothing() -> None:
    shares = Shares(1)
    await shares.wait("a")
    early, late = (asyncio.create_task(shares.wait("a")) for _ in range(2))
    await asyncio.sleep(0)
    early.cancel()
    await asyncio.gather(early, return_exceptions=True)
    shares.release("a")
    await asyncio.wait_for(late, 10)
    # Given and given up at once.
    last = asyncio.create_task(shares.wait("a"))
    await asyncio.sleep(0)
    shares.release("a")
    last.cancel()
    await asyncio.gather(last, return_exceptions=True)
    assert shares.held == 0
