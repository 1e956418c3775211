"""The prompt template: the system prompt, and the text around each chunk and the question."""

from dataclasses import dataclass, replace
from typing import Any

from jinja2 import TemplateError

from fusionkv.protos.runtime.errors import FailedPrecondition

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
        head, tail: what the chat template puts before and after a user message; empty without a chat template. `head`
            includes a system prompt that the operator has set.
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
    def of(cls, tokenizer: Any) -> "PromptTemplate":
        """The template of a tokenizer: split from its chat template if it has one, plain text otherwise.

        The chat template is rendered with marks in place of passages and question, and split at the marks. The
        begin-of-sequence token is removed: the gateway adds it to the prompt.

        Raises:
            FailedPrecondition: the chat template fails, or does not render a message exactly once.
        """
        if not getattr(tokenizer, "chat_template", None):
            around = "{system}\n"
            question = "Question: {question}\nAnswer:"
            return cls(f"{INSTRUCTION}\n", "{text}\n", question, around, _TURN, around_system=around)
        try:
            system, before, after = _cut(tokenizer, [f"{INSTRUCTION}\n\n{_ASKED}"], _CONTEXT, _QUESTION)
            head = system[: system.index(INSTRUCTION)]
        except (ValueError, TypeError, TemplateError) as error:
            raise FailedPrecondition(
                f"the tokenizer's chat template can't render a single user message ({error}): correct it, or remove "
                "it to use plain text"
            ) from error
        own_system = _own_system(tokenizer, [before, after]) or f"{head}{{system}}\n\n"
        turn = _turn(tokenizer, [before, after]) or _TURN
        question = f"{before.lstrip()}{{question}}{after}"
        return cls(system, "{text}\n\n", question, own_system, turn, head, after, own_system)

    def configured(self, system: str, prompt: str) -> "PromptTemplate":
        """The template with an operator's system prompt and layout of a user message; empty ones change nothing.

        Args:
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


def _own_system(tokenizer: Any, around: list[str]) -> str:
    """Text around a system message; empty if the chat template accepts none, or if it changes other parts."""
    try:
        head, between, *rest = _cut(tokenizer, [_ASKED], _SYSTEM, _CONTEXT, _QUESTION, system=_SYSTEM)
    except (ValueError, TypeError, TemplateError):
        return ""
    return f"{head}{{system}}{between}" if rest == around else ""


def _turn(tokenizer: Any, around: list[str]) -> str:
    """Text around an assistant message; empty if the chat template accepts none, or if it changes other parts."""
    marks = (_CONTEXT, _QUESTION, _ANSWER, _NEXT)
    try:
        _, before, answer, next_, after = _cut(tokenizer, [_ASKED, _ANSWER, _NEXT], *marks)
    except (ValueError, TypeError, TemplateError):
        return ""
    return f"{answer}{{answer}}{next_}" if [before, after] == around else ""


def _cut(tokenizer: Any, turns: list[str], *marks: str, system: str = "") -> list[str]:
    """Splits a rendered conversation at the marks, without the begin-of-sequence token.

    Raises:
        ValueError: a mark does not occur exactly once, or the marks are in another order.
    """
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
    rest = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    parts = []
    for mark in marks:
        part, rest = rest.split(mark)
        parts.append(part)
    return [parts[0].removeprefix(tokenizer.bos_token or ""), *parts[1:], rest]
