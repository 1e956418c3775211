"""One contract suite over every engine that a remote tier may stand on; and a Redis behind TLS."""

import asyncio
import contextlib
import os
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from redis.connection import AbstractConnection

from fusionkv.kvcache_service.index import record as records
from fusionkv.kvcache_service.index.index import HitRanker
from fusionkv.kvcache_service.index.record import EntryRecord
from fusionkv.kvcache_service.keys import VERSIONS, path_keys
from fusionkv.kvcache_service.remote.redis_engine import RedisEngine
from fusionkv.kvcache_service.remote.tier import BLOCK_BYTES, SLOTS, RemoteEngine, RemoteTier
from fusionkv.kvcache_service.tiers.base import Unreachable
from tests.chaos.network import Relay
from tests.commands import run_python
from tests.conftest import Authority
from tests.kvcache_service.tools import NAMESPACE, disk_keys, path
from tests.kvcache_service.tools import record as entry
from tests.ports import free_port
from tests.system.mooncake_process import MooncakeMaster
from tests.system.object_process import Directory, ObjectServer
from tests.system.redis_process import RedisCluster, RedisServer
from tests.system.shared_services import REMOTES, Remote, made
from tests.waiting import until, wait_until

pytestmark = pytest.mark.system
OTHER = b"m" * 32
TTL = 600


def connect(remote: Remote, timeout: float = 20) -> RemoteEngine:
    if isinstance(remote, ObjectServer | Directory):
        from fusionkv.kvcache_service.remote.object_engine import ObjectEngine

        engine = ObjectEngine(remote.url, timeout=timeout)
        engine.block_bytes = BLOCK_BYTES  # test_object_engine.py has blocks of 16 MiB
        return engine
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
def engine(remote: Remote) -> Iterator[RemoteEngine]:
    """One for all tests: a Mooncake Store's memory is that of its clients."""
    found = connect(remote)
    yield found
    found.close()


class Counted:
    """An engine whose calls are counted, each of which is one round trip, and the names that are asked for kept."""

    def __init__(self, engine: RemoteEngine) -> None:
        self._engine, self.calls, self.asked = engine, 0, list[str]()
        self.block_bytes, self.lookup_values = engine.block_bytes, engine.lookup_values

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def counted(given: Any, *more: Any) -> Any:
            self.calls += 1
            self.asked += given if method == "get" else ()
            return getattr(self._engine, method)(given, *more)

        return counted


@pytest.fixture
def counted(engine: RemoteEngine) -> Counted:
    return Counted(engine)


@pytest.fixture
def tier(counted: Counted) -> RemoteTier:
    tier = RemoteTier(counted)
    for namespace in (NAMESPACE, OTHER):
        tier.delete_all(namespace)
    return tier


def store(tier: RemoteTier, names: str, data: bytes = b"data", **more: Any) -> EntryRecord:
    made = entry(names, data, **more)
    tier.write(made, 0, [data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES)])
    tier.commit(made)
    return made


def find(tier: RemoteTier, names: str, *variants: bytes, namespace: bytes = NAMESPACE) -> EntryRecord | None:
    """The best for the last element of a path."""
    elements, last = path(names), len(names) - 1
    wanted: list[Sequence[bytes]] = [(), *[variants] * last]
    (found,) = tier.lookup(namespace, elements, wanted, [last])
    return HitRanker(namespace, elements, variants).best(None, found)


def content(tier: RemoteTier, found: EntryRecord) -> bytes:
    return read(tier, found, 0, found.size)


def read(tier: RemoteTier, found: EntryRecord, first: int, size: int) -> bytes:
    into = bytearray(size)
    tier.read(found, first, memoryview(into))
    return bytes(into)


def test_bytes_come_back(tier: RemoteTier) -> None:
    for size in (1, 4096, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES - 1):
        data = os.urandom(size)
        made = store(tier, "SA", data)
        assert find(tier, "SA") == made
        assert content(tier, made) == data
        assert size <= BLOCK_BYTES or read(tier, made, 1, size - BLOCK_BYTES) == data[BLOCK_BYTES:]


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
    found = tier.lookup(NAMESPACE, path(names), [()] * len(names), range(len(names)))
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
    (found,) = tier.lookup(NAMESPACE, path("SzX"), [()] * 3, [2])
    assert 1 <= len(found) <= SLOTS
    assert set(map(repr, found)) <= set(map(repr, made.values()))
    for name, one in made.items():
        assert find(tier, f"S{name}X") == one, "by its exact path each is found"


