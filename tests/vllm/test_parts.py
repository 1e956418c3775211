"""What the connector is made of, without vLLM: what it believes of a request, prefixes, and pages of any layout."""

import asyncio
import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fusionkv.kvcache_service.client import Entry, Hit, HitKind, Lookup
from fusionkv.kvcache_service.keys import chunk_digest
from fusionkv.protos.runtime.errors import Unavailable
from fusionkv.vllm_connector.background import Background
from fusionkv.vllm_connector.options import ConnectorOptions
from fusionkv.vllm_connector.pages import Pages
from fusionkv.vllm_connector.prompts import FusedPrompt, KVLayout, Prefix, alterations, digest
from fusionkv.vllm_connector.scheduler import ConnectorScheduler
from fusionkv.vllm_connector.steps import VLLMSteps
from tests.kvcache_service.tools import serving
from tests.waiting import until

LAYOUT = KVLayout(30, 3, 64, "bfloat16")
OPTIONS = ConnectorOptions(chunk_tokens=4)
PROMPT = list(range(100, 120))
GOOD = {
    "worker": "10.0.0.1:7071", "handle": "ab" * 16, "tokens": 19, "model_fingerprint": "cd" * 32,
    "checksum": "ef" * 16, "prompt_digest": hashlib.sha256(np.array(PROMPT[:19], "<u4").tobytes()).hexdigest(),
    "dtype": "bfloat16", "layers": 30, "kv_heads": 3, "head_dim": 64, "path": "/proc/12/fd/34",
}  # fmt: skip


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"cash": "x"}, "cash is not one of cache, chunk_tokens"),
        ({"chunk_tokens": 0}, "chunk_tokens: 0 is outside 1"),
        ({"pool_bytes": "much"}, "pool_bytes: not a size: 'much'"),
        ({"listen": "127.0.0.1:1"}, "listen needs pool_bytes"),
    ],
)
def test_options_that_are_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=f"kv_connector_extra_config.{why}"):
        ConnectorOptions.of(given)


def test_options_are_read_as_settings_are() -> None:
    """As texts too, with units; null is the default."""
    read = ConnectorOptions.of({"pool_bytes": "1GiB", "load_seconds": "2.5", "chunk_tokens": "64", "cache": None})
    assert read == ConnectorOptions(pool_bytes=1 << 30, load_seconds=2.5, chunk_tokens=64)


def test_a_prompt_that_fits() -> None:
    prompt = FusedPrompt.of({"fusionkv": GOOD, "else": 1})
    assert prompt is not None
    assert prompt.mismatch(LAYOUT, "cd" * 32, PROMPT) == ""
    assert digest(PROMPT[:19]) == GOOD["prompt_digest"]
    assert FusedPrompt.of(None) is FusedPrompt.of({"other": 1}) is None


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"layers": 31}, "vLLM's is"),
        ({"dtype": "float16"}, "vLLM's is"),
        ({"model_fingerprint": "00" * 32}, "the KV is of model 0000000000000000"),
        ({"tokens": 20}, "the KV has 20 tokens, but the prompt has 20"),
        ({"tokens": 0}, "the KV has 0 tokens"),
        ({"tokens": 18}, "the KV is of another prompt"),
    ],
)
def test_a_prompt_that_does_not_fit(wrong: dict[str, Any], why: str) -> None:
    prompt = FusedPrompt.of({"fusionkv": {**GOOD, **wrong}})
    assert prompt is not None
    assert why in prompt.mismatch(LAYOUT, "cd" * 32, PROMPT)


@pytest.mark.parametrize(
    "wrong",
    [
        "x", None, {"more": 1}, {"tokens": "19"}, {"tokens": True}, {"handle": "no"}, {"checksum": None},
        {"path": "/etc/passwd"}, {"path": "/proc/1/fd/2/../../../etc/passwd"},
    ],
)  # fmt: skip
def test_what_is_no_prompt(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"fusionkv|hexadecimal"):
        FusedPrompt.of({"fusionkv": {**GOOD, **wrong} if isinstance(wrong, dict) else wrong or {}})


@contextmanager
def scheduling_over(cache: str, folder: Path) -> Iterator[ConnectorScheduler]:
    background = Background(cache, None)
    try:
        yield ConnectorScheduler(background, str(folder), {}, LAYOUT, 1, 4, OPTIONS)
    finally:
        background.close()


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[ConnectorScheduler]:
    """Without a cache service or a worker that answers."""
    (tmp_path / "config.json").write_text("{}")
    with scheduling_over("127.0.0.1:1", tmp_path) as made:
        made._fingerprint.result(5)
        yield made


