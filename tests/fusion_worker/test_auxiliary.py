"""CacheClip's second model: another tokenizer, its own KV in the same cache service, scores by character."""

import asyncio
import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from fusionkv.fusion_worker import models as worker_models
from fusionkv.fusion_worker.evaluate.data.stories import sample
from fusionkv.fusion_worker.prompt import ChunkSource
from fusionkv.fusion_worker.select.auxiliary import carry_over, spans_of
from fusionkv.kvcache_service.client import CacheClient
from fusionkv.protos.runtime.errors import ResourceExhausted
from tests.fusion_worker.oracle import Parts, byte_tokenizer, fallback_tokenizer, network, oracle, whole, windows

SYSTEM = "Answer from the text."
CHUNKS = (
    "The lake of Velkorda is blue and deep.",
    "Nobody owns the copper lantern; the mayor of Tanvan chose it.",
    "The code of Bervek is 535, the code of Tanvan is 88.",
)
QUESTION = "What is the code of Tanvan?"


@pytest.fixture(scope="module")
def other_tokenizer() -> PreTrainedTokenizerFast:
    """Pieces of a few characters, learnt from the texts above."""
    raw = Tokenizer(models.BPE(unk_token="?"))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Metaspace()
    raw.train_from_iterator([SYSTEM, *CHUNKS, QUESTION], trainers.BpeTrainer(vocab_size=110, special_tokens=["?"]))
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="?")


@pytest.fixture
def second(other_tokenizer: PreTrainedTokenizerFast) -> Any:
    """A model of another family with that tokenizer."""
    made = copy.deepcopy(network("qwen3"))
    return worker_models.wrap("second", made, other_tokenizer, b"second".ljust(32), 2048)


@pytest.fixture
def parts() -> Parts:
    """The prompt in bytes: one token for each character."""
    tokenizer = byte_tokenizer().backend_tokenizer
    system, question, *chunks = (tokenizer.encode(text).ids for text in (SYSTEM, QUESTION, *CHUNKS))
    return system, chunks, question


def expected_scores(tokenizer: PreTrainedTokenizerFast, chunk: str) -> list[float]:
    """For each character of a chunk the best score of the second model's tokens over it, from dense attention."""
    plain = oracle("qwen3")

    def encode(text: str) -> Any:
        return tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)

    system, found = encode(SYSTEM).input_ids, encode(chunk)
    context = plain.kv([*system, *found.input_ids])
    scores = plain.attention(context, encode(QUESTION).input_ids, [2])[len(system) :].tolist()
    best = [0.0] * len(chunk)
    for score, (start, stop) in zip(scores, found.offset_mapping, strict=True):
        for at in range(start, stop):
            best[at] = max(best[at], score)
    return best


def test_scores_find_their_tokens_in_the_other_tokenizer(root: Path, reference_model: Path) -> None:
    """A score on each token of the second model in turn arrives at the primary's tokens over the same characters."""
    primary, second = (
        Tokenizer.from_file(str(folder / "tokenizer.json"))
        for folder in (reference_model, root / "models/clip/tuned-1")
    )
    for page in sample(random.Random(11)).pages:
        text, spans = spans_of(primary, primary.encode(page.text + "\n", add_special_tokens=False).ids)
        own = second.encode(text, add_special_tokens=False).offsets
        assert text == page.text + "\n"
        assert own != spans, "the tokenizers cut every page in another way"
        for (start, stop), one in zip(own, torch.eye(len(own)), strict=True):
            found = carry_over(one, own, spans).nonzero().flatten().tolist()
            assert found == [i for i, (a, b) in enumerate(spans) if a < stop and start < b]
            assert found


