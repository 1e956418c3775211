"""Chunks as anchor tokens, asked for through a real gateway; the answers are those of plain transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from fusionkv.gateway.client.client import Client
from fusionkv.protos.runtime.errors import FailedPrecondition, InvalidArgument
from tests.fusion_worker.compressed import SEGMENT, anchored, cut
from tests.fusion_worker.oracle import Oracle
from tests.gateway.conftest import Stack
from tests.waiting import wait_until

pytestmark = pytest.mark.system
PAGES = [f"Report Velnora. The code of Name{i} is {100 + i}." for i in range(3)]
QUESTION = "code of Name1?"
ANSWER = 6


@pytest.fixture(scope="module")
def tiny_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with anchor tokens, whose embeddings are those of other tokens."""
    folder = tmp_path_factory.mktemp("anchored")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny_model)
    tokenizer.add_tokens([f"<|pad_{i}|>" for i in range(260 - len(tokenizer))])
    tokenizer.add_special_tokens({"extra_special_tokens": [f"<|anchor_50_{i}|>" for i in range(1, SEGMENT // 2 + 1)]})
    network = Qwen2ForCausalLM.from_pretrained(tiny_model)
    network.resize_token_embeddings(len(tokenizer))
    with torch.no_grad():
        network.model.embed_tokens.weight[260:] = network.model.embed_tokens.weight[100 : 100 + SEGMENT // 2]
        network.lm_head.weight[260:] = network.lm_head.weight[259]  # never drawn
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def client(stack: Stack) -> Client:
    for i, page in enumerate(PAGES):
        stack.client.ingest("anchored", f"page-{i}.txt", page)
    return stack.client


def test_an_answer_from_anchors_alone(client: Client, tiny_model: Path) -> None:
    words = PreTrainedTokenizerFast.from_pretrained(tiny_model)
    system = words.encode("Answer the question using the passages.\n")
    chunks = [words.encode(page + "\n", add_special_tokens=False) for page in PAGES]
    anchors = words.convert_tokens_to_ids([f"<|anchor_50_{i}|>" for i in range(1, SEGMENT // 2 + 1)])
    network = Qwen2ForCausalLM.from_pretrained(tiny_model, attn_implementation="eager").eval()
    oracle, question = Oracle(network), words.encode(f"Question: {QUESTION}\nAnswer:", add_special_tokens=False)
    context, expected = anchored(oracle, system, [cut(chunk, anchors) for chunk in chunks]), list[int]()
    for _ in range(ANSWER):
        expected.append(int(oracle.after(context, [*question, *expected]).argmax()))

    asked: dict[str, Any] = {"recipe": "full_reuse+anchored(50)", "max_tokens": ANSWER}
    answers = [client.ask("anchored", QUESTION, **asked)]
    s = answers[0].summary
    assert answers[0].text == words.decode(expected)
    assert (s.recipe, s.degraded, s.chunks_missed) == (asked["recipe"], False, len(PAGES))
    assert s.context_tokens == s.tokens_reused == s.tokens_encoded == sum(map(len, chunks))
    assert s.tokens_recomputed == s.tokens_lossless == 0

    def found() -> bool:
        answers.append(client.ask("anchored", QUESTION, **asked))
        return answers[-1].summary.chunks_missed == 0

    wait_until(found)
    assert answers[-1].text == answers[0].text
    assert sum(hit.tokens for hit in answers[-1].summary.hits if hit.kind == "alternative") == s.context_tokens


def test_what_anchors_have_no_text_for(client: Client) -> None:
    full, whole = (
        client.ask("anchored", QUESTION, max_tokens=ANSWER, recipe=recipe, ratio=1.0)
        for recipe in ("full_attention", "full_reuse+anchored(50)")
    )
    assert (whole.text, whole.summary.tokens_recomputed) == (full.text, full.summary.context_tokens)
    with pytest.raises(InvalidArgument, match="keeps no KV of a chunk's text"):
        client.ask("anchored", QUESTION, recipe="full_reuse+anchored(50)", ratio=0.2)
    with pytest.raises(FailedPrecondition, match=r"no anchor tokens that save 75%.*use \+anchored\(50\)"):
        client.ask("anchored", QUESTION, recipe="full_reuse+anchored(75)")
