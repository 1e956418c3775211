"""The pages of the disk tier's index: a whole one is never taken for damaged, and damage that stays hides nothing."""

import random
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest

from fusionkv.kvcache_service import keys
from fusionkv.kvcache_service.index import record
from fusionkv.kvcache_service.tiers import ledger_pages
from fusionkv.kvcache_service.tiers.disk_index import DiskIndex
from tests.examples import examples

NAMESPACE, SYSTEM = keys.namespace(b"pages", {}, ""), keys.chunk_digest([0])
MAP_BYTES = 64 << 20
PAGE = 4096


def entry(number: int, chunks: int = 1) -> record.Record:
    path = [SYSTEM, *(keys.chunk_digest([number, i]) for i in range(chunks))]
    return record.make(NAMESPACE, path, b"", 1000, 512, 0, number.to_bytes(record.CHECKSUM_BYTES))


def check(folder: Path) -> None:
    ledger_pages.check(str(folder / "data.mdb"))


def churn(
    ledger: DiskIndex, dice: random.Random, steps: int, first: int, longest: int = 1
) -> dict[int, record.Record]:
    """Puts, deletes and notes of heat; gives what is left of what it put."""
    live: dict[int, record.Record] = {}
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
@pytest.mark.parametrize("longest", [1, 3, 150])
def test_a_whole_index_is_in_order(tmp_path: Path, longest: int) -> None:
    ledger = DiskIndex(tmp_path / "index", MAP_BYTES, sync=False)
    check(tmp_path / "index")
    for round_ in range(6):
        churn(ledger, random.Random(round_), 60, 1000 * round_, longest)
        check(tmp_path / "index")
    ledger.close()
    check(tmp_path / "index")


def test_a_long_list_of_free_pages_is_in_order(tmp_path: Path) -> None:
    """Of 20,000 entries that go at once the free pages take pages of their own to be listed."""
    ledger = DiskIndex(tmp_path / "index", MAP_BYTES, sync=False)
    entries = [(entry(n), n * PAGE, 1.0) for n in range(20_000)]
    ledger.put(entries)
    check(tmp_path / "index")
    ledger.delete([(known.key, at) for known, at, _ in entries])
    check(tmp_path / "index")
    ledger.put(entries[:500])
    check(tmp_path / "index")
    ledger.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[bytes]]:
    """An index of about 30 pages, a third of them free, and its keys."""
    folder = tmp_path_factory.mktemp("whole") / "index"
    ledger = DiskIndex(folder, MAP_BYTES, sync=False)
    live = churn(ledger, random.Random(1), 150, 0)
    ledger.close()
    return folder, {known.key for known in live.values()}


def flip(bits: int) -> Callable[[bytearray, random.Random], None]:
    def damage(data: bytearray, dice: random.Random) -> None:
        for _ in range(bits):
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)

    return damage


