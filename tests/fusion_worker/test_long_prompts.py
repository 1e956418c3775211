"""What the message about a prompt that is too long advises."""

import pytest

from fusionkv.protos.contract.length import shorten

FEWER, SHORTER = "ask for at most 10 tokens", "use fewer passages"


@pytest.mark.parametrize(
    ("prompt", "answer", "context", "said"),
    [
        (90, 20, 50, f"{FEWER} (max_tokens) or {SHORTER} (top_k) or shorter ones (chunk_tokens)"),
        (90, 20, 5, f"{FEWER} (max_tokens)"),
        (120, 20, 50, f"{SHORTER} (top_k) or shorter ones (chunk_tokens)"),
        (100, 1, 0, "shorten the question or the system prompt"),
    ],
)
def test_only_what_helps_is_advised(prompt: int, answer: int, context: int, said: str) -> None:
    assert shorten(prompt, answer, 100, context) == said
