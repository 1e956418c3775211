"""The text around a prompt's parts: what is the system prompt, what stands around a chunk and the question."""

from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from fusionkv.protos.runtime.errors import FailedPrecondition

INSTRUCTION = "Answer the question using the passages."
_CONTEXT = "\x00context\x00"
_QUESTION = "\x00question\x00"


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """`chunk` holds `{text}` once and `question` holds `{question}` once; `system` is used as it is.

    head, tail: what the chat template puts before and behind a user's message; empty without one.
    """

    system: str
    chunk: str
    question: str
    head: str = ""
    tail: str = ""

    @classmethod
    def of(cls, tokenizer: Any) -> "PromptTemplate":
        """The template of a tokenizer: cut out of its chat template when it has one, plain text otherwise.

        The chat template is rendered with marks in place of passages and question; what stands before, between and
        after the marks are the parts. The begin-of-sequence token is taken off: the prompt's builder adds it.

        Raises:
            FailedPrecondition: the chat template fails, or does not show a message exactly once.
        """
        if not getattr(tokenizer, "chat_template", None):
            return cls(f"{INSTRUCTION}\n", "{text}\n", "Question: {question}\nAnswer:")
        user = f"{INSTRUCTION}\n\n{_CONTEXT}\n\nQuestion: {_QUESTION}"
        try:
            rendered = tokenizer.apply_chat_template(
                [{"role": "user", "content": user}], tokenize=False, add_generation_prompt=True
            )
            system, rest = rendered.split(_CONTEXT)
            before, after = rest.split(_QUESTION)
            head = system[: system.index(INSTRUCTION)].removeprefix(tokenizer.bos_token or "")
        except (ValueError, TypeError, TemplateError) as error:
            raise FailedPrecondition(
                f"the tokenizer's chat template does not take one message of a user ({error}): mend it, or remove it "
                "to get plain text"
            ) from error
        bos = tokenizer.bos_token or ""
        return cls(system.removeprefix(bos), "{text}\n\n", f"{before.lstrip()}{{question}}{after}", head, after)
