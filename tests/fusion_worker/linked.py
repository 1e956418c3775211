"""Models with link tokens (KVLink 2.3)."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from tests.fusion_worker.oracle import Ids

# Any tokens serve: what makes one a link token is what it sees and where it stands.
LINKS = tuple(tuple(range(212 + 5 * i, 217 + 5 * i)) for i in range(8))


def with_link_tokens(model: Any) -> Any:
    return dataclasses.replace(model, links=LINKS)


def links(chunks: Sequence[Ids], each: int) -> list[Ids]:
    """The first link tokens of each chunk."""
    return [LINKS[i][:each] for i in range(len(chunks))]
