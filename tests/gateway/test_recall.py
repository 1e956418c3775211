"""Retrieval finds every page that a question of the example corpus needs, whatever the embedding is worth."""

import json
from pathlib import Path

import numpy as np
import pytest

from fusionkv.gateway.config import GatewayConfig
from fusionkv.gateway.retrieval import hybrid
from fusionkv.gateway.retrieval.base import Chunk, ModelIdentity
from fusionkv.gateway.retrieval.embedded import EmbeddedRetrieval

MODEL = ModelIdentity(b"f" * 32, b"t" * 32)
DIM = 128
QUESTIONS = 160


@pytest.mark.slow
@pytest.mark.parametrize("spread", [0.0, 1.0], ids=["all alike", "random"])
async def test_the_default_top_k_holds_all_pages_of_a_story(root: Path, tmp_path: Path, spread: float) -> None:
    corpus = root / "examples/corpus"
    pages = sorted(corpus.glob("*/*.md"))
    questions = json.loads((corpus / "questions.json").read_text())
    rng = np.random.default_rng(0)
    config = GatewayConfig()

    def useless(count: int) -> np.ndarray:
        """Vectors that know nothing of the text: unit float32 `[count, DIM]`."""
        made = np.ones((count, DIM)) + spread * rng.standard_normal((count, DIM))
        return (made / np.linalg.norm(made, axis=1, keepdims=True)).astype(np.float32)

    engine = await EmbeddedRetrieval.open(tmp_path)
    for page in pages:
        text = page.read_text().strip()
        await engine.replace(page.parent.name, page.name, [Chunk(page.name, 0, text, (1,))], useless(1), MODEL)
    missed = []
    for question in questions[:: max(1, len(questions) // QUESTIONS)]:
        found = await engine.candidates(question["corpus"], question["question"], useless(1)[0], 100, MODEL)
        got = {c.document for c, _ in hybrid.rank(found, config.dense_weight, config.top_k)}
        if not set(question["documents"]) <= got:
            missed.append(question["question"])
    assert not missed
    await engine.close()
