"""What the tests stand on: which services are no forks, and the time that a test may take."""

from typing import Any

from tests import stopwatch
from tests.forks import Fork


def test_what_may_change_the_imports_is_no_fork(launch: Any) -> None:
    service = launch("fusionkv.gateway", "--help", services=0, env={"PYTHONUTF8": "1"})
    assert not isinstance(service.process, Fork)
    assert service.wait() == 0


def test_only_a_mark_lets_a_test_take_long() -> None:
    assert stopwatch.too_long(1e9, {"system"}) == stopwatch.too_long(0.0, {"gpu"}) == ""
    assert "a test that has no mark" in stopwatch.too_long(1e9, {"gpu"})
