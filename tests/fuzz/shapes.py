"""Texts and JSON bodies of any length, each of a shape that has been somebody's quadratic case.

A shape is named by its pattern: what stands between « and » is repeated, several such parts equally often, and %d in
it counts up.
"""

import base64
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
