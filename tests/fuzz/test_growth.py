"""The harness of growth.py itself: it finds what grows too fast, and nothing else."""

import time

import pytest

from tests.fuzz import growth

MIB = 1 << 20


class Limit(Exception):
    pass


def spin(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_what_grows_with_the_input_passes() -> None:
    costs = growth.check(lambda n: n, growth.in_thread(lambda n: spin(n / 1000)), 100)
    assert [round(c.seconds / costs[0].seconds) for c in costs] == [1, 2, 4]
    costs = growth.check(lambda n: n, growth.in_thread(lambda n: bytearray(n * MIB)), 30)
    assert [round(c.bytes / costs[0].bytes) for c in costs] == [1, 2, 4]
    # So little is not compared.
    growth.check(lambda n: n, growth.in_thread(lambda n: spin(n * n / 4000)), 5)


@pytest.mark.long
@pytest.mark.slow
def test_what_grows_with_its_square_is_found() -> None:
    """Also where it ends in an error, which is an answer and no limit."""

    def refuses(n: int) -> None:
        spin(n * n / 2000)
        raise ValueError

    with pytest.raises(AssertionError, match="time grows too fast at 40"):
        growth.check(lambda n: n, growth.in_thread(refuses, errors=ValueError), 20)
    with pytest.raises(AssertionError, match="memory grows too fast at 20"):
        growth.check(lambda n: n, growth.in_thread(lambda n: bytearray(n * n * MIB // 3)), 10)
    with pytest.raises(ValueError):  # noqa: PT011
        growth.check(lambda n: n, growth.in_thread(refuses), 20)


def test_a_limit_ends_it_in_time() -> None:
    def limited(n: int) -> None:
        spin(min(0.3, n * n / 1000))
        if n >= 20:
            raise Limit

    costs = growth.check(lambda n: n, growth.in_thread(limited, limits=Limit), 10, deadline=1)
    assert [c.cut for c in costs] == [False, True]
    with pytest.raises(AssertionError, match=r"longer than 0.2 s at 20"):
        growth.check(lambda n: n, growth.in_thread(limited, limits=Limit), 10, deadline=0.2)
