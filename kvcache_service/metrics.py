"""Counters and gauges of the service, for Stats and OpenTelemetry."""

from collections import Counter
from collections.abc import Callable, Iterable

from opentelemetry import metrics
from opentelemetry.metrics import Observation

_COUNTERS = {
    "lookups": ("{chunk}", "Path elements looked up, by kind of hit"),
    "lookups.remote": ("{chunk}", "Path elements whose best entry is in the remote tier alone, by kind of hit"),
    "puts": ("{entry}", "Puts by outcome: stored, exists, superfluous, refused"),
    "checksum.failures": ("{entry}", "Entries that were damaged or unreadable, by tier, or on the network"),
    "fetched": ("By", "Bytes sent to callers, by the tier that they came from"),
    "stored": ("By", "Bytes stored"),
    "promotions": ("{entry}", "Entries copied up into a tier"),
    "demotions": ("{entry}", "Copies dropped from a tier that stay in the one below"),
    "evictions": ("{entry}", "Entries dropped for good to make room in a tier"),
    "remote.reads": ("{entry}", "Entries copied from the remote tier"),
    "remote.writes": ("{entry}", "Entries written back to the remote tier"),
    "remote.failures": ("{call}", "Calls of the remote tier that failed or were late"),
}


class Counters:
    """Monotonic counts by name and one attribute."""

    def __init__(self) -> None:
        meter = metrics.get_meter(__name__)
        self._exported = {
            name: meter.create_counter(f"fusionkv.kvcache.{name}", unit, help)
            for name, (unit, help) in _COUNTERS.items()
        }
        self._counts: Counter[tuple[str, str]] = Counter()
        # An alert tells of the first one too, which it would not see as an increase of something new.
        for where in ("memory", "disk", "remote", "network"):
            self.add("checksum.failures", 0, tier=where)

    def add(self, name: str, n: int = 1, *, kind: str = "", tier: str = "") -> None:
        self._counts[name, kind or tier] += n
        attributes = {"fusionkv.kind": kind} if kind else {"fusionkv.tier": tier} if tier else {}
        self._exported[name].add(n, attributes)

    def get(self, name: str, attribute: str | None = None) -> int:
        """Count for one attribute, or the sum over all."""
        if attribute is not None:
            return self._counts[name, attribute]
        return sum(n for (counted, _), n in self._counts.items() if counted == name)


def observe_tiers(tiers: Callable[[], Iterable[tuple[str, int, int]]]) -> None:
    """Exports used and maximum bytes of each tier, from (tier, used, capacity)."""

    def bytes_of(which: int) -> list[Observation]:
        return [Observation(sizes[which], {"fusionkv.tier": tier}) for tier, *sizes in tiers()]

    _gauge("fusionkv.kvcache.tier.used", "By", "Bytes taken in each tier", lambda: bytes_of(0))
    _gauge("fusionkv.kvcache.tier.capacity", "By", "Bytes that each tier may take", lambda: bytes_of(1))


def observe_remote(state: Callable[[], tuple[bool, int]]) -> None:
    """Exports the state of the remote tier: reachability, and number of entries waiting to be written back."""
    answers, waiting = "Whether the remote tier answers", "Entries that are not written back to the remote tier yet"
    _gauge("fusionkv.kvcache.remote.reachable", "{tier}", answers, lambda: [Observation(state()[0])])
    _gauge("fusionkv.kvcache.remote.waiting", "{entry}", waiting, lambda: [Observation(state()[1])])


def _gauge(name: str, unit: str, description: str, observe: Callable[[], list[Observation]]) -> None:
    metrics.get_meter(__name__).create_observable_gauge(name, [lambda _: observe()], unit, description)
