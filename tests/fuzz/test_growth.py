"""The harness of growth.py itself: it finds what grows too fast, and nothing else."""

import time
from collections.abc import Callable

import pytest

from tests.fuzz import growth

MIB = 1 << 20


def spin(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@pytest.mark.parametrize(
    "call", [lambda n: spin(n / 100), lambda n: bytearray(n * 3 * MIB), lambda n: spin(n * n / 5000)]
)
def test_what_grows_with_the_input_or_takes_little_passes(call: Callable[[int], object]) -> None:
    growth.check(lambda n: n, growth.in_thread(call), 10)


@pytest.mark.parametrize("call", [lambda n: spin(n * n / 1000), lambda n: bytearray(n * n * MIB // 3)])
def test_what_grows_with_its_square_is_found(call: Callable[[int], object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "_AGAIN", 1)
    with pytest.raises(AssertionError, match="grows too fast"):
        growth.check(lambda n: n, growth.in_thread(call), 10)


def test_a_limit_ends_it_in_time() -> None:
    def limited(n: int) -> None:
        spin(min(0.3, n * n / 1000))
        if n >= 40:
            raise TimeoutError

    growth.check(lambda n: n, growth.in_thread(limited, limits=TimeoutError), 10, deadline=1)
    with pytest.raises(AssertionError, match=r"longer than 0.2 s"):
        growth.check(lambda n: n, growth.in_thread(limited, limits=TimeoutError), 10, deadline=0.2)
