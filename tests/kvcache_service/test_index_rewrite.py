"""The disk tier's index, written anew at every start: nothing is lost of a whole one, and damage hides nothing."""

import contextlib
import random
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import pytest

from fusionkv.kvcache_service import keys
from fusionkv.kvcache_service.index.record import CHECKSUM_BYTES, EntryRecord, make
from fusionkv.kvcache_service.tiers import index_file
from fusionkv.kvcache_service.tiers.disk_index import DiskIndex

NAMESPACE, SYSTEM = keys.namespace(b"pages", {}, ""), keys.chunk_digest([0])
MAP_BYTES = 64 << 20
PAGE = 4096


@pytest.fixture(autouse=True)
def index_process() -> None:
    """It checks the index, as in a service."""


def entry(number: int, chunks: int = 1) -> EntryRecord:
    path = [SYSTEM, *(keys.chunk_digest([number, i]) for i in range(chunks))]
    return make(NAMESPACE, path, b"", 1000, 512, 0, number.to_bytes(CHECKSUM_BYTES))


def opened(folder: Path) -> "contextlib.closing[DiskIndex]":
    return contextlib.closing(DiskIndex(folder, MAP_BYTES, sync=False))


def churn(ledger: DiskIndex, dice: random.Random, steps: int, first: int, longest: int = 1) -> dict[int, EntryRecord]:
    """Puts, deletes and notes of heat; gives what is left of what it put."""
    live: dict[int, EntryRecord] = {}
    for number in range(first, first + steps):
        for more in range(dice.choice((1, 1, 8))):
            live[number * 10 + more] = entry(number * 10 + more, dice.randint(1, longest))
        ledger.put([(live[n], n * PAGE, 1.0) for n in list(live)[-8:]])
        if len(live) > 40:
            going = dice.sample(sorted(live), dice.choice((1, 20)))
            ledger.delete([(live.pop(n).key, n * PAGE) for n in going])
        ledger.save_heat([(live[n].key, dice.random()) for n in dice.sample(sorted(live), 1)])
    return live


# Of one chunk a record takes a part of a page; of 150 it takes pages of its own.
@pytest.mark.parametrize("longest", [1, 150])
def test_a_whole_index_stays_as_it_is(tmp_path: Path, longest: int) -> None:
    there: list[Any] = []
    for start in range(2):
        with opened(tmp_path / "index") as index:
            assert [*index.load()] == there
            churn(index, random.Random(start), 60, 1000 * start, longest)
            there = [*index.load()]
            assert all(known is not None for _, known, _ in there)
    with opened(tmp_path / "index") as index:
        assert [*index.load()] == there
    assert [*tmp_path.iterdir()] == [tmp_path / "index"]


def test_what_was_deleted_takes_no_room_after_a_start(tmp_path: Path) -> None:
    entries = [(entry(n), n * PAGE, 1.0) for n in range(2000)]
    with opened(tmp_path / "index") as index:
        index.put(entries)
        index.delete([(known.key, at) for known, at, _ in entries[10:]])
    file = tmp_path / "index" / "data.mdb"
    large = file.stat().st_size
    with opened(tmp_path / "index") as index:
        assert {key for key, *_ in index.load()} == {known.key for known, *_ in entries[:10]}
    assert file.stat().st_size < large / 10


Whole = tuple[Path, set[bytes]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """An index of about 30 pages, a third of them free, and its keys."""
    folder = tmp_path_factory.mktemp("whole") / "index"
    with opened(folder) as ledger:
        live = churn(ledger, random.Random(1), 150, 0)
    return folder, {known.key for known in live.values()}


@pytest.fixture
def copied(whole: Whole, tmp_path: Path) -> Whole:
    return Path(shutil.copytree(whole[0], tmp_path / "index")), whole[1]


Damage = Callable[[bytearray, random.Random], None]


def flip(bits: int) -> Damage:
    def damage(data: bytearray, dice: random.Random) -> None:
        for _ in range(bits):
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)

    return damage


