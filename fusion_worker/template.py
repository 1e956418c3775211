"""The prompt template: the system prompt, and the text around each chunk and the question."""

import inspect
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from jinja2 import meta
from transformers.utils.chat_template_utils import _compile_jinja_template

from fusionkv.fusion_worker.rendering import RENDERER, Conversation, Source
from fusionkv.protos.contract.template import check_variables
from fusionkv.protos.runtime.errors import FailedPrecondition, InvalidArgument

log = logging.getLogger(__name__)

# The date of a chat template that states today's, unless the operator sets another.
DATE = "2026-01-01"
# Seconds of processor time for a chat template: at the start, and with a request's values.
_SECONDS, _REQUEST_SECONDS = 5, 1
INSTRUCTION = "Answer the question using the passages."
_CONTEXT, _QUESTION, _SYSTEM, _ANSWER, _NEXT = (
    f"\x00{mark}\x00" for mark in ("context", "question", "system", "answer", "next")
)
_ASKED = f"{_CONTEXT}\n\nQuestion: {_QUESTION}"
_TURN = "\nAnswer: {answer}\nQuestion: "


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """The text around a prompt's parts.

    Attributes:
        system: the default system prompt, used as it is.
        chunk: holds `{text}` once.
        question: holds `{question}` once.
        own_system: text around a system prompt that a request brings, which replaces `system`; holds `{system}` once.
        turn: text between two user messages of a conversation; holds `{answer}` once.
        head, tail: what the chat template puts before and after a user message; without a chat template, `head` is
            what begins a prompt. It includes a system prompt that the operator has set.
        around_system: `own_system` without the beginning of the operator's user message.
    """

    system: str
    chunk: str
    question: str
    own_system: str
    turn: str
    head: str = ""
    tail: str = ""
    around_system: str = ""

    @classmethod
    def of(cls, tokenizer: Any, today: str = DATE) -> "PromptTemplate":
        """The template of a tokenizer: split from its chat template if it has one, plain text otherwise.

        The chat template is rendered with marks in place of passages and question (`rendering.Renderer`), and split
        at the marks. A prompt begins with the begin-of-sequence token where transformers' does: where the chat
        template writes it, or without one, where the tokenizer's post-processor puts it.

        today: YYYY-MM-DD, the date that the chat template is told.
        Raises FailedPrecondition if the chat template fails, takes too much time, memory or text, renders differently
        each time, or does not render a message exactly once; Unavailable if the process that renders ended twice.
        """
        if not getattr(tokenizer, "chat_template", None):
            begin = beginning(tokenizer)
            around = f"{begin}{{system}}\n"
            question = "Question: {question}\nAnswer:"
            return cls(f"{begin}{INSTRUCTION}\n", "{text}\n", question, around, _TURN, begin, around_system=around)
        asked = _conversations({}, today)
        try:
            # The first one again, and once more on another day.
            more = [asked[0], asked[0]._replace(today="1999-12-31")]
            *rendered, again, other_day = RENDERER.render(Source.of(tokenizer), [*asked, *more], _SECONDS)
            if rendered[0] != again:
                raise ValueError("renders differently each time")
            template = cls._split(rendered)
        except ValueError as error:
            raise FailedPrecondition(
                f"the tokenizer's chat template {error}: correct it, or remove it to use plain text"
            ) from error
        if other_day != again:
            log.warning(
                "the chat template states the date, and is told that it is %s each day: with another date, no stored "
                "KV could be used. Set it by --template-date",
                today,
            )
        return template

    @classmethod
    def _split(cls, rendered: Sequence[Mapping[str, str]]) -> "PromptTemplate":
        """The template from what was rendered of `_conversations`. Raises ValueError, which says what is wrong."""
        asked, own, talked = rendered
        try:
            if asked["error"]:
                raise ValueError(asked["error"])
            system, before, after = _cut(asked["text"], _CONTEXT, _QUESTION)
            head = system[: system.index(INSTRUCTION)]
        except ValueError as error:
            raise ValueError(f"can't render a single user message ({error})") from error
        # Where the chat template accepts no such message, or other parts change with it.
        own_system, turn = f"{head}{{system}}\n\n", _TURN
        with suppress(ValueError):
            begin, between, *rest = _cut(own["text"], _SYSTEM, _CONTEXT, _QUESTION)
            if rest == [before, after]:
                own_system = f"{begin}{{system}}{between}"
        with suppress(ValueError):
            _, *first, answer, next_, last = _cut(talked["text"], _CONTEXT, _QUESTION, _ANSWER, _NEXT)
            if [*first, last] == [before, after]:
                turn = f"{answer}{{answer}}{next_}"
        question = f"{before.lstrip()}{{question}}{after}"
        return cls(system, "{text}\n\n", question, own_system, turn, head, after, own_system)

    def configured(self, system: str, prompt: str) -> "PromptTemplate":
        """The template with an operator's system prompt and layout of a user message; empty ones change nothing.

        prompt: holds `{passages}`, and behind it `{question}`, each once.
        """
        template = self
        if prompt:
            before, after = prompt.split("{passages}")
            question = f"{after.lstrip()}{self.tail}"
            own_system = f"{self.own_system}{before}"
            template = replace(self, system=f"{self.head}{before}", question=question, own_system=own_system)
        if not system:
            return template
        head = self.around_system.replace("{system}", system)
        return replace(template, system=template.own_system.replace("{system}", system), head=head)


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer's chat template, for requests that set variables of it.

    system, prompt: the operator's, as in `PromptTemplate.configured`. today: as in `PromptTemplate.of`.
    """

    tokenizer: Any
    system: str = ""
    prompt: str = ""
    today: str = DATE

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names that the chat template reads and nobody sets, such as enable_thinking."""
        if not getattr(self.tokenizer, "chat_template", None):
            return frozenset()
        source = self.tokenizer.get_chat_template()
        environment = _compile_jinja_template(source).environment
        read = meta.find_undeclared_variables(environment.parse(source))
        parameters = inspect.signature(self.tokenizer.apply_chat_template).parameters
        return frozenset(read - {"messages", *parameters, *environment.globals, *self.tokenizer.special_tokens_map})

    def rendered(self, values: Mapping[str, Any]) -> PromptTemplate:
        """The prompt template with values for variables.

        Raises:
            InvalidArgument: the chat template does not use a variable, or can't be rendered with its value, or only
                with too much time, memory or text.
            Unavailable: the process that renders ended twice.
        """
        check_variables(values, self.variables)
        if not getattr(self.tokenizer, "chat_template", None):
            return PromptTemplate.of(self.tokenizer).configured(self.system, self.prompt)
        asked = _conversations(values, self.today)
        try:
            rendered = RENDERER.render(Source.of(self.tokenizer), asked, _REQUEST_SECONDS)
            template = PromptTemplate._split(rendered)
        except ValueError as error:
            raise InvalidArgument(
                f"chat_template_kwargs: with these values, the model's chat template {error}"
            ) from error
        return template.configured(self.system, self.prompt)


