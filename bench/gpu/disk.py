"""Reads from a disk into device memory, through pinned host memory and with kvikio, and the device's checksum."""

import os
import tempfile
from collections.abc import Callable

import torch

from fusionkv.bench.gpu.report import Row
from fusionkv.bench.gpu.setup import Setup, share
from fusionkv.kernels.checksum import piece_digests
from fusionkv.kernels.xxh3 import accumulate

# As in protos/runtime/checksum.py, which needs a package that may not be installed for this run.
_PIECE_BYTES = 256 << 10


def measure(setup: Setup) -> None:
    """Measures each way to read, and the checksum."""
    if not setup.allows("reading from a disk", 15):
        return
    size = max(setup.sizes.copied // 16, _PIECE_BYTES)
    device = torch.empty(size, dtype=torch.uint8, device=setup.device)
    lines: list[tuple[object, ...]] = []
    with tempfile.TemporaryFile() as file:
        written = torch.randint(256, (size,), dtype=torch.uint8)
        os.pwrite(file.fileno(), written.numpy().data, 0)
        os.fsync(file.fileno())
        ways: dict[str, Callable[[], object]] = {"through pinned host memory": _through_host(file.fileno(), device)}
        direct = _direct(file.fileno(), device)
        if direct is None:
            setup.report.notice("kvikio: no CUDA device, or the package is not installed")
        else:
            ways["by kvikio"] = direct
        host_ms = None
        for name, run in ways.items():
            device.zero_()
            ms = setup.clock.ms(run)
            if not device.cpu().equal(written):
                setup.report.fail(f"reading from a disk {name}: the bytes differ")
            rate = size / ms / 1e6
            baseline = "through pinned host memory" if host_ms else ""
            row = Row("disk", f"{name}, {size >> 20} MiB", ms, baseline=baseline, baseline_ms=host_ms, rate=rate)
            host_ms = host_ms or ms
            lines.append((name, setup.report.add(row).rate, row.ratio, None))
    lines.append(_checksum(setup, device))
    columns = ("what", "GB/s", "to the first", "of the copy rate")
    setup.report.table("From a disk into device memory", columns, lines)


def _through_host(file: int, device: torch.Tensor) -> Callable[[], None]:
    host = torch.empty(len(device), dtype=torch.uint8, pin_memory=device.is_cuda)

    def run() -> None:
        # Drops the page cache: kvikio reads from the disk, too.
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.preadv(file, [host.numpy().data], 0)
        device.copy_(host)

    return run


def _direct(file: int, device: torch.Tensor) -> Callable[[], object] | None:
    if not device.is_cuda:
        return None
    try:
        import kvikio  # pyright: ignore[reportMissingImports]
    except (ImportError, OSError):
        return None
    source = kvikio.CuFile(f"/proc/self/fd/{file}")

    def run() -> object:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        return source.read(device, len(device), 0)

    return run


def _checksum(setup: Setup, data: torch.Tensor) -> tuple[object, ...]:
    """Measures the checksum, which reads all bytes twice, the second time from the cache."""
    few = data[: 4 * _PIECE_BYTES]
    expected = accumulate(few.cpu(), _PIECE_BYTES)
    if setup.device.type == "cuda":
        from fusionkv.kernels.gpu import checksum_triton

        if not checksum_triton.accumulate(few, _PIECE_BYTES).cpu().equal(expected):
            setup.report.fail("checksum: the kernel's accumulators differ from the reference")
    ms = setup.clock.ms(lambda: piece_digests(data, _PIECE_BYTES))
    rate = len(data) / ms / 1e6
    # The ceiling counts bytes read and bytes written.
    part = share(rate, setup.copy_gbs / 2)
    setup.report.add(Row("disk", f"checksum, {len(data) >> 20} MiB", ms, rate=rate, share=part))
    return "checksum on the device", rate, None, part
