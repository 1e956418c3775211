"""Pool of parser processes, which are reused, and killed if a document takes too long."""

import asyncio
import contextlib
import math
import signal
import time
from array import array
from collections import defaultdict
from dataclasses import dataclass

from fusionkv.gateway.auth.tenants import Tenant
from fusionkv.gateway.children import ChildProcess
from fusionkv.gateway.config import GatewayConfig
from fusionkv.gateway.ingest import parse, parser
from fusionkv.gateway.ingest.document import Pairs
from fusionkv.gateway.tokens import Vocabulary
from fusionkv.protos.runtime.errors import InvalidArgument, ResourceExhausted, Unavailable

Piece = tuple[str, list[int]]  # text and token ids of a chunk
# Tokens that a CPU second of parsing costs; an ordinary document has at least ten times as many tokens per second.
TOKENS_A_SECOND = 10_000
# Starting Python, its imports and a tokenizer of 10 MB take one second on an idle machine.
_START_SECONDS = 60.0
# Threads take address space, which is limited, and cores, which answers need.
_ENVIRON = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
# Signals from outside: the OOM killer, or an operator.
_EXTERNAL_SIGNALS = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


@dataclass(frozen=True)
class ParsedDocument:
    """One document of a file; name, title, metadata and line are as in ingest.document.Document."""

    name: str
    title: str
    metadata: Pairs
    line: int
    pieces: list[Piece]


class Parsers:
    """Parses up to `parsers` documents at the same time; one of several tenants can't use all parsers."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._free = asyncio.Semaphore(config.parsers)
        # A document waits for one of its tenant's places first, of which there are fewer than parsers, and then for a
        # parser. So it waits behind few documents of each other tenant, however many that tenant sends.
        share = max(1, config.parsers - int(config.several_tenants))
        self._shares: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(share))
        self._idle: list[Parser] = []

    async def parse(
        self, tenant: Tenant, content: bytes, kind: str, vocabulary: Vocabulary, first_line: int = 1
    ) -> tuple[list[ParsedDocument], int]:
        """Parses a file into documents with their chunks; returns the cost in tokens too, spent even on failure.

        Raises:
            InvalidArgument: the content is not of its media type, has too much text or too many chunks, or takes too
                long or too much memory to parse.
            ResourceExhausted: all parsers stay busy, or the tenant's quota of tokens is used up.
            Unavailable: a parser can't be started, or was killed from outside.
        """
        seconds = self._config.parse_seconds
        async with contextlib.AsyncExitStack() as slot:
            try:
                async with asyncio.timeout(seconds):
                    await slot.enter_async_context(self._shares[tenant.salt])
                    await slot.enter_async_context(self._free)
            except TimeoutError as error:
                raise ResourceExhausted(
                    f"all parsers have been busy for {seconds:g} s; try again later", retry_after=0.5
                ) from error
            # Earlier documents may have used up the quota while this one waited.
            tenant.meter.check_tokens()
            process = self._idle.pop() if self._idle else Parser(self._config)
            try:
                await process.use(vocabulary)
                return await process.parse(content, kind, first_line), _cost(process)
            finally:
                tenant.meter.spend(_cost(process))
                if process.usable:
                    self._idle.append(process)
                else:
                    await process.end()

    async def close(self) -> None:
        """Ends all processes. Call it when no document is being parsed."""
        while self._idle:
            await self._idle.pop().end()


class Parser:
    """One process, started at its first use. Any failure except a refusal makes it unusable."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._process: ChildProcess | None = None
        self._vocabulary: Vocabulary | None = None
        self.usable = False
        self.seconds = 0.0
        """CPU seconds of the last document, or all seconds if its process did not finish it; 0 before the first."""

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def use(self, vocabulary: Vocabulary) -> None:
        """Starts the process and sends it the vocabulary, if necessary. Raises Unavailable if it can't be started."""
        self.seconds = 0.0
        if self._vocabulary is vocabulary:
            return
        self.usable = False
        try:
            async with asyncio.timeout(_START_SECONDS):
                if self._process is None:
                    memory = str(self._config.parse_memory_bytes)
                    self._process = await ChildProcess.start(parser.__name__, memory, environ=_ENVIRON)
                await self._process.send({}, vocabulary.model.SerializeToString())
                await self._process.receive()
        except (OSError, EOFError, TimeoutError) as error:
            raise Unavailable(f"can't start a parser: {error or type(error).__name__}") from error
        self._vocabulary, self.usable = vocabulary, True

    async def parse(self, content: bytes, kind: str, first_line: int = 1) -> list[ParsedDocument]:
        """Parses a file, after `use`. Raises as `Parsers.parse`."""
        assert self._process is not None
        config, began = self._config, time.monotonic()
        self.usable = False
        options = {
            "kind": kind,
            "seconds": config.parse_seconds,
            "max_text": parse.max_text(len(content), config.max_text_bytes),
            "max_chunks": config.max_document_chunks,
            "chunk_tokens": config.chunk_tokens,
            "overlap_tokens": config.overlap_tokens,
            "first_line": first_line,
        }
        documents: list[ParsedDocument] = []
        try:
            async with asyncio.timeout(config.parse_seconds):
                await self._process.send(options, content)
                while "end" not in (message := await self._process.receive())[0]:
                    value, data = message
                    if "document" in value:
                        name, title, metadata, line = value["document"]
                        pairs = tuple((key, text) for key, text in metadata)
                        documents.append(ParsedDocument(name, title, pairs, line, []))
                    else:
                        documents[-1].pieces.append((value["piece"], array("I", data).tolist()))
        except TimeoutError as error:
            raise InvalidArgument(
                f"parsing took longer than {config.parse_seconds:g} s: split the document, or raise parse_seconds"
            ) from error
        except (OSError, EOFError) as error:
            raise await self._ended() from error
        finally:
            self.seconds = time.monotonic() - began
        end = message[0]["end"]
        self.seconds, self.usable = end["seconds"], not end["ends"]
        if end["refused"]:
            raise InvalidArgument(end["refused"])
        return documents

    async def end(self) -> None:
        self.usable = False
        if self._process is not None:
            await self._process.end()

    async def _ended(self) -> Unavailable | InvalidArgument:
        """The error for a process that ended while parsing."""
        assert self._process is not None
        status = await self._process.wait()
        if -status in _EXTERNAL_SIGNALS:
            return Unavailable(f"the parser was killed from outside by {signal.Signals(-status).name}; try again")
        if status == -signal.SIGXCPU:
            return InvalidArgument(f"parsing took longer than {self._config.parse_seconds:g} s of CPU time")
        if status == -signal.SIGABRT:  # native code aborts when memory runs out
            return InvalidArgument(parser.no_memory(self._config.parse_memory_bytes))
        cause = signal.Signals(-status).name if status < 0 else f"exit code {status}"
        return InvalidArgument(f"the parser crashed ({cause}) on this document, which is damaged or hostile")


def _cost(process: Parser) -> int:
    return math.ceil(TOKENS_A_SECOND * process.seconds)
