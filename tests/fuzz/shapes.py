"""Texts, JSON bodies and bytes of any length, each of a shape that has been somebody's quadratic case."""

import base64
import json
from collections.abc import Callable, Mapping

Texts = Mapping[str, Callable[[int], str]]
Bytes = Mapping[str, Callable[[int], bytes]]

TEXTS: Texts = {
    "one letter": lambda n: "a" * n,
    "words": lambda n: "word " * (n // 5),
    "different words": lambda n: " ".join(f"w{i}" for i in range(n // 6)),
    "letters with spaces": lambda n: "a " * (n // 2),
    "spaces": lambda n: " " * n,
    "tabs and lines": lambda n: "\t\n\r\n" * (n // 4),
    "digits": lambda n: "9" * n,
    "a fraction": lambda n: "0." + "3" * n,
    "an exponent": lambda n: "1e" + "9" * n,
    "underscores in a number": lambda n: "1_" * (n // 2) + "1",
    "dots": lambda n: "." * n,
    "dots with letters": lambda n: "a." * (n // 2),
    "slashes": lambda n: "../" * (n // 3),
    "colons": lambda n: "a:" * (n // 2),
    "at signs": lambda n: "a@" * (n // 2),
    "equal signs": lambda n: "a=" * (n // 2),
    "commas": lambda n: "a," * (n // 2),
    "quotes": lambda n: "'" * n,
    "double quotes": lambda n: '"' * n,
    "backslashes": lambda n: "\\" * n,
    "brackets": lambda n: "[" * n,
    "brackets that close": lambda n: "[" * (n // 2) + "]" * (n // 2),
    "braces": lambda n: "{" * n,
    "placeholders": lambda n: "{question}" * (n // 10),
    "a template's marks": lambda n: "{{ x }}{% y %}" * (n // 14),
    "percent signs": lambda n: "%" * n,
    "escapes of a URL": lambda n: "%41" * (n // 3),
    "angle brackets": lambda n: "<" * n,
    "control tokens": lambda n: "<eos>" * (n // 5),
    "NULs": lambda n: "\0" * n,
    "combining marks": lambda n: "a" + "\u0301" * n,
    "beyond ASCII": lambda n: "é" * n,
    "beyond the first plane": lambda n: "😀" * n,
    "right to left": lambda n: "\u202eא" * (n // 2),
    "ligatures": lambda n: "\ufdfa" * n,
    "words joined": lambda n: "a-" * (n // 2),
    "letters in turn": lambda n: "ab" * (n // 2),
    "operators of a search": lambda n: "+a -b AND OR NOT ~2 ^3 * ? " * (n // 27),
    "base64": lambda n: base64.b64encode(bytes(3 * n // 4)).decode(),
    "hexadecimal": lambda n: "0f" * (n // 2),
}

_ASKED = '"model":"c","messages":[{"role":"user","content":"q"}]'


def _body(*more: str) -> bytes:
    return f"{{{','.join((_ASKED, *more))}}}".encode()


def _messages(messages: str) -> bytes:
    return f'{{"model":"c","messages":[{messages}]}}'.encode()


def _of_text(make: Callable[[int], str]) -> Callable[[int], bytes]:
    return lambda n: _messages(json.dumps({"role": "user", "content": make(n)}))


JSON: Bytes = {
    "lists": lambda n: b"[" * n,
    "lists that close": lambda n: b"[" * (n // 2) + b"]" * (n // 2),
    "objects": lambda n: b'{"a":' * (n // 5),
    "lists in a field": lambda n: _body('"stop":' + "[" * (n // 2) + "]" * (n // 2)),
    "few levels, often": lambda n: _body('"user":[' + ",".join(["[[[[]]]]"] * (n // 9)) + "]"),
    "a long integer": lambda n: _body('"seed":' + "9" * n),
    "a long negative integer": lambda n: _body('"max_tokens":-' + "9" * n),
    "integers of 4,300 digits": lambda n: _body('"user":[' + ",".join(["9" * 4300] * (n // 4301 + 1)) + "]"),
    "integers of 4,301 digits": lambda n: _body('"user":[' + ",".join(["9" * 4301] * (n // 4302 + 1)) + "]"),
    "a long fraction": lambda n: _body('"temperature":0.' + "3" * n),
    "a long exponent": lambda n: _body('"temperature":1e' + "9" * n),
    "a long exponent below": lambda n: _body('"temperature":1e-' + "9" * n),
    "many numbers": lambda n: _body('"user":[' + ",".join(["1e308"] * (n // 6)) + "]"),
    "one key, often": lambda n: _body(",".join(['"user":1'] * (n // 9))),
    "one object, often": lambda n: _body(",".join(['"metadata":{"a":{}}'] * (n // 19))),
    "messages, often": lambda n: _body(",".join(['"messages":[{"role":"user","content":"q"}]'] * (n // 45))),
    "unknown keys": lambda n: _body(",".join(f'"k{i}":1' for i in range(n // 10))),
    "unknown keys of ours": lambda n: _body('"fusionkv":{' + ",".join(f'"k{i}":1' for i in range(n // 10)) + "}"),
    "a long key": lambda n: _body(f'"{"k" * n}":1'),
    "a long model": lambda n: b'{"model":"' + b"m" * n + b'","messages":[{"role":"user","content":"q"}]}',
    "a model with a long ratio": lambda n: (
        b'{"model":"c@' + b"9" * n + b'","messages":[{"role":"user","content":"q"}]}'
    ),
    "a model with colons": lambda n: (
        b'{"model":"' + b"c:" * (n // 2) + b'","messages":[{"role":"user","content":"q"}]}'
    ),
    "many messages": lambda n: _messages(",".join(['{"role":"user","content":"q"}'] * (n // 30))),
    "many turns": lambda n: _messages(
        ",".join(
            ['{"role":"user","content":"q"},{"role":"assistant","content":"a"}'] * (n // 65)
            + ['{"role":"user","content":"q"}']
        )
    ),
    "many parts": lambda n: _messages(
        '{"role":"user","content":[' + ",".join(['{"type":"text","text":"x"}'] * (n // 27)) + "]}"
    ),
    "many messages that are none": lambda n: _messages(",".join(["0"] * (n // 2))),
    "many stops": lambda n: _body('"stop":[' + ",".join(['"x"'] * (n // 4)) + "]"),
    "a long stop": lambda n: _body(f'"stop":"{"x" * n}"'),
    "escapes": lambda n: _messages('{"role":"user","content":"' + "\\n" * (n // 2) + '"}'),
    "escapes by number": lambda n: _messages('{"role":"user","content":"' + "\\u0041" * (n // 6) + '"}'),
    "pairs of surrogates": lambda n: _messages('{"role":"user","content":"' + "\\ud83d\\ude00" * (n // 12) + '"}'),
    "halves of pairs": lambda n: _messages('{"role":"user","content":"' + "\\ud83d" * (n // 6) + '"}'),
    "a text that does not end": lambda n: b'{"model":"' + b"\\\\" * (n // 2),
    "spaces": lambda n: b" " * n + _body(),
    "spaces behind": lambda n: _body() + b" " * n,
    "commas": lambda n: b"[" + b"," * n,
    "literals that are none": lambda n: b"[" + b"NaN," * (n // 4) + b"0]",
    "bytes that are no text": lambda n: b'{"model":"' + b"\xff" * n + b'"}',
    "a byte order mark": lambda n: b"\xef\xbb\xbf" * (n // 3) + _body(),
    **{f"a question of {name}": _of_text(make) for name, make in TEXTS.items()},
}


def _encoded(make: Callable[[int], str]) -> Callable[[int], bytes]:
    return lambda n: make(n).encode()


def _in_toml(make: Callable[[int], str]) -> Callable[[int], str]:
    return lambda n: f"recipe = '''{make(n)}'''\n"


BYTES: Bytes = {
    "zeros": lambda n: bytes(n),
    "ones": lambda n: b"\xff" * n,
    "continued numbers": lambda n: b"\x80" * n,
    "a field's tag": lambda n: b"\x0a" * n,
    "empty fields": lambda n: b"\x0a\x00" * (n // 2),
    "fields in fields": lambda n: _nested(n),
    "groups": lambda n: b"\x0b" * n,
    "groups that end": lambda n: b"\x0b" * (n // 2) + b"\x0c" * (n // 2),
    "unknown numbers": lambda n: b"\xf8\x07\x01" * (n // 3),
    "unknown texts": lambda n: b"\xfa\x07\x01a" * (n // 4),
    "the same number": lambda n: b"\x10\x01" * (n // 2),
    "digests": lambda n: (b"\x0a\x20" + bytes(32)) * (n // 34),
    "headers": lambda n: (b"\x0a\x02\x08\x01") * (n // 4),
    "a long field": lambda n: b"\x0a" + _varint(n) + bytes(n),
    "all bytes": lambda n: bytes(range(256)) * (n // 256),
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
    "a long text": lambda n: f'recipe = "{"x" * n}"\n',
    "a long key": lambda n: "k" * n + " = 1\n",
    "many keys": lambda n: "".join(f"k{i} = 1\n" for i in range(n // 8)),
    "a key with dots": lambda n: "a." * (n // 2) + "a = 1\n",
    "many keys with dots": lambda n: "".join(f"a.b.c.d.k{i} = 1\n" for i in range(n // 16)),
    "tables": lambda n: "".join(f"[t{i}]\n" for i in range(n // 8)),
    "tables in tables": lambda n: "[" + "a." * (n // 2) + "a]\n",
    "lists of tables": lambda n: "[[token]]\n" * (n // 10),
    "lists of lists": lambda n: "x = " + "[" * (n // 2) + "]" * (n // 2) + "\n",
    "tables in a line": lambda n: "x = " + "{a=" * (n // 4) + "1" + "}" * (n // 4) + "\n",
    "an integer": lambda n: "top_k = " + "9" * n + "\n",
    "an integer in another base": lambda n: "top_k = 0x" + "f" * n + "\n",
    "an integer with underscores": lambda n: "top_k = 1" + "_1" * (n // 2) + "\n",
    "a fraction": lambda n: "dense_weight = 0." + "3" * n + "\n",
    "escapes": lambda n: 'recipe = "' + "\\n" * (n // 2) + '"\n',
    "a text of many lines": lambda n: 'recipe = """' + "x\n" * (n // 2) + '"""\n',
    "a text that does not end": lambda n: 'recipe = """' + '""\n' * (n // 3),
    "comments": lambda n: "# x\n" * (n // 4),
    "lines": lambda n: "\n" * n,
    "carriage returns": lambda n: "\r\n" * (n // 2),
    **{f"a text of {name}": _in_toml(make) for name, make in TEXTS.items()},
}

_HOST = b"Host: gateway\r\n"


def _get(headers: bytes, path: bytes = b"/") -> bytes:
    return b"GET " + path + b" HTTP/1.1\r\n" + _HOST + headers + b"\r\n"


def _post(body: bytes, headers: bytes = b"Transfer-Encoding: chunked\r\n") -> bytes:
    return b"POST / HTTP/1.1\r\n" + _HOST + headers + b"\r\n" + body


def _sized(body: bytes, headers: bytes) -> bytes:
    return _post(body, headers + b"Content-Length: %d\r\n" % len(body))


HTTP: Bytes = {
    "a long header": lambda n: _get(b"X: " + b"x" * n + b"\r\n"),
    "a long name": lambda n: _get(b"x" * n + b": y\r\n"),
    "many headers": lambda n: _get(b"X: y\r\n" * (n // 6)),
    "many names": lambda n: _get(b"".join(b"X%d: y\r\n" % i for i in range(n // 10))),
    "a long path": lambda n: _get(b"", b"/" + b"x" * n),
    "a path of dots": lambda n: _get(b"", b"/" + b"../" * (n // 3)),
    "a path of escapes": lambda n: _get(b"", b"/" + b"%2e" * (n // 3)),
    "a long query": lambda n: _get(b"", b"/?" + b"a=b&" * (n // 4)),
    "a long method": lambda n: b"G" * n + b" / HTTP/1.1\r\n\r\n",
    "spaces before a value": lambda n: _get(b"X:" + b" " * n + b"y\r\n"),
    "folded headers": lambda n: _get(b"X: y\r\n" + b" z\r\n" * (n // 4)),
    "lines before": lambda n: b"\r\n" * (n // 2) + _get(b""),
    "cookies": lambda n: _get(b"Cookie: " + b"a=b; " * (n // 5) + b"\r\n"),
    "a cookie of quotes": lambda n: _get(b'Cookie: a="' + b'\\"' * (n // 2) + b"\r\n"),
    "lists in a header": lambda n: _get(b"Accept: " + b"a," * (n // 2) + b"\r\n"),
    "a type with parameters": lambda n: _get(b"Content-Type: a/b" + b";a=b" * (n // 4) + b"\r\n"),
    "baggage": lambda n: _get(b"baggage: " + b"a=b," * (n // 4) + b"\r\n"),
    "state of a trace": lambda n: _get(
        b"traceparent: 00-" + b"1" * 32 + b"-" + b"1" * 16 + b"-01\r\ntracestate: " + b"a=b," * (n // 4) + b"\r\n"
    ),
    "requests at once": lambda n: _get(b"") * (n // 40),
    "bodies at once": lambda n: _post(b"1\r\nx\r\n0\r\n\r\n") * (n // 80),
    "a chunk": lambda n: _post(b"%x\r\n" % n + bytes(n) + b"\r\n0\r\n\r\n"),
    "chunks of a byte": lambda n: _post(b"1\r\nx\r\n" * (n // 6) + b"0\r\n\r\n"),
    "a chunk's size": lambda n: _post(b"0" * n + b"1\r\nx\r\n0\r\n\r\n"),
    "extensions of a chunk": lambda n: _post(b"1" + b";a=b" * (n // 4) + b"\r\nx\r\n0\r\n\r\n"),
    "extensions of all chunks": lambda n: _post(b"1;a=b\r\nx\r\n" * (n // 10) + b"0\r\n\r\n"),
    "trailers": lambda n: _post(b"1\r\nx\r\n0\r\n" + b"X: y\r\n" * (n // 6) + b"\r\n"),
    "a long trailer": lambda n: _post(b"0\r\nX: " + b"x" * n + b"\r\n\r\n"),
    "a body": lambda n: _post(bytes(n), b"Content-Length: %d\r\n" % n),
    "a body's long length": lambda n: _post(b"", b"Content-Length: " + b"0" * n + b"1\r\n"),
    "a compressed body": lambda n: _sized(_zeros(n), b"Content-Encoding: gzip\r\n"),
    "bytes that are no HTTP": lambda n: b"\x80" * n,
    "a charset": lambda n: _sized(b"x" * n, b"Content-Type: text/plain; charset=punycode\r\n"),
}  # fmt: skip


def _zeros(n: int) -> bytes:
    """So many bytes that are a thousand times as many when they are unpacked."""
    import gzip

    return gzip.compress(bytes(1000 * n))