def available(scheduler: ConnectorScheduler) -> Any:
    """How many tokens a request has elsewhere, once that is known."""
    found = scheduler._requests["0"].available
    assert found is not None
    return found


def asked(**more: Any) -> Any:
    """A request as vLLM's scheduler has it."""
    plain: dict[str, Any] = {"kv_transfer_params": None, "cache_salt": None, "lora_request": None, "mm_features": []}
    plain |= {"prompt_token_ids": PROMPT, "prompt_embeds": None}
    return SimpleNamespace(request_id="0", **{**plain, **more})


@pytest.mark.parametrize(
    "more",
    [{"lora_request": object()}, {"mm_features": [object()]}, {"prompt_embeds": torch.zeros(20, 8)}],
    ids=["adapter", "image", "embeddings"],
)
def test_kv_of_more_than_tokens_is_not_shared(
    more: dict[str, Any], scheduler: ConnectorScheduler, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither the keys of the cache service nor a fused prompt's digest tell it apart."""
    request = asked(**more)
    assert scheduler.matched(request, 0) == (0, False)
    assert not scheduler.finished(request, (0, 1, 2, 3, 4), completed=True), "saved"
    assert scheduler.transfers() == []

    fitting = {**GOOD, "model_fingerprint": scheduler._fingerprint.result().hex(), "worker": "127.0.0.1:1"}
    request = asked(kv_transfer_params={"fusionkv": fitting}, **more)
    scheduler.matched(request, 0)
    assert available(scheduler).result(5) == 0
    assert "the request has an adapter, images or embeddings" in caplog.text


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"cache_salt": None}, "needs a cache_salt"),
        ({"lora_request": object()}, "an adapter, images or embeddings"),
        ({"prompt_embeds": torch.zeros(20, 8), "prompt_token_ids": None}, "there is no question"),
        ({"kv_transfer_params": {"fusionkv": {"spans": [[2, 20]]}}}, "there is no question"),
    ],
)
def test_passages_that_are_not_fused(scheduler: ConnectorScheduler, more: dict[str, Any], why: str) -> None:
    """vLLM computes the prompt, and says why."""
    spans = {"cache_salt": "fused", "kv_transfer_params": {"fusionkv": {"spans": [[2, 9], [9, 15]]}}}
    request = asked(**spans)
    assert scheduler.matched(request, 0) == (0, False)
    assert "set pool_bytes" in scheduler.figures(request)["degraded_reason"]  # type: ignore[index]
    scheduler.finished(request, (), completed=True)

    scheduler._fuses = True
    request = asked(**spans)
    assert scheduler.matched(request, 4) == (11, True)
    assert scheduler.figures(request) is None
    scheduler.finished(request, (), completed=False)

    request = asked(**{**spans, **more})
    assert scheduler.matched(request, 0) == (0, False)
    assert why in scheduler.figures(request)["degraded_reason"]  # type: ignore[index]


def test_figures_of_requests_that_have_ended(scheduler: ConnectorScheduler) -> None:
    """A gateway's call gets them by its ticket, whatever became of the request."""
    scheduler._fuses = True
    reused: dict[str, Any] = {"spans": [[2, 9], [9, 15]], "recipe": "prophetkv"}
    for asks, computed, figures in (
        (reused, 15, {"tokens_reused": 13, "tokens_recomputed": 0}),  # vLLM's prefix cache has all
        (reused, 12, {"tokens_reused": 10, "tokens_recomputed": 3}),  # and here all but a part of the last page
        ({**reused, "recipe": "full_attention"}, 4, {"tokens_lossless": 2, "tokens_recomputed": 11}),
        ({**reused, "spans": []}, 0, {"degraded": True}),
        (reused, 4, {"tokens_encoded": 13}),
    ):
        request = asked(cache_salt="fused", kv_transfer_params={"fusionkv": {**asks, "ticket": "t"}})
        if scheduler.matched(request, computed)[1]:
            scheduler.fused({"0": figures})
        assert scheduler.told() == {}
        scheduler.finished(request, (), completed=True)
        told = scheduler.told()
        assert told["t"].items() >= figures.items()
    request = asked(cache_salt="fused", kv_transfer_params={"fusionkv": reused})
    scheduler.matched(request, 0)
    scheduler.finished(request, (), completed=True)
    assert scheduler.told() == {}


