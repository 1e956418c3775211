"""What the tests stand on: services that are forks, and the time that a test may take."""

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests import stopwatch
from tests.forks import Fork
from tests.services import start_gateway


@pytest.fixture
def gateway(launch: Any, tmp_path: Path) -> Any:
    return start_gateway(launch, tmp_path, None)


def test_a_fork_takes_signals(gateway: Any) -> None:
    assert isinstance(gateway.process, Fork)
    assert gateway.process.poll() is None
    assert gateway.stop() == 0
    assert "stopped" in gateway.log


def test_a_fork_can_be_killed(gateway: Any) -> None:
    gateway.kill9()
    assert gateway.process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("flags", "env", "status", "said"),
    [
        (["--help"], {}, 0, "usage: fusionkv-gateway"),
        (["--none"], {}, 2, "unrecognized arguments: --none"),
        ([], {"FUSIONKV_GATEWAY_MAX_REQUESTS": "many"}, 1, "many"),
    ],
)
def test_a_fork_has_flags_environment_output_and_status(
    launch: Any, flags: list[str], env: dict[str, str], status: int, said: str
) -> None:
    service = launch("fusionkv.gateway", *flags, services=0, env=env)
    assert isinstance(service.process, Fork)
    assert service.wait() == status
    assert said in service.log


def test_what_may_change_the_imports_is_no_fork(launch: Any) -> None:
    service = launch("fusionkv.gateway", "--help", services=0, env={"PYTHONUTF8": "1"})
    assert not isinstance(service.process, Fork)
    assert service.wait() == 0


def test_only_a_mark_lets_a_test_take_long() -> None:
    watch = stopwatch.Stopwatch()
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    assert 0.2 <= watch.seconds() < stopwatch.LIMIT_SECONDS
    assert stopwatch.quiet_seconds(cpu=1, wall=9, stalled=2) == 7, "it slept"
    assert stopwatch.quiet_seconds(cpu=1, wall=99, stalled=90) == 1, "others had the cores"
    assert stopwatch.too_long(1e9, {"system"}) == stopwatch.too_long(0.0, {"gpu"}) == ""
    assert "a test that has no mark" in stopwatch.too_long(1e9, {"gpu"})
