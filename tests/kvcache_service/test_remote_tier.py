"""One contract suite over every engine that a remote tier may stand on."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fusionkv.kvcache_service.index import record as records
from fusionkv.kvcache_service.index.index import HitRanker
from fusionkv.kvcache_service.index.record import Record
from fusionkv.kvcache_service.keys import VERSIONS, path_keys
from fusionkv.kvcache_service.remote.redis_engine import RedisEngine
from fusionkv.kvcache_service.remote.tier import BLOCK_BYTES, SLOTS, Engine, RemoteTier, _blocks, blocks_of
from fusionkv.kvcache_service.tiers.base import Unreachable
from fusionkv.kvcache_service.tiers.sealed_disk import DiskKeys
from fusionkv.protos.runtime.checksum import checksum
from tests.kvcache_service.tools import path
from tests.system.mooncake_process import MooncakeMaster
from tests.system.redis_process import RedisServer
from tests.system.shared_services import REMOTES, Remote, made

pytestmark = pytest.mark.system
NAMESPACE, OTHER = b"n" * 32, b"m" * 32
TTL = 600


def entry(names: str, data: bytes = b"data", variant: bytes = b"", namespace: bytes = NAMESPACE) -> Record:
    return records.make(namespace, path(names), variant, len(data), 5, 0, checksum(data))


def connect(remote: Remote, timeout: float = 20) -> Engine:
    if not isinstance(remote, MooncakeMaster):
        return RedisEngine(remote.url, ttl=TTL, timeout=timeout)
    from fusionkv.kvcache_service.remote.mooncake_engine import MooncakeEngine

    return MooncakeEngine(remote.url, 32 << 20)


@pytest.fixture(scope="module", params=list(REMOTES))
def remote(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
    started = made(request.param, tmp_path_factory.mktemp("remote"))
    yield started
    started.kill9()


@pytest.fixture(scope="module")
def engine(remote: Remote) -> Iterator[Engine]:
    """One for all tests: a Mooncake Store's memory is that of its clients."""
    found = connect(remote)
    yield found
    found.close()


