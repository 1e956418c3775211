"""Retrieval by words alone finds every page that a question of the example corpus needs."""

import json
from pathlib import Path

import numpy as np
import pytest

from fusionkv.gateway.config import GatewayConfig
from fusionkv.gateway.retrieval.base import Chunk, ModelIdentity
from fusionkv.gateway.retrieval.embedded import EmbeddedRetrieval
from fusionkv.gateway.retrieval.hybrid import HybridSearch

MODEL = ModelIdentity(b"f" * 32, b"t" * 32)
QUESTIONS = 160


@pytest.mark.slow
async def test_the_default_top_k_holds_all_pages_of_a_story(root: Path, tmp_path: Path) -> None:
    corpus = root / "examples/corpus"
    pages = sorted(corpus.glob("*/*.md"))
    questions = json.loads((corpus / "questions.json").read_text())
    config = GatewayConfig()
    search = HybridSearch(config)
    engine = await EmbeddedRetrieval.open(tmp_path)
    for page in pages:
        chunk = Chunk(page.name, 0, page.read_text().strip(), (1,))
        await engine.replace(page.parent.name, page.name, [chunk], np.zeros((1, 0)), MODEL)
    missed = []
    for question in questions[:: max(1, len(questions) // QUESTIONS)]:
        found = await search.search(engine, question["corpus"], question["question"], config.top_k, MODEL)
        if not set(question["documents"]) <= {chunk.document for chunk, _ in found}:
            missed.append(question["question"])
    assert not missed
    await engine.close()
