"""A process that holds one model for a gateway: `python -m fusionkv.gateway.embed.child TASK DIRECTORY THREADS`.

Frames come in and go out by its standard input and output. It ends when its input does.
"""

import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from fusionkv.fusion_worker.library import lean
from fusionkv.gateway.embed.frames import HEAD, frame

EMBED, RERANK = "embed", "rerank"
# A message to a reply.
Answer = Callable[[dict[str, Any]], tuple[dict[str, Any], bytes]]


def main() -> None:
    task, directory, threads = sys.argv[1:]
    # Frames alone use the two pipes: whatever a library prints goes to standard error.
    given, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):  # the gateway has ended
        try:
            with lean.uncompiled():
                answer, told = _load(task, Path(directory), int(threads))
        except Exception as error:  # of a directory that is no model, whatever transformers makes of it
            line = str(error).strip().partition("\n")[0]
            answers.write(frame({"refused": line or type(error).__name__}))
            answers.flush()
            return
        answers.write(frame(told))
        answers.flush()
        _serve(given, answers, answer)


def _load(task: str, directory: Path, threads: int) -> tuple[Answer, dict[str, Any]]:
    """What answers messages, and what the gateway is told of the model first."""
    import torch
    from transformers.utils import logging

    torch.set_num_threads(threads)
    logging.disable_progress_bar()
    if task == RERANK:
        from fusionkv.gateway.embed.cross_encoder import CrossEncoder

        pairs = CrossEncoder(directory)
        return lambda m: ({"scores": pairs.score(m["question"], m["texts"])}, b""), {"name": pairs.name}
    from fusionkv.gateway.embed.sentence_model import SentenceModel

    model = SentenceModel(directory)
    return (
        lambda m: ({}, model.embed(m["texts"], m["question"]).tobytes()),
        {"name": model.name, "dim": model.dim},
    )


def _serve(given: BinaryIO, answers: BinaryIO, answer: Answer) -> None:
    while head := given.read(HEAD.size):
        size, more = HEAD.unpack(head)
        message = json.loads(given.read(size))
        given.read(more)
        try:
            reply = frame(*answer(message))
        except Exception as error:
            reply = frame({"failed": f"{type(error).__name__}: {error}"})
        answers.write(reply)
        answers.flush()


if __name__ == "__main__":
    main()
