"""The client's view of the response to a Lookup."""

from dataclasses import dataclass, field

from fusionkv.kvcache_service.hits import HitKind
from fusionkv.protos.kvcache.v1 import kvcache_pb2 as pb

_TIERS = {pb.TIER_MEMORY: "memory", pb.TIER_DISK: "disk", pb.TIER_REMOTE: "remote"}


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored chunk; `size` in bytes, `base` is the RoPE position of its first token."""

    key: bytes
    size: int
    tokens: int
    base: int
    checksum: bytes
    tier: str
    """"memory", "disk" or "remote": in the shared tier, not covered by the lease."""
    variant: bytes
    """Empty for full attention over the path."""
    shared: memoryview | None = field(default=None, compare=False, repr=False)
    """View of the bytes in the service's shared memory, valid while `lease` is held; None if not available."""
    lease: int = field(default=0, compare=False, repr=False)
    extent: tuple[int, int] | None = field(default=None, compare=False, repr=False)
    """Segment and offset in the service's segment files, valid while `lease` is held; None if not available."""
    signature: bytes = field(default=b"", repr=False)
    """As passed to `put`."""


@dataclass(frozen=True, slots=True)
class Hit:
    kind: HitKind
    entry: Entry | None


@dataclass(frozen=True, slots=True)
class Lookup:
    """One hit per element of the path; `lease` covers all entries found, 0 if there is none."""

    hits: tuple[Hit, ...]
    lease: int


_KINDS = {
    pb.HIT_KIND_EXACT: HitKind.EXACT,
    pb.HIT_KIND_ALTERNATIVE: HitKind.ALTERNATIVE,
    pb.HIT_KIND_MISS: HitKind.MISS,
}


def hit(message: pb.Hit, lease: int, arena: memoryview | None) -> Hit:
    """Converts one hit of a response.

    Args:
        lease: Lease of the response.
        arena: The service's shared memory, if mapped.

    Returns:
        The hit; a miss if its kind or tier is unknown, as a later version of the service may send.
    """
    e, kind, tier = message.entry, _KINDS.get(message.kind, HitKind.MISS), _TIERS.get(message.entry.tier)
    if kind is HitKind.MISS or tier is None or not message.HasField("entry"):
        return Hit(HitKind.MISS, None)
    view = None if arena is None else shared(e, arena, e.size_bytes)
    names = (e.key, e.size_bytes, e.tokens, e.base, e.checksum, tier, e.variant)
    extent = (e.extent.segment, e.extent.offset) if e.HasField("extent") else None
    held = 0 if tier == "remote" else lease
    return Hit(kind, Entry(*names, view, held, extent, e.signature))


def shared(at: pb.Entry | pb.Prefetched, arena: memoryview, size: int) -> memoryview | None:
    """View of an entry's bytes in the arena; None if it is not in memory."""
    inside = at.HasField("arena_offset") and at.arena_offset + size <= len(arena)
    return arena[at.arena_offset : at.arena_offset + size] if inside else None
