"""The question of a request, alone or as the last message of a conversation."""

from dataclasses import dataclass

from fusionkv.protos.gateway.v1 import gateway_pb2 as pb
from fusionkv.protos.runtime.errors import InvalidArgument

# Characters of a whole conversation. Longer context belongs in passages.
MAX_QUESTION = 1 << 16
MAX_MESSAGES = 1024


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation that ends with the user's question.

    Attributes:
        turns: texts of the user and the assistant, alternating; the first and the last are the user's.
        system: the system prompt; empty uses the worker's.
    """

    turns: tuple[str, ...]
    system: str = ""

    @property
    def question(self) -> str:
        return self.turns[-1]

    @classmethod
    def of(cls, request: pb.GenerateRequest) -> "Conversation":
        """Reads the conversation of a request.

        Raises:
            InvalidArgument: the request does not have exactly one of question and messages, or they are empty, too
                long or in the wrong order.
        """
        if not request.messages:
            check_question(request.question)
            _check_length(request.system, "system prompt")
            return cls((request.question,), request.system)
        if request.question:
            raise InvalidArgument("a request takes either a question or messages, not both")
        if len(request.messages) > MAX_MESSAGES:
            raise InvalidArgument(f"{len(request.messages)} messages are given; the maximum is {MAX_MESSAGES}")
        _check_length("".join(message.text for message in request.messages) + request.system, "conversation")
        systems = [m.text for m in request.messages if m.role == pb.ROLE_SYSTEM]
        if systems and request.system:
            raise InvalidArgument("the system prompt is given both as a field and as a message")
        return cls(_turns(request), "\n\n".join(systems) or request.system)


def check_question(question: str, what: str = "question") -> None:
    """Raises InvalidArgument if a question has no text, or far more text than any model accepts."""
    if not question.strip():
        raise InvalidArgument(f"the {what} is empty")
    _check_length(question, what)


def _check_length(text: str, what: str) -> None:
    if len(text) > MAX_QUESTION:
        raise InvalidArgument(f"the {what} has {len(text)} characters; the maximum is {MAX_QUESTION}")


def _turns(request: pb.GenerateRequest) -> tuple[str, ...]:
    """Texts of the user and the assistant in turn; consecutive messages of one role become one turn."""
    turns: list[str] = []
    last = pb.ROLE_UNSPECIFIED
    for number, message in enumerate(request.messages):
        if message.role == pb.ROLE_SYSTEM:
            continue
        if message.role not in (pb.ROLE_USER, pb.ROLE_ASSISTANT):
            raise InvalidArgument(f"message {number} has none of the roles system, user and assistant")
        if not turns and message.role != pb.ROLE_USER:
            raise InvalidArgument(f"message {number} has the role assistant; the first turn must be the user's")
        if message.role == last:
            turns[-1] += f"\n\n{message.text}"
        else:
            turns.append(message.text)
        last = message.role
    if last != pb.ROLE_USER:
        raise InvalidArgument("the last message must have the role user: it is the question")
    check_question(turns[-1], "last message")
    return tuple(turns)
