"""The life of a request: however it ends, everything that it held is free and the others go on."""

import asyncio
import dataclasses
import functools
import threading
from typing import Any

import pytest
import torch

from fusionkv.fusion_worker.compute.jobs import ForwardJob, Nothing
from fusionkv.fusion_worker.pool.slots import SlotRange
from fusionkv.protos.contract.length import shorten
from fusionkv.protos.runtime.errors import InvalidArgument, ResourceExhausted
from tests.fusion_worker.oracle import Parts, oracle, random_ids

LENGTHS = (14, 9)


def ascii_only(model: Any) -> Any:
    """Greedy answers of this model are printable ASCII: other logits are 0, below the best of 94 random ones."""
    model.network.lm_head.weight.data[94:] = 0
    return dataclasses.replace(model, ends=frozenset())


def queued(rig: Any) -> int:
    scheduler = rig.servicer.engine._scheduler
    return len(scheduler._prefills) + len(scheduler._decodes)


def ask_many(rig: Any, parts: Parts, count: int, **more: Any) -> list["asyncio.Task[Any]"]:
    return [asyncio.create_task(rig.ask(*parts, **more)) for _ in range(count)]


async def cancelled(*tasks: "asyncio.Task[Any]") -> None:
    """Cancels requests that end at once."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks, timeout=60)
    assert all(task.cancelled() for task in tasks)


async def test_the_answer_ends_at_max_tokens(start: Any, parts: Any) -> None:
    rig = await start("llama", replace=ascii_only, max_new_tokens=7)
    for asked, count in ((1, 1), (4, 4), (0, 7)):
        answer = await rig.ask(*parts, max_tokens=asked)
        assert (answer.summary.finish_reason, len(answer.ids), len(answer.text)) == ("max_tokens", count, count)


async def test_an_answer_without_a_limit_takes_what_the_models_limit_leaves(start: Any, parts: Any) -> None:
    system, chunks, question = parts
    prompt = len(system) + sum(map(len, chunks)) + len(question)
    for room, count in ((8, 7), (7, 7), (3, 3), (1, 1)):
        limited = functools.partial(dataclasses.replace, max_tokens=prompt + room)
        rig = await start(
            "llama", replace=lambda model, limited=limited: limited(ascii_only(model)), max_new_tokens=7
        )
        answer = await rig.ask(*parts, max_tokens=0)
        assert (answer.summary.finish_reason, len(answer.ids)) == ("max_tokens", count)
    with pytest.raises(InvalidArgument, match=f"the prompt has {prompt + 1} tokens .* and 1 more are requested"):
        await rig.ask(system, chunks, [*question, 7], max_tokens=0)
    with pytest.raises(InvalidArgument, match="and 2 more are requested, 1 more than"):
        await rig.ask(*parts, max_tokens=2)


async def test_the_answer_ends_at_an_end_token(start: Any, parts: Any) -> None:
    rig = await start("llama", replace=ascii_only)
    whole = await rig.ask(*parts, max_tokens=12)
    end = next(i for i in range(3, 12) if whole.ids[i] not in whole.ids[:i])
    ended = dataclasses.replace(rig.model, ends=frozenset({whole.ids[end], 300}))
    answer = await (await start("llama", replace=lambda _: ended)).ask(*parts, max_tokens=12)
    found = answer.summary.finish_reason, answer.ids, answer.text
    assert found == ("end", whole.ids[: end + 1], whole.text[:end])


async def test_the_answer_ends_before_a_stop_string(start: Any, parts: Any) -> None:
    rig = await start("llama", replace=ascii_only)
    whole = (await rig.ask(*parts, max_tokens=24)).text
    never = "\x01never\x02"
    for at, size, other in ((0, 1, never), (0, 3, never), (5, 4, never), (10, 1, never), (4, 2, whole[8:12])):
        stop = whole[at : at + size]
        answer = await rig.ask(*parts, max_tokens=24, stop=[other, stop])
        found = answer.summary.finish_reason, answer.text, len(answer.ids)
        assert found == ("stop_string", whole[: whole.index(stop)], whole.index(stop) + size)
    answer = await rig.ask(*parts, max_tokens=24, stop=[whole[-1] + "x"])
    assert answer.text == whole, "what was held back is sent when the stop string does not come"


async def test_sampling_through_the_engine(start: Any, parts: Any) -> None:
    rig = await start("llama", replace=ascii_only)
    more = {"max_tokens": 16, "temperature": 1.5}
    drawn = [(await rig.ask(*parts, seed=5, **more)).ids for _ in range(2)]
    assert drawn[0] == drawn[1] != (await rig.ask(*parts, seed=6, **more)).ids
    greedy = await rig.ask(*parts, max_tokens=16)
    assert (await rig.ask(*parts, top_k=1, **more)).ids == greedy.ids
    beside = await asyncio.gather(*(rig.ask(*parts, seed=s, **more) for s in (7, 5, 8)))
    assert beside[1].ids == drawn[0], "a seed decides, whatever runs beside it"


async def test_stages_sum_to_the_time_of_the_first_token(start: Any, parts: Any) -> None:
    rig = await start("llama", max_requests=2, pool_bytes=1 << 20)
    await rig.ask(*parts)
    held = rig.pool.reserve(rig.pool.capacity - 8)  # the next ones wait for room
    tasks = [asyncio.create_task(rig.ask(*parts, recipe=r)) for r in ("full_attention", "prophetkv", "epic")]
    # One waits for room, one behind it, and one for its turn.
    await rig.until(lambda: rig.pool.turn.locked() and rig.servicer.answerer.admission.waiting == 1)
    await asyncio.sleep(0.5)
    rig.pool.release(held)
    for answer in await asyncio.gather(*tasks):
        s = answer.summary.seconds
        stages = s.queue + s.lookup + s.load + s.encode + s.select + s.prefill
        assert s.ttft > 0.49
        assert stages == pytest.approx(s.ttft, abs=0.2)


async def test_cancelled_while_others_have_the_engine(start: Any, parts: Any) -> None:
    """Encoding, selecting, prefill and queue: nothing has reached the engine yet."""
    rig = await start("llama", max_requests=5)
    await rig.ask(*parts)
    gate, running = await rig.block(*parts, recipe="full_attention")
    system, chunks, question = parts
    tasks = {
        "encode": rig.ask(system, [random_ids(8, 77)], question),
        "select": rig.ask(system, chunks, question, recipe="prophetkv", ratio=0.4),
        "prefill": rig.ask(*parts, recipe="full_attention"),
        "prefill over reused parts": rig.ask(*parts, recipe="full_reuse"),
        "queue": rig.ask(*parts),
    }
    asked = [asyncio.create_task(task, name=name) for name, task in tasks.items()]
    await rig.until(lambda: queued(rig) == 4)
    await cancelled(*asked)  # the engine is busy with others: nothing is to be waited for
    gate.opened.set()
    await running
    await rig.ask(*parts, ratio=1.0, expected=oracle("llama").full_attention(parts))


@pytest.mark.parametrize("recipe", ["full_attention", "prophetkv"])
async def test_cancelled_in_its_own_step(recipe: str, start: Any, parts: Any) -> None:
    """Its slots stay its own until the engine has left them."""
    rig = await start("llama")
    gate, running = await rig.block(*parts, recipe=recipe)
    fresh = rig.pool._fresh
    assert fresh > 0
    for _ in range(2):  # by the caller, and by the end of the server's grace
        running.cancel()
        done, _ = await asyncio.wait([running], timeout=0.1)
        assert not done
    assert rig.pool._fresh == fresh
    gate.opened.set()
    await asyncio.wait([running], timeout=60)
    assert running.cancelled()
    assert (await rig.ask(*parts)).ids


async def test_cancelled_while_the_worker_stops(start: Any) -> None:
    """Between two of its steps, of which the second never comes."""
    rig = await start("llama", max_step_tokens=16)
    engine, reached, go = rig.servicer.engine, threading.Event(), threading.Event()
    step = engine.step

    def held(slices: Any) -> None:
        reached.set()
        assert go.wait(60)
        step(slices)

    engine.step = held
    running = asyncio.create_task(rig.ask([], [], random_ids(60, 1)))
    assert await asyncio.to_thread(reached.wait, 60)
    running.cancel()
    await asyncio.sleep(0)
    threading.Timer(0.2, go.set).start()  # while the worker waits for the engine's thread
    await rig.servicer.close()
    await cancelled(running)


async def test_cancelled_at_any_moment(start: Any, parts: Any) -> None:
    rig = await start("llama", pool_bytes=1 << 18, max_requests=3)
    for i in range(40):
        asked = ask_many(rig, (parts[0], [random_ids(10, i), *parts[1]], parts[2]), 4, ratio=0.3, max_tokens=6)
        await asyncio.sleep(i * 0.001)
        asked[i % 4].cancel()
        asked[(i + 1) % 4].cancel()
        await asyncio.wait(asked, timeout=60)
        assert not any(t.exception() for t in asked if not t.cancelled())
        rig.pool.check_integrity()


async def test_cancelled_while_it_waits_for_room(start: Any, parts: Any) -> None:
    rig = await start("llama", pool_bytes=1 << 18)
    held = rig.pool.reserve(rig.pool.capacity)
    first, second = ask_many(rig, parts, 2)
    await rig.until(lambda: rig.pool.turn.locked())
    await cancelled(first)
    rig.pool.release(held)
    assert (await second).ids


async def test_a_failing_job_fails_alone(start: Any, parts: Any) -> None:
    """A token that the model has no embedding for, in one step with two requests.

    On a GPU its ids are on the wrong device as well: there, such a token would end the process's use of the GPU.
    """
    rig = await start("llama")
    expected = await rig.ask(*parts, max_tokens=3)
    gate, running = await rig.block(*parts, recipe="full_attention")
    held = rig.pool.reserve(4)
    bad = ForwardJob(torch.tensor([3, 999_999]), torch.arange(2), (SlotRange(held[0].start, 2),), (), Nothing())
    failing = asyncio.create_task(rig.servicer.engine.run(bad))
    good = ask_many(rig, parts, 2, max_tokens=3)
    await rig.until(lambda: queued(rig) == 3)
    gate.opened.set()
    with pytest.raises(IndexError if rig.model.device.type == "cpu" else RuntimeError):
        await failing
    for task in good:
        assert (await task).ids == expected.ids
    await running
    rig.pool.release(held)


async def test_many_requests_and_a_pool_for_two(start: Any) -> None:
    rig = await start("llama", pool_bytes=150 << 10, replace=ascii_only)
    assert rig.pool.capacity < 3 * 40
    prompts = [([1, 2], [random_ids(12, i % 3), [i, 9]], [5]) for i in range(20)]
    alone = [await rig.ask(*prompt, max_tokens=4) for prompt in prompts]
    finished = []

    async def ask(i: int) -> Any:
        answer = await rig.ask(*prompts[i], max_tokens=4)
        finished.append(i)
        return answer

    together = await asyncio.wait_for(asyncio.gather(*map(ask, range(20))), 200)
    assert [answer.ids for answer in together] == [answer.ids for answer in alone]
    assert max(abs(i - at) for at, i in enumerate(finished)) <= 4, "who came first is served first"


async def test_a_prompt_that_fits_no_empty_pool(start: Any, parts: Any) -> None:
    rig = await start("llama", pool_bytes=100 << 10)
    capacity = rig.pool.capacity
    for recipe in ("full_attention", "prophetkv"):
        for long, tokens in ((([1], [random_ids(capacity, 1)], [5]), 1), (parts, capacity)):
            with pytest.raises(ResourceExhausted, match="pool_bytes"):
                await rig.ask(*long, recipe=recipe, max_tokens=tokens)
    assert (await rig.ask(*parts)).ids


async def test_more_than_may_wait_are_refused(start: Any, parts: Any) -> None:
    rig = await start("llama", max_requests=1, max_queue=2)
    gate, running = await rig.block(*parts)
    waiting = ask_many(rig, parts, 2)
    await rig.until(lambda: rig.servicer.answerer.admission.waiting == 2)
    with pytest.raises(ResourceExhausted, match="try again later") as refused:
        await rig.ask(*parts)
    assert (refused.value.retry_after or 0) > 0
    await cancelled(waiting[0])
    (late,) = ask_many(rig, parts, 1)
    await rig.until(lambda: rig.servicer.answerer.admission.waiting == 2)
    gate.opened.set()
    for task in (running, waiting[1], late):
        assert (await task).ids


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"recipe": "magic"}, "unknown recipe 'magic'; known: full_attention"),
        ({"ratio": float("nan")}, "it must be from 0 to 1"),
        ({"question": [260]}, "the question holds token id 260, but the vocabulary has 260 tokens"),
        ({"chunks": [[1], [2**32 - 1]]}, "chunk 1 holds token id 4294967295"),
        ({"chunks": [[]]}, "chunk 0 is empty"),
        ({"system": [300]}, "the system prompt holds token id 300"),
        ({"max_tokens": 2043}, "more than the model's maximum of 2048 in total"),
        ({"temperature": -1.0}, "temperature"),
        ({"tenant": "x" * 257}, "tenant"),
        ({"variants": [[b"short"]], "chunks": [[1]]}, "a variant of chunk 0 is not 32 bytes long"),
    ],
    ids=str,
)
async def test_bad_requests(change: dict[str, Any], message: str, start: Any) -> None:
    rig = await start("llama")
    fields = {"system": [1], "chunks": [[1, 2]], "question": [3, 4, 5], **change}
    parts = [fields.pop(name) for name in ("system", "chunks", "question")]
    with pytest.raises(InvalidArgument, match=message):
        await rig.ask(*parts, **fields)


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
def test_a_prompt_that_is_too_long_is_told_only_what_helps(prompt: int, answer: int, context: int, said: str) -> None:
    assert shorten(prompt, answer, 100, context) == said
