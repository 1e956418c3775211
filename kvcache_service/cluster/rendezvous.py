"""Which service a chunk belongs to: rendezvous hashing, so that a join or a leave moves only what must move."""

from collections.abc import Iterable

import xxhash


def ranking(group: bytes, addresses: Iterable[str]) -> list[str]:
    """Addresses in the order in which they are to have a group: the first is its home, the second takes copies.

    Each address gets a number from the group and itself alone. So a new one takes 1/N of the groups from the others,
    and those of one that left go to their second (Thaler and Ravishankar, 1998).
    """
    return sorted(addresses, key=lambda name: (xxhash.xxh3_64_intdigest(group + name.encode()), name), reverse=True)
