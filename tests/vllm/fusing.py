"""Checks of fused prefill inside vLLM, in one process with it: run by test_fusing.py with vLLM's Python.

usage: fusing.py MODEL CACHE PID EXPECTED [CHECK...]

PID: of the cache service. EXPECTED: a fusion worker's answers, by recipe, as JSON. CHECK: all by default.
"""

import asyncio
import gc
import json
import os
import queue
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

# One process: the checks look at vLLM's model and at the connector's pool.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
# One thread: threads that wait for each other on a busy machine spin, which would count as processor time.
os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

import torch
from tokenizers import Tokenizer
from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group  # pyright: ignore[reportMissingImports]

from fusionkv.fusion_worker import models
from fusionkv.fusion_worker.client import WorkerClient
from fusionkv.protos.fusion.v1 import fusion_pb2 as pb
from fusionkv.vllm_connector.network import model_among
from fusionkv.vllm_connector.spans import SpannedPrompt

SYSTEM, QUESTION = [1, 5, 6, 7], [9, 8, 7, 6, 5]
TOKENS = 8
Found = tuple[list[int], dict[str, Any]]


def chunk(seed: int, tokens: int = 150) -> list[int]:
    return [10 + (seed * 7919 + i * i * 31 + i * 7) % 240 for i in range(tokens)]


def joined(chunks: Iterable[Sequence[int]], system: Sequence[int] = SYSTEM) -> tuple[list[int], list[list[int]]]:
    """A prompt and the spans of its chunks."""
    ids, spans = list(system), []
    for each in chunks:
        spans.append([len(ids), len(ids) + len(each)])
        ids += each
    return ids + QUESTION, spans


