"""Timing on a device: medians of repeated runs with a cold L2 cache, and what a GPU computes in a run."""

import statistics
import time
from collections.abc import Callable

import torch

_SWEEP_BYTES = 1 << 28  # several times any L2 cache
_SLEEP_CYCLES = 2_000_000  # about 1 ms at 2 GHz
_RUNS = (5, 20)
_SECONDS = 0.3


class Clock:
    """Times operations on one device."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._sweep = torch.empty(_SWEEP_BYTES if self._cuda else 0, dtype=torch.uint8, device=device)

    def ms(self, run: Callable[[], object]) -> float:
        """Median time of one run, in milliseconds; see `samples`."""
        return statistics.median(self.samples(run))

    def samples(self, run: Callable[[], object]) -> list[float]:
        """Milliseconds of 5 to 20 runs, after one that compiles and one that estimates how many fit into 0.3 s."""
        run()
        self.synchronize()
        started = time.perf_counter()
        run()
        self.synchronize()
        count = int(_SECONDS / max(time.perf_counter() - started, 1e-6))
        count = max(_RUNS[0], min(count, _RUNS[1]))
        return self._cuda_samples(run, count) if self._cuda else [_wall_ms(run) for _ in range(count)]

    def synchronize(self) -> None:
        """Waits until the device has finished all work."""
        if self._cuda:
            torch.cuda.synchronize()

    def _cuda_samples(self, run: Callable[[], object], count: int) -> list[float]:
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
        for before, after in events:
            self._sweep.zero_()
            # Lets Python run ahead of the device, so that the time excludes launching.
            torch.cuda._sleep(_SLEEP_CYCLES)
            before.record()
            run()
            after.record()
        torch.cuda.synchronize()
        return [before.elapsed_time(after) for before, after in events]


def busy_ms(run: Callable[[], object]) -> float:
    """Milliseconds that a GPU computes and copies in a run."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return sum(each.self_device_time_total for each in profile.key_averages()) / 1e3


def _wall_ms(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return (time.perf_counter() - started) * 1e3
