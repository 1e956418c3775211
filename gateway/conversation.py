"""What is asked: a question, or a conversation whose last message is the question."""

from dataclasses import dataclass

from fusionkv.protos.gateway.v1 import gateway_pb2 as pb
from fusionkv.protos.runtime.errors import InvalidArgument

# Characters, of a conversation together. What does not belong to the question belongs in a passage.
MOST_QUESTION = 1 << 16
MOST_MESSAGES = 1024


@dataclass(frozen=True, slots=True)
class Conversation:
    """turns: texts of the user and the assistant, by turns; the first and the last are the user's.

    system: empty takes the worker's system prompt.
    """

    turns: tuple[str, ...]
    system: str = ""

    @property
    def question(self) -> str:
        return self.turns[-1]

    @classmethod
    def of(cls, request: pb.GenerateRequest) -> "Conversation":
        """The conversation of a request.

        Raises:
            InvalidArgument: not exactly one of question and messages; they are empty, too long or out of turn.
        """
        if not request.messages:
            check_question(request.question)
            _check_length(request.system, "system prompt")
            return cls((request.question,), request.system)
        if request.question:
            raise InvalidArgument("both a question and messages are given: the last message is the question")
        if len(request.messages) > MOST_MESSAGES:
            raise InvalidArgument(f"{len(request.messages)} messages are given; at most {MOST_MESSAGES} are taken")
        _check_length("".join(message.text for message in request.messages) + request.system, "conversation")
        systems = [m.text for m in request.messages if m.role == pb.ROLE_SYSTEM]
        if systems and request.system:
            raise InvalidArgument("the system prompt is given twice: as a field and as a message")
        return cls(_turns(request), "\n\n".join(systems) or request.system)


def check_question(question: str, what: str = "question") -> None:
    """Raises InvalidArgument for a question without text, or with far more than any model takes."""
    if not question.strip():
        raise InvalidArgument(f"the {what} is empty")
    _check_length(question, what)


def _check_length(text: str, what: str) -> None:
    if len(text) > MOST_QUESTION:
        raise InvalidArgument(f"the {what} has {len(text)} characters; at most {MOST_QUESTION} are taken")


def _turns(request: pb.GenerateRequest) -> tuple[str, ...]:
    """What user and assistant said; messages of one of them that follow each other are one turn."""
    turns: list[str] = []
    last = pb.ROLE_UNSPECIFIED
    for number, message in enumerate(request.messages):
        if message.role == pb.ROLE_SYSTEM:
            continue
        if message.role not in (pb.ROLE_USER, pb.ROLE_ASSISTANT):
            raise InvalidArgument(f"message {number} has no role: system, user or assistant")
        if not turns and message.role != pb.ROLE_USER:
            raise InvalidArgument(f"message {number} is the assistant's: the user speaks first")
        if message.role == last:
            turns[-1] += f"\n\n{message.text}"
        else:
            turns.append(message.text)
        last = message.role
    if last != pb.ROLE_USER:
        raise InvalidArgument("the last message must be the user's: it is the question")
    check_question(turns[-1], "last message")
    return tuple(turns)