class Counted(Engine):
    """An engine whose calls are counted: each is one round trip."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self.calls = engine, 0

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        self.calls += 1
        return self._engine.get(names)

    def put(self, values: Sequence[tuple[str, bytes]]) -> None:
        self.calls += 1
        self._engine.put(values)

    def touch(self, names: Sequence[str]) -> list[bool]:
        self.calls += 1
        return self._engine.touch(names)

    def remove(self, names: Sequence[str]) -> None:
        self.calls += 1
        self._engine.remove(names)

    def remove_all(self, prefix: str) -> None:
        self._engine.remove_all(prefix)

    def close(self) -> None:
        self._engine.close()


@pytest.fixture
def counted(engine: Engine) -> Counted:
    return Counted(engine)


@pytest.fixture
def tier(counted: Counted) -> RemoteTier:
    tier = RemoteTier(counted)
    for namespace in (NAMESPACE, OTHER):
        tier.delete_all(namespace)
    return tier


def store(tier: RemoteTier, names: str, data: bytes = b"data", **more: Any) -> Record:
    made = entry(names, data, **more)
    tier.write(made, 0, [data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES)])
    tier.commit(made)
    return made


def find(tier: RemoteTier, names: str, *variants: bytes, namespace: bytes = NAMESPACE) -> Record | None:
    """The best for the last element of a path."""
    elements, last = path(names), len(names) - 1
    wanted: list[Sequence[bytes]] = [(), *[variants] * last]
    (found,) = tier.find(namespace, elements, wanted, [last])
    return HitRanker(namespace, elements, variants).best(None, found)


def content(tier: RemoteTier, found: Record) -> bytes:
    return b"".join(tier.read(found, 0, blocks_of(found)))


def test_bytes_come_back(tier: RemoteTier) -> None:
    for size in (1, 4096, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES - 1):
        data = os.urandom(size)
        made = store(tier, "SA", data)
        assert find(tier, "SA") == made
        assert content(tier, made) == data
        assert b"".join(tier.read(made, 1, 8)) == data[BLOCK_BYTES:]


def test_an_entry_is_found_once_all_of_it_is_written(tier: RemoteTier) -> None:
    made = entry("SA")
    tier.write(made, 0, [b"data"])
    assert find(tier, "SA") is None
    assert tier.touch([made]) == [False]
    tier.commit(made)
    assert find(tier, "SA") == made
    assert tier.touch([made, entry("SB")]) == [True, False]


def test_a_prompt_is_looked_up_in_one_round_trip(tier: RemoteTier, counted: Counted) -> None:
    names = "SABCDEFGHIJ"
    stored = {n: store(tier, names[: n + 1]) for n in (0, 2, 3)} | {7: store(tier, "SG"), 9: store(tier, "SXI")}
    before = counted.calls
    found = tier.find(NAMESPACE, path(names), [()] * len(names), range(len(names)))
    assert counted.calls == before + 1
    assert found == [[stored[n]] if n in stored else [] for n in range(len(names))]


def test_exact_before_variant_before_the_longest_common_suffix(tier: RemoteTier) -> None:
    variant = b"v" * 32
    long = store(tier, "SAX")
    assert find(tier, "SBX") == long
    short = store(tier, "SX")
    assert find(tier, "SBX") in (short, long), "one of them may have taken the other's place"
    own = store(tier, "SX", b"other", variant=variant)
    assert find(tier, "SBX", variant) == own
    assert find(tier, "SAX", variant) == long
    assert find(tier, "SBX", b"w" * 32) in (short, long)
    assert find(tier, "TBX") is None, "another system prompt"
    assert find(tier, "S") is None


def test_versions_are_found_by_likeness(tier: RemoteTier) -> None:
    three = next(variant for variant, most in VERSIONS.items() if most == 3)
    made = store(tier, "SABX", variant=three)
    assert find(tier, "SAX", three) == made
    assert find(tier, "SCX", three) is None
    assert find(tier, "SAX") is None


def test_the_index_of_a_chunk_is_bounded(tier: RemoteTier) -> None:
    made = {name: store(tier, f"S{name}X", name.encode()) for name in "ABCDEFGHIJKLMNOPQ"}
    (found,) = tier.find(NAMESPACE, path("SzX"), [()] * 3, [2])
    assert 1 <= len(found) <= SLOTS
    assert set(map(repr, found)) <= set(map(repr, made.values()))
    for name, one in made.items():
        assert find(tier, f"S{name}X") == one, "by its exact path each is found"


def test_two_that_computed_one_entry_with_different_bytes(tier: RemoteTier) -> None:
    first, second = store(tier, "SA", b"1" * 3000), store(tier, "SA", b"2" * 3000)
    assert find(tier, "SA") == second
    assert (content(tier, first), content(tier, second)) == (b"1" * 3000, b"2" * 3000)


def test_what_is_deleted_or_lost_is_not_there(tier: RemoteTier, engine: Engine) -> None:
    large = os.urandom(2 * BLOCK_BYTES)
    deleted, lost, kept = store(tier, "SA"), store(tier, "SB", large), store(tier, "SC")
    tier.delete([deleted, entry("SZ")])
    assert find(tier, "SA") is None
    engine.remove([_blocks(lost)[1]])
    assert tier.touch([deleted, lost, kept]) == [False, False, True]
    for gone in (deleted, lost):
        with pytest.raises(FileNotFoundError):
            content(tier, gone)
    assert tier.read(lost, 0, 1) == [large[:BLOCK_BYTES]]


def test_a_namespace_is_deleted_as_a_whole(tier: RemoteTier) -> None:
    mine, other = store(tier, "SA"), store(tier, "SA", namespace=OTHER)
    tier.delete_all(NAMESPACE)
    assert find(tier, "SA") is None
    assert tier.touch([mine, other]) == [False, True]
    assert find(tier, "SA", namespace=OTHER) == other


def test_what_a_stranger_wrote_is_nobody_elses(tier: RemoteTier, engine: Engine) -> None:
    """Nonsense, another chunk's record, another tenant's, one whose key is not its path's."""
    store(tier, "SA")
    names: list[str] = []

    class Watched(Counted):
        def get(self, asked: Sequence[str]) -> list[bytes | None]:
            names.extend(asked)
            return super().get(asked)

    RemoteTier(Watched(engine)).find(NAMESPACE, path("SA"), [(), ()], [1])
    forged = Record(path_keys(NAMESPACE, path("SA"))[-1], OTHER, b"".join(path("AS")), b"", 4, 5, 0, b"c" * 16)
    wrong = [entry("SB"), entry("SA", namespace=OTHER), forged]
    values = [b"", b"nonsense", os.urandom(200), *(one.key + records.encode(one, 0) for one in wrong)]
    for value in values:
        engine.put([(name, value or b"-") for name in names])
        assert find(tier, "SA") is None


