"""A degraded answer is marked in its trace and in a metric; every stage of a request is a span."""

from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from fusionkv.fusion_worker.client import WorkerClient
from fusionkv.protos.fusion.v1 import fusion_pb2 as pb
from tests.system.otlp import attributes, receiving

pytestmark = [pytest.mark.system, pytest.mark.slow]
STAGES = {"queue", "lookup", "load", "encode", "select", "prefill", "decode"}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    return tmp_path


async def test_a_degraded_answer(launch: Any, directory: Path) -> None:
    with receiving() as received:
        env = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": received.endpoint,
            "OTEL_BSP_SCHEDULE_DELAY": "100",
            "OTEL_METRIC_EXPORT_INTERVAL": "200",
        }
        flags = ("--model", str(directory), "--listen", "127.0.0.1:0", "--device", "cpu", "--threads", "1")
        lost = launch("fusionkv.fusion_worker", *flags, "--cache", "127.0.0.1:1", env=env)
        alone = launch("fusionkv.fusion_worker", *flags, env=env)
        request = pb.GenerateRequest(
            recipe="prophetkv",
            ratio=0.5,
            system=pb.Tokens(ids=[5]),
            chunks=[pb.Chunk(ids=[6, 7, 8]), pb.Chunk(ids=[9, 10, 11, 12])],
            question=pb.Tokens(ids=[13, 14]),
            sampling=pb.Sampling(max_tokens=2),
        )
        for service, degraded in ((lost, True), (alone, False)):
            worker = WorkerClient(service.address)
            (summary,) = [e.summary async for e in worker.generate(request) if e.HasField("summary")]
            assert summary.degraded == degraded
            await worker.close()
            if degraded:
                reason = summary.degraded_reason
        received.wait_for(lambda: reason in [attributes(s).get("fusionkv.degraded") for _, s in received.spans])
        received.wait_for(lambda: received.total("fusionkv-worker", "fusionkv.worker.degraded") == 1)
        wanted = {f"fusionkv.{stage}" for stage in STAGES}
        received.wait_for(lambda: wanted <= {s.name for _, s in received.spans})
        # A request's spans belong to one trace, its call's.
        for service in (lost, alone):
            assert service.stop() == 0
        spans = [span for _, span in received.spans]
        calls = {s.trace_id for s in spans if s.name.endswith("FusionService/Generate")}
        assert {s.trace_id for s in spans if s.name.startswith("fusionkv.")} <= calls