class Checks:
    def __init__(self, model: Path, cache: str, expected: dict[str, list[int]]) -> None:
        self.directory, self.expected = model, expected
        transfer: dict[str, Any] = {
            "kv_connector": "FusionKVConnector",
            "kv_connector_module_path": "fusionkv.vllm_connector.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
        }
        self.listen = f"unix:/tmp/fusing-{os.getpid()}.sock"
        options = {"cache": cache, "pool_bytes": 1 << 26, "separator": "</s>", "listen": self.listen}
        transfer["kv_connector_extra_config"] = options
        limit = min(4096, json.loads((model / "config.json").read_text())["max_position_embeddings"])
        flags: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "max_model_len": limit, "max_num_seqs": 8}
        # Prompts are longer than a step of vLLM, and few long answers fit its 48 pages of 128 tokens.
        flags |= {"max_num_batched_tokens": 256, "enable_chunked_prefill": True, "num_gpu_blocks_override": 48}
        flags |= {"kv_transfer_config": transfer}
        self.llm = LLM(str(model), **flags)
        self.engine = self.llm.llm_engine
        self.connector: Any = get_kv_transfer_group()
        self.salts = 0

    def params(self, tokens: int = TOKENS, **fused: Any) -> SamplingParams:
        extra = {"kv_transfer_params": {"fusionkv": fused}} if fused else None
        return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=tokens > TOKENS, extra_args=extra)

    def ask(
        self, *asked: tuple[list[int], dict[str, Any]], salt: str | None = "", tokens: int = TOKENS
    ) -> list[Found]:
        """Asks all at once. salt: empty makes one for each; None gives none. tokens: of each answer."""
        prompts = []
        for ids, _ in asked:
            self.salts += 1
            more = {} if salt is None else {"cache_salt": salt or f"salt-{self.salts}"}
            prompts.append({"prompt_token_ids": ids, **more})
        outs = self.llm.generate(prompts, [self.params(tokens, **fused) for _, fused in asked], use_tqdm=False)
        return [(list(o.outputs[0].token_ids), (o.kv_transfer_params or {}).get("fusionkv", {})) for o in outs]

    def fused(self, chunks: Sequence[Sequence[int]], salt: str | None = "", **more: Any) -> Found:
        ids, spans = joined(chunks)
        return self.ask((ids, {"spans": spans, "tenant": "all", **more}), salt=salt)[0]

    def plain(self, chunks: Sequence[Sequence[int]]) -> list[int]:
        return self.ask((joined(chunks)[0], {}))[0][0]

    def idle(self) -> None:
        """Nothing is pinned or reserved once the connector's loop has come to rest."""
        until = time.monotonic() + 30
        while True:
            try:
                return self.connector._fusing.pool.check_integrity(idle=True)
            except AssertionError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)

    def check_model(self) -> None:
        """Logits of vLLM's weights through transformers' modules are transformers' own; nothing else is copied."""
        gc.unfreeze()  # vLLM freezes what exists after its start
        config = self.engine.vllm_config.compilation_config
        theirs = model_among(config.static_forward_context)
        ours, own = self.connector._fusing._model.network, models.load(self.directory, dtype="float32").network
        ids = torch.tensor([chunk(1)])
        own.config._attn_implementation = ours.config._attn_implementation = "sdpa"
        try:
            with torch.inference_mode():
                mine, right = (each(ids, use_cache=False).logits for each in (ours, own))
        finally:
            ours.config._attn_implementation = "fusionkv"
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-4)
        there = {p.untyped_storage().data_ptr() for p in theirs.parameters()}
        copied = {name for name, p in ours.named_parameters() if p.untyped_storage().data_ptr() not in there}
        # Gemma's norms, with 1 added (`kernels.norms`).
        norms = {name for name, _ in ours.named_parameters() if "norm" in name}
        assert copied <= (norms if ours.config.model_type.startswith("gemma") else set())

    def check_all_recomputed(self) -> None:
        """r = 1 is vLLM's own prefill, for a prompt that nothing was reused of, and for one of known chunks."""
        for chunks in ([chunk(1), chunk(2), chunk(3)], [chunk(3), chunk(1), chunk(2)]):
            tokens, figures = self.fused(chunks, recipe="prophetkv", ratio=1)
            assert tokens == self.plain(chunks)
            assert "degraded" not in figures
            assert figures.get("tokens_recomputed", 0) + figures.get("tokens_lossless", 0) == 450

    def check_recipes(self) -> None:
        """Every recipe gives the fusion worker's answer, from what the worker has stored; r = 0 its full reuse."""
        for name, right in self.expected.items():
            recipe, _, ratio = name.partition("@")
            more = {"ratio": float(ratio)} if ratio else {}
            chunks = [chunk(3), chunk(1), chunk(2)]
            tokens, figures = self.fused(chunks, recipe=recipe, corpus="c", tenant=name, **more)
            assert "degraded" not in figures, figures
            assert "chunks_missed" not in figures, figures
            assert tokens == right, (name, tokens, right, figures)

    def check_other_order(self) -> None:
        chunks = [chunk(n) for n in (11, 12, 13, 14)]
        _, first = self.fused(chunks, recipe="prophetkv")
        assert first["chunks_missed"] == 4
        for order in (chunks[::-1], [chunks[i] for i in (2, 0, 3, 1)]):
            _, figures = self.fused(order, recipe="prophetkv")
            assert "chunks_missed" not in figures
            assert sum(hit["chunks"] for hit in figures["hits"]) == 4
            assert figures["tokens_recomputed"] == 120  # 20% of 600

    def check_others_go_on(self) -> None:
        """A running answer gets a token between any two steps of a fused prefill."""
        other = self.engine.add_request("running", {"prompt_token_ids": chunk(97)}, self.params(300))
        got: dict[str, int] = {}

        def step() -> None:
            got.update({out.request_id: len(out.outputs[0].token_ids) for out in self.engine.step()})

        while not got:
            step()
        ids, spans = joined(chunk(100 + n) for n in range(8))
        asked = {"prompt_token_ids": ids, "cache_salt": "others"}
        self.engine.add_request("fused", asked, self.params(spans=spans, recipe="prophetkv"))
        before = got["running"]
        while "fused" not in got:
            step()
        # 1,200 tokens to encode and 240 to recompute, at most 256 in a step.
        assert got["running"] - before >= 6
        self.engine.abort_request([other], internal=False)
        while self.engine.has_unfinished_requests():
            step()

    def check_others_wait_no_longer(self) -> None:
        """Beside a fused prefill of 3,900 tokens, steps take about as long as beside vLLM's of the 780 recomputed."""
        ids, spans = joined(chunk(200 + n) for n in range(26))
        fused = self.params(spans=spans, recipe="prophetkv", tenant="all")
        self.ask((ids, {"spans": spans, "recipe": "prophetkv", "tenant": "all"}))
        other = self.engine.add_request("running", {"prompt_token_ids": chunk(98)}, self.params(1000))
        moved = [i for span in reversed(spans) for i in ids[slice(*span)]]
        longest: dict[str, list[float]] = {"fused": [], "plain": []}
        # On a busy machine the longest of 60 steps is by chance longer than that of 4: medians of 26 and 26 ms there.
        for number in range(5):
            for name, params, context in (("fused", fused, moved), ("plain", self.params(), moved[:780])):
                prompt = {"prompt_token_ids": [*SYSTEM, *context, *QUESTION], "cache_salt": f"{name}-{number}"}
                self.engine.add_request(f"{name}-{number}", prompt, params)
                seconds, got = list[float](), set[str]()
                while f"{name}-{number}" not in got:
                    began = time.process_time()
                    got |= {out.request_id for out in self.engine.step()}
                    seconds.append(time.process_time() - began)
                longest[name].append(max(seconds))
                print(f"{name}: {len(seconds)} steps, the longest {max(seconds):.3f} s", flush=True)
        self.engine.abort_request([other], internal=False)
        while self.engine.has_unfinished_requests():
            self.engine.step()
        assert statistics.median(longest["fused"]) <= 1.5 * statistics.median(longest["plain"])

    def check_parameters(self) -> None:
        chunks = [chunk(21), chunk(22)]
        ids, spans = joined(chunks)
        right = self.plain(chunks)
        for wrong, why in (
            ({"spans": []}, "is empty"),
            ({"spans": [[4, 154], [160, 304]]}, "does not begin where"),
            ({"spans": [[4, 4], [4, 304]]}, "is empty, or"),
            ({"spans": [[4, len(ids)]]}, "there is no question"),
            ({"spans": [[4, "x"]]}, "pairs of positions"),
            ({"spans": [[-1, 154]]}, "does not begin where"),
            ({"spans": spans, "more": 1}, "more is not one of"),
            ({"spans": spans, "ratio": "1"}, "ratio has the wrong type"),
            ({"spans": spans, "ratio": 2}, "from 0 to 1"),
            ({"spans": spans, "recipe": "none"}, "unknown recipe"),
            ({"spans": spans, "recipe": "ape"}, "only the fusion worker can decode"),
            ({"spans": spans, "recipe": "cacheclip"}, "small second model"),
            ({"spans": spans, "tenant": "t" * 300}, "longer than 256"),
        ):
            tokens, figures = self.ask((ids, wrong))[0]
            assert figures.get("degraded"), wrong
            assert why in figures["degraded_reason"], figures
            assert tokens == right, wrong
        tokens, figures = self.fused(chunks, salt=None)
        assert "needs a cache_salt" in figures["degraded_reason"]
        assert tokens == right
        tokens, figures = self.fused(chunks, recipe="full_attention")
        assert tokens == right
        assert (figures["recipe"], figures["ratio"], figures["context_tokens"]) == ("full_attention", 1, 300)
        assert figures["tokens_recomputed"] + figures["tokens_lossless"] == 300

    def check_preempted(self) -> None:
        """Of eight answers that do not fit vLLM's pages together, some are begun again, and marked."""
        prompts = [joined([chunk(110 + n), chunk(120 + n)]) for n in range(8)]
        asked = [(ids, {"spans": spans, "recipe": "prophetkv", "ratio": 1}) for ids, spans in prompts]
        found = self.ask(*asked, tokens=800)
        marked = [figures["degraded_reason"] for _, figures in found if figures.get("degraded")]
        assert marked
        assert all("preempted" in why for why in marked), marked
        plain = self.ask(*((ids, {}) for ids, _ in prompts), tokens=800)
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in plain]

    def check_prefix_hit_first(self) -> None:
        """Only what vLLM's own prefix cache lacks is written."""
        chunks = [chunk(31), chunk(32), chunk(33)]
        for other in (chunk(34), chunk(35)):
            tokens, figures = self.fused([*chunks, other], salt="the same", recipe="prophetkv", ratio=1)
            assert "degraded" not in figures
            assert tokens == self.plain([*chunks, other])

    def check_repeated(self) -> None:
        """A prompt that vLLM's prefix cache has up to its last page is not fused again."""
        chunks = [chunk(36), chunk(37), chunk(38)]
        right, _ = self.fused(chunks, salt="repeated")
        tokens, figures = self.fused(chunks, salt="repeated")
        assert tokens == right
        assert "hits" not in figures
        assert (figures["tokens_reused"], figures["tokens_recomputed"]) == (3 * 128 - len(SYSTEM), 450 + 4 - 3 * 128)

    def check_reset(self) -> None:
        """What vLLM forgets of its prefixes is fused again, from the pool; while it sleeps, nothing is lost."""
        chunks = [chunk(131), chunk(132), chunk(133)]
        right, _ = self.fused(chunks, salt="reset")

        def reset() -> None:
            assert self.llm.reset_prefix_cache()

        def sleep() -> None:
            self.llm.sleep(level=1)
            self.llm.wake_up()

        for forget in (reset, sleep):
            forget()
            again, figures = self.fused(chunks, salt="reset")
            assert again == right
            assert "chunks_missed" not in figures
            assert sum(hit["chunks"] for hit in figures["hits"]) == 3

    def check_reset_while_fusing(self) -> None:
        """A request that waits for its KV goes on, or its blocks come back."""
        blocks = self.engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        self.plain([chunk(136)])
        before, chunks = blocks.get_num_free_blocks(), [chunk(137), chunk(138)]
        ids, spans = joined(chunks)
        for number, mode in enumerate(("keep", "keep", "abort")):
            asked = {"prompt_token_ids": ids, "cache_salt": f"asleep-{number}"}
            self.engine.add_request(f"asleep-{number}", asked, self.params(spans=spans, recipe="prophetkv", ratio=1))
            self.engine.step()
            assert not self.llm.reset_prefix_cache()  # vLLM resets no prefixes while blocks are in use
            self.llm.sleep(level=0, mode=mode)
            self.llm.wake_up(tags=["scheduling"])
            if mode == "abort":
                self.engine.abort_request(
                    [f"asleep-{number}"], internal=False
                )  # vLLM's sleep told the scheduler alone
            outs = []
            while self.engine.has_unfinished_requests():
                outs = self.engine.step() or outs
            assert bool(outs) is (mode == "keep")
            if outs:
                assert "degraded" not in outs[0].kv_transfer_params["fusionkv"]
                assert list(outs[0].outputs[0].token_ids) == self.plain(chunks)
        self.plain([chunk(136)])
        self.idle()
        assert blocks.get_num_free_blocks() == before

    def check_separators(self) -> None:
        """Prompts of text alone: a separator marks their passages."""
        vocabulary = Tokenizer.from_file(str(self.directory / "tokenizer.json"))
        end = vocabulary.encode("</s>", add_special_tokens=False).ids
        ids, spans = joined([[*chunk(95), *end], [*chunk(96), *end]], [*SYSTEM, *end])
        for salt in ("separated-1", "separated-2"):
            (tokens, figures), (right, told) = (
                self.ask((ids, fused), salt=salt)[0] for fused in ({}, {"spans": spans})
            )
            assert tokens == right
            assert figures["chunks_missed"] == 2  # a tenant for each salt
            assert "chunks_missed" not in told

    def check_many_at_once(self) -> None:
        prompts = [[chunk(40 + n), chunk(50 + n % 2)] for n in range(5)]
        asked = [(ids, {"spans": spans, "recipe": "prophetkv", "ratio": 1}) for ids, spans in map(joined, prompts)]
        both = [found for pair in zip(asked, [(ids, {}) for ids, _ in asked], strict=True) for found in pair]
        found = self.ask(*both)
        for (tokens, figures), (plain, _) in zip(found[::2], found[1::2], strict=True):
            assert "degraded" not in figures
            assert tokens == plain

    def check_tenants(self) -> None:
        chunks = [chunk(61), chunk(62)]
        assert self.fused(chunks, tenant="a")[1]["chunks_missed"] == 2
        assert self.fused(chunks, tenant="b")[1]["chunks_missed"] == 2
        assert "chunks_missed" not in self.fused(chunks, tenant="a")[1]

    def check_aborted(self) -> None:
        """Whenever a caller leaves, vLLM's blocks and the pool's slots come back."""
        blocks = self.engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        self.plain([chunk(70)])
        before = blocks.get_num_free_blocks()
        for steps in range(6):
            ids, spans = joined([chunk(71 + steps), chunk(81 + steps)])
            prompt = {"prompt_token_ids": ids, "cache_salt": f"aborted-{steps}"}
            (name,) = self.llm.enqueue([prompt], self.params(spans=spans), use_tqdm=False)
            for _ in range(steps):
                self.engine.step()
            self.engine.abort_request([name], internal=False)
            self.plain([chunk(70)])
        self.idle()
        assert blocks.get_num_free_blocks() == before

    def check_tickets(self) -> None:
        """Who was promised a prompt's KV gets its figures once the request has ended, whatever became of it."""
        ids, spans = joined([chunk(181), chunk(182)])
        told: queue.Queue[Any] = queue.Queue()

        async def follow(recipe: str) -> None:
            worker = WorkerClient(self.listen)
            asked = SpannedPrompt(tuple(ids), tuple(map(tuple, spans)), recipe).request()
            async with aclosing(worker.prefill(pb.PrefillRequest(prompt=asked))) as events:
                async for event in events:
                    told.put(event)
            await worker.close()

        for recipe, salt in (("prophetkv", "a"), ("prophetkv", "a"), ("full_attention", "b"), ("prophetkv", "")):
            following = threading.Thread(target=lambda recipe=recipe: asyncio.run(follow(recipe)))
            following.start()
            ticket = told.get(timeout=60).promise.ticket.hex()
            self.ask((ids, {"spans": spans, "recipe": recipe, "ticket": ticket}), salt=salt or None)
            self.engine.step()  # as a server's loop, which goes on after the last request
            summary = told.get(timeout=60).summary
            following.join()
            assert summary.degraded is not bool(salt), summary
            if salt:
                counted = summary.tokens_lossless + summary.tokens_reused + summary.tokens_recomputed
                assert (summary.recipe, counted) == (recipe, 300), summary

    def check_with_a_corrupt_cache(self) -> None:
        """Damaged KV is found: it is not there, or vLLM computes the prompt."""
        told, chunks = sys.argv[3], [chunk(141), chunk(142), chunk(143)]
        self.fused(chunks)
        right, _ = self.fused(chunks[::-1])
        for n in range(6):  # the memory tier has room for few
            self.fused([chunk(150 + 3 * n + i) for i in range(3)])
        self.connector._fusing.pool.clear()
        command = Path(f"/proc/{told}/cmdline").read_text().split("\0")
        for file in (Path(command[command.index("--data-dir") + 1]) / "segments").glob("*.kv"):
            damaged = bytes(byte ^ 0x10 for byte in file.read_bytes())
            with file.open("r+b") as segment:  # the file that the service has open
                segment.write(damaged)
        tokens, figures = self.fused(chunks[::-1])
        assert figures.get("degraded") or figures.get("chunks_missed"), figures
        assert tokens == (self.plain(chunks[::-1]) if figures.get("degraded") else right), figures

    def check_with_a_slow_cache(self) -> None:
        chunks = [chunk(171), chunk(172)]
        os.kill(int(sys.argv[3]), signal.SIGSTOP)
        try:
            tokens, figures = self.fused(chunks)
            assert figures["degraded"], figures
            assert tokens == self.plain(chunks)
        finally:
            os.kill(int(sys.argv[3]), signal.SIGCONT)
        until = time.monotonic() + 30
        while self.fused(chunks)[1].get("degraded"):
            assert time.monotonic() < until

    def check_with_the_cache_gone(self) -> None:
        """The last check."""
        os.kill(int(sys.argv[3]), 9)
        for chunks in ([chunk(91), chunk(92)], [chunk(2), chunk(1)]):
            tokens, figures = self.fused(chunks)
            assert figures["degraded"], figures
            assert tokens == self.plain(chunks)


def main() -> None:
    began = time.monotonic()
    checks = Checks(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[4]))
    for name in sys.argv[5:] or sorted(n.removeprefix("check_") for n in dir(checks) if n.startswith("check_")):
        getattr(checks, f"check_{name}")()
        checks.idle()
        print(f"{time.monotonic() - began:.1f} s: {name} passed", flush=True)
    print("all passed", flush=True)


if __name__ == "__main__":
    main()
