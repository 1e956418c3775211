"""What a request asks, read from its question or its messages."""

from typing import Any

import pytest

from fusionkv.gateway.client import requests
from fusionkv.gateway.plan import Conversation
from fusionkv.protos.gateway.v1 import gateway_pb2 as pb
from fusionkv.protos.runtime.errors import InvalidArgument


def read(*said: tuple[str, str], **options: Any) -> Conversation:
    messages = [{"role": role, "content": text} for role, text in said]
    return Conversation.of(requests.generate("c", messages=messages, **options))


def test_roles_become_turns() -> None:
    assert Conversation.of(pb.GenerateRequest(question="Who?", system="Brief.")) == Conversation(("Who?",), "Brief.")
    asked = read(
        ("system", "Be brief."), ("user", "Who?"), ("assistant", "He."), ("system", "Be kind."), ("user", "Why?")
    )
    assert asked == Conversation(("Who?", "He.", "Why?"), "Be brief.\n\nBe kind.")
    assert asked.question == "Why?"
    assert read(("user", "Why?"), system="Be brief.") == Conversation(("Why?",), "Be brief.")


def test_messages_of_one_role_that_follow_each_other_are_one_turn() -> None:
    asked = read(
        ("user", "Hello."), ("user", "Who?"), ("assistant", "He."), ("assistant", "Or she."), ("user", "Why?")
    )
    assert asked.turns == ("Hello.\n\nWho?", "He.\n\nOr she.", "Why?")


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (pb.GenerateRequest(), "the question is empty"),
        (pb.GenerateRequest(question=" \n"), "the question is empty"),
        (pb.GenerateRequest(question="q", messages=[pb.Message()]), "either a question or messages, not both"),
        (pb.GenerateRequest(messages=[pb.Message(text="x")]), "message 0 has none of the roles"),
        (pb.GenerateRequest(messages=[pb.Message(role=9, text="x")]), "message 0 has none of the roles"),
        (
            pb.GenerateRequest(messages=[pb.Message(role=pb.ROLE_SYSTEM, text="x")]),
            "last message must have the role user",
        ),
        (pb.GenerateRequest(messages=[pb.Message(role=pb.ROLE_USER)]), "last message is empty"),
        (
            pb.GenerateRequest(messages=[pb.Message(role=pb.ROLE_ASSISTANT, text="x")]),
            "the first turn must be the user's",
        ),
        (
            pb.GenerateRequest(system="s", messages=[pb.Message(role=r, text="x") for r in (1, 2)]),
            "system prompt is given both as a field and as a message",
        ),
        (
            pb.GenerateRequest(messages=[pb.Message(role=r, text="x" * 30_000) for r in (2, 3, 2)]),
            "the conversation has 90000 characters; the maximum is 65536",
        ),
        (pb.GenerateRequest(messages=[pb.Message()] * 1025), "1025 messages are given; the maximum is 1024"),
        (pb.GenerateRequest(question="q", system="x" * 65_537), "the system prompt has 65537 characters"),
    ],
)
def test_what_cannot_be_followed_is_named(request_: pb.GenerateRequest, error: str) -> None:
    with pytest.raises(InvalidArgument, match=error):
        Conversation.of(request_)


def test_the_last_message_must_be_the_users() -> None:
    with pytest.raises(InvalidArgument, match="last message must have the role user"):
        read(("user", "Who?"), ("assistant", "He."))
    with pytest.raises(InvalidArgument, match="unknown role 'tool' of a message; known: system, user, assistant"):
        read(("tool", "x"))