def test_two_that_computed_one_entry_with_different_bytes(tier: RemoteTier) -> None:
    first, second = store(tier, "SA", b"1" * 3000), store(tier, "SA", b"2" * 3000)
    assert find(tier, "SA") == second
    assert (content(tier, first), content(tier, second)) == (b"1" * 3000, b"2" * 3000)


def test_what_is_deleted_or_lost_is_not_there(tier: RemoteTier, engine: RemoteEngine) -> None:
    large = os.urandom(2 * BLOCK_BYTES)
    deleted, lost, kept = store(tier, "SA"), store(tier, "SB", large), store(tier, "SC")
    tier.delete([deleted, entry("SZ")])
    assert find(tier, "SA") is None
    engine.remove([tier._blocks(lost)[1]])
    assert tier.touch([deleted, lost, kept]) == [False, False, True]
    for gone in (deleted, lost):
        with pytest.raises(FileNotFoundError):
            content(tier, gone)
    assert read(tier, lost, 0, BLOCK_BYTES) == large[:BLOCK_BYTES]


def test_values_fill_buffers_of_their_size(engine: RemoteEngine, remote: Remote) -> None:
    """A connection that met another response, or was closed by the server, harms no later call."""
    values = {
        f"fusionkv:buffer:{n}": os.urandom(size) for n, size in enumerate((BLOCK_BYTES, 5, BLOCK_BYTES, 1 << 19))
    }
    engine.put(list(values.items()))

    def filled(names: Sequence[str], more: int = 0) -> bool:
        buffers = [bytearray(len(values.get(name, b"?")) + more) for name in names]
        complete = engine.get_into(names, list(map(memoryview, buffers)))
        assert not complete or buffers == [values[name] for name in names]
        return complete

    for _ in range(2):
        assert filled(list(values))
        assert not any(filled(list(values), more) for more in (-1, 1))
        assert not filled(["fusionkv:buffer:none"])
        assert not filled([*values, "fusionkv:buffer:none"])
    if isinstance(engine, RedisEngine):
        nodes = engine._cluster.get_primaries() if engine._cluster else [None]
        for node in nodes:
            client = engine._node if node is None else engine._cluster.get_redis_connection(node)
            client.client_kill_filter(_type="normal", skipme=True)
    assert filled(list(values))


def test_a_namespace_is_deleted_as_a_whole(tier: RemoteTier) -> None:
    mine, other = store(tier, "SA"), store(tier, "SA", namespace=OTHER)
    tier.delete_all(NAMESPACE)
    assert find(tier, "SA") is None
    assert tier.touch([mine, other]) == [False, True]
    assert find(tier, "SA", namespace=OTHER) == other


def test_what_a_stranger_wrote_is_nobody_elses(tier: RemoteTier, engine: RemoteEngine) -> None:
    """Nonsense, another chunk's record, another tenant's, one whose key is not its path's."""
    store(tier, "SA")
    watched = Counted(engine)
    RemoteTier(watched).lookup(NAMESPACE, path("SA"), [(), ()], [1])
    forged = EntryRecord(path_keys(NAMESPACE, path("SA"))[-1], OTHER, b"".join(path("AS")), b"", 4, 5, 0, b"c" * 16)
    wrong = [entry("SB"), entry("SA", namespace=OTHER), forged]
    values = [b"", b"nonsense", os.urandom(200), *(one.key + records.encode(one, 0) for one in wrong)]
    for value in values:
        engine.put([(name, value or b"-") for name in watched.asked])
        assert find(tier, "SA") is None


def test_blocks_are_encrypted(tier: RemoteTier, engine: RemoteEngine, tmp_path: Path) -> None:
    one, other = os.urandom(32), os.urandom(32)
    data = b"secret" * 1000
    sealed, rotated, strange = (
        RemoteTier(engine, disk_keys(tmp_path / f"{n}", *given))
        for n, given in enumerate([(one,), (other, one), (other,)])
    )
    made = store(sealed, "SA", data)
    (name,) = sealed._blocks(made)
    (value,) = engine.get([name])
    assert b"secret" not in value
    assert content(sealed, made) == content(rotated, made) == data
    with pytest.raises(FileNotFoundError):
        content(strange, made)
    engine.remove([name])
    engine.put([(name, value[:-1] + bytes([value[-1] ^ 1]))])
    with pytest.raises(FileNotFoundError, match="damaged"):
        content(sealed, made)
    another = store(sealed, "SB", b"secret" * 1000)
    (other_name,) = sealed._blocks(another)
    engine.remove([other_name])
    engine.put([(other_name, value)])
    with pytest.raises(FileNotFoundError, match="damaged"):
        content(sealed, another)


