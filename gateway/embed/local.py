"""Embedders and rerankers of local model directories, each in a separate process.

The process is this module, as `python -m fusionkv.gateway.embed.local TASK DIRECTORY THREADS`. It answers messages
(children.py), and ends with its input.
"""

import asyncio
import contextlib
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from fusionkv.fusion_worker.library import lean
from fusionkv.gateway.children import ChildProcess, Message, frame, messages, take_pipes
from fusionkv.gateway.embed.base import CHARACTERS, Embedder, Reranker
from fusionkv.protos.runtime import cancellation, folders
from fusionkv.protos.runtime.errors import FailedPrecondition, ServiceError, Unavailable, first_line

# Loading Python, torch and a model of 100 MB takes four seconds on an idle machine.
_START_SECONDS = 120.0
# Limit for a batch, in which even a large model on one core answers; a process that takes longer hangs.
_ANSWER_SECONDS = 600.0
# Texts per batch: 8 of 256 tokens take MiniLM 0.2 s on one core, for which a question may have to wait.
_BATCH = 8
_EMBED, _RERANK = "embed", "rerank"
# Computes the reply to a message.
Answer = Callable[[dict[str, Any]], Message]


class _Request(NamedTuple):
    background: bool
    turn: int
    number: int
    message: dict[str, Any]
    reply: "asyncio.Future[Message]"


class _LocalModel:
    """A model in a separate process, which processes questions before documents, and requests of tenants in turn.

    For one event loop. The next request restarts a process that died or hung.
    """

    task = ""
    name: str

    def __init__(self, directory: Path, threads: int) -> None:
        self._directory, self._threads = directory, threads
        self._process: ChildProcess | None = None
        self._numbers = itertools.count()
        self._queue: asyncio.PriorityQueue[_Request] = asyncio.PriorityQueue()
        # Start-time fair queueing: the turn that is served, and the last one of each tenant with requests behind it.
        self._turn = {False: 0, True: 0}
        self._last: dict[tuple[bool, str], int] = {}
        self._serving: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, directory: Path, threads: int) -> Self:
        """Starts the process and waits until the model is loaded.

        Raises:
            FailedPrecondition: the directory contains no such model.
            Unavailable: the process can't be started.
        """
        model = cls(directory, threads)
        await model._start()
        model._serving = asyncio.create_task(model._serve())
        return model

    async def close(self) -> None:
        """Ends the process; pending requests fail as UNAVAILABLE."""
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
        while not self._queue.empty():
            _fail(self._queue.get_nowait().reply, Unavailable("the gateway is stopping"))
        await self._end()

    async def _ask(self, message: dict[str, Any], *, background: bool = False, tenant: str = "") -> Message:
        """Returns the reply to a message. `background` messages wait until there are no others.

        A tenant's message waits behind one of each other tenant, however many that tenant has sent before.

        Raises Unavailable if the process ended or hung before replying, or can't be started.
        """
        if self._queue.empty():
            self._last.clear()
        turn = max(self._turn[background], self._last.get((background, tenant), 0)) + 1
        self._last[background, tenant] = turn
        reply = asyncio.get_running_loop().create_future()
        self._queue.put_nowait(_Request(background, turn, next(self._numbers), message, reply))
        return await reply

    async def _serve(self) -> None:
        while True:
            request = await self._queue.get()
            self._turn[request.background] = request.turn
            if request.reply.done():  # the caller was cancelled
                continue
            try:
                process = self._process or await self._start()
                async with asyncio.timeout(_ANSWER_SECONDS):
                    await process.send(request.message)
                    reply, data = await process.receive()
            except asyncio.CancelledError:
                _fail(request.reply, Unavailable("the gateway is stopping"))
                raise
            except (OSError, EOFError) as error:
                await self._end()
                why = "hung" if isinstance(error, TimeoutError) else f"ended: {type(error).__name__}"
                _fail(request.reply, Unavailable(f"the process of the model {self._directory} {why}"))
            except ServiceError as error:
                _fail(request.reply, error)
            else:
                if "failed" in reply:
                    _fail(request.reply, ServiceError(f"{self._directory}: {reply['failed']}"))
                elif not request.reply.done():
                    request.reply.set_result((reply, data))

    async def _start(self) -> ChildProcess:
        # An OpenMP thread that waits releases its core to the workers.
        environ = {"OMP_NUM_THREADS": str(self._threads), "OMP_WAIT_POLICY": "PASSIVE"}
        environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        argv = __name__, self.task, str(self._directory), str(self._threads)
        try:
            async with asyncio.timeout(_START_SECONDS):
                self._process = await ChildProcess.start(*argv, environ=environ)
                description, _ = await self._process.receive()
        except (OSError, EOFError, TimeoutError) as error:
            await self._end()
            reason = str(error) or type(error).__name__
            raise Unavailable(f"can't start the process of the model {self._directory}: {reason}") from error
        if "refused" in description:
            await self._end()
            raise FailedPrecondition(f"{self._directory} can't be used to {self.task}: {description['refused']}")
        self._describe(description)
        return self._process

    def _describe(self, description: dict[str, Any]) -> None:
        self.name = description["name"]

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.end()


