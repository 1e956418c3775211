"""The processes in which documents are parsed: as many as may be, kept warm, killed when one takes too long."""

import asyncio
import contextlib
import json
import math
import os
import signal
import sys
import time
from array import array
from dataclasses import dataclass
from pathlib import Path

from fusionkv.gateway.auth.shares import Shares
from fusionkv.gateway.auth.tenants import Tenant
from fusionkv.gateway.config import GatewayConfig
from fusionkv.gateway.ingest import parse, parser
from fusionkv.gateway.ingest.document import Pairs
from fusionkv.gateway.tokens import Vocabulary
from fusionkv.protos.runtime.errors import InvalidArgument, ResourceExhausted, Unavailable

Piece = tuple[str, list[int]]  # a chunk's text and its token ids
# Tokens that a CPU second of parsing counts as: an ordinary document has ten times as many and more in that time.
TOKENS_A_SECOND = 10_000
# For the start of Python, its imports and a tokenizer of 10 MB: a second, on a machine with nothing else to do.
_START_SECONDS = 60.0
# All that a parser knows of the gateway's environment, which may hold secrets.
_ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL")
_WRITTEN = 1 << 18
# Sent by somebody else: the machine is out of memory, or an operator wants it to end.
_FROM_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


@dataclass(frozen=True)
class ParsedDocument:
    """One of a file. name, title, metadata, line: as of ingest.document.Document."""

    name: str
    title: str
    metadata: Pairs
    line: int
    pieces: list[Piece]


@dataclass(frozen=True)
class Parsed:
    """`cost`: tokens that parsing counted as, which are spent already."""

    documents: list[ParsedDocument]
    cost: int


