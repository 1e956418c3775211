"""Texts, JSON bodies and bytes of any length, each of a shape that has been somebody's quadratic case.

A shape is named by its pattern: what stands between « and » is repeated, several such parts equally often, and %d in
it counts up.
"""

import base64
import gzip
import json
import re
from collections.abc import Callable, Mapping
from typing import TypeVar

Texts = Mapping[str, Callable[[int], str]]
Bytes = Mapping[str, Callable[[int], bytes]]
_S = TypeVar("_S", str, bytes)


def _of(pieces: list[_S], size: int) -> _S:
    """Joins the pieces, every other one of them repeated, to about `size` characters or bytes."""
    empty, number = pieces[0][:0], "%d" if isinstance(pieces[0], str) else b"%d"
    numbered = any(number in unit for unit in pieces[1::2])
    count = max(1, size // (sum(map(len, pieces[1::2])) + 2 * numbered))

    def repeated(unit: _S) -> _S:
        return empty.join([unit % i for i in range(count)]) if number in unit else unit * count

    return empty.join([repeated(piece) if at % 2 else piece for at, piece in enumerate(pieces)])


def text(pattern: str) -> Callable[[int], str]:
    pieces = re.split("[«»]", pattern)
    return lambda size: _of(pieces, size)


def data(pattern: str) -> Callable[[int], bytes]:
    """As `text` in UTF-8: the size is that of the bytes."""
    pieces = [piece.encode() for piece in re.split("[«»]", pattern)]
    return lambda size: _of(pieces, size)


def texts(*patterns: str) -> dict[str, Callable[[int], str]]:
    return {pattern: text(pattern) for pattern in patterns}


def datas(*patterns: str) -> dict[str, Callable[[int], bytes]]:
    return {pattern: data(pattern) for pattern in patterns}


TEXTS: Texts = {
    **texts(
        "«a»", "«word »", "«w%d »", "«a »", "« »", "«\t\n\r\n»", "«9»", "0.«3»", "1e«9»", "«1_»1", "«.»", "«a.»",
        "«../»", "«a:»", "«a@»", "«a=»", "«a,»", "«'»", '«"»', "«\\»", "«[»", "«[»«]»", "«{»", "«{question}»",
        "«{{ x }}{% y %}»", "«%»", "«%41»", "«<»", "«<eos>»", "«\0»", "a«\u0301»", "«é»", "«😀»", "«\u202eא»",
        "«\ufdfa»", "«a-»", "«ab»", "«+a -b AND OR NOT ~2 ^3 * ? »", "«0f»",
    ),
    "base64": lambda n: base64.b64encode(bytes(3 * n // 4)).decode(),
}  # fmt: skip

_MESSAGE = '{"role":"user","content":"q"}'
_MESSAGES = f'"messages":[{_MESSAGE}]'
# Behind the fields of a request, and in place of its messages.
_FIELDS = (
    '"stop":«[»«]»', '"user":[«[[[[]]]],»0]', '"seed":«9»', '"max_tokens":-«9»', '"temperature":0.«3»',
    '"temperature":1e«9»', '"temperature":1e-«9»', '"user":[«1e308,»0]', '«"user":1,»"user":1', '"«k»":1',
    '«"metadata":{"a":{}},»"user":1', f'«{_MESSAGES},»"user":1', '«"k%d":1,»"user":1', '"fusionkv":{«"k%d":1,»"k":1}',
    '"stop":[«"x",»"x"]', '"stop":"«x»"',
)  # fmt: skip
_SAID = (
    f"«{_MESSAGE},»{_MESSAGE}", f'«{_MESSAGE},{{"role":"assistant","content":"a"}},»{_MESSAGE}', "«0,»0",
    '{"role":"user","content":[«{"type":"text","text":"x"},»{"type":"text","text":"x"}]}',
    *(f'{{"role":"user","content":"«{unit}»"}}' for unit in ("\\n", "\\u0041", "\\ud83d\\ude00", "\\ud83d")),
)  # fmt: skip


def _asked(make: Callable[[int], str]) -> Callable[[int], bytes]:
    return lambda n: b'{"model":"c","messages":[%s]}' % json.dumps({"role": "user", "content": make(n)}).encode()


def _integers(digits: int) -> Callable[[int], bytes]:
    return data(f'{{"model":"c",{_MESSAGES},"user":[«{"9" * digits},»0]}}')


JSON: Bytes = {
    **datas(
        "«[»", "«[»«]»", '«{"a":»', f'{{"model":"«m»",{_MESSAGES}}}', f'{{"model":"c@«9»",{_MESSAGES}}}',
        f'{{"model":"«c:»",{_MESSAGES}}}', '{"model":"«\\\\»', f'« »{{"model":"c",{_MESSAGES}}}',
        f'{{"model":"c",{_MESSAGES}}}« »', "[«,»", "[«NaN,»0]", f'«\ufeff»{{"model":"c",{_MESSAGES}}}',
    ),
    **{field: data(f'{{"model":"c",{_MESSAGES},{field}}}') for field in _FIELDS},
    **{said: data(f'{{"model":"c","messages":[{said}]}}') for said in _SAID},
    # Python refuses integers of more than 4,300 digits.
    **{f"integers of {digits} digits": _integers(digits) for digits in (4300, 4301)},
    "bytes that are no text": lambda n: b'{"model":"' + b"\xff" * n + b'"}',
    **{f"a question of {name}": _asked(make) for name, make in TEXTS.items()},
}  # fmt: skip


def _times(unit: bytes) -> Callable[[int], bytes]:
    return lambda n: unit * (n // len(unit))


def _encoded(make: Callable[[int], str]) -> Callable[[int], bytes]:
    return lambda n: make(n).encode()


def _quoted(make: Callable[[int], str]) -> Callable[[int], str]:
    return lambda n: f"recipe = '''{make(n)}'''\n"


# Protobuf: of fields that are empty, numbers, groups or digests, and what a codec may count first.
_UNITS = (
    b"\0", b"\xff", b"\x80", b"\x0a", b"\x0a\x00", b"\x0b", b"\xf8\x07\x01", b"\xfa\x07\x01a", b"\x10\x01",
    b"\x0a\x20" + bytes(32), b"\x0a\x02\x08\x01", bytes(range(256)),
)  # fmt: skip
BYTES: Bytes = {
    **{unit.hex(): _times(unit) for unit in _UNITS},
    "fields in fields": lambda n: _nested(n),
    "groups that end": lambda n: b"\x0b" * (n // 2) + b"\x0c" * (n // 2),
    "a long field": lambda n: b"\x0a" + _varint(n) + bytes(n),
    "a version, then zeros": lambda n: b"\x01" + bytes(n),
    "a count, then names": lambda n: b"\x01\xff\xff" + bytes(range(1, 33)) * (n // 32),
    **{f"text: {name}": _encoded(make) for name, make in TEXTS.items()},
}


def _varint(number: int) -> bytes:
    made = b""
    while number > 0x7F:
        made += bytes([number & 0x7F | 0x80])
        number >>= 7
    return made + bytes([number])


def _nested(n: int) -> bytes:
    """A field in a field in a field, so many bytes of it; made from the inside, as bytes that are joined once."""
    parts: list[bytes] = []
    size = 0
    while size < n:
        head = b"\x0a" + _varint(size)
        parts.append(head)
        size += len(head)
    return b"".join(reversed(parts))


TOML: Texts = {
    **texts(
        'recipe = "«x»"\n', "«k» = 1\n", "«k%d = 1\n»", "«a.»a = 1\n", "«a.b.c.d.k%d = 1\n»", "«[t%d]\n»",
        "[«a.»a]\n", "«[[token]]\n»", "x = «[»«]»\n", "x = «{a=»1«}»\n", "top_k = «9»\n", "top_k = 0x«f»\n",
        "top_k = 1«_1»\n", "dense_weight = 0.«3»\n", 'recipe = "«\\n»"\n', 'recipe = """«x\n»"""\n',
        'recipe = """«""\n»', "«# x\n»", "«\n»", "«\r\n»",
    ),
    **{f"a text of {name}": _quoted(make) for name, make in TEXTS.items()},
}  # fmt: skip


def _post(body: bytes, headers: bytes) -> bytes:
    return b"POST / HTTP/1.1\r\nHost: gateway\r\n%sContent-Length: %d\r\n\r\n%s" % (headers, len(body), body)


_GET, _CHUNKED = "GET / HTTP/1.1\r\nHost: gateway\r\n", "Transfer-Encoding: chunked\r\n\r\n"
_TRACE = f"traceparent: 00-{'1' * 32}-{'1' * 16}-01\r\n"
_HEADERS = (
    "X: «x»", "«x»: y", "«X: y\r\n»X: y", "«X%d: y\r\n»X: y", "X:« »y", "X: y«\r\n z»", "Cookie: «a=b; »",
    'Cookie: a="«\\"»', "Accept: «a,»", "Content-Type: a/b«;a=b»", "baggage: «a=b,»", f"{_TRACE}tracestate: «a=b,»",
)  # fmt: skip
_CHUNKS = (
    "«1\r\nx\r\n»0\r\n\r\n", "«0»1\r\nx\r\n0\r\n\r\n", "1«;a=b»\r\nx\r\n0\r\n\r\n", "«1;a=b\r\nx\r\n»0\r\n\r\n",
    "1\r\nx\r\n0\r\n«X: y\r\n»\r\n", "0\r\nX: «x»\r\n\r\n",
)  # fmt: skip
HTTP: Bytes = {
    **{header: data(f"{_GET}{header}\r\n\r\n") for header in _HEADERS},
    **{path: data(f"{_GET.replace('/', path, 1)}\r\n") for path in ("/«x»", "/«../»", "/«%2e»", "/?«a=b&»")},
    **{chunks: data(f"{_GET.replace('GET', 'POST')}{_CHUNKED}{chunks}") for chunks in _CHUNKS},
    "a chunk": lambda n: data(f"{_GET.replace('GET', 'POST')}{_CHUNKED}{n:x}\r\n«\0»\r\n0\r\n\r\n")(n),
    **datas("«G» / HTTP/1.1\r\n\r\n", f"«\r\n»{_GET}\r\n", f"«{_GET}\r\n»"),
    "bodies at once": data(f"«{_GET.replace('GET', 'POST')}{_CHUNKED}1\r\nx\r\n0\r\n\r\n»"),
    "a body": lambda n: _post(bytes(n), b""),
    "a body's long length": data(f"{_GET.replace('GET', 'POST')}Content-Length: «0»1\r\n\r\n"),
    # A thousand times as many bytes when they are unpacked.
    "a compressed body": lambda n: _post(gzip.compress(bytes(1000 * n)), b"Content-Encoding: gzip\r\n"),
    "bytes that are no HTTP": _times(b"\x80"),
    "a charset": lambda n: _post(b"x" * n, b"Content-Type: text/plain; charset=punycode\r\n"),
}