@pytest.mark.long
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

        def answers() -> bool:
            with contextlib.suppress(OSError):
                engine.put([("b", b"2")])
                return engine.get(["b", "nothing"]) == [b"2", None]
            return False

        wait_until(answers, 30)
    finally:
        engine.close()
        own.kill9()


@pytest.mark.slow
def test_a_cluster_is_away_without_one_of_its_nodes(tmp_path: Path) -> None:
    """Of which the others know a while later: a refusal would be final for an entry that is to be written back."""
    own = RedisCluster(tmp_path)
    with contextlib.closing(connect(own, timeout=2)) as engine:
        try:
            engine.put([("a", b"1")])
            own.servers[2].kill9()
            wait_until(lambda: own.servers[0].client().execute_command("CLUSTER INFO")["cluster_state"] == "fail")
            for n in range(20):
                with pytest.raises(Unreachable):
                    engine.put([(f"{n}", b"1")])
        finally:
            own.kill9()


async def test_a_cluster_that_comes_back_elsewhere_is_found_by_its_url(tmp_path: Path) -> None:
    """As in Kubernetes, where the name stays, and each pod gets another address."""

    def cluster(name: str) -> RedisServer:
        (tmp_path / name).mkdir()
        one = RedisServer(tmp_path / name, "--cluster-enabled", "yes", port=free_port(10_000))
        one.client().execute_command("CLUSTER ADDSLOTS", *range(16384))
        return one

    first = cluster("first")
    relay = Relay(f"127.0.0.1:{free_port()}", first.address)
    await relay.start()
    with contextlib.closing(RedisEngine(f"redis://{relay.address}", ttl=60, timeout=2)) as engine:

        async def stores() -> bool:
            with contextlib.suppress(OSError):
                await asyncio.to_thread(engine.put, [("a", b"1")])
                return True
            return False

        await until(stores)
        first.kill9()
        second = cluster("second")
        try:
            relay.aim(second.address)
            await until(stores, 20)
        finally:
            second.kill9()
            await relay.close()


async def test_a_primary_that_became_a_replica_is_left_for_the_new_one(tmp_path: Path) -> None:
    """As in a planned failover: the address leads to the new primary, and the old one keeps its connections."""
    old = RedisServer(tmp_path)
    new = old.replica()
    relay = Relay(f"127.0.0.1:{free_port()}", old.address)
    await relay.start()
    with contextlib.closing(RedisEngine(f"redis://{relay.address}", ttl=60, timeout=20)) as engine:
        try:
            await asyncio.to_thread(engine.put, [("a", b"1")])
            new.promote()
            old.client().execute_command("REPLICAOF", "127.0.0.1", new.port)
            relay.aim(new.address, part=False)
            with pytest.raises(OSError, match="read only replica"):
                await asyncio.to_thread(engine.put, [("b", b"2")])
            await asyncio.to_thread(engine.put, [("b", b"2")])
            assert new.client().get("b") == b"2"
        finally:
            old.kill9()
            new.kill9()
            await relay.close()


@pytest.mark.parametrize("user", ["", "ca@che"])
def test_new_connections_use_the_password_that_the_file_has_now(tmp_path: Path, user: str) -> None:
    own, file = RedisServer(tmp_path), tmp_path / "password"
    file.write_text("before\n")
    admin = own.client()
    admin.ping()

    def change(password: str) -> None:
        admin.execute_command("ACL", "SETUSER", user or "default", "on", "resetpass", f">{password}", "~*", "+@all")
        admin.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    change("before")
    if user:
        admin.execute_command("ACL", "SETUSER", "default", "off")
    at = own.url.replace("//", f"//{quote(user)}@") if user else own.url

    def stores() -> bool:
        with contextlib.suppress(Unreachable):
            engine.put([("a", b"1")])
            return True
        return False

    try:
        with contextlib.closing(RedisEngine(at, ttl=60, timeout=20, password=file)) as engine:
            assert stores()
            change("after")
            assert not stores()
            file.write_text("after\n")
            wait_until(stores)
    finally:
        own.kill9()


