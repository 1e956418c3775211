"""KV events: publishes what is stored and removed in each tier, in vLLM's format over ZeroMQ, for routers."""

import contextlib
import itertools
import logging
import queue
import re
import threading
import time
from collections import deque
from typing import Any

import msgspec
import zmq

from fusionkv.kvcache_service.index.record import EntryRecord
from fusionkv.kvcache_service.keys import DIGEST_BYTES, path_keys
from fusionkv.protos.observe import logs

_faults = logs.RateLimitedLog(logging.getLogger(__name__))
MEDIA = {"memory": "CPU", "disk": "STORAGE"}
END_SEQUENCE = (-1).to_bytes(8, "big", signed=True)

# Events that wait for the thread, and of one batch; bytes of batches that can be replayed.
_MAX_EVENTS, _BATCH, _REPLAY_BYTES = 65_536, 512, 64 << 20
# Messages that wait for a subscriber: beyond, it misses them. As many can be replayed.
_MAX_MESSAGES = 10_000
_POLL_SECONDS = 0.1
_CLOSE_SECONDS = 1.0


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """An entry is in a tier. The fields are those of vLLM, without the last ones, which have defaults."""

    block_hashes: list[bytes]
    """The entry's key, by `keys.entry_key`."""
    parent_block_hash: bytes | None
    """Key of the path before the entry's chunk; None for a system prompt."""
    token_ids: list[int]
    """Empty: the cache service knows digests of token ids alone."""
    block_size: int
    """Number of tokens of the chunk."""
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[bytes, bytes, bytes]]
    """Namespace, digest of the chunk's token ids, and variant: what finds the chunk behind any path."""


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """An entry is in a tier no more."""

    block_hashes: list[bytes]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """The service has started: what was said of it before is void."""


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    # llm-d refuses batches of two fields.
    data_parallel_rank: int | None


class EventPublisher:
    """Publishes from a thread: no subscriber keeps a call waiting, be it slow, gone or asking for a replay.

    A message has three frames: topic, sequence number (8 bytes, big-endian, from 0), and an EventBatch. A subscriber
    that misses a number asks the replay endpoint for all from a number on, as it asks vLLM, and gets what is left.
    """

    def __init__(self, endpoint: str, topic: str) -> None:
        """endpoint: tcp://ADDRESS:PORT or ipc://PATH, with "*" for all addresses. Replays are at the next port, or at
        the path with ".replay".

        Raises OSError if it cannot be used.
        """
        self._topic = topic.encode()
        self._context = zmq.Context()
        self._publisher, self._replay = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        for socket, place, most in (
            (self._publisher, endpoint, _MAX_MESSAGES),
            # ZeroMQ counts messages as sent only half of this limit at a time: a replay and its end fit in the rest.
            (self._replay, replay_endpoint(endpoint), 2 * (_MAX_MESSAGES + 1)),
        ):
            socket.setsockopt(zmq.SNDHWM, most)
            socket.setsockopt(zmq.LINGER, 0)
            try:
                socket.bind(place)
            except zmq.ZMQError as error:
                self._context.destroy(linger=0)
                raise OSError(f"events_endpoint can't be used: {place}: {error}") from error
        self._queue: queue.Queue[tuple[EntryRecord | bytes, str]] = queue.Queue(_MAX_EVENTS)
        self._lost, self._closed = False, False
        self._sequence = itertools.count()
        self._sent: deque[tuple[int, bytes]] = deque()
        self._sent_bytes = 0
        self._thread = threading.Thread(target=self._run, name="kvcache-events", daemon=True)
        self._thread.start()

    def stored(self, record: EntryRecord, tier: str) -> None:
        """Publishes that an entry is in a tier."""
        self._add((record, tier))

    def removed(self, key: bytes, tier: str) -> None:
        """Publishes that an entry is in a tier no more."""
        self._add((key, tier))

    def close(self) -> None:
        """Publishes what is left, for at most a second."""
        self._closed = True
        self._thread.join(_CLOSE_SECONDS)

    def _add(self, change: tuple[EntryRecord | bytes, str]) -> None:
        try:
            self._queue.put_nowait(change)
        except queue.Full:
            self._lost = True

    def _run(self) -> None:
        try:
            self._send([AllBlocksCleared()])
            while not self._closed or not self._queue.empty():
                try:
                    if self._replay.poll(0):
                        self._answer()
                    self._publish()
                except Exception as error:
                    _faults.warning("an event is not published", error)
                    time.sleep(_POLL_SECONDS)
        finally:
            self._context.destroy(linger=int(1000 * _POLL_SECONDS))

    def _publish(self) -> None:
        """Sends what waits, or what comes soon."""
        changes: list[tuple[EntryRecord | bytes, str]] = []
        with contextlib.suppress(queue.Empty):
            changes.append(self._queue.get(timeout=_POLL_SECONDS))
            while len(changes) < _BATCH:
                changes.append(self._queue.get_nowait())
        if changes:
            self._send([_event(*change) for change in changes])
        if self._lost:
            self._lost = False
            # Subscribers see from the number that is missing that they do.
            next(self._sequence)
            _faults.warning("events were lost", OSError(f"more than {_MAX_EVENTS} events waited"))

    def _send(self, events: list[Any]) -> None:
        payload = msgspec.msgpack.encode(EventBatch(time.time(), events, 0))
        number = next(self._sequence)
        self._sent.append((number, payload))
        self._sent_bytes += len(payload)
        while self._sent_bytes > _REPLAY_BYTES or len(self._sent) > _MAX_MESSAGES:
            self._sent_bytes -= len(self._sent.popleft()[1])
        self._publisher.send_multipart((self._topic, number.to_bytes(8, "big"), payload))

    def _answer(self) -> None:
        """Replays batches to a subscriber, all of them unless it asks again before it has read them."""
        frames = self._replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            return
        caller, start = frames[0], int.from_bytes(frames[2], "big")
        for number, payload in self._sent:
            if number >= start:
                self._replay.send_multipart((caller, b"", self._topic, number.to_bytes(8, "big"), payload))
        self._replay.send_multipart((caller, b"", b"", END_SEQUENCE, b""))


def replay_endpoint(endpoint: str) -> str:
    """Where a publisher at `endpoint` replays. Raises OSError if it is malformed."""
    if endpoint.startswith("ipc:///"):
        return f"{endpoint}.replay"
    if match := re.fullmatch(r"(tcp://.+):(\d{1,5})", endpoint):
        return f"{match[1]}:{int(match[2]) + 1}"
    raise OSError(f"events_endpoint can't be used: expected tcp://ADDRESS:PORT or ipc:///PATH, not {endpoint}")


def _event(change: EntryRecord | bytes, tier: str) -> BlockStored | BlockRemoved:
    if isinstance(change, bytes):
        return BlockRemoved([change], MEDIA[tier])
    path = [change.trail[at : at + DIGEST_BYTES] for at in range(0, len(change.trail), DIGEST_BYTES)][::-1]
    parent = path_keys(change.namespace, path[:-1])[-1] if len(path) > 1 else None
    extra = (change.namespace, change.chunk, change.variant)
    return BlockStored([change.key], parent, [], change.tokens, None, MEDIA[tier], None, [extra])
