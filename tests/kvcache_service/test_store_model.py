"""Random sequences of everything a store can do, against a model that is a dictionary."""

import asyncio
import itertools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from fusionkv.kvcache_service.config import Config
from fusionkv.kvcache_service.index.record import EntryRecord, HitKind
from fusionkv.kvcache_service.store.store import Store
from fusionkv.kvcache_service.store.writing import reserve
from fusionkv.kvcache_service.tiers.extents import aligned
from fusionkv.protos.runtime.errors import NotFound, ResourceExhausted
from tests.examples import examples
from tests.kvcache_service import tools
from tests.kvcache_service.tools import path
from tests.waiting import until

BLOCK = 4096
# Thousands of restarts: a file system in memory, where there is one, makes their flushes free.
SCRATCH = "/dev/shm" if Path("/dev/shm").is_dir() else None
NAMESPACES = [b"n" * 32, b"m" * 32]
names = st.text("AB", max_size=3).map(lambda tail: "S" + tail)
sizes = st.one_of(st.integers(1, 3 * BLOCK), st.integers(3 * BLOCK, 9 * BLOCK))
variants = st.sampled_from(["", "", "v", "w"])
namespaces = st.sampled_from([NAMESPACES[0], *NAMESPACES])


def make_machine(memory: int, disk: int, share: float) -> type[RuleBasedStateMachine]:
    class StoreMachine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.loop = asyncio.new_event_loop()
            self.directory = Path(tempfile.mkdtemp(prefix="fusionkv-model", dir=SCRATCH))
            self.clock = tools.Clock()
            self.content: dict[bytes, tuple[EntryRecord, str, bytes]] = {}
            self.leases: dict[int, tuple[set[bytes], float]] = {}
            self.count = 0
            self.open()

        def open(self) -> None:
            tiers = tools.make_tiers(self.directory, memory, disk)
            self.store = Store(Config(max_leases=6, tenant_share=share), tiers, clock=self.clock, wall=self.clock)
            self.loop.run_until_complete(self.store.open())

        def leased(self) -> set[bytes]:
            self.leases = {i: (k, t) for i, (k, t) in self.leases.items() if t > self.clock.now}
            return {key for keys, _ in self.leases.values() for key in keys}

        def record(self, text: str, variant: str, size: int, namespace: bytes) -> tuple[EntryRecord, bytes]:
            self.count += 1
            data = tools.payload(self.count, size)
            return tools.record(text, data, variant.encode() * 32 * (len(text) > 1), namespace), data

        @rule(text=names, variant=variants, size=sizes, namespace=namespaces, finish=st.booleans())
        def put(self, text: str, variant: str, size: int, namespace: bytes, finish: bool) -> None:
            new, data = self.record(text, variant, size, namespace)
            leased = self.leased()

            async def begin() -> Any:
                return reserve(self.store, new)

            try:
                writer = self.loop.run_until_complete(begin())
            except ResourceExhausted:
                home = self.store.residents.home
                assert size > self.store.residents.contents[home.name].tenants.limit or leased or self.store.leases
                self.assert_content(set())
                return
            assert (writer is None) == (new.key in self.content)
            if writer is not None:
                evicted = {key for key in self.content if self.store.entries.get(key) is None}
                assert not evicted & leased, "a leased entry was evicted"
                for key in evicted:
                    del self.content[key]

                async def send() -> None:
                    view = memoryview(data)
                    for piece in (view[: size // 3], view[size // 3 :]):
                        await writer.write(piece)
                    if finish:
                        assert await writer.commit()
                    writer.abort()

                self.loop.run_until_complete(send())
                if finish:
                    self.content[new.key] = (new, text, data)
            self.assert_content(set())

        @rule(text=names, namespace=namespaces, wanted=st.lists(st.sampled_from("vwx"), max_size=2))
        def lookup(self, text: str, namespace: bytes, wanted: list[str]) -> None:
            self.leased()
            asked = [[v.encode() * 32 for v in wanted] if i else [] for i in range(len(text))]
            try:
                found, lease = self.store.lookup(namespace, path(text), asked, 30.0)
            except ResourceExhausted:
                assert len(self.leases) == 6
                return
            keys = set()
            for i, (kind, resident) in enumerate(found):
                expected_kind, candidates = self.expected(namespace, text[: i + 1], wanted)
                assert kind is expected_kind
                assert (resident.record.key in candidates) if resident else not candidates
                keys |= {resident.record.key} if resident else set()
            assert bool(lease) == bool(keys)
            if lease:
                self.leases[lease] = (keys, self.clock.now + 30.0)

        def expected(self, namespace: bytes, prefix: str, wanted: list[str]) -> tuple[HitKind, set[bytes]]:
            entries = [(r, text) for r, text, _ in self.content.values() if r.namespace == namespace]
            exact = {r.key for r, text in entries if text == prefix and not r.variant}
            if exact:
                return HitKind.EXACT, exact
            same = [(r, text) for r, text in entries if len(text) > 1 and text[-1] == prefix[-1] and len(prefix) > 1]
            for variant in wanted:
                hits = {r.key for r, _ in same if r.variant == variant.encode() * 32}
                if hits:
                    return HitKind.ALTERNATIVE, hits
            plain = [(r, text) for r, text in same if not r.variant]
            if not plain:
                return HitKind.MISS, set()
            best = max(tools.common(text, prefix) for _, text in plain)
            return HitKind.ALTERNATIVE, {r.key for r, text in plain if tools.common(text, prefix) == best}

        @precondition(lambda self: self.content)
        @rule(data=st.data())
        def fetch(self, data: st.DataObject) -> None:
            key = data.draw(st.sampled_from(sorted(self.content)))

            async def read() -> bytes:
                with self.store.reader.pinned(key) as entry:
                    return b"".join([bytes(frame) async for frame in self.store.reader.frames(entry)])

            assert self.loop.run_until_complete(read()) == self.content[key][2]

        @rule()
        def fetch_what_is_not_there(self) -> None:
            with pytest.raises(NotFound), self.store.reader.pinned(b"?" * 32):
                pass

        @precondition(lambda self: self.leases)
        @rule(data=st.data())
        def release(self, data: st.DataObject) -> None:
            lease = data.draw(st.sampled_from(sorted(self.leases)))
            self.store.leases.release(lease)
            del self.leases[lease]

        @rule(seconds=st.sampled_from([0.5, 7.0, 31.0]))
        def wait(self, seconds: float) -> None:
            self.clock.now += seconds
            self.store.leases.expire()
            self.leased()

        @precondition(lambda self: self.content)
        @rule(data=st.data())
        def delete(self, data: st.DataObject) -> None:
            some = st.lists(st.sampled_from([*sorted(self.content), b"?" * 32]), max_size=3)
            keys = data.draw(some)
            deleted = self.loop.run_until_complete(self.store.delete(keys))
            assert deleted == len(set(keys) & set(self.content))
            self.assert_content(set(keys) & set(self.content))

        @rule(namespace=namespaces)
        def delete_namespace(self, namespace: bytes) -> None:
            keys = {key for key, (r, _, _) in self.content.items() if r.namespace == namespace}
            assert set(self.store.entries.index.namespace_keys(namespace)) == keys
            assert self.loop.run_until_complete(self.store.delete(list(keys))) == len(keys)
            self.assert_content(keys)

        @precondition(lambda self: disk)
        @rule()
        def restart(self) -> None:
            heats = {entry.record.key: entry.heat for entry in self.store.entries}
            self.loop.run_until_complete(self.store.close())
            self.open()
            self.leases.clear()
            self.assert_content(set())
            assert {entry.record.key: entry.heat for entry in self.store.entries} == heats

        def assert_content(self, deleted: set[bytes]) -> None:
            for key in deleted:
                del self.content[key]
                # A lease holds the deleted entry's bytes, not another entry of its name.
                for keys, _ in self.leases.values():
                    keys.discard(key)
            assert {entry.record.key for entry in self.store.entries} == set(self.content)

        @invariant()
        def integrity(self) -> None:
            while self.store.reader.reads or self.store.work.tasks:
                self.loop.run_until_complete(asyncio.sleep(0))
            # An aborted put gives its place back when its thread is done.
            self.loop.run_until_complete(until(lambda: not tools.reserved(self.store)))
            self.store.check_integrity(idle=True)
            assert len(self.store.leases) >= len(self.leases)
            for tier, namespace in itertools.product(self.store.residents.tiers, NAMESPACES):
                sizes = [
                    e.record.size
                    for e in (*self.store.entries, *self.store.entries.withdrawn)
                    if e.record.namespace == namespace and tier.name in e.places
                ]
                assert sum(map(aligned, sizes)) <= self.store.residents.contents[tier.name].tenants.limit

        def teardown(self) -> None:
            self.loop.run_until_complete(self.store.close())
            self.loop.close()
            shutil.rmtree(self.directory)

    return StoreMachine


@pytest.mark.hypothesis
@pytest.mark.slow
@pytest.mark.parametrize(
    ("memory", "disk", "share"),
    [(8, 16, 1), (12, 0, 1), (16, 8, 1), (12, 16, 0.6)],
    ids=["memory+disk", "memory", "small disk", "shares"],
)
def test_store_behaves_as_its_model(memory: int, disk: int, share: float) -> None:
    run_state_machine_as_test(
        make_machine(memory * BLOCK, disk * BLOCK, share),
        settings=settings(
            max_examples=examples(100, few=8),
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
