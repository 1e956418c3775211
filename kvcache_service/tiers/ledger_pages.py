"""Whether the pages of an LMDB file fit together, read as bytes: format 1, as LMDB 0.9 writes it on 64-bit machines.

LMDB itself reads only what a call needs, and believes it. A bit that flips in the list of free pages, in a branch or
in a node's flags shows much later: what is written then lands on a page that is in use.
"""

import os
import struct
from collections.abc import Iterator
from itertools import pairwise

import lmdb

_MAGIC, _FORMAT = 0xBEEFC0DE, 1
_HEADER = struct.Struct("=QHHHH")  # page number, padding, flags, end of the pointers, begin of the nodes
_RUN = struct.Struct("=QHHI")  # the same of pages in a row for one value: their count in place of the last two
_NODE = struct.Struct("=HHHH")  # a value's length or a child's number, its lower part first; flags; the key's length
_TREE = struct.Struct("=IHHQQQQQ")  # bytes of a page, flags, depth, pages by kind, entries, root
_META = struct.Struct(f"=IIQQ{_TREE.size}s{_TREE.size}sQQ")  # magic, format, address, size, trees, last page, commit
_NUMBER = struct.Struct("=Q")
_BRANCH, _LEAF, _OVERFLOW = 1, 2, 4
_BIG, _SUBTREE = 1, 2
_NUMBERED = 8  # a tree whose keys are integers
_NOWHERE = 2**64 - 1
_METAS = 2
_UNWRITTEN = 1 << 16
_Meta = tuple[int, int, int, int, bytes, bytes, int, int]
_Node = tuple[int, int, bytes, int]  # a value's length or a child, flags, key, where the value begins on its page


def check(path: str) -> None:
    """Reads every page in use, and the lists of those that are free. A file of another format is left to LMDB.

    Raises:
        lmdb.CorruptedError: a page is used twice, out of bounds or of another kind, or keys are not in order.
        OSError: the file can't be read.
    """
    with open(path, "rb", buffering=0) as file:
        first = _meta(file.fileno(), 0)
        size = _TREE.unpack(first[4])[0]
        metas = [first, _meta(file.fileno(), size)]
        if all(meta[:2] == (_MAGIC, _FORMAT) for meta in metas):
            _File(file.fileno(), size, max(metas, key=lambda meta: meta[-1])).check()


def later(path: str) -> bool:
    """Whether both pages that say what the file is name one later format. Raises OSError when it can't be read."""
    with open(path, "rb", buffering=0) as file:
        first = _meta(file.fileno(), 0)
        magic, form, *_ = _meta(file.fileno(), _TREE.unpack(first[4])[0])
    return first[:2] == (magic, form) and magic == _MAGIC and form > _FORMAT


def _meta(fd: int, offset: int) -> _Meta:
    """One of the two pages that say what the file holds, of which the newer one counts."""
    page = os.pread(fd, _HEADER.size + _META.size, offset)
    _expect(len(page) == _HEADER.size + _META.size, "the file ends too early")
    meta: _Meta = _META.unpack_from(page, _HEADER.size)
    return meta


