"""What documents of hostile shapes cost as they get larger, in the process that parses them for a gateway."""

import asyncio
import dataclasses
from collections.abc import Iterator

import pytest

from fusionkv.gateway.config import GatewayConfig
from fusionkv.gateway.ingest.parsers import Parser
from fusionkv.protos.runtime.errors import InvalidArgument
from tests.fuzz import effort, growth
from tests.fuzz.document_shapes import SHAPES, SQUARES
from tests.fuzz.growth import Cost, Measure
from tests.gateway.test_tokens import vocabulary

# Bytes of the smallest; the largest has four times as many. The square of these takes a second and more.
SIZE = 100_000 if effort.SECONDS else 4_000
CONFIG = GatewayConfig(parse_seconds=60 if effort.SECONDS else 20, max_document_chunks=10**6, max_text_bytes=16 << 20)
# What the gateway cuts a document off by; other refusals are answers as any other.
LIMITS = ("parsing took longer", "bytes of memory", "bytes of text")
BUGS = ("the parser crashed", "can't be parsed")


class Measured:
    """A parser that is replaced when it ends, and what each document costs it."""

    def __init__(self, config: GatewayConfig) -> None:
        self._runner = asyncio.Runner()
        self._vocabulary = vocabulary()
        self._config = config
        self._parser = Parser(config)

    def of(self, kind: str) -> Measure[bytes]:
        return lambda content: self._runner.run(self._measure(content, kind))

    async def _measure(self, content: bytes, kind: str) -> Cost:
        effort.done["document of growing size"] += 1
        await self._parser.use(self._vocabulary)
        pid, before, refused = self._parser.pid, growth.trim(self._parser.pid), ""
        try:
            await self._parser.parse(content, kind)
        except InvalidArgument as error:
            refused = str(error)
        assert not any(bug in refused for bug in BUGS), refused
        cut = any(limit in refused for limit in LIMITS)
        cost = Cost(self._parser.seconds, max(0, growth.peak(pid) - before) if self._parser.usable else 0, cut)
        if not self._parser.usable:
            await self._parser.end()
            self._parser = Parser(self._config)
        return cost

    def close(self) -> None:
        self._runner.run(self._parser.end())
        self._runner.close()


@pytest.fixture(scope="module")
def measured() -> Iterator[Measured]:
    made = Measured(CONFIG)
    yield made
    made.close()


GROWING = [(kind, name) for kind, shapes in SHAPES.items() for name in shapes]


def test_there_are_enough() -> None:
    assert all(len(shapes) >= 30 for shapes in SHAPES.values())


# Some of each kind, and in `make test-all` all of them.
@pytest.mark.parametrize(
    ("kind", "name"),
    [pytest.param(*case, marks=pytest.mark.slow) if number % 8 else case for number, case in enumerate(GROWING)],
)
def test_costs_grow_with_a_document(measured: Measured, kind: str, name: str) -> None:
    growth.check(SHAPES[kind][name], measured.of(kind), SIZE, deadline=CONFIG.parse_seconds + 1)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, shapes in SQUARES.items() for name in shapes])
def test_the_deadline_ends_what_grows_faster(kind: str, name: str) -> None:
    limited = Measured(dataclasses.replace(CONFIG, parse_seconds=2.0))
    try:
        cost = limited.of(kind)(SQUARES[kind][name](1_000_000))
    finally:
        limited.close()
    assert cost.cut
    assert cost.seconds < 3