async def test_tokens_are_chosen_by_the_second_model(
    start: Any, parts: Any, second: Any, other_tokenizer: PreTrainedTokenizerFast
) -> None:
    rig, plain = await start("llama", auxiliary=second), oracle("llama")
    scores = [score for chunk in CHUNKS for score in expected_scores(other_tokenizer, chunk)]
    first, last = len(SYSTEM) + len(CHUNKS[0]), len(SYSTEM) + sum(map(len, CHUNKS))
    best = sorted(range(first, last), key=lambda p: (-scores[p - len(SYSTEM)], p))
    chosen = torch.zeros(last, dtype=torch.bool)
    chosen[best[: round(0.4 * sum(map(len, CHUNKS)))]] = True
    fresh = windows(chosen, first, 8, 5)
    assert 0 < fresh.sum() < chosen.sum(), "the windows keep all or nothing"
    expected = plain.overlaid(whole(parts), plain.reused(*parts[:2]), fresh)
    answer = await rig.ask(*parts, recipe="cacheclip", ratio=0.4, expected=expected)
    assert answer.summary.tokens_recomputed == fresh.sum()


@pytest.mark.system
async def test_its_kv_is_kept_in_the_same_cache_service(
    cached: Any, parts: Parts, second: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, other = [await cached("llama", auxiliary=second) for _ in range(2)]
    before = await first.fill(*parts, recipe="cacheclip", ratio=0.4)
    counted = []
    monkeypatch.setattr(ChunkSource, "isolated", lambda *_: counted.append(1))  # a part the cache service lacks
    again = await other.ask(*parts, recipe="cacheclip", ratio=0.4, expected=before.logits[0])
    assert counted == []
    assert again.ids == before.ids


@pytest.mark.system
async def test_its_cache_out_of_reach_is_plain_prefill(cached: Any, parts: Parts, second: Any) -> None:
    """In a pool that has no room for the loaded context beside the plain prefill."""
    room = (len(whole(parts)) + 110) * (await cached("llama")).model.kv.token_bytes
    rig = await cached("llama", auxiliary=second, pool_bytes=room)
    rig.servicer.auxiliary._loader.lookups._cache = CacheClient("127.0.0.1:1")
    async with asyncio.timeout(120):
        expected = oracle("llama").full_attention(parts)
        assert (await rig.ask(*parts, recipe="cacheclip", ratio=0.4, expected=expected)).summary.degraded


async def test_a_pool_too_small_for_a_chunk_names_its_own_setting(start: Any, parts: Any, second: Any) -> None:
    rig = await start("llama", auxiliary=second, auxiliary_pool_bytes=16 * second.kv.token_bytes)
    with pytest.raises(ResourceExhausted, match="raise auxiliary_pool_bytes to"):
        await rig.ask(*parts, recipe="cacheclip", ratio=0.4)


async def test_without_a_choice_it_is_not_asked(start: Any, parts: Any, second: Any) -> None:
    rig = await start("llama", auxiliary=second)
    rig.servicer.auxiliary.scores = lambda prompt: pytest.fail("asked")
    for ratio in (0.0, 1.0):
        assert (await rig.ask(*parts, recipe="cacheclip", ratio=ratio)).ids


def test_spans_of_tokens_that_make_half_a_character() -> None:
    tokenizer = byte_tokenizer().backend_tokenizer
    # Three bytes of one sign, a letter, and the first of two bytes.
    ids = tokenizer.encode("\u20aca").ids + tokenizer.encode("\u00fc").ids[:1]
    assert spans_of(tokenizer, ids) == ("\u20aca", [(0, 1), (0, 1), (0, 1), (1, 2), (2, 2)])


def test_spans_of_tokens_with_a_byte_that_is_no_text() -> None:
    ids = [*"\u00e9".encode(), 0xA9, 257]
    assert spans_of(fallback_tokenizer(), ids) == ("\u00e9\ufffd b", [(0, 1), (0, 1), (1, 4), (1, 4)])


def test_a_token_takes_the_best_score_it_touches() -> None:
    scores = torch.tensor([3.0, 1.0, 2.0])
    carried = carry_over(scores, [(0, 2), (2, 5), (5, 6)], [(0, 1), (1, 3), (3, 4), (4, 6), (6, 6)])
    assert carried.tolist() == [3.0, 3.0, 1.0, 2.0, 0.0]