@pytest.fixture
def expiring(redis: RedisServer) -> Iterator[RedisEngine]:
    with contextlib.closing(RedisEngine(redis.url, ttl=500, timeout=20)) as engine:
        yield engine


def test_what_is_not_touched_expires(redis: RedisServer, expiring: RedisEngine) -> None:
    tier, client = RemoteTier(expiring), redis.client()
    store(tier, "SA", os.urandom(2 * BLOCK_BYTES))
    names = list(client.scan_iter())
    assert len(names) == 4, "two blocks, and two records"
    assert all(0 < client.pttl(name) <= 500_000 for name in names)
    for name in names:
        client.pexpire(name, 1000)
    assert tier.touch([entry("SB")]) == [False]
    assert all(client.pttl(name) <= 1000 for name in names)
    (made,) = tier.lookup(NAMESPACE, path("SA"), [(), ()], [1])[0]
    assert tier.touch([made]) == [True]
    assert all(client.pttl(name) > 400_000 for name in names)


def test_a_namespace_is_deleted_in_few_round_trips(expiring: RedisEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    values = [(f"fusionkv:a:{n}", b"1") for n in range(2000)]
    expiring.put([*values, ("fusionkv:b:1", b"1")])
    sent, send = list[Any](), AbstractConnection.send_packed_command

    def counted(connection: Any, *given: Any, **more: Any) -> None:
        sent.append(given)
        send(connection, *given, **more)

    monkeypatch.setattr(AbstractConnection, "send_packed_command", counted)
    expiring.remove_all("fusionkv:a:")
    assert len(sent) < 20
    assert expiring.get(["fusionkv:a:0", "fusionkv:a:1999", "fusionkv:b:1"]) == [None, None, b"1"]


_CLOSED_DURING_CALLS = """
import contextlib, os, sys, threading, time
from fusionkv.kvcache_service.remote.mooncake_engine import MooncakeEngine

engine, blocks = MooncakeEngine(sys.argv[1], 32 << 20), [(f"closed:{n}", os.urandom(1 << 20)) for n in range(4)]
engine.probe()
calls = []

def work():
    with contextlib.suppress(OSError):
        while calls.append(None) is None:
            engine.put(blocks)
            engine.get([name for name, _ in blocks])

for _ in range(4):
    threading.Thread(target=work, daemon=True).start()
while len(calls) < 8:
    time.sleep(0.01)
engine.close()
os._exit(0)
"""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("remote", ["mooncake"], indirect=True)
def test_closing_a_mooncake_client_waits_for_its_calls(remote: Remote) -> None:
    # Mooncake's client ends the process with SIGSEGV if it is closed during a call: in five of six tries.
    for _ in range(2):
        run_python("-c", _CLOSED_DURING_CALLS, remote.url)


def test_a_redis_that_is_full_refuses(redis: RedisServer, expiring: RedisEngine) -> None:
    redis.client().config_set("maxmemory", "1mb")
    with pytest.raises(OSError, match="Redis returned an error") as refused:
        expiring.put([(f"{n}", os.urandom(1 << 20)) for n in range(4)])
    assert not isinstance(refused.value, Unreachable)


async def test_tls_takes_only_the_named_ca_and_host(
    redis: RedisServer, authority: Callable[[str], Authority]
) -> None:
    async def ask(certificate: tuple[Path, Path], ca: Path) -> bool:
        """Writes and reads through a TLS end in front of a Redis (the one that tests start speaks none itself)."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*certificate)
        relay = Relay(f"127.0.0.1:{free_port()}", redis.address)
        await relay.start(context)
        url = f"rediss://{relay.address}?ssl_ca_certs={ca}"
        try:
            with contextlib.closing(RedisEngine(url, ttl=60, timeout=20)) as engine:
                await asyncio.to_thread(engine.put, [("a", b"1")])
                return await asyncio.to_thread(engine.get, ["a"]) == [b"1"]
        finally:
            await relay.close()

    own, other = authority("own"), authority("other")
    assert await ask(own.issue("redis"), own.ca)
    for certificate, ca in ((own.issue("redis"), other.ca), (own.issue("elsewhere", ("10.9.8.7",)), own.ca)):
        with pytest.raises(Unreachable):
            await ask(certificate, ca)
