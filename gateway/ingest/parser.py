"""A process that parses and splits documents for a gateway, so that one that is hostile can be killed.

Frames go in and out by its standard input and output: a tag and two byte strings, each with its length. It holds
nothing of the gateway's but the model's tokenizer and the document in work, and ends with the gateway.
"""

import contextlib
import ctypes
import gc
import json
import math
import os
import resource
import signal
import struct
import sys
import time
from array import array
from pathlib import Path
from typing import Any, BinaryIO

from fusionkv.gateway.ingest import parse
from fusionkv.gateway.tokens import Vocabulary
from fusionkv.protos.fusion.v1 import fusion_pb2
from fusionkv.protos.runtime.errors import InvalidArgument, details

HEAD = struct.Struct("<cQQ")
# To the parser: a GetModelResponse; options as JSON, then a file. From it: that it is ready; a document's name and so
# on as JSON, then for each of its chunks the text and the token ids as uint32; the end of the file, as JSON.
MODEL, FILE, READY, DOCUMENT, PIECE, END = b"M", b"F", b"R", b"D", b"P", b"E"
# Behind the gateway and the workers of the same machine: with a tenth of their weight where cores are short.
_NICE = 10
# A process that once had more is replaced: its memory is in pieces.
_MOST_KEPT = 384 << 20
_PR_SET_PDEATHSIG = 1


def frame(tag: bytes, first: bytes = b"", second: bytes = b"") -> bytes:
    return HEAD.pack(tag, len(first), len(second)) + first + second


def main() -> None:
    memory = int(sys.argv[1])
    _confine(memory)
    # Frames alone use the two pipes: whatever a library prints, which may quote a document, goes nowhere.
    given, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # Now, so that no document waits for them.
    import pypdf  # noqa: F401

    from fusionkv.gateway.ingest import parse_html  # noqa: F401

    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)
    # Looking for cycles while a tree grows takes a third of the time; they are looked for behind each document.
    gc.freeze()
    gc.disable()
    with contextlib.suppress(BrokenPipeError):  # the gateway has ended, or wants no answer any more
        _serve(given, answers, memory)


def _confine(memory: int) -> None:
    """Ends with the gateway, has so many bytes, leaves nothing on a disk, is killed first and runs last."""
    parent = os.getppid()
    with contextlib.suppress(AttributeError, OSError):  # Linux only; elsewhere the end of its input tells
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    if os.getppid() != parent:
        sys.exit()
    with contextlib.suppress(OSError, ValueError):  # macOS knows the limit, and takes none
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    run_last(os.getpid())


def run_last(pid: int) -> None:
    """Lowers the priority of a process that leads a session."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, _NICE)
        # Linux may weigh sessions instead of processes (autogroup): there, only the session's own niceness counts.
        # Beside two parsers that have all of two cores, an answer of 60 ms takes 1.3 s without it.
        Path(f"/proc/{pid}/autogroup").write_text(str(_NICE))


def _serve(given: BinaryIO, answers: BinaryIO, memory: int) -> None:
    vocabulary: Vocabulary | None = None
    while head := given.read(HEAD.size):
        tag, *sizes = HEAD.unpack(head)
        first, second = (given.read(size) for size in sizes)
        if tag == MODEL:
            vocabulary = Vocabulary(fusion_pb2.GetModelResponse.FromString(first))
            answers.write(frame(READY))
        else:
            assert vocabulary is not None
            end = _document(json.loads(first), second, vocabulary, answers, memory)
            answers.write(frame(END, json.dumps(end).encode()))
            answers.flush()
            if end["ends"]:
                return
        answers.flush()
        del first, second
        gc.collect()


def _document(
    options: dict[str, Any], content: bytes, vocabulary: Vocabulary, answers: BinaryIO, memory: int
) -> dict[str, Any]:
    """Writes a document's chunks; returns what comes behind them: CPU seconds, and why it is refused, if it is."""
    began = time.process_time()
    # The gateway kills it sooner, unless that stands still.
    whole, hard = math.ceil(began + options["seconds"]) + 1, resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (whole, hard))
    refused, ends = "", False
    try:
        count = 0
        for document in parse.parse(content, options["kind"], options["most_text"], options["first_line"]):
            pieces = vocabulary.chunks(document, options["chunk_tokens"], options["overlap_tokens"])
            count += len(pieces)
            if count > options["most_chunks"]:
                raise InvalidArgument(f"the document has {count} chunks; at most {options['most_chunks']} are taken")
            known = [document.name, document.title, document.metadata, document.line]
            answers.write(frame(DOCUMENT, json.dumps(known).encode()))
            for text, ids in pieces:
                answers.write(frame(PIECE, text.encode(), array("I", ids).tobytes()))
    except InvalidArgument as error:
        refused = details(error)
    except MemoryError:
        refused, ends = no_memory(memory), True
    except Exception as error:  # of a library, at what it never saw
        refused = f"the document can't be parsed: {type(error).__name__}"
    return {"seconds": time.process_time() - began, "refused": refused, "ends": ends or _peak() > _MOST_KEPT}


def no_memory(memory: int) -> str:
    return f"parsing takes more than {memory} bytes of memory: split the document, or raise parse_memory_bytes"


def _peak() -> int:
    """The most bytes of memory that this process has had; 0 where the system does not say.

    Not ru_maxrss, which begins with what the gateway had when it started this process.
    """
    try:
        with open("/proc/self/status") as file:
            return next((int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM:")), 0)
    except OSError:
        return 0


if __name__ == "__main__":
    main()