def lose_pages(data: bytearray, dice: random.Random) -> None:
    for _ in range(3):
        at = PAGE * dice.randrange(len(data) // PAGE)
        data[at : at + PAGE] = dice.choice((bytes(PAGE), dice.randbytes(PAGE)))


@pytest.mark.hypothesis
@pytest.mark.parametrize("damage", [flip(1), flip(10), flip(30), lose_pages], ids=["1 bit", "10", "30", "pages"])
def test_what_seems_whole_stays_so(
    whole: tuple[Path, set[bytes]], tmp_path: Path, damage: Callable[[bytearray, random.Random], None]
) -> None:
    """Damage is noticed, or harms nothing that is written later."""
    dice, left, trials = random.Random(2), list[str](), 60
    for trial in range(trials):
        folder = tmp_path / f"{trial}"
        shutil.copytree(whole[0], folder)
        data = bytearray((folder / "data.mdb").read_bytes())
        damage(data, dice)
        (folder / "data.mdb").write_bytes(data)
        try:
            check(folder)
        except lmdb.CorruptedError:
            continue
        left.append(str(folder))
    assert len(left) < trials
    # LMDB meets what was not noticed, and would end this process if that were wrong.
    done = subprocess.run(
        [sys.executable, "-c", LATER, *left[: examples(60, few=10)]], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-200:] + done.stderr


# Loads what is there, goes on as a service does, and finds all of it again.
LATER = """
import random, sys
from pathlib import Path
from tests.kvcache_service.test_ledger_pages import MAP_BYTES, check, churn
from fusionkv.kvcache_service.tiers.disk_index import DiskIndex
for folder in map(Path, sys.argv[1:]):
    print(folder, flush=True)
    ledger = DiskIndex(folder, MAP_BYTES, sync=False)
    there = {key: known for key, known, _ in ledger.load()}
    ledger.delete([(key, 0) for key, known in there.items() if known is None])
    live = churn(ledger, random.Random(3), 150, 10_000)
    ledger.close()
    check(folder)
    ledger = DiskIndex(folder, MAP_BYTES, sync=False)
    found = {key for key, known, _ in ledger.load() if known}
    lost = ({key for key, known in there.items() if known} | {known.key for known in live.values()}) - found
    assert not lost, f"{len(lost)} entries are lost"
    ledger.close()
"""


def test_every_bit_of_a_page_s_head_counts(whole: tuple[Path, set[bytes]], tmp_path: Path) -> None:
    """Of a page in use, all but two bytes that mean nothing; of a free one none."""
    data, used = bytearray((whole[0] / "data.mdb").read_bytes()), 0
    for page in range(2, len(data) // PAGE):
        refused = 0
        for bit in range(8 * 16):
            at = page * PAGE + bit // 8
            data[at] ^= 1 << bit % 8
            (tmp_path / "data.mdb").write_bytes(data)
            try:
                check(tmp_path)
            except lmdb.CorruptedError:
                refused += 1
            data[at] ^= 1 << bit % 8
        assert refused in (0, 8 * 14)
        used += refused > 0
    assert used >= 5, "two trees of leaves, their branches, and the lists of free pages"


def test_a_page_that_is_free_and_in_use_is_noticed(
    whole: tuple[Path, set[bytes]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One number in the list of free pages is wrong: all records can be read, and the next ones would lie on them."""
    data = bytearray((whole[0] / "data.mdb").read_bytes())
    newest = max((0, PAGE), key=lambda at: struct.unpack_from("=Q", data, at + 16 + 24 + 2 * 48 + 8))
    free_root, main_root = (struct.unpack_from("=Q", data, newest + 16 + 24 + n * 48 + 40)[0] for n in (0, 1))
    (node,) = struct.unpack_from("=H", data, free_root * PAGE + 16)
    listed = free_root * PAGE + node + 8 + 8 + 8  # behind the node's head, its key and the count
    struct.pack_into("=Q", data, listed, main_root)
    folder = tmp_path / "index"
    shutil.copytree(whole[0], folder)
    (folder / "data.mdb").write_bytes(data)
    with lmdb.open(str(folder), max_dbs=2, readonly=True, lock=False) as env, env.begin() as txn:
        records = env.open_db(b"records", txn, create=False)
        assert {bytes(key) for key, _ in txn.cursor(db=records)} == whole[1]
    with pytest.raises(lmdb.CorruptedError, match=f"page {main_root} is in use twice"):
        check(folder)
    ledger = DiskIndex(folder, MAP_BYTES, sync=False)
    assert [*ledger.load()] == []
    ledger.close()
    assert f"page {main_root} is in use twice): the disk tier starts empty" in caplog.text


def test_a_file_that_ends_too_early_is_noticed(whole: tuple[Path, set[bytes]], tmp_path: Path) -> None:
    data = (whole[0] / "data.mdb").read_bytes()
    for length in (1, 100, PAGE, PAGE + 100, 2 * PAGE, len(data) // 2):
        (tmp_path / "data.mdb").write_bytes(data[:length])
        with pytest.raises(lmdb.CorruptedError):
            check(tmp_path)