def beginning(tokenizer: Any) -> str:
    """The control tokens that a tokenizer's post-processor puts in front of a plain text.

    Raises FailedPrecondition if they are not control tokens of the tokenizer.
    """
    encoded = tokenizer("a", return_special_tokens_mask=True)
    added = encoded["special_tokens_mask"]
    ids = encoded["input_ids"][: added.index(0) if 0 in added else 0]
    text = "".join(tokenizer.convert_ids_to_tokens(ids))
    control = {id_ for id_, token in tokenizer.backend_tokenizer.get_added_tokens_decoder().items() if token.special}
    if not control.issuperset(ids):
        raise FailedPrecondition(
            f"the post_processor of tokenizer.json puts {text[:80]!r} in front of a text, which is not among its "
            "added_tokens: add it there as special"
        )
    return text


def _cut(rest: str, *marks: str) -> list[str]:
    """Splits a rendered conversation at the marks.

    Raises ValueError if a mark does not occur exactly once, or the marks are in another order.
    """
    parts = []
    for mark in marks:
        if rest.count(mark) != 1:
            raise ValueError("it does not write each text once and unchanged")
        part, rest = rest.split(mark)
        parts.append(part)
    return [*parts, rest]


def _conversations(values: Mapping[str, Any], today: str) -> list[Conversation]:
    """Those that a template is made of."""
    talks: tuple[tuple[str, list[str]], ...] = (
        ("", [f"{INSTRUCTION}\n\n{_ASKED}"]),
        (_SYSTEM, [_ASKED]),
        ("", [_ASKED, _ANSWER, _NEXT]),
    )
    return [Conversation(_messages(system, turns), today, values) for system, turns in talks]


def _messages(system: str, turns: Sequence[str]) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": system}] if system else []
    return messages + [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
