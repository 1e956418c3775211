"""What strangers may send to a port: HTTP that is malformed, gRPC that is none, and secrets in every place."""

import contextlib
import json
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc

# Every secret begins with it, and says where it stood.
MARK = "zq7secret"
_HOST = b"Host: gateway"


def mark(place: str) -> str:
    return f"{MARK}-{place}"


def _head(*lines: bytes, first: bytes = b"POST /v1/chat/completions HTTP/1.1") -> bytes:
    return b"\r\n".join((first, _HOST, *lines, b"", b""))


def _chunked(body: bytes, *lines: bytes) -> bytes:
    return _head(b"Transfer-Encoding: chunked", *lines) + body


def _sized(body: bytes, *lines: bytes) -> bytes:
    return _head(b"Content-Type: application/json", b"Content-Length: %d" % len(body), *lines) + body


def malformed(token: bytes = b"") -> Mapping[str, bytes]:
    """Requests by what is wrong with them; those with a body that is looked at carry `token`."""
    secret = mark("http").encode()
    auth = b"Authorization: Bearer " + secret
    let_in = b"Authorization: Bearer " + (token or secret)
    body = json.dumps(
        {"model": secret.decode(), "messages": [{"role": "user", "content": mark("question")}]}
    ).encode()
    return {
        "control byte in a value": _head(auth + b"\x01"),
        "token that ends in CR": _head(auth + b"\r"),
        "NUL in a value": _head(auth + b"\0" + secret),
        "space before the colon": _head(b"Authorization : Bearer " + secret),
        "leading space": _head(b" " + auth),
        "folded header": _head(auth, b"  " + secret),
        "missing colon": _head(b"Authorization Bearer " + secret),
        "empty name": _head(b": " + secret),
        "name that is no token": _head(b"Auth(" + secret + b"): x"),
        "name beyond ASCII": _head("Schlüssel: ".encode() + secret),
        "bare LF": _head(auth).replace(b"\r\n", b"\n"),
        "bare CR": _head(auth).replace(b"\r\n", b"\r"),
        "bad chunk size": _chunked(b"xyz" + secret + b"\r\n" + body, let_in),
        "bad chunk end": _chunked(b"5\r\n" + secret + b"\r\n0\r\n\r\n", let_in),
        "chunk size too large": _chunked(b"f" * 40 + b";" + secret + b"\r\n", let_in),
        "bad chunk extension": _chunked(b"5;\0" + secret + b"\r\nabcde\r\n", let_in),
        "bad trailer": _chunked(b"5\r\nabcde\r\n0\r\n" + secret + b"\r\n\r\n", let_in),
        "two lengths": _head(b"Content-Length: 5", b"Content-Length: 6", auth) + body,
        "length and chunks": _chunked(b"0\r\n\r\n", b"Content-Length: 5", auth),
        "length that is none": _head(b"Content-Length: " + secret, auth) + body,
        "negative length": _head(b"Content-Length: -1", auth) + body,
        "coding that is unknown": _head(b"Transfer-Encoding: " + secret, auth) + body,
        "gzip that is none": _sized(body, b"Content-Encoding: gzip", let_in),
        "deflate that is none": _sized(body, b"Content-Encoding: deflate", let_in),
        "encoding that is unknown": _sized(body, b"Content-Encoding: " + secret, let_in),
        "body that ends early": _head(b"Content-Length: 5000", let_in) + body,
        "method that is none": _head(auth, first=secret + b" / HTTP/1.1"),
        "method with a control byte": _head(auth, first=b"G\x01T /" + secret + b" HTTP/1.1"),
        "version that is none": _head(auth, first=b"GET /" + secret + b" HTTP/9.x"),
        "no version": b"GET /" + secret + b"\r\n\r\n",
        "path with a space": _head(auth, first=b"GET /" + secret + b" x HTTP/1.1"),
        "path with a bad host": _head(auth, first=b"GET http://[" + secret + b"/ HTTP/1.1"),
        "path beyond ASCII": _head(auth, first="GET /ü".encode() + secret + b" HTTP/1.1"),
        "path that is escaped badly": _head(auth, first=b"GET /v1/models/%ff%00%zz" + secret + b" HTTP/1.1"),
        "CONNECT": _head(auth, first=b"CONNECT " + secret + b":443 HTTP/1.1"),
        "upgrade": _head(b"Connection: upgrade", b"Upgrade: " + secret, auth) + secret,
        "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + secret,
        "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + secret,
        "header that is too long": _head(b"X: " + secret * 2000),
        "line that is too long": _head(auth, first=b"GET /" + secret * 2000 + b" HTTP/1.1"),
        "too many headers": _head(*(b"X-%d: %s" % (i, secret) for i in range(500))),
        "expectation that is none": _head(b"Expect: " + secret, b"Content-Length: 5", auth) + body,
        "no bytes of text": b"\xff\xfe" + secret + b"\r\n\r\n",
        "two hosts": _head(b"Host: " + secret, auth),
        "cookie that is none": _head(b"Cookie: \x80;;=" + secret, auth),
        "bad trace": _head(
            b"traceparent: 00-" + secret, b"tracestate: " + secret + b"==", b"baggage: " + secret, let_in
        ),
        "trace beyond ASCII": _head(b"baggage: a=\xff" + secret, let_in),
        "long trace": _head(b"baggage: a=" + secret * 500, b"tracestate: a=" + secret * 60, let_in),
        "token that is none": _head(b"Authorization: Bearer " + secret),
        "scheme that is none": _head(b"Authorization: " + secret),
        "password that is none": _head(b"Authorization: Basic " + secret),
        "second request that is none": _head(auth, first=b"GET / HTTP/1.1") + secret + b"\x01\r\n\r\n",
        "JSON that is none": _sized(body[:-5], let_in),
        "JSON that is no UTF-8": _sized(body + b"\xff", let_in),
        "JSON in another charset": _sized(body, b"Content-Type: application/json; charset=" + secret, let_in),
        "JSON that nests": _sized(b'["' + secret + b'",' + b"[" * 100_000, let_in),
        "JSON with a long number": _sized(b'{"model":"' + secret + b'","seed":' + b"9" * 100_000 + b"}", let_in),
        "JSON with half a surrogate": _sized(body.replace(b"question", b"\\ud800"), let_in),
        "JSON of another shape": _sized(json.dumps({"model": "c", "messages": secret.decode()}).encode(), let_in),
        "JSON with a field that is unknown": _sized(b'{"' + secret + b'":1}', let_in),
        "question for a corpus that is none": _sized(body, let_in),
    }  # fmt: skip


def send(address: str, data: bytes, seconds: float = 5.0) -> bytes:
    """What comes back for these bytes until the connection ends; after silence of some seconds this side ends it."""
    host, _, port = address.rpartition(":")
    said = b""
    with socket.create_connection((host, int(port)), timeout=60) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(data)
        connection.settimeout(seconds)
        while True:
            try:
                part = connection.recv(65536)
            except TimeoutError:
                connection.settimeout(60)
                connection.shutdown(socket.SHUT_WR)
                continue
            if not part:
                break
            said += part
    return said


def reset(address: str, data: bytes) -> None:
    """Sends these bytes, then breaks the connection."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(data)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def call(channel: grpc.Channel, method: str, sent: Sequence[bytes], *metadata: Any) -> tuple[grpc.StatusCode, str]:
    """Status and details of a call with these bytes, whatever kind of method it is."""
    called: Callable[..., Any] = channel.stream_stream(method)
    try:
        for _ in called(iter(sent), metadata=metadata, timeout=20):
            pass
    except grpc.RpcError as error:
        return error.code(), error.details()  # type: ignore[attr-defined]  # a call is an error too
    return grpc.StatusCode.OK, ""