@pytest.fixture
def keys(tmp_path: Path) -> Callable[..., DiskKeys]:
    def made(*lines: str) -> DiskKeys:
        file = tmp_path / f"{len(list(tmp_path.iterdir()))}.keys"
        file.write_text("\n".join(lines))
        return DiskKeys(file)

    return made


def test_blocks_are_encrypted(tier: RemoteTier, engine: Engine, keys: Callable[..., DiskKeys]) -> None:
    one, other = os.urandom(32).hex(), os.urandom(32).hex()
    data = b"secret" * 1000
    sealed = RemoteTier(engine, keys(one))
    made = store(sealed, "SA", data)
    (name,) = _blocks(made)
    (value,) = engine.get([name])
    assert value is not None
    assert b"secret" not in value
    assert content(sealed, made) == content(RemoteTier(engine, keys(other, one)), made) == data
    for unable in (RemoteTier(engine, keys(other)),):
        with pytest.raises(FileNotFoundError):
            content(unable, made)
    engine.remove([name])
    engine.put([(name, value[:-1] + bytes([value[-1] ^ 1]))])
    with pytest.raises(FileNotFoundError, match="damaged"):
        content(sealed, made)
    another = store(sealed, "SB", b"secret" * 1000)
    engine.remove(_blocks(another))
    engine.put([(_blocks(another)[0], value)])
    with pytest.raises(FileNotFoundError, match="damaged"):
        content(sealed, another)


@pytest.mark.slow
def test_an_engine_that_is_away_says_so(tmp_path: Path, remote: Remote) -> None:
    """Each call, within its time; and a new connection is made once it is back."""
    own = type(remote)(tmp_path)
    engine = connect(own, timeout=2)
    try:
        engine.put([("a", b"1")])
        own.kill9()
        calls: list[Callable[[], Any]] = [
            lambda: engine.get(["a"]), lambda: engine.put([("a", b"1")]), lambda: engine.touch(["a"]),
            lambda: engine.remove(["a"]), lambda: engine.remove_all("a"),
        ]  # fmt: skip
        began = time.monotonic()
        for call in calls:
            with pytest.raises(Unreachable):
                call()
        assert time.monotonic() - began < 30
        own.start()
        deadline = time.monotonic() + 30
        while True:
            try:
                engine.put([("b", b"2")])
                assert engine.get(["b", "nothing"]) == [b"2", None]
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.2)
    finally:
        engine.close()
        own.kill9()


def test_what_is_not_touched_expires(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    engine = RedisEngine(server.url, ttl=500, timeout=20)
    tier = RemoteTier(engine)
    store(tier, "SA", os.urandom(2 * BLOCK_BYTES))
    redis = server.client()
    names = list(redis.scan_iter())
    assert len(names) == 4, "two blocks, and two records"
    assert all(0 < redis.pttl(name) <= 500_000 for name in names)
    for name in names:
        redis.pexpire(name, 1000)
    assert tier.touch([entry("SB")]) == [False]
    assert all(redis.pttl(name) <= 1000 for name in names)
    (made,) = tier.find(NAMESPACE, path("SA"), [(), ()], [1])[0]
    assert tier.touch([made]) == [True]
    assert all(redis.pttl(name) > 400_000 for name in names)
    engine.close()
    server.kill9()


def test_a_redis_that_is_full_refuses(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, "--maxmemory", "1mb")
    engine = RedisEngine(server.url, ttl=500, timeout=20)
    with pytest.raises(OSError, match="Redis returned an error") as refused:
        engine.put([(f"{n}", os.urandom(1 << 20)) for n in range(4)])
    assert not isinstance(refused.value, Unreachable)
    engine.close()
    server.kill9()
