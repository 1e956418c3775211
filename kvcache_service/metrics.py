"""What the service counts, once for Stats and once for OpenTelemetry."""

from collections import Counter
from collections.abc import Callable, Iterable

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

_COUNTERS = {
    "lookups": ("{chunk}", "Path elements looked up, by kind of hit"),
    "lookups.elsewhere": ("{chunk}", "Path elements whose best entry another service holds, by kind of hit"),
    "puts": ("{entry}", "Puts by outcome: stored, exists, superfluous, refused"),
    "checksum.failures": ("{entry}", "Entries whose bytes did not have their checksum, by tier, or on the network"),
    "bytes.fetched": ("By", "Bytes sent to callers, by the tier that they came from"),
    "bytes.put": ("By", "Bytes stored"),
    "promotions": ("{entry}", "Entries copied up into a tier"),
    "demotions": ("{entry}", "Copies dropped from a tier that stay in the one below"),
    "evictions": ("{entry}", "Entries dropped for good to make room in a tier"),
    "puts.elsewhere": ("{entry}", "Puts sent on to the service where they belong"),
    "moves": ("{entry}", "Entries handed to the service where they belong, or on leaving"),
    "copies": ("{entry}", "Hot entries copied to a second service"),
    "shared_index.failures": ("{call}", "Calls of the shared index in Redis that failed or were late"),
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

    def add(self, name: str, n: int = 1, *, kind: str = "", tier: str = "") -> None:
        self._counts[name, kind or tier] += n
        attributes = {"fusionkv.kind": kind} if kind else {"fusionkv.tier": tier} if tier else {}
        self._exported[name].add(n, attributes)

    def get(self, name: str, attribute: str | None = None) -> int:
        """The count of one attribute, or of all."""
        if attribute is not None:
            return self._counts[name, attribute]
        return sum(n for (counted, _), n in self._counts.items() if counted == name)


def observe_tiers(tiers: Callable[[], Iterable[tuple[str, int, int]]]) -> None:
    """Exports the bytes taken in each tier and those that it may take, from (tier, used, capacity)."""

    def used(_: CallbackOptions) -> Iterable[Observation]:
        return [Observation(n, {"fusionkv.tier": tier}) for tier, n, _ in tiers()]

    def capacity(_: CallbackOptions) -> Iterable[Observation]:
        return [Observation(n, {"fusionkv.tier": tier}) for tier, _, n in tiers()]

    meter = metrics.get_meter(__name__)
    meter.create_observable_gauge("fusionkv.kvcache.tier.used", [used], "By", "Bytes taken in each tier")
    meter.create_observable_gauge("fusionkv.kvcache.tier.capacity", [capacity], "By", "Bytes that each tier may take")


def observe_shared_index(state: Callable[[], tuple[int, int]]) -> None:
    """Exports what a service knows of the index that it shares: services alive (0 while Redis fails), own changes."""
    meter = metrics.get_meter(__name__)
    meter.create_observable_gauge(
        "fusionkv.kvcache.members",
        [lambda _: [Observation(state()[0])]],
        "{service}",
        "Services that share the index",
    )
    meter.create_observable_gauge(
        "fusionkv.kvcache.shared_index.waiting",
        [lambda _: [Observation(state()[1])]],
        "{entry}",
        "Own entries whose change is not in the shared index yet",
    )