def lose_pages(data: bytearray, dice: random.Random) -> None:
    for _ in range(3):
        at = PAGE * dice.randrange(len(data) // PAGE)
        data[at : at + PAGE] = dice.choice((bytes(PAGE), dice.randbytes(PAGE)))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("damage", [flip(1), flip(10), flip(30), lose_pages], ids=["1 bit", "10", "30", "pages"])
def test_damage_is_noticed_or_harms_nothing(whole: Whole, tmp_path: Path, damage: Damage) -> None:
    """Each is opened by a process that damage would end, goes on as a service does, and finds all of it again."""
    dice = random.Random(2)
    folders = []
    for trial in range(20):
        folders.append(tmp_path / f"{trial}")
        shutil.copytree(whole[0], folders[-1])
        data = bytearray((folders[-1] / "data.mdb").read_bytes())
        damage(data, dice)
        (folders[-1] / "data.mdb").write_bytes(data)
    done = subprocess.run([sys.executable, "-c", OPENED, *map(str, folders)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-200:] + done.stderr
    assert "starts empty" in done.stderr or damage is not lose_pages


OPENED = """
import logging, random, sys
from pathlib import Path
from tests.kvcache_service.test_index_rewrite import churn, opened
logging.basicConfig()
for folder in map(Path, sys.argv[1:]):
    print(folder, flush=True)
    with opened(folder) as index:
        there = {key: known for key, known, _ in index.load()}
        index.delete([(key, 0) for key, known in there.items() if known is None])
        live = churn(index, random.Random(3), 60, 10_000)
    with opened(folder) as index:
        found = {key for key, known, _ in index.load() if known}
    lost = ({key for key, known in there.items() if known} | {known.key for known in live.values()}) - found
    assert not lost, f"{len(lost)} entries are lost"
"""


def test_a_wrong_list_of_free_pages_harms_nothing(copied: Whole) -> None:
    """One number in the list of free pages is wrong: all records can be read, and the next ones would lie on them."""
    folder, known = copied
    data = bytearray((folder / "data.mdb").read_bytes())
    newest = max((0, PAGE), key=lambda at: struct.unpack_from("=Q", data, at + 16 + 24 + 2 * 48 + 8))
    free_root, main_root = (struct.unpack_from("=Q", data, newest + 16 + 24 + n * 48 + 40)[0] for n in (0, 1))
    (node,) = struct.unpack_from("=H", data, free_root * PAGE + 16)
    listed = free_root * PAGE + node + 8 + 8 + 8  # behind the node's head, its key and the count
    struct.pack_into("=Q", data, listed, main_root)
    (folder / "data.mdb").write_bytes(data)
    with opened(folder) as index:
        assert {key for key, *_ in index.load()} == known
        live = churn(index, random.Random(3), 60, 10_000)
    with opened(folder) as index:
        assert {key for key, *_ in index.load()} == known | {record.key for record in live.values()}


def test_a_lost_page_does_not_keep_it_from_opening(copied: Whole, caplog: Any) -> None:
    """Zeros where a page was: some of them would end this very process with SIGABRT."""
    folder, known = copied
    path = folder / "data.mdb"
    data = path.read_bytes()
    for page in range(2, len(data) // PAGE, 5):
        path.write_bytes(data[: PAGE * page] + bytes(PAGE) + data[PAGE * (page + 1) :])
        with opened(folder) as index:
            assert {key for key, *_ in index.load()} in (set(), known)
            index.put([(entry(0), 0, 1.0)])
    assert "the process that reads it was killed by SIGABRT" in caplog.text


def test_keys_out_of_order_are_noticed(copied: Whole, tmp_path: Path) -> None:
    """A bit of a key: LMDB reads all of it, and would not find what is on the key's other side."""
    folder, known = copied
    data, key = (folder / "data.mdb").read_bytes(), min(known)
    (folder / "data.mdb").write_bytes(data.replace(key, bytes([key[0] ^ 0x80, *key[1:]])))
    with pytest.raises(lmdb.CorruptedError, match="out of order"):
        index_file.rewrite(str(folder), str(tmp_path / "new"))


def test_a_file_that_ends_too_early_or_is_none_starts_empty(whole: Whole, tmp_path: Path, caplog: Any) -> None:
    data = (whole[0] / "data.mdb").read_bytes()
    cut = (data[:length] for length in (0, 100, PAGE + 100, len(data) // 2))
    for number, content in enumerate((*cut, b"not a database" * 1000)):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        (folder / "data.mdb").write_bytes(content)
        caplog.clear()
        with opened(folder) as index:
            assert [*index.load()] == []
        assert "starts empty" in caplog.text or not content


def test_whoever_ends_the_check_is_said(copied: Whole, monkeypatch: Any, caplog: Any) -> None:
    """As systemd does to all of a service that it stops, or the kernel without memory: that is no damage."""
    killed = subprocess.CompletedProcess([], -signal.SIGKILL, "", "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: killed)
    with opened(copied[0]) as index:
        assert {key for key, *_ in index.load()} == copied[1]
    assert "was not checked: the process that reads it was killed by SIGKILL" in caplog.text
