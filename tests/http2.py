"""A client of HTTP/2 that does what gRPC's own never would: messages that never end, and streams reset at once."""

import contextlib
import socket
import struct
from collections import Counter

DATA, HEADERS, RESET, SETTINGS, PING, GOAWAY, WINDOW = 0, 1, 3, 4, 6, 7, 8
END_STREAM, END_HEADERS, ACK = 1, 4, 1
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_WINDOW, _FRAME = 65_535, 16_384
_STREAMS_SETTING, _WINDOW_SETTING = 3, 4


def _text(value: bytes) -> bytes:
    """A string of HPACK, without Huffman coding."""
    if len(value) < 127:
        return bytes([len(value)]) + value
    rest, head = len(value) - 127, bytearray([127])
    while rest > 127:
        head.append(rest & 127 | 128)
        rest >>= 7
    return bytes([*head, rest]) + value


def message_head(size: int, compressed: bool = False) -> bytes:
    """What stands before a gRPC message of so many bytes."""
    return struct.pack(">BI", compressed, size)


class Connection:
    """One connection, on which the server's flow control is kept to."""

    def __init__(self, address: str, window: int = _WINDOW) -> None:
        """window: bytes that the server may send on a stream; more are never granted."""
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=60)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.replies: dict[int, bytes] = {}
        """The heads and trailers of each stream, as they came."""
        self.ended: set[int] = set()
        self.closed = False
        self.max_streams: int | None = None
        self._buffer = b""
        self._initial = self._window = _WINDOW
        self._used: Counter[int] = Counter()
        self._given: Counter[int] = Counter()
        self._last = -1
        self.socket.sendall(_PREFACE + self._frame(SETTINGS, 0, 0, struct.pack(">HI", _WINDOW_SETTING, window)))

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *exc: object) -> None:
        self.socket.close()

    def open(self, method: str, *metadata: tuple[str, str], authority: str = "test", end: bool = False) -> int:
        """Begins a call of a method, "/package.Service/Name"; returns the number of its stream."""
        self._last += 2
        self.write(self.head(self._last, method, *metadata, authority=authority, end=end))
        return self._last

    def head(
        self, stream: int, method: str, *metadata: tuple[str, str], authority: str = "test", end: bool = False
    ) -> bytes:
        fields = [
            (":method", "POST"), (":scheme", "http"), (":path", method), (":authority", authority),
            ("te", "trailers"), ("content-type", "application/grpc"), *metadata,
        ]  # fmt: skip
        block = b"".join(b"\x00" + _text(name.encode()) + _text(value.encode()) for name, value in fields)
        return self._frame(HEADERS, END_HEADERS | (END_STREAM if end else 0), stream, block)

    def reset(self, stream: int) -> bytes:
        return self._frame(RESET, 0, stream, struct.pack(">I", 8))

    def write(self, data: bytes) -> None:
        with contextlib.suppress(ConnectionError):
            self.socket.sendall(data)

    def send(self, stream: int, data: bytes, *, patience: float = 0.5, end: bool = False) -> int:
        """Sends as much of `data` on a stream as the server takes; returns how much that was.

        patience: seconds without any progress after which no more is sent.
        """
        sent = 0
        while sent < len(data) and not self.closed and stream not in self.ended:
            room = min(self._window, self._initial + self._given[stream] - self._used[stream], _FRAME)
            if room <= 0:
                if not self.receive(patience):
                    break
                continue
            part = data[sent : sent + room]
            last = end and sent + len(part) == len(data)
            try:
                self.socket.sendall(self._frame(DATA, END_STREAM if last else 0, stream, part))
            except OSError:
                self.closed = True
                break
            sent += len(part)
            self._window -= len(part)
            self._used[stream] += len(part)
        return sent

    def receive(self, seconds: float) -> bool:
        """Reads what has come, waiting up to `seconds` for it; whether anything has."""
        self.socket.settimeout(seconds)
        try:
            part = self.socket.recv(1 << 16)
        except TimeoutError:
            return False
        except OSError:
            part = b""
        finally:
            self.socket.settimeout(60)
        if not part:
            self.closed = True
            return False
        self._buffer += part
        while len(self._buffer) >= 9:
            size = int.from_bytes(self._buffer[:3], "big")
            if len(self._buffer) < 9 + size:
                break
            kind, flags = self._buffer[3], self._buffer[4]
            stream = int.from_bytes(self._buffer[5:9], "big")
            body, self._buffer = self._buffer[9 : 9 + size], self._buffer[9 + size :]
            self._take(kind, flags, stream, body)
        return True

    def finish(self, seconds: float = 30.0) -> None:
        """Reads until every stream that was opened has ended, the connection is closed, or nothing comes."""
        while not self.closed and len(self.ended) < (self._last + 1) // 2 and self.receive(seconds):
            pass

    def _take(self, kind: int, flags: int, stream: int, body: bytes) -> None:
        if kind == WINDOW:
            given = int.from_bytes(body, "big")
            if stream:
                self._given[stream] += given
            else:
                self._window += given
        elif kind == SETTINGS and not flags & ACK:
            for at in range(0, len(body), 6):
                name, value = struct.unpack(">HI", body[at : at + 6])
                if name == _WINDOW_SETTING:
                    self._initial = value
                elif name == _STREAMS_SETTING:
                    self.max_streams = value
            self.write(self._frame(SETTINGS, ACK, 0, b""))
        elif kind == PING and not flags & ACK:
            self.write(self._frame(PING, ACK, 0, body))
        elif kind == HEADERS:
            self.replies[stream] = self.replies.get(stream, b"") + body
        elif kind == GOAWAY:
            self.closed = True
        if kind == RESET or (kind in (HEADERS, DATA) and flags & END_STREAM):
            self.ended.add(stream)

    @staticmethod
    def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
        return len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body
