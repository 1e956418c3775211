"""Measures the recall of retrieval: `make recall ARGS="FILE..."`.

Files have CacheBlend's format, with `gold` marking the passages that an answer needs: a JSON array of objects with
`question` and `ctxs`, each with `title`, `text` and `gold`. All passages of a file form one corpus, which is searched
by words, by embeddings and by both, with the gateway's code and defaults.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track

from fusionkv.bench import command
from fusionkv.fusion_worker.evaluate.command import run as run_command
from fusionkv.gateway.config import NONE, GatewayConfig
from fusionkv.gateway.embed.base import Embedder
from fusionkv.gateway.embed.choose import open_embedder
from fusionkv.gateway.retrieval.base import HybridSearch, Query, TextChunk
from fusionkv.gateway.retrieval.embedded import EmbeddedRetrieval
from fusionkv.gateway.tokens import ModelIdentity
from fusionkv.protos.runtime import settings

TOP = 8
# Number of retrieved chunks in which gold passages are ranked.
_DEPTH = 100
_CORPUS = "passages"
MODEL = ModelIdentity(b"", b"")


@dataclass(frozen=True)
class Row:
    """The results of a file with a search mode.

    Attributes:
        recall_at_8: mean share of a question's gold passages among the first eight.
        mrr: mean reciprocal rank of the first gold passage, 0 if none is among the first hundred.
    """

    file: str
    mode: str
    recall_at_8: float
    mrr: float
    passages: int
    questions: int
    embedder: str


@dataclass(frozen=True)
class Asked:
    question: str
    gold: frozenset[int]


def read(file: Path) -> tuple[list[str], list[Asked]]:
    """Reads all passages, and the questions with the numbers of their gold passages. Raises ValueError."""
    try:
        samples = json.loads(file.read_text(encoding="utf-8"))
        numbers: dict[tuple[str, str], int] = {}
        asked = []
        for sample in samples:
            gold = set()
            for passage in sample["ctxs"]:
                number = numbers.setdefault((passage.get("title") or "", passage["text"]), len(numbers))
                gold |= {number} if passage["gold"] else set()
            if gold:
                asked.append(Asked(sample["question"], frozenset(gold)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: not questions with gold passages: {type(error).__name__}: {error}") from error
    if not asked:
        raise ValueError(f"{file}: no question has a gold passage")
    return ["\n".join(filter(None, passage)) for passage in numbers], asked


async def measure(file: Path, embedder: Embedder | None) -> list[Row]:
    """Measures a file: by words, and, with an embedder, by vectors and by both."""
    passages, asked = await asyncio.to_thread(read, file)
    plain = GatewayConfig(embedder=NONE)
    weights = {"bm25": 0.0} | ({"dense": 1.0, "hybrid": plain.dense_weight} if embedder is not None else {})
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        engine = await EmbeddedRetrieval.open(Path(folder))
        try:
            by_both = HybridSearch(plain, embedder)
            model = by_both.identity(MODEL)
            vectors = await by_both.vectors(passages, {})
            chunks = [TextChunk(_CORPUS, number, text, (0,)) for number, text in enumerate(passages)]
            await engine.replace(_CORPUS, _CORPUS, chunks, vectors, model)
            for mode, weight in weights.items():
                search = HybridSearch(GatewayConfig(embedder=NONE, dense_weight=weight), embedder)
                ranks = [await _ranks(search, engine, question) for question in asked]
                found = [np.mean([rank <= TOP for rank in each]) for each in ranks]
                first = [1 / min(each) for each in ranks]
                name = embedder.name if embedder is not None else ""
                scores = round(float(np.mean(found)), 4), round(float(np.mean(first)), 4)
                rows.append(Row(file.name, mode, *scores, len(passages), len(asked), name))
        finally:
            await engine.close()
    return rows


async def _ranks(search: HybridSearch, engine: EmbeddedRetrieval, asked: Asked) -> list[float]:
    """Ranks of the gold passages, from 1; infinite if not found."""
    found = await search.search(engine, Query(_CORPUS, asked.question), _DEPTH, MODEL)
    places = {chunk.position: float(rank) for rank, (chunk, _) in enumerate(found, 1)}
    return [places.get(number, float("inf")) for number in asked.gold]


async def _run(args: argparse.Namespace) -> list[Row]:
    config = settings.load(GatewayConfig, "gateway", flags={"embedder": args.embedder} if args.embedder else {})
    embedder = await open_embedder(config)
    try:
        rows: list[Row] = []
        for file in track(args.files, console=Console(stderr=True), disable=not sys.stderr.isatty()):
            rows += await measure(file, embedder)
        return rows
    finally:
        if embedder is not None:
            await embedder.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--embedder", help="as the gateway's setting (default: minilm, if fetched)")
    parser.add_argument("--json", type=Path, default=Path("build/bench/recall.json"), help="results (%(default)s)")
    args = parser.parse_args()
    return run_command("recall", partial(_show, args))


def _show(args: argparse.Namespace) -> None:
    rows = asyncio.run(_run(args))
    command.write([asdict(row) for row in rows], args.json)
    columns = ("file", "mode", "passages", "questions", f"recall@{TOP}", "MRR")
    lines = [
        (row.file, row.mode, row.passages, row.questions, f"{row.recall_at_8:.3f}", f"{row.mrr:.3f}") for row in rows
    ]
    command.show(command.table(None, columns, lines, texts=2))


if __name__ == "__main__":
    sys.exit(main())