def test_steps_run_in_the_thread_of_vllm() -> None:
    """One while vLLM is busy; errors, and its end, reach the engine."""
    steps = VLLMSteps(torch.device("cpu"))
    assert steps.step(threading.get_ident) == threading.get_ident()  # before vLLM runs steps
    steps.start()
    with ThreadPoolExecutor(3) as engine:
        asked = [engine.submit(steps.step, threading.get_ident) for _ in range(2)]
        while len(steps._calls) < 2:
            time.sleep(0.001)
        steps.run(busy=True, loading=lambda: True)
        assert wait(asked, 5, FIRST_COMPLETED).done
        assert len(steps._calls) == 1
        steps.run(busy=False, loading=lambda: False)
        assert [each.result(5) for each in asked] == [threading.get_ident()] * 2

        def fail() -> None:
            raise ValueError("no")

        asked = [engine.submit(steps.step, fail)]
        while not asked[0].done():
            steps.run(busy=False, loading=lambda: True)
        with pytest.raises(ValueError, match="no"):
            asked[0].result()
        waits = engine.submit(steps.step, fail)
        while not steps._calls:
            time.sleep(0.001)
        steps.close()
        for ended in (waits, engine.submit(steps.step, fail)):
            with pytest.raises(Unavailable, match="shutting down"):
                ended.result(5)


def test_long_work_is_drawn_in_several_turns() -> None:
    """While vLLM is busy, each of its steps gets one turn."""
    steps, drawn = VLLMSteps(torch.device("cpu")), list[int]()

    def work() -> Iterator[int]:
        for number in range(6):
            drawn.append(threading.get_ident())
            time.sleep(0.002)  # two are one turn, of 3 ms
            yield number

    steps.start()
    with ThreadPoolExecutor(1) as engine:
        asked = engine.submit(steps.draw, work())
        while not asked.done():
            before = len(drawn)
            steps.run(busy=True, loading=lambda: True)
            assert len(drawn) - before <= 2
    assert (asked.result(), drawn) == (5, [threading.get_ident()] * 6)


def test_a_preempted_request_is_marked(scheduler: ConnectorScheduler) -> None:
    scheduler._fuses = True
    request = asked(cache_salt="fused", kv_transfer_params={"fusionkv": {"spans": [[2, 15]]}})
    assert scheduler.matched(request, 0) == (15, True)
    scheduler.allocated(request, (0, 1), 15)
    (load,) = scheduler.transfers()
    assert (load.start, load.stop) == (0, 15)  # type: ignore[union-attr]
    scheduler.fused({"0": {"tokens_recomputed": 3}, "another": {}})
    assert scheduler.figures(request) == {"tokens_recomputed": 3}
    assert scheduler.matched(request, 0) == (0, False)
    assert "preempted" in scheduler.figures(request)["degraded_reason"]  # type: ignore[index]


def test_kv_of_a_model_that_flags_change_is_kept_apart(scheduler: ConnectorScheduler, tmp_path: Path) -> None:
    """The fingerprint covers the model's files alone."""

    def config(**more: Any) -> Any:
        """As vLLM's ModelConfig has them."""
        usual: dict[str, Any] = {
            "model": "org/name",
            "quantization": None,
            "hf_overrides": {},
            "hf_config_path": None,
        }
        return SimpleNamespace(**{**usual, "revision": None, **more})

    assert alterations(config()) == alterations(config(revision="main")) == {}
    assert alterations(config(model=str(tmp_path), revision="v1")) == {}  # of a directory it has no meaning
    with pytest.raises(ValueError, match="a function"):
        alterations(config(hf_overrides=lambda config: config))
    rope: dict[str, Any] = {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}
    different: tuple[dict[str, Any], ...] = (
        {},
        {"quantization": "fp8"},
        {"hf_overrides": rope},
        {"hf_overrides": {"rope_parameters": {**rope["rope_parameters"], "factor": 4.0}}},
        {"hf_config_path": "/other"},
        {"revision": "v1"},
    )
    namespaces, prefix = set(), Prefix.of(PROMPT, "", 4)
    fitting = {**GOOD, "model_fingerprint": scheduler._fingerprint.result().hex(), "worker": "127.0.0.1:1"}
    source = FusedPrompt.of({"fusionkv": fitting})
    assert source is not None
    for flags in different:
        found = alterations(config(**flags))
        made = ConnectorScheduler(scheduler._background, str(tmp_path), found, LAYOUT, 1, 4, OPTIONS)
        namespaces.add(made._namespace(b"f" * 32, prefix, 0))
        assert made._mismatch(source, made._fingerprint.result(5), PROMPT) == (
            "" if found.keys() <= {"quantization"} else f"vLLM's {next(iter(found))} makes another model of its files"
        )
    assert len(namespaces) == len(different)


