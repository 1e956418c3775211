"""Faults of a cache service's disk: damaged, cut short, lost, full, read-only."""

import asyncio
import contextlib
import os
import random
import resource
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path

from tests.chaos.faults import Scene, fault
from tests.chaos.network import remount
from tests.chaos.process import Process, Wrong

_PAGE = 4096


@fault("cache", 2)
async def bits_flip_in_segments(scene: Scene) -> AsyncIterator[None]:
    scene.let_go(end=False)
    for file in (scene.data / "segments").glob("*.kv"):
        _flip(file, scene.dice, scene.dice.choice((1, 20, 500)))
    scene.cache.signal(signal.SIGCONT)
    yield


@fault("cache")
async def segments_cut_short(scene: Scene) -> AsyncIterator[None]:
    running = scene.dice.random() < 0.5
    scene.let_go(end=not running)
    _cut_short(scene.data / "segments", scene.dice)
    if running:
        scene.cache.signal(signal.SIGCONT)
    else:
        await scene.cache.start()
    yield


@fault("cache", 2)
async def index_damaged(scene: Scene) -> AsyncIterator[None]:
    scene.let_go()
    how = scene.dice.choice(("bits", "bits", "pages", "header", "cut", "empty", "garbage"))
    _damage(scene.data / "index" / "data.mdb", how, scene.dice)
    scene.oracle.seen[f"index: {how}"] += 1
    yield
    await scene.cache.start()


@fault("cache")
async def data_lost(scene: Scene) -> AsyncIterator[None]:
    scene.let_go()
    shutil.rmtree(scene.data)
    yield
    await scene.cache.start()


@fault("cache", 2, needs="mount")
async def disk_full(scene: Scene) -> AsyncIterator[None]:
    ballast = scene.data.parent / "ballast"
    _fill(ballast, scene.dice.choice((0, 0, 1 << 16, 1 << 20)))
    try:
        yield
        if scene.dice.random() < 0.3:  # a full disk is no reason not to start
            scene.cache.kill9()
            await scene.cache.start()
            await scene.oracle.traffic(answers_fail=False)
    finally:
        os.unlink(ballast)


@fault("cache")
async def files_may_not_grow(scene: Scene) -> AsyncIterator[None]:
    pid, (_, hard) = scene.cache.pid, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (scene.dice.choice((4096, 1 << 20)), hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))


@fault("cache", needs="mount")
async def disk_read_only(scene: Scene) -> AsyncIterator[None]:
    scene.cache.kill9()
    remount(scene.data.parent, "ro")
    try:
        log = await asyncio.to_thread(_fails_to_start, scene.cache)
        if "Read-only file system" not in log:
            raise Wrong(f"a read-only disk is not named:\n{log}")
        yield
    finally:
        remount(scene.data.parent, "rw")
    await scene.cache.start()


def _fill(ballast: Path, left: int) -> None:
    """Takes all the room there is, but `left` bytes."""
    with ballast.open("wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while True:
                file.write(bytes(_PAGE))
        file.truncate(max(0, file.tell() - left))


def _damage(file: Path, how: str, dice: random.Random) -> None:
    size = file.stat().st_size
    if how == "bits":
        _flip(file, dice, dice.choice((1, 30, 1000)))
        return
    with file.open("r+b") as opened:
        if how == "pages":
            for _ in range(3):
                opened.seek(_PAGE * dice.randrange(max(1, size // _PAGE)))
                opened.write(dice.choice((bytes(_PAGE), dice.randbytes(_PAGE))))
        elif how == "header":
            opened.seek(dice.randrange(0, 2 * _PAGE, 8))
            opened.write(dice.randbytes(8))
        elif how == "garbage":
            opened.write(dice.randbytes(size))
        else:
            opened.truncate(dice.randrange(max(1, size)) if how == "cut" else 0)


def _cut_short(segments: Path, dice: random.Random) -> None:
    for file in segments.glob("*.kv"):
        os.truncate(file, int(file.stat().st_size * dice.random()))


def _flip(file: Path, dice: random.Random, bits: int) -> None:
    """In stretches that hold something."""
    with file.open("r+b") as opened:
        size = file.stat().st_size
        for _ in range(bits):
            at = dice.randrange(max(1, size))
            opened.seek(at)
            byte = opened.read(1)
            if byte:
                opened.seek(at)
                opened.write(bytes([byte[0] ^ 1 << dice.randrange(8)]))


def _fails_to_start(process: Process) -> str:
    """Starts it, and gives what it said when it ended by itself."""
    service = process.begin()
    status = service.wait(60)
    if status != 1 or "Traceback" in service.log:
        raise Wrong(f"{process.name} ended with {status}:\n{service.log}")
    return service.log
