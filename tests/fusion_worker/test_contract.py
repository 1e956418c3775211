"""The gateway refuses, before it sends any event, what a worker refuses, and nothing else."""

import random
from collections import Counter
from collections.abc import Awaitable
from contextlib import AsyncExitStack, aclosing
from typing import Any

from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.fusion_worker.quality.verdict import UNSAFE, Judged, Verdict
from fusionkv.fusion_worker.servicer import handler
from fusionkv.gateway.auth.tenants import Meter, Quota, Tenant
from fusionkv.gateway.config import GatewayConfig
from fusionkv.gateway.pipeline import Pipeline
from fusionkv.gateway.retrieval.base import HybridSearch
from fusionkv.gateway.tokens import Vocabulary
from fusionkv.gateway.workers.workers import WorkerPool
from fusionkv.protos.contract.recipes import MODIFIERS, RECIPES
from fusionkv.protos.deadline import Deadline
from fusionkv.protos.fusion.v1 import fusion_pb2
from fusionkv.protos.fusion.v1.fusion_pb2 import Sampling
from fusionkv.protos.gateway.v1 import gateway_pb2 as pb
from fusionkv.protos.runtime.errors import FailedPrecondition, InvalidArgument
from tests.fusion_worker.linked import with_link_tokens
from tests.services import listening

NUMBERS = ("", "", "", "", "(5)", "(5)", "(50)", "(8, 5)", "(0)", "(3,9)", "(1,2,3)", "()", "(101)", "(1234567)")
STOPS: tuple[tuple[str, ...], ...] = ((), ("x",), ("",), ("x" * 257,), ("x",) * 17)
NAN = float("nan")
LENGTH, REQUESTS = 600, 70


def drawn_recipe(draw: random.Random) -> str:
    weights = [8] * len(MODIFIERS) + [1, 1]
    terms = draw.choices([*MODIFIERS, "magic", ""], weights, k=draw.choice((0, 0, 0, 0, 1, 1, 1, 2, 9)))
    base = draw.choice([*RECIPES, "", "default", "default", "magic"])
    return "+".join([base or "default" * bool(terms), *(term + draw.choice(NUMBERS) for term in terms)])


def drawn(draw: random.Random) -> pb.GenerateRequest:
    """A request of which most fields are valid."""

    def one(values: Any, *weights: int) -> Any:
        return draw.choices(values, weights)[0]

    recipe = drawn_recipe(draw)
    return pb.GenerateRequest(
        question="Who? " * one((1, 20, 130), 30, 4, 1),
        passages=[pb.Passage(text=f"{i} " * one((4, 20, 300), 30, 4, 1)) for i in range(one((3, 1, 9), 5, 3, 2))],
        recipe=recipe,
        ratio=one((None, 0.0, 0.2, 1.0, -0.1, 1.5, NAN), 30, 4, 4, 4, 1, 1, 1),
        sampling=Sampling(
            temperature=one((0, 0.5, 100, 100.5, 200, -1, NAN), 20, 20, 4, 1, 1, 1, 1),
            top_p=one((0, 0.5, 1.5, NAN), 20, 20, 1, 1),
            max_tokens=one((0, 9, LENGTH, 2**32 - 1), 20, 20, 1, 1),
            stop=one(STOPS, 20, 20, 1, 1, 1),
        ),
        prompt_template=one(("", "{passages} {question}", "{question}"), 12, 4, 1),
        # Of two errors, a worker names another one first: it renders templates in a call of its own.
        chat_template_kwargs={} if recipe else one(({}, {"thinks": "true"}, {"thinks": "no JSON"}), 2, 1, 1),
    )


async def by_worker(rig: Any, vocabulary: Vocabulary, asked: pb.GenerateRequest) -> None:
    """What a worker checks of a request by itself, as if the gateway had checked nothing."""
    try:
        WorkerConfig(prompt_template=asked.prompt_template)
    except ValueError as error:
        raise InvalidArgument(str(error)) from error
    if values := dict(asked.chat_template_kwargs):
        await rig.servicer.RenderTemplate(fusion_pb2.RenderTemplateRequest(chat_template_kwargs=values), None)
    layout = asked.prompt_template
    request = fusion_pb2.GenerateRequest(
        recipe=asked.recipe or "default",
        system={"ids": vocabulary.system(layout=layout)},
        chunks=[fusion_pb2.Chunk(ids=vocabulary.chunk(passage.text.strip())) for passage in asked.passages],
        question={"ids": vocabulary.question(asked.question, layout=layout)},
        sampling=fusion_pb2.Sampling.FromString(asked.sampling.SerializeToString()),
    )
    if asked.HasField("ratio"):
        request.ratio = asked.ratio
    await rig.servicer._checked(request)


async def by_gateway(pipeline: Pipeline, asked: pb.GenerateRequest) -> None:
    """Up to the first event."""
    tenant = Tenant("", None, Meter(Quota))  # type: ignore[arg-type]
    async with aclosing(pipeline.answer(tenant, asked, Deadline.after(60))) as events:
        assert (await anext(events)).HasField("sources")


async def verdict(check: Awaitable[None]) -> str:
    try:
        await check
    except (InvalidArgument, FailedPrecondition) as error:
        return type(error).__name__
    return "accepted"


async def test_gateway_and_worker_refuse_the_same_requests(start: Any) -> None:
    draw, verdicts = random.Random(0), Counter[str]()
    unsafe = Verdict("", {"a3": (Judged(UNSAFE, 0.1, "for tests"),)})
    rigs = (
        await start("llama", max_tokens=LENGTH, verdict=unsafe),
        await start("llama", max_tokens=LENGTH, replace=with_link_tokens),
        await start("mistral-window", max_tokens=LENGTH),
    )
    for rig in rigs:
        async with AsyncExitStack() as stack:
            pool = WorkerPool([await stack.enter_async_context(listening(handler(rig.servicer)))])
            stack.push_async_callback(pool.close)
            pipeline, vocabulary = (
                Pipeline(GatewayConfig(), pool, HybridSearch(GatewayConfig())),
                await pool.model(Deadline.after(30)),
            )
            for _ in range(REQUESTS):
                asked = drawn(draw)
                found = await verdict(by_worker(rig, vocabulary, asked))
                assert await verdict(by_gateway(pipeline, asked)) == found, str(asked)
                verdicts[found] += 1
    assert min(verdicts["accepted"], verdicts["InvalidArgument"]) > 50
    assert verdicts["FailedPrecondition"] > 5
