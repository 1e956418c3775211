"""Leases hold what they name until they are released or their time is over."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusionkv.kvcache_service.store.entries import Leases
from fusionkv.protos.runtime.errors import ResourceExhausted
from tests.kvcache_service import tools


@dataclass(eq=False)
class Thing:
    leases: int = 0


def test_the_last_lease_to_end_is_reported() -> None:
    clock, ended = tools.Clock(), []
    leases = Leases(10, clock, ended.append)
    thing, other = Thing(), Thing()
    first, second = leases.grant([thing, other], 5), leases.grant([thing], 9)
    assert first != second
    leases.release(first)
    assert ended == [other]
    leases.release(first)
    clock.now += 8.999
    leases.expire()
    assert (ended, len(leases)) == ([other], 1)
    clock.now += 0.002
    leases.expire()
    assert (ended, len(leases)) == ([other, thing], 0)


def test_the_limit_counts_live_leases_only() -> None:
    clock = tools.Clock()
    leases = Leases(2, clock, lambda _: None)
    leases.grant([Thing()], 1)
    leases.grant([Thing()], 100)
    with pytest.raises(ResourceExhausted, match="raise max_leases"):
        leases.grant([Thing()], 1)
    clock.now += 2
    leases.grant([Thing()], 1)


@given(st.lists(st.tuples(st.sampled_from(["grant", "release", "wait"]), st.integers(0, 300)), max_size=300))
def test_counts_agree_and_nothing_piles_up(steps: list[tuple[str, int]]) -> None:
    now, things = [0.0], [Thing() for _ in range(4)]
    leases = Leases(1000, lambda: now[0], lambda thing: None)
    granted: list[int] = []
    for step, n in steps:
        if step == "grant":
            granted.append(leases.grant(things[: n % 5], 1 + n))
        elif step == "release" and granted:
            leases.release(granted.pop(n % len(granted)))
        elif step == "wait":
            now[0] += n / 10
            leases.expire()
        leases.check_integrity(things)
        assert len(leases._expiry) <= 2 * len(leases) + 65