@pytest.mark.parametrize(
    "more",
    [{"kv_transfer_params": {"fusionkv": {**GOOD, "worker": "\ud800"}}}, {"cache_salt": "\ud800"}],
    ids=["worker", "salt"],
)
def test_what_nobody_expects_ends_no_engine(more: dict[str, Any], scheduler: ConnectorScheduler) -> None:
    if (params := more.get("kv_transfer_params")) is not None:
        params["fusionkv"]["model_fingerprint"] = scheduler._fingerprint.result().hex()
    request = asked(**more)
    scheduler.matched(request, 0)
    wait([available(scheduler)], 5)
    assert scheduler.matched(request, 0) == (0, False)
    scheduler.finished(request, (0, 1, 2, 3, 4), completed=True)


async def test_workers_that_are_gone_are_forgotten(tmp_path: Path) -> None:
    """They come back under other addresses, and a client of each would reconnect for ever."""
    background = Background("", None)
    prompt = FusedPrompt.of({"fusionkv": {**GOOD, "worker": "127.0.0.1:1"}})
    assert prompt is not None
    try:
        async with serving(tmp_path / "data") as service:  # it answers, which is enough to be connected

            async def use(there: str) -> tuple[bool, list[str]]:
                async with background.worker(there) as client:
                    await client.answers(5)
                async with background.worker(there) as again:
                    return again is client, [*background._workers]

            there = service.client.address
            assert await asyncio.wrap_future(background.run(use(there))) == (True, [there])
            await asyncio.wrap_future(background.run(background.release(prompt, "")))
            assert [*background._workers] == [there]
        await until(lambda: not background._workers[there].connected)
        await asyncio.wrap_future(background.run(background.release(prompt, "")))
        assert background._workers == background._users == {}
    finally:
        background.close()


async def test_a_request_that_ends_during_its_lookup_leaves_no_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = threading.Event()
    monkeypatch.setattr("fusionkv.vllm_connector.scheduler.fingerprint", lambda _: known.wait(30) and b"f" * 32)
    async with serving(tmp_path / "data") as service:
        with scheduling_over(service.client.address, tmp_path) as found:
            prefix = Prefix.of(PROMPT, "", 4)
            namespace = found._namespace(b"f" * 32, prefix, 0)
            await service.put(prefix.path(1), b"kv", namespace=namespace, tokens=4, base=0)
            request = asked()
            assert found.matched(request, 0) == (None, False)
            looked_up = available(found)
            assert not found.finished(request, (0, 1, 2, 3, 4), completed=False)
            known.set()
            assert await asyncio.wrap_future(looked_up) == 4
            await until(lambda: not any(entry.leases for entry in service.store.entries))


