"""Faults of a cache service's disk: damaged, cut short, lost, full, read-only."""

import asyncio
import os
import random
import resource
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path

from tests.chaos.faults import Scene, fault
from tests.small_disk import SmallDisk
from tests.system.cache_process import check_refused

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
    for file in (scene.data / "segments").glob("*.kv"):
        os.truncate(file, int(file.stat().st_size * scene.dice.random()))
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
    disk = _disk(scene)
    disk.fill(scene.dice.choice((0, 0, 1 << 16, 1 << 20)))
    try:
        yield
        if scene.dice.random() < 0.3:  # a full disk is no reason not to start
            scene.cache.kill9()
            await scene.cache.start()
            await scene.oracle.traffic()
    finally:
        disk.empty()


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
    disk = _disk(scene)
    disk.read_only()
    try:
        await asyncio.to_thread(check_refused, scene.cache.begin(), "Read-only file system")
        yield
    finally:
        disk.writable()
    await scene.cache.start()


def _disk(scene: Scene) -> SmallDisk:
    folder = scene.data.parent
    return SmallDisk(folder, folder, ())


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
