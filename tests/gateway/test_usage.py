"""What callers and telemetry are told was in the cache: what was found there, and nothing that was encoded now."""

import pytest

from fusionkv.gateway import genai
from fusionkv.gateway.client import langchain, requests, results
from fusionkv.gateway.client.results import Summary
from fusionkv.gateway.http import replies
from fusionkv.protos.gateway.v1 import gateway_pb2 as pb
from tests.gateway.conftest import Stack

pytestmark = pytest.mark.system


def told(response: pb.GenerateResponse) -> set[int]:
    """By the OpenAI-compatible endpoint, by LangChain's chat model and by the span."""
    summary = results.event(response)
    assert isinstance(summary, Summary)
    chunk = langchain._chunk(summary)
    assert chunk is not None
    return {
        replies._usage(summary)["prompt_tokens_details"]["cached_tokens"],
        chunk.message.usage_metadata["input_token_details"]["cache_read"],  # type: ignore[attr-defined]
        genai.answer_attributes(response.summary, "m")["gen_ai.usage.cache_read.input_tokens"],  # type: ignore[arg-type]
    }


def test_cached_tokens_are_those_that_were_found(stack: Stack) -> None:
    for name in ("lake", "hill"):
        stack.client.ingest("usage", f"{name}.txt", f"The {name} is far away.")
    request = requests.generate("usage", "How far is it?", recipe="full_reuse", max_tokens=1)
    cold, warm = ([*stack.client._stub.Generate(request)][-1] for _ in range(2))
    assert cold.summary.tokens_lossless + cold.summary.tokens_reused == cold.summary.context_tokens
    assert cold.summary.chunks_missed == 2
    assert told(cold) == {0}
    assert told(warm) == {warm.summary.context_tokens}
