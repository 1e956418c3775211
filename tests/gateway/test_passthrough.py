"""What is told of a chat that is passed on to vLLM; tests/gateway/test_vllm.py has how it is answered."""

from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from fusionkv.gateway import pipeline
from fusionkv.gateway.passthrough import passed
from fusionkv.protos.deadline import NO_DEADLINE
from fusionkv.protos.gateway.v1 import gateway_pb2 as pb
from fusionkv.protos.runtime.errors import FailedPrecondition

SECRET = "my password is swordfish"
REPLIES: list[Any] = [
    {"choices": [{"delta": {}}]},
    {"choices": [{"finish_reason": "stop"}], "usage": {"prompt_tokens": 5, "completion_tokens": 2}},
]


class Told:
    """spans: the exporter; ttft: the histogram; current: the spans in which vLLM was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spans, self.ttft, self.current = InMemorySpanExporter(), Mock(), list[Any]()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.spans))
        monkeypatch.setattr(pipeline, "tracer", self.provider.get_tracer("test"))
        monkeypatch.setattr(pipeline, "_ttft", self.ttft)

    def answer(self, replies: list[Any], stream: bool = True) -> AsyncGenerator[Any]:
        async def chat(*_: Any) -> AsyncGenerator[Any]:
            for reply in replies:
                self.current.append(trace.get_current_span().get_span_context().span_id)
                if isinstance(reply, Exception):
                    raise reply
                yield reply

        async def sources(*_: Any) -> Any:
            return SimpleNamespace(model=SimpleNamespace(name="m")), []

        tenant = SimpleNamespace(meter=Mock(), salt="acme")
        fields = {"messages": [{"role": "user", "content": SECRET}]}
        asked: Any = (SimpleNamespace(chat=chat), SimpleNamespace(sources=sources))
        call: Any = SimpleNamespace(tenant=tenant, deadline=NO_DEADLINE)
        return passed(*asked, call, pb.GenerateRequest(), fields, stream)

    def span(self) -> Any:
        (span,) = self.spans.get_finished_spans()
        assert SECRET not in span.to_json()
        return span


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    return Told(monkeypatch)


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_is_told_as_a_workers(told: Told, stream: bool) -> None:
    with told.provider.get_tracer("test").start_as_current_span("request") as request:
        *_, last = [response async for response in told.answer(REPLIES if stream else REPLIES[1:], stream)]
        chat = told.span()
    assert last.summary.trace_id == f"{request.get_span_context().trace_id:032x}"
    assert chat.name == "chat m"
    assert {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m"}.items() <= chat.attributes.items()
    assert {"fusionkv.recipe": "full_attention", "gen_ai.usage.output_tokens": 2}.items() <= chat.attributes.items()
    assert set(told.current) == {chat.context.span_id}
    # Of a whole reply, no first token is known.
    assert told.ttft.record.call_count == stream


async def test_errors_and_leaving_are_told_without_texts(told: Told) -> None:
    with pytest.raises(FailedPrecondition):
        _ = [response async for response in told.answer([FailedPrecondition(f"input: {SECRET}")])]
    failed = told.span()
    assert failed.status.status_code is trace.StatusCode.ERROR
    assert failed.attributes["error.type"] == "FAILED_PRECONDITION"
    assert "fusionkv.cancelled" not in failed.attributes
    told.spans.clear()
    left = told.answer(REPLIES)
    for _ in range(2):
        await anext(left)
    await left.aclose()
    assert told.span().attributes["fusionkv.cancelled"]
