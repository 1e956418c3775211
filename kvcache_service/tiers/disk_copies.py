"""The disk tier where another tier is below it: copies that end with the process, so that no index is needed."""

from collections.abc import Iterator, Mapping, Sequence

from fusionkv.kvcache_service.index.record import Record
from fusionkv.kvcache_service.tiers.base import Place, Recovered, Tier
from fusionkv.kvcache_service.tiers.disk import DiskTier


class DiskCopies(DiskTier):
    """As DiskTier, but nothing is committed: it starts empty, and writes over what its files hold."""

    lasting = False  # an index of a time when it was the last tier names what is overwritten now

    def commit(self, record: Record, place: Place, heat: float) -> None:
        pass

    def forget(self, entries: Sequence[tuple[bytes, Place]]) -> None:
        pass

    def save_heat(self, heats: Sequence[tuple[bytes, float]]) -> None:
        pass

    def recover(self) -> Iterator[Recovered]:
        return iter(())

    def check_integrity(self, held: Mapping[Place, bytes | None]) -> None:
        Tier.check_integrity(self, held)
