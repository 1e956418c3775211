"""What a service answers to a Lookup, as its callers see it."""

from dataclasses import dataclass, field

from fusionkv.kvcache_service.hits import HitKind
from fusionkv.protos.kvcache.v1 import kvcache_pb2 as pb

_TIERS = {pb.TIER_MEMORY: "memory", pb.TIER_DISK: "disk", pb.TIER_REMOTE: "remote"}


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored chunk: `size` in bytes, `base` the position its keys were rotated for, `checksum` of the bytes."""

    key: bytes
    size: int
    tokens: int
    base: int
    checksum: bytes
    tier: str
    """"memory", "disk", or "remote": in the tier that services share, and covered by no lease."""
    variant: bytes
    """Empty when the entry is full attention over its path."""
    shared: memoryview | None = field(default=None, compare=False, repr=False)
    """The bytes where they lie, for as long as `lease` is held: on the service's machine, if they are in memory."""
    lease: int = field(default=0, compare=False, repr=False)
    extent: tuple[int, int] | None = field(default=None, compare=False, repr=False)
    """Segment and offset of the bytes on the service's disk, for as long as `lease` is held."""
    signature: bytes = field(default=b"", repr=False)
    """As it was put."""


@dataclass(frozen=True, slots=True)
class Hit:
    kind: HitKind
    entry: Entry | None


@dataclass(frozen=True, slots=True)
class Lookup:
    """One hit for each element of the path; `lease` names the lease on all entries found, 0 when none was."""

    hits: tuple[Hit, ...]
    lease: int


_KINDS = {
    pb.HIT_KIND_EXACT: HitKind.EXACT,
    pb.HIT_KIND_ALTERNATIVE: HitKind.ALTERNATIVE,
    pb.HIT_KIND_MISS: HitKind.MISS,
}


def hit(found: pb.Hit, lease: int, arena: memoryview | None) -> Hit:
    """One hit; `lease` is that of the reply, `arena` the service's memory if it is seen here.

    What can't be made sense of, since a later version of the service answered, is a miss.
    """
    e, kind, tier = found.entry, _KINDS.get(found.kind, HitKind.MISS), _TIERS.get(found.entry.tier)
    if kind is HitKind.MISS or tier is None or not found.HasField("entry"):
        return Hit(HitKind.MISS, None)
    there = None if arena is None else shared(e, arena, e.size_bytes)
    names = (e.key, e.size_bytes, e.tokens, e.base, e.checksum, tier, e.variant)
    extent = (e.extent.segment, e.extent.offset) if e.HasField("extent") else None
    held = 0 if tier == "remote" else lease
    return Hit(kind, Entry(*names, there, held, extent, e.signature))


def shared(at: pb.Entry | pb.Prefetched, arena: memoryview, size: int) -> memoryview | None:
    """An entry's bytes in the arena, if it is there."""
    inside = at.HasField("arena_offset") and at.arena_offset + size <= len(arena)
    return arena[at.arena_offset : at.arena_offset + size] if inside else None
