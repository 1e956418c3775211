"""What a worker must make of chunks of which only anchor tokens are kept (KVLink 2.4), in plain transformers."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from tests.fusion_worker.oracle import KV, Ids, Oracle, join

SEGMENT = 16
Cuts = Sequence[tuple[Ids, Ids]]
# Any tokens serve: what makes one an anchor or a link token is what it sees and where it stands.
ANCHORS = {50: tuple(range(200, 208)), 75: tuple(range(208, 212))}
LINKS = tuple(tuple(range(212 + 5 * i, 217 + 5 * i)) for i in range(8))


def with_special_tokens(model: Any) -> Any:
    return dataclasses.replace(model, anchors=ANCHORS, links=LINKS)


def links(chunks: Sequence[Ids], each: int) -> list[Ids]:
    """The first link tokens of each chunk."""
    return [LINKS[i][:each] for i in range(len(chunks))]


def cut(chunk: Ids, anchors: Ids) -> Cuts:
    """A chunk's segments of 16 tokens, the last one filled up from before it, each with its share of anchors."""
    found = []
    for at in range(0, len(chunk), SEGMENT):
        new = len(chunk[at : at + SEGMENT])
        found.append((chunk[: at + new][-SEGMENT:], anchors[: math.ceil(new * len(anchors) / SEGMENT)]))
    return found


def anchored(plain: Oracle, system: Ids, chunks: Sequence[Cuts], links: Sequence[Ids] = ()) -> KV:
    """System prompt and the chunks' anchor tokens at their places; links behind each chunk see all before them."""
    kv = [plain.kv(system)] if system else []
    for chunk, behind in zip(chunks, links or [()] * len(chunks), strict=True):
        kv = [join([*kv, _anchors(plain, system, chunk, kv[0][0][0].shape[2] if kv else 0)])]
        kv = [plain.kv(behind, past=kv[0])] if behind else kv
    return kv[0]


def _anchors(plain: Oracle, system: Ids, cuts: Cuts, position: int) -> KV:
    """A chunk's anchor tokens, moved to `position`. Each segment is read behind the system prompt, and moved to right
    before its anchors, which see the system prompt, it, and the anchors before.
    """
    before, at, found, count = [plain.kv(system)] if system else [], len(system), list[KV](), 0
    for text, anchors in cuts:
        read = plain.moved(plain.kv([*system, *text]), at, at + len(text), count)
        seen = join([*before, *found, read])
        stop = seen[0][0].shape[2] + len(anchors)
        found.append(plain.moved(plain.kv(anchors, past=seen), stop - len(anchors), stop, 0))
        count += len(anchors)
    return plain.moved(join(found), 0, count, position - at - len(cuts[0][0]))