class _File:
    def __init__(self, fd: int, size: int, meta: _Meta) -> None:
        self._fd, self._size = fd, size
        *_, free, main, last, _ = meta
        self._free, self._main = _TREE.unpack(free), _TREE.unpack(main)
        _expect(self._free[0] == size >= _HEADER.size + _META.size, f"pages of {self._free[0]} and {size} bytes")
        self._pages = min(last + 1, os.fstat(fd).st_size // size)
        # Pages at the end that were taken and given back at once may never have been written.
        _expect(last - self._pages < _UNWRITTEN, f"{last} pages, of which {self._pages} are there")
        self._taken = bytearray(self._pages)

    def check(self) -> None:
        for page, nodes in self._leaves(self._free, _NUMBERED):
            for node in nodes:
                value = self._value(page, node)
                count = _NUMBER.unpack_from(value)[0] if len(value) >= _NUMBER.size else _NOWHERE
                _expect((count + 1) * _NUMBER.size <= len(value), "a list of free pages ends too early")
                for (free,) in _NUMBER.iter_unpack(value[_NUMBER.size : (count + 1) * _NUMBER.size]):
                    self._take(free, 1)
        for page, nodes in self._leaves(self._main, 0):
            for node in nodes:
                value = self._value(page, node)
                _expect(node[1] == _SUBTREE and len(value) == _TREE.size, "something that is no database")
                for _ in self._leaves(_TREE.unpack(value), 0):
                    pass

    def _leaves(self, tree: tuple[int, ...], flags: int) -> Iterator[tuple[bytes, list[_Node]]]:
        """A tree's leaf pages in order, with their nodes."""
        _expect(tree[1] == flags, f"a tree with the flags {tree[1]:#x}")
        depth, root = tree[2], tree[-1]
        _expect((depth == 0) == (root == _NOWHERE), f"a tree of depth {depth} with the root {root}")
        if depth:
            yield from self._below(root, depth, flags == _NUMBERED, b"", None)

    def _below(
        self, number: int, depth: int, numbered: bool, low: bytes, high: bytes | None
    ) -> Iterator[tuple[bytes, list[_Node]]]:
        """The leaf pages below a page, or itself; its keys are `low` at least and less than `high`."""
        page, nodes = self._page(number, depth == 1)
        keys = [key for _, _, key, _ in nodes]
        if depth > 1:
            keys[0] = low  # the first child's key is nowhere
        ends = [*keys, *([] if high is None else [high])]
        if numbered:
            ordered = all(_number(a) < _number(b) for a, b in pairwise(ends)) and _number(low) <= _number(ends[0])
        else:
            ordered = all(a < b for a, b in pairwise(ends)) and low <= ends[0]
        _expect(ordered, f"page {number}: keys out of order")
        if depth == 1:
            for node in nodes:
                _expect(node[1] in (0, _BIG, _SUBTREE), f"page {number}: a node with the flags {node[1]:#x}")
                if node[1] == _BIG:
                    self._run(page, node)
            yield page, nodes
            return
        for (child, flags, *_), first, end in zip(nodes, keys, [*keys[1:], high], strict=True):
            yield from self._below(child | flags << 32, depth - 1, numbered, first, end)

    def _page(self, number: int, leaf: bool) -> tuple[bytes, list[_Node]]:
        """A branch or leaf page, and its nodes."""
        self._take(number, 1)
        page = os.pread(self._fd, self._size, number * self._size)
        named, _, kind, lower, upper = _HEADER.unpack_from(page)
        known = (named, kind) == (number, _LEAF if leaf else _BRANCH)
        bounded = _HEADER.size < lower <= upper <= self._size and lower % 2 == 0
        _expect(known and bounded, f"page {number} is not what it should be")
        nodes, spans = [], [(self._size, self._size)]
        for (at,) in struct.iter_unpack("=H", page[_HEADER.size : lower]):
            if at > self._size - _NODE.size:  # for each of millions, so nothing is said in advance
                raise lmdb.CorruptedError(f"page {number}: a node out of bounds")
            low, high, flags, length = _NODE.unpack_from(page, at)
            value = at + _NODE.size + length
            end = value + (_NUMBER.size if flags == _BIG else low | high << 16) * leaf
            spans.append((at, end + end % 2))
            nodes.append((low | high << 16, flags, page[at + _NODE.size : value], value))
        spans.sort()
        together = spans[0][0] == upper and all(end == begin for (_, end), (begin, _) in pairwise(spans))
        _expect(together, f"page {number}: nodes that do not fill what is taken of it")
        return page, nodes

    def _run(self, page: bytes, node: _Node) -> int:
        """The first of the pages in a row that hold a long value."""
        (first,) = _NUMBER.unpack_from(page, node[3])
        _expect(first < self._pages, f"page {first} is out of bounds")
        named, _, kind, count = _RUN.unpack(os.pread(self._fd, _RUN.size, first * self._size))
        enough = count * self._size >= _RUN.size + node[0]
        _expect((named, kind) == (first, _OVERFLOW) and enough, f"page {first} is not what it should be")
        self._take(first, count)
        return int(first)

    def _value(self, page: bytes, node: _Node) -> bytes:
        length, flags, _, at = node
        if flags != _BIG:
            return page[at : at + length]
        (first,) = _NUMBER.unpack_from(page, at)
        return os.pread(self._fd, length, first * self._size + _RUN.size)

    def _take(self, number: int, count: int) -> None:
        if not _METAS <= number <= number + count <= self._pages:
            raise lmdb.CorruptedError(f"page {number} is out of bounds")
        if any(self._taken[number : number + count]):
            raise lmdb.CorruptedError(f"page {number} is in use twice")
        self._taken[number : number + count] = bytes([1]) * count


def _number(key: bytes) -> int:
    return int.from_bytes(key, "little")


def _expect(right: bool, otherwise: str) -> None:
    if not right:
        raise lmdb.CorruptedError(otherwise)
