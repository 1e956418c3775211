"""Retrieval finds what questions need: in the example corpus, and as `make recall` measures it."""

import json
from pathlib import Path

import numpy as np
import pytest

from fusionkv.bench import recall
from fusionkv.gateway.config import GatewayConfig
from fusionkv.gateway.retrieval.base import HybridSearch, Query, TextChunk
from fusionkv.gateway.retrieval.embedded import EmbeddedRetrieval
from fusionkv.gateway.tokens import ModelIdentity
from tests.gateway.test_ingest import Topics

MODEL = ModelIdentity(b"f" * 32, b"t" * 32)
QUESTIONS = 160
Capsys = pytest.CaptureFixture[str]


@pytest.mark.long
@pytest.mark.slow
async def test_the_default_top_k_holds_all_pages_of_a_story(root: Path, tmp_path: Path) -> None:
    corpus = root / "examples/corpus"
    pages = sorted(corpus.glob("*/*.md"))
    questions = json.loads((corpus / "questions.json").read_text())
    config = GatewayConfig()
    search = HybridSearch(config)
    engine = await EmbeddedRetrieval.open(tmp_path)
    for page in pages:
        chunk = TextChunk(page.name, 0, page.read_text().strip(), (1,))
        await engine.replace(page.parent.name, page.name, [chunk], np.zeros((1, 0)), MODEL)
    missed = []
    for question in questions[:: max(1, len(questions) // QUESTIONS)]:
        found = await search.search(engine, Query(question["corpus"], question["question"]), config.top_k, MODEL)
        if not set(question["documents"]) <= {chunk.document for chunk, _ in found}:
            missed.append(question["question"])
    assert not missed
    await engine.close()


def write(file: Path) -> Path:
    """Two questions: one that shares words with its passage alone, and one that only its topic leads to."""
    others = [{"title": f"Other {i}", "text": f"Nothing of note, number {i}.", "gold": False} for i in range(30)]
    code = [{"title": "A", "text": "4711 opens it.", "gold": True}]
    horses = [{"title": "", "text": f"Horses are animals {i}.", "gold": i < 2} for i in range(3)]
    asked = {"What is the code 4711 for?": code, "Which horse?": horses}
    file.write_text(json.dumps([{"question": q, "ctxs": [*found, *others]} for q, found in asked.items()]))
    return file


async def test_shares_and_ranks_by_hand(tmp_path: Path) -> None:
    rows = bm25, dense, hybrid = await recall.measure(write(tmp_path / "small.json"), Topics())
    assert [row.mode for row in rows] == ["bm25", "dense", "hybrid"]
    assert {(row.file, row.passages, row.questions, row.embedder) for row in rows} == {
        ("small.json", 34, 2, "topics")
    }
    # Words find "4711", and stems the horses.
    assert bm25.recall_at_8 == bm25.mrr == hybrid.recall_at_8 == hybrid.mrr == 1.0
    # The passage of the first question has none of the topics: all of 34 are alike, or not found.
    assert dense.recall_at_8 >= 0.5
    (alone,) = await recall.measure(tmp_path / "small.json", None)
    assert (alone.mode, alone.recall_at_8, alone.embedder) == ("bm25", 1.0, "")


def test_the_command_writes_a_row_a_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys) -> None:
    out = tmp_path / "build/recall.json"
    monkeypatch.setattr("sys.argv", ["recall", str(write(tmp_path / "small.json")), "--json", str(out)])
    assert recall.main() == 0
    (row,) = json.loads(out.read_text())
    assert {"file": "small.json", "mode": "bm25", "recall_at_8": 1.0, "mrr": 1.0}.items() <= row.items()
    assert "recall@8" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["no JSON", "[]", '[{"question": "q"}]', '[{"question": "q", "ctxs": [{}]}]'])
def test_a_file_that_is_none_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys, content: str
) -> None:
    (tmp_path / "x.json").write_text(content)
    monkeypatch.setattr("sys.argv", ["recall", str(tmp_path / "x.json"), "--json", str(tmp_path / "out.json")])
    assert recall.main() == 1
    assert capsys.readouterr().err.startswith(f"recall: {tmp_path}/x.json: ")
