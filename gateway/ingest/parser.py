"""Process that parses and splits documents for a gateway; a hostile document can be stopped by killing it.

Of the gateway, it holds only the model's tokenizer and the current document. It ends with the gateway. It receives
(children.py):

    {}, a GetModelResponse   answered by {}
    options, a file          answered by {"document": fields} for each document, followed by {"piece": text} and token
                             ids (uint32) for each of its chunks; and at the end by {"end": result}
"""

import contextlib
import gc
import math
import os
import resource
import sys
import time
from array import array
from pathlib import Path
from typing import Any, BinaryIO

from fusionkv.gateway.children import frame, messages, take_pipes
from fusionkv.gateway.ingest import parse
from fusionkv.gateway.ingest.document import of_line
from fusionkv.gateway.tokens import Vocabulary
from fusionkv.protos.fusion.v1 import fusion_pb2
from fusionkv.protos.runtime import process
from fusionkv.protos.runtime.errors import InvalidArgument, details

# Niceness: parsers have a tenth of the weight of gateway and workers when cores are scarce.
_NICE = 10
# A process that has used more memory is replaced, because its heap is fragmented.
_MAX_REUSED = 384 << 20


def main() -> None:
    memory = int(sys.argv[1])
    _confine(memory)
    # Imported now, so that the first document does not wait for it.
    from fusionkv.gateway.ingest import parse_html, parse_markdown, parse_pdf  # noqa: F401

    # Output of libraries is dropped: it may quote a document.
    incoming, outgoing = take_pipes(output=os.open(os.devnull, os.O_WRONLY))
    # Garbage collection while a tree grows takes a third of the time; it runs after each document instead.
    gc.freeze()
    gc.disable()
    with contextlib.suppress(BrokenPipeError):  # the gateway has ended, or has cancelled the request
        _serve(incoming, outgoing, memory)


def _confine(memory: int) -> None:
    """Ends with the gateway, limits memory, writes no core dumps, is killed first by the OOM killer, and runs at low
    priority.
    """
    process.end_with_parent(parent=os.getppid())
    with contextlib.suppress(OSError):  # the container may not allow it
        Path("/proc/self/oom_score_adj").write_text("1000")
    with contextlib.suppress(OSError, ValueError):  # the system's own limit is lower
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(_NICE)
    with contextlib.suppress(OSError):
        # With autogroup, Linux schedules sessions instead of processes, and only the session's niceness counts: if it
        # is not set, an answer of 60 ms takes 1.3 s beside two parsers on two cores.
        Path("/proc/self/autogroup").write_text(str(_NICE))


def _serve(incoming: BinaryIO, outgoing: BinaryIO, memory: int) -> None:
    vocabulary: Vocabulary | None = None
    for options, content in messages(incoming):
        end: dict[str, Any] = {}
        if not options:
            vocabulary = Vocabulary(fusion_pb2.GetModelResponse.FromString(content))
            outgoing.write(frame({}))
        else:
            assert vocabulary is not None
            end = _document(options, content, vocabulary, outgoing, memory)
            outgoing.write(frame({"end": end}))
        outgoing.flush()
        if end.get("ends"):
            return
        del content
        gc.collect()


def _document(
    options: dict[str, Any], content: bytes, vocabulary: Vocabulary, outgoing: BinaryIO, memory: int
) -> dict[str, Any]:
    """Writes the documents and their chunks; returns the result: CPU seconds, and the reason of a refusal."""
    began = time.process_time()
    # A backstop: normally, the gateway kills the process earlier.
    soft, hard = math.ceil(began + options["seconds"]) + 1, resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))
    refused, ends = "", False
    try:
        count = 0
        for document in parse.parse(content, options["kind"], options["max_text"], options["first_line"]):
            sizes = options["chunk_tokens"], options["overlap_tokens"]
            with of_line(document.line):
                pieces = vocabulary.chunks(document, *sizes) if document.text.strip() else []
            count += len(pieces)
            if count > options["max_chunks"]:
                raise InvalidArgument(f"the document has {count} chunks; the maximum is {options['max_chunks']}")
            fields = [document.name, document.title, document.metadata, document.line]
            outgoing.write(frame({"document": fields}))
            for text, ids in pieces:
                outgoing.write(frame({"piece": text}, array("I", ids).tobytes()))
    except InvalidArgument as error:
        refused = details(error)
    except MemoryError:
        refused, ends = no_memory(memory), True
    except Exception as error:  # an unexpected error of a library
        refused = f"the document can't be parsed: {type(error).__name__}"
    return {"seconds": time.process_time() - began, "refused": refused, "ends": ends or _peak() > _MAX_REUSED}


def no_memory(memory: int) -> str:
    return f"parsing needs more than {memory} bytes of memory: split the document, or raise parse_memory_bytes"


def _peak() -> int:
    """The process's peak memory in bytes; 0 if the system does not report it.

    Not ru_maxrss, which starts at the gateway's memory at the fork.
    """
    with open("/proc/self/status") as file:
        return next((int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM:")), 0)


if __name__ == "__main__":
    main()
