"""Renders chat templates in processes with little time, memory and text, which a template can't exceed."""

import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any, NamedTuple

from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

from fusionkv.protos.deadline import Deadline
from fusionkv.protos.runtime.errors import Unavailable

# Usual templates take 1 ms for a message, and the longest known ones have 20,000 characters.
_MEMORY, _BYTES = 512 << 20, 256 << 10
# Seconds that pass for each of processor time, on a machine with much else to do.
_PATIENCE = 10


class Source(NamedTuple):
    """A chat template, and the special tokens that it knows by name."""

    template: str
    special: dict[str, Any]

    @classmethod
    def of(cls, tokenizer: Any) -> "Source":
        """That of a tokenizer. Raises ValueError if it has several, and none is the default."""
        return cls(tokenizer.get_chat_template(), dict(tokenizer.special_tokens_map))


class Conversation(NamedTuple):
    """What to render.

    today: YYYY-MM-DD, the date that the template is told. values: for variables of the template.
    """

    messages: list[dict[str, str]]
    today: str
    values: Mapping[str, Any]


class Exceeded(ValueError):
    """A template takes too much; the message says which limit it exceeds."""


def _bounded(source: Source, conversations: Sequence[Conversation], seconds: int) -> list[dict[str, str]]:
    """As `Renderer.render`, in a fork of this process: in 20 ms."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        _answer(source, conversations, seconds, writing)
    os.close(writing)
    answer, deadline = b"", Deadline.after(_PATIENCE * seconds)
    with open(reading, "rb", buffering=0) as pipe:
        while len(answer) <= _BYTES and select.select([pipe], [], [], deadline.remaining())[0]:
            if not (data := pipe.read(1 << 16)):
                break
            answer += data
    late = deadline.passed
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if len(answer) > _BYTES:
        raise Exceeded(f"takes more than {_BYTES >> 10} KiB of text")
    if late or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU):
        raise Exceeded(f"takes more than {seconds} s of processor time")
    try:
        rendered: list[dict[str, str]] = json.loads(answer)
    except ValueError:
        raise Exceeded(f"takes more than {_MEMORY >> 20} MiB of memory") from None
    return rendered


def _answer(source: Source, conversations: Sequence[Conversation], seconds: int, writing: int) -> None:
    """Writes the renderings; nothing if they need more memory. Ends the process."""
    try:
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY, used + _MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))  # SIGXCPU, then SIGKILL
        rendered = []
        for each in conversations:
            rendered.append(_rendered(source, each))
            if len(rendered[-1]["text"]) > _BYTES:
                break  # before it is copied: this answer is too long as well
        with open(writing, "wb") as pipe:
            pipe.write(json.dumps(rendered, ensure_ascii=False)[: _BYTES + 1].encode(errors="replace"))
    finally:
        os._exit(0)


def _rendered(source: Source, conversation: Conversation) -> dict[str, str]:
    try:
        _compiled(source, conversation.today)
        rendered: Any = render_jinja_template(
            conversations=[conversation.messages],
            chat_template=source.template,
            add_generation_prompt=True,
            **{**source.special, **conversation.values},
        )
    except MemoryError:
        raise
    except Exception as error:  # a template may raise anything
        return {"text": "", "error": str(error) or type(error).__name__}
    [text], _ = rendered
    return {"text": text, "error": ""}


def _compiled(source: Source, today: str) -> None:
    """Compiles the template, to the cache that `render_jinja_template` takes it from."""
    _compile_jinja_template(source.template).globals["strftime_now"] = date.fromisoformat(today).strftime


class Renderer:
    """Renders in a process that is started when it is first needed, and again if it has ended.

    A template may loop or multiply for hours within one operation, which nothing in this process could end; and a
    fork of this process could crash or hang, since gRPC has threads in it. The process is started by exec, loads
    transformers but no torch (2 s of processor time, 68 MB), and forks for each call. Thread-safe; calls wait for
    each other.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Starts the process, so that it is ready when it is first needed."""
        with self._lock:
            self._start()

    def render(self, source: Source, conversations: Sequence[Conversation], seconds: int) -> list[dict[str, str]]:
        """The text, or else the error, of each conversation.

        seconds: of processor time, for all of them.
        Raises Exceeded if a template takes more time, memory or text, and Unavailable if the process ended twice.
        """
        asked = json.dumps([source, conversations, seconds])
        with self._lock:
            answer = self._asked(asked) or self._asked(asked)
        if not answer:
            raise Unavailable("the process that renders chat templates ends: is there enough memory?")
        rendered, exceeded = json.loads(answer)
        if exceeded:
            raise Exceeded(exceeded)
        return list(rendered)

    def _start(self) -> None:
        if self.process is None or self.process.poll() is not None:
            # In a new session, so that only the worker gets the terminal's signals. It ends with its input.
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "fusionkv.fusion_worker.rendering"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # numpy's other threads would be there at each fork
                text=True,
                start_new_session=True,
            )

    def _asked(self, line: str) -> str:
        """The line that the process answers; empty if it has ended."""
        self._start()
        assert self.process is not None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            print(line, file=self.process.stdin, flush=True)
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            self.process.kill()
            self.process.wait()
        return answer


RENDERER = Renderer()
"""That of this process."""


def _serve() -> None:
    for line in sys.stdin:
        source, conversations, seconds = json.loads(line)
        source, conversations = Source(*source), [Conversation(*each) for each in conversations]
        try:
            rendered = _bounded(source, conversations, seconds)
            if not rendered[0]["error"]:  # it can be compiled, within the limits: the next forks find it compiled
                _compiled(source, conversations[0].today)
            answer = rendered, ""
        except Exceeded as error:
            answer = [], str(error)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _serve()
