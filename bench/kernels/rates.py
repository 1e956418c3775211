"""Measures the ceilings of a device: matrix products, copies in its memory, and copies from pinned host memory."""

import mmap
import tempfile
import warnings
from collections.abc import Callable

import torch

from fusionkv.bench.gpu.report import Row
from fusionkv.bench.gpu.setup import Setup
from fusionkv.fusion_worker.transfer.pinned import address_of, register, unregister


def measure(setup: Setup) -> None:
    """Measures the ceilings, and sets those that other parts use in the setup."""
    lines = []
    setup.matrix_tflops = _matrix(setup)
    lines.append(("matrix product, TFLOP/s", setup.matrix_tflops))
    setup.copy_gbs = _copy(setup)
    lines.append(("copy in device memory, GB/s read and written", setup.copy_gbs))
    if setup.device.type == "cuda":
        lines.append(("copy from pinned host memory, GB/s", _host(setup)))
        lines.append(("copy from a page-locked mapping, GB/s", _mapped(setup)))
    else:
        setup.report.notice("copies from pinned host memory: no CUDA device")
    setup.report.table("Ceilings of this device, best of several", ("what", "rate"), lines)


def _matrix(setup: Setup) -> float:
    size = setup.sizes.matrix
    # Normal values: with zeros, the product draws less power and runs faster than with real data.
    a, b = (torch.randn(size, size, dtype=setup.dtype, device=setup.device) for _ in range(2))
    out = torch.empty_like(a)
    name = f"matmul {size} {str(setup.dtype)[6:]}"
    return _row(setup, name, lambda: torch.matmul(a, b, out=out), 2 * size**3, 1e12)


def _copy(setup: Setup) -> float:
    size = setup.sizes.copied
    source = torch.zeros(size, dtype=torch.uint8, device=setup.device)
    target = torch.empty_like(source)
    return _row(setup, f"copy {size >> 20} MiB", lambda: target.copy_(source), 2 * size, 1e9)


def _host(setup: Setup) -> float:
    size = setup.sizes.copied // 4
    source = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(size, dtype=torch.uint8, device=setup.device)
    name = f"pinned host to device {size >> 20} MiB"
    return _row(setup, name, lambda: target.copy_(source, non_blocking=True), size, 1e9)


def _mapped(setup: Setup) -> float:
    """From a read-only mapping, as a worker has of a cache service's memory."""
    size = setup.sizes.copied // 4
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(size)
        mapping = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)
    with warnings.catch_warnings(action="ignore"):  # it is only read
        source = torch.frombuffer(mapping, dtype=torch.uint8)
    target = torch.empty(size, dtype=torch.uint8, device=setup.device)
    register(address_of(mapping), size, setup.device)
    try:
        name = f"page-locked mapping to device {size >> 20} MiB"
        return _row(setup, name, lambda: target.copy_(source, non_blocking=True), size, 1e9)
    finally:
        unregister(address_of(mapping), setup.device)


def _row(setup: Setup, name: str, run: Callable[[], object], work: float, unit: float) -> float:
    """The best rate of `run`, which processes `work` operations or bytes, in `unit` per second."""
    ms = min(setup.clock.samples(run))
    rate = work / (ms * 1e-3) / unit
    setup.report.add(Row("rate", name, ms, rate=rate))
    return rate