class Parsers:
    """Parses documents, `parsers` at once; where there are several tenants, none has all of them."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._slots = Shares(config.parsers, spare=int(config.several_tenants))
        self._idle: list[Parser] = []
        self._starting: set[asyncio.Task[None]] = set()

    async def parse(
        self, tenant: Tenant, content: bytes, kind: str, vocabulary: Vocabulary, first_line: int = 1
    ) -> Parsed:
        """A file's documents with their chunks. What parsing costs is spent, whether it succeeds or not.

        Raises:
            InvalidArgument: content that is not of its type, has too much text or too many chunks, or takes too long
                or too much memory to parse.
            ResourceExhausted: all parsers stay busy, or the tenant's quota of tokens is used up.
            Unavailable: no parser can be started, or it was killed by somebody else.
        """
        seconds = self._config.parse_seconds
        try:
            async with asyncio.timeout(seconds):
                await self._slots.wait(tenant.salt)
        except TimeoutError as error:
            raise ResourceExhausted(
                f"all parsers have been busy for {seconds:g} s; try again later", retry_after=0.5
            ) from error
        process: Parser | None = None
        try:
            # Those before it may have used up what was left when it came.
            tenant.meter.check_tokens()
            process = self._idle.pop() if self._idle else Parser(self._config)
            await process.use(vocabulary)
            documents = await process.parse(content, kind, first_line)
            return Parsed(documents, _cost(process))
        finally:
            if process is not None:
                tenant.meter.spend(_cost(process))
            if process is None or process.usable:
                self._idle += [process] if process is not None else []
                self._slots.release(tenant.salt)
            else:
                process.kill()
                task = asyncio.create_task(self._replace(process, tenant, vocabulary))
                self._starting.add(task)
                task.add_done_callback(self._starting.discard)

    async def close(self) -> None:
        """Ends all of them, when no document is in work any more."""
        for task in list(self._starting):
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        while self._idle:
            await self._idle.pop().end()

    async def _replace(self, ended: "Parser", tenant: Tenant, vocabulary: Vocabulary) -> None:
        """Starts another one, and only then frees the slot: the next document does not wait for it."""
        process = Parser(self._config)
        try:
            await ended.end()
            with contextlib.suppress(Unavailable):  # the next document tries it again, and is told
                await process.use(vocabulary)
        finally:
            if process.usable:
                self._idle.append(process)
            else:
                await process.end()
            self._slots.release(tenant.salt)


class Parser:
    """One process, which is started when it is first used. Whatever fails in it but a refusal makes it unusable."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._process: asyncio.subprocess.Process | None = None
        self._vocabulary: Vocabulary | None = None
        self.usable = False
        self.seconds = 0.0
        """CPU seconds that the last document took; nothing before there was one."""

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def use(self, vocabulary: Vocabulary) -> None:
        """Starts it, if that is still to do, and gives it this vocabulary, if it has another one.

        Raises:
            Unavailable: it can't be started.
        """
        self.seconds = 0.0
        if self._vocabulary is vocabulary:
            return
        self.usable = False
        try:
            async with asyncio.timeout(_START_SECONDS):
                if self._process is None:
                    self._process = await self._start()
                await self._write(parser.frame(parser.MODEL, vocabulary.model.SerializeToString()))
                tag, _, _ = await self._read()
                assert tag == parser.READY
        except (OSError, EOFError, TimeoutError) as error:
            raise Unavailable(f"no parser could be started: {error or type(error).__name__}") from error
        self._vocabulary, self.usable = vocabulary, True

    async def parse(self, content: bytes, kind: str, first_line: int = 1) -> list[ParsedDocument]:
        """As Parsers.parse."""
        config, used, began = self._config, self._used(), time.monotonic()
        self.usable, answered = False, False
        most_text = parse.most_text(len(content), config.max_text_bytes)
        options = {
            "kind": kind,
            "seconds": config.parse_seconds,
            "most_text": most_text,
            "most_chunks": config.max_document_chunks,
            "chunk_tokens": config.chunk_tokens,
            "overlap_tokens": config.overlap_tokens,
            "first_line": first_line,
        }
        documents: list[ParsedDocument] = []
        try:
            async with asyncio.timeout(config.parse_seconds):
                await self._write(parser.frame(parser.FILE, json.dumps(options).encode(), content))
                while True:
                    tag, first, second = await self._read()
                    if tag == parser.END:
                        break
                    if tag == parser.DOCUMENT:
                        name, title, metadata, line = json.loads(first)
                        pairs = tuple((key, value) for key, value in metadata)
                        documents.append(ParsedDocument(name, title, pairs, line, []))
                    else:
                        documents[-1].pieces.append((first.decode(), array("I", second).tolist()))
            end = json.loads(first)
            answered = True
        except TimeoutError as error:
            raise InvalidArgument(
                f"parsing took longer than {config.parse_seconds:g} s: split it, or raise parse_seconds"
            ) from error
        except (OSError, EOFError) as error:
            raise await self._ended() from error
        finally:
            if not answered:
                now = self._used()
                self.seconds = time.monotonic() - began if now is None or used is None else now - used
        self.seconds, self.usable = end["seconds"], not end["ends"]
        if end["refused"]:
            raise InvalidArgument(end["refused"])
        return documents

    def kill(self) -> None:
        """Ends it at once; also the start of one that was cancelled."""
        self.usable = False
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def end(self) -> None:
        """Kills it, and waits until it is gone."""
        self.kill()
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            with contextlib.suppress(OSError):  # what was not written yet is not wanted any more
                await self._process.stdin.wait_closed()
            await self._process.wait()

    async def _start(self) -> asyncio.subprocess.Process:
        # Without a preexec_fn no code of this process, which has threads of gRPC's, runs in the child.
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", parser.__name__, str(self._config.parse_memory_bytes)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
            # Threads take address space, of which there is little, and cores, which are others'.
            | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"},
            # Ctrl-C reaches the gateway alone.
            start_new_session=True,
        )
        # Also while it starts. Where Linux refuses it (two within 0.1 s), the process does it a little later.
        parser.run_last(process.pid)
        return process

    async def _write(self, data: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        view = memoryview(data)
        for at in range(0, len(data), _WRITTEN):
            self._process.stdin.write(view[at : at + _WRITTEN])
            await self._process.stdin.drain()

    async def _read(self) -> tuple[bytes, bytes, bytes]:
        assert self._process is not None
        stdout = self._process.stdout
        assert stdout is not None
        tag, first, second = parser.HEAD.unpack(await stdout.readexactly(parser.HEAD.size))
        return tag, await stdout.readexactly(first), await stdout.readexactly(second)

    async def _ended(self) -> Unavailable | InvalidArgument:
        """Why it ended in the middle of a document."""
        assert self._process is not None
        status = await self._process.wait()
        if -status in _FROM_OUTSIDE:
            return Unavailable(f"the parser was ended by {signal.Signals(-status).name} from outside; try again")
        if status == -signal.SIGXCPU:
            return InvalidArgument(f"parsing took longer than {self._config.parse_seconds:g} s of CPU time")
        if status == -signal.SIGABRT:  # native code knows no other way to say it
            return InvalidArgument(parser.no_memory(self._config.parse_memory_bytes))
        how = f"by {signal.Signals(-status).name}" if status < 0 else f"with exit code {status}"
        return InvalidArgument(f"the parser ended {how} at this document: it is damaged, or made to do that")

    def _used(self) -> float | None:
        """CPU seconds of the process so far; None where the system does not say."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def _cost(process: Parser) -> int:
    return math.ceil(TOKENS_A_SECOND * process.seconds)