class LocalEmbedder(_LocalModel, Embedder):
    """An embedder from a Sentence-Transformers directory."""

    task = _EMBED

    def _describe(self, description: dict[str, Any]) -> None:
        super()._describe(description)
        self.dim = description["dim"]

    async def embed(self, texts: Sequence[str], *, question: bool = False, tenant: str = "") -> np.ndarray:
        vectors = np.zeros((len(texts), self.dim), np.float32)
        # Batches of texts of similar length: shorter texts are padded to the longest.
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))

        async def batch(places: list[int]) -> None:
            message = {"texts": [texts[i][:CHARACTERS] for i in places], "question": question}
            _, data = await self._ask(message, background=not question, tenant=tenant)
            vectors[places] = np.frombuffer(data, np.float32).reshape(len(places), self.dim)

        await cancellation.all_of(batch(order[at : at + _BATCH]) for at in range(0, len(order), _BATCH))
        return vectors


class LocalReranker(_LocalModel, Reranker):
    """A reranker from a cross-encoder directory."""

    task = _RERANK

    async def score(self, question: str, passages: Sequence[str]) -> list[float]:
        scores: list[float] = []
        for at in range(0, len(passages), _BATCH):
            texts = [text[:CHARACTERS] for text in passages[at : at + _BATCH]]
            reply, _ = await self._ask({"question": question[:CHARACTERS], "texts": texts})
            scores += reply["scores"]
        return scores


def _fail(reply: "asyncio.Future[Message]", error: Exception) -> None:
    if not reply.done():
        reply.set_exception(error)


def main() -> None:
    """Runs a model in this process."""
    task, directory, threads = sys.argv[1:]
    incoming, outgoing = take_pipes(output=2)
    folders.settle()
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):  # the gateway has ended
        try:
            with lean.uncompiled():
                answer, description = _load(task, Path(directory), int(threads))
        except Exception as error:  # transformers may raise anything for a directory that is not a model
            outgoing.write(frame({"refused": first_line(error)}))
            outgoing.flush()
            return
        outgoing.write(frame(description))
        outgoing.flush()
        for message, _ in messages(incoming):
            try:
                reply = frame(*answer(message))
            except Exception as error:
                reply = frame({"failed": f"{type(error).__name__}: {error}"})
            outgoing.write(reply)
            outgoing.flush()


def _load(task: str, directory: Path, threads: int) -> tuple[Answer, dict[str, Any]]:
    """Loads the model; returns the function that answers messages, and the model's description for the gateway."""
    import torch
    from transformers.utils import logging

    from fusionkv.gateway.embed.models import CrossEncoder, SentenceModel

    torch.set_num_threads(threads)
    logging.disable_progress_bar()
    if task == _RERANK:
        pairs = CrossEncoder(directory)
        return lambda m: ({"scores": pairs.score(m["question"], m["texts"])}, b""), {"name": pairs.name}
    model = SentenceModel(directory)
    return (lambda m: ({}, model.embed(m["texts"], m["question"]).tobytes()), {"name": model.name, "dim": model.dim})


if __name__ == "__main__":
    main()