async def test_of_a_longer_prompt_than_the_cache_service_takes_the_beginning_is_shared(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    async with serving(tmp_path / "data") as service:
        with scheduling_over(service.client.address, tmp_path) as found:
            request = asked(prompt_token_ids=list(range(4 * 300)))
            prefix = Prefix.of(request.prompt_token_ids, "", 4)
            namespace = found._namespace(found._fingerprint.result(5), prefix, 0)
            await service.put(prefix.path(1), b"kv", namespace=namespace, tokens=4, base=0)
            last = prefix.path(len(prefix.digests))
            await service.put(last, b"kv", namespace=namespace, tokens=4, base=4 * (len(last) - 2))
            found.matched(request, 0)
            assert await asyncio.wrap_future(available(found)) == 4


def test_prefixes() -> None:
    prefix = Prefix.of(list(range(1000)), "salt", 256)
    assert prefix.digests == tuple(chunk_digest(range(at, at + 256)) for at in (0, 256, 512))
    assert prefix.path(2) == [chunk_digest(()), *prefix.digests[:2]]
    assert len(Prefix.of(range(768), "", 256).digests) == 2  # the last token is always computed
    assert len(Prefix.of(range(769), "", 256).digests) == 3
    assert Prefix.of(range(200), "", 256).digests == ()

    def hit(kind: HitKind, tokens: int = 256) -> Hit:
        return Hit(kind, Entry(b"", 1, tokens, 0, b"", "memory", b""))

    none, exact, stale = Hit(HitKind.MISS, None), hit(HitKind.EXACT), hit(HitKind.ALTERNATIVE)
    for hits, count in (
        ((none, exact, exact, exact), 3),
        ((none, exact, none, exact), 1),
        ((none, stale, exact, exact), 0),
        ((none, exact, hit(HitKind.EXACT, 128), exact), 1),
    ):
        assert prefix.exact_chunks(Lookup(hits, 1)) == count


Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


def strided(keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """[blocks, heads, size, 2 * dim], as FlashAttention has it."""
    size, dim = cache.shape[2], keys.shape[-1]
    cache[slots // size, :, slots % size, :dim] = keys
    cache[slots // size, :, slots % size, dim:] = values


def halves(keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """[2, blocks, size, heads, dim], as older versions have it."""
    size = cache.shape[2]
    cache[0, slots // size, slots % size] = keys
    cache[1, slots // size, slots % size] = values


def packed(keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """[blocks, heads, size, 2 * dim], keys by columns and then values by pairs of tokens, as a CPU packs them."""
    blocks, heads, size, twice = cache.shape
    dim = twice // 2
    flat = cache.view(blocks, heads, 2, size * dim)
    for i, slot in enumerate(slots.tolist()):
        block, at = divmod(slot, size)
        flat[block, :, 0].view(heads, dim, size)[:, :, at] = keys[i]
        flat[block, :, 1].view(heads, size // 2, dim, 2)[:, at // 2, :, at % 2] = values[i]


class Layer:
    """An attention layer as the connector sees it."""

    num_kv_heads, head_size = 3, 20

    def __init__(self, write: Write) -> None:
        self.impl, self._write = self, write

    def do_kv_cache_update(self, layer: Any, keys: Any, values: Any, cache: Any, slots: Any) -> None:
        assert keys.is_contiguous()
        assert values.is_contiguous()
        self._write(keys, values, cache, slots)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("write", [strided, halves, packed])
def test_pages_of_any_layout(write: Write, dtype: torch.dtype) -> None:
    blocks, size, layers = 11, 16, 12
    shape = (2, blocks, size, 3, 20) if write is halves else (blocks, 3, size, 40)
    # Given in another order than the model's: layer 10 comes behind layer 9.
    names = sorted(f"model.layers.{n}.attn" for n in range(layers))
    caches = {name: torch.full(shape, 7.0, dtype=dtype) for name in names}
    pages = Pages(caches, {name: Layer(write) for name in names}, blocks)
    assert (len(pages), pages.page_tokens, pages.token_bytes()) == (12, size, 12 * 2 * 3 * 20 * dtype.itemsize)
    kv = torch.randn(layers, 2, 50, 3, 20, generator=torch.Generator().manual_seed(1)).to(dtype)
    mine = [8, 2, 5, 0, 9]
    assert [*pages.write(kv, mine, 10)] == [None] * layers
    assert pages.read(mine, 10, 60).equal(kv)
    assert pages.read(mine, 33, 41).equal(kv[:, :, 23:31])
    assert pages.read([1, 3, 4], 0, 48).unique().tolist() == [7.0]  # nobody else's were touched
    first = torch.zeros(shape, dtype=dtype)
    write(kv[10, 0], kv[10, 1], first, torch.tensor([mine[p // size] * size + p % size for p in range(10, 60)]))
    there = first != 0
    assert caches["model.layers.10.attn"][there].equal(first[there])


def test_pages_that_can_not_be_used() -> None:
    layer, other = Layer(strided), type("L", (), {"impl": object()})()
    for shape, dtype, given, why in (
        ((4, 3, 16, 40), torch.uint8, layer, "set kv_cache_dtype to auto"),
        ((3, 3, 16, 40), torch.float32, layer, "which dimension"),
        ((4, 3, 16, 40), torch.float32, other, "has no do_kv_cache_update"),
    ):
        with pytest.raises(ValueError, match=why):
            Pages({"l.0": torch.zeros(shape, dtype=dtype)}, {"l.0": given}, shape[0])
