"""Process that runs one model for a gateway: `python -m fusionkv.gateway.embed.child TASK DIRECTORY THREADS`.

It answers messages (children.py), and ends with its input.
"""

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fusionkv.fusion_worker.library import lean
from fusionkv.gateway.children import Message, frame, messages, take_pipes
from fusionkv.protos.runtime.errors import first_line

EMBED, RERANK = "embed", "rerank"
# Computes the reply to a message.
Answer = Callable[[dict[str, Any]], Message]


def main() -> None:
    task, directory, threads = sys.argv[1:]
    given, answers = take_pipes(output=2)
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):  # the gateway has ended
        try:
            with lean.uncompiled():
                answer, description = _load(task, Path(directory), int(threads))
        except Exception as error:  # transformers may raise anything for a directory that is not a model
            answers.write(frame({"refused": first_line(error)}))
            answers.flush()
            return
        answers.write(frame(description))
        answers.flush()
        for message, _ in messages(given):
            try:
                reply = frame(*answer(message))
            except Exception as error:
                reply = frame({"failed": f"{type(error).__name__}: {error}"})
            answers.write(reply)
            answers.flush()


def _load(task: str, directory: Path, threads: int) -> tuple[Answer, dict[str, Any]]:
    """Loads the model; returns the function that answers messages, and the model's description for the gateway."""
    import torch
    from transformers.utils import logging

    from fusionkv.gateway.embed.models import CrossEncoder, SentenceModel

    torch.set_num_threads(threads)
    logging.disable_progress_bar()
    if task == RERANK:
        pairs = CrossEncoder(directory)
        return lambda m: ({"scores": pairs.score(m["question"], m["texts"])}, b""), {"name": pairs.name}
    model = SentenceModel(directory)
    return (
        lambda m: ({}, model.embed(m["texts"], m["question"]).tobytes()),
        {"name": model.name, "dim": model.dim},
    )


if __name__ == "__main__":
    main()
