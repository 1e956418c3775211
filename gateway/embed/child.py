"""Process that runs one model for a gateway: `python -m fusionkv.gateway.embed.child TASK DIRECTORY THREADS`.

It reads frames from standard input, writes frames to standard output, and ends at the end of its input.
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
# Computes the reply to a message: JSON and bytes.
Answer = Callable[[dict[str, Any]], tuple[dict[str, Any], bytes]]


def main() -> None:
    task, directory, threads = sys.argv[1:]
    # Only frames may use the two pipes: output of libraries goes to standard error.
    given, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull) as devnull:
        os.dup2(devnull.fileno(), 0)
    os.dup2(2, 1)
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):  # the gateway has ended
        try:
            with lean.uncompiled():
                answer, description = _load(task, Path(directory), int(threads))
        except Exception as error:  # transformers may raise anything for a directory that is not a model
            line = str(error).strip().partition("\n")[0]
            answers.write(frame({"refused": line or type(error).__name__}))
            answers.flush()
            return
        answers.write(frame(description))
        answers.flush()
        _serve(given, answers, answer)


def _load(task: str, directory: Path, threads: int) -> tuple[Answer, dict[str, Any]]:
    """Loads the model; returns the function that answers messages, and the model's description for the gateway."""
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
        size, data_size = HEAD.unpack(head)
        message = json.loads(given.read(size))
        given.read(data_size)
        try:
            reply = frame(*answer(message))
        except Exception as error:
            reply = frame({"failed": f"{type(error).__name__}: {error}"})
        answers.write(reply)
        answers.flush()


if __name__ == "__main__":
    main()
