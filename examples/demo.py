"""The demo: three services, a corpus, and the same questions by four recipes, each asked twice (`make demo`)."""

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from fusionkv.gateway.client.client import AsyncClient
from fusionkv.gateway.client.results import fields
from fusionkv.protos.runtime.errors import ServiceError

ROOT = Path(__file__).parent.parent
RECIPES = ("full_attention", "full_reuse", "prophetkv", "default")
STAGES = ("retrieve", "plan", "queue", "lookup", "load", "encode", "select", "prefill")
PASSES = (1, 2)
START_SECONDS = 120
STOP_SECONDS = 60
SHOWN = 28  # characters of an answer in the table; build/demo.json has all


@dataclass(frozen=True)
class Question:
    shelf: str
    text: str
    answer: str
    task: str
    needs: frozenset[str]


@dataclass(frozen=True)
class Row:
    """One answer, as build/demo.json holds it. `summary` is the gateway's, with its stage times and counts."""

    question: str
    task: str
    expected: str
    documents_needed: int
    documents_retrieved: int
    recipe: str
    asked: int
    answer: str
    right: bool
    summary: dict[str, Any]


class Failed(Exception):
    """The demo can't go on, or did not do what it must; the message says why."""


@contextlib.asynccontextmanager
async def services(model: Path, folder: Path, console: Console) -> AsyncIterator[str]:
    """Runs cache service, worker and gateway by `fusionkv serve`; gives the gateway's address.

    Raises:
        Failed: they did not come up, ended badly, or logged an error.
    """
    log = folder / "services.log"
    flags = ("--json", "--model", str(model), "--data-dir", str(folder / "data"), "--listen", "127.0.0.1:0")
    program = Path(sys.executable).parent / "fusionkv"
    with log.open("w") as errors:
        process = await asyncio.create_subprocess_exec(
            *(program, "serve", "all", *flags),
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            # The stories' names are made up, so that words alone find their pages, and nothing has to be fetched.
            env={**os.environ, "FUSIONKV_GATEWAY_EMBEDDER": "none"},
        )
    try:
        yield await asyncio.wait_for(_gateway_address(process, console), START_SECONDS)
        process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.communicate(), STOP_SECONDS)
        if process.returncode or " ERROR " in log.read_text():
            raise Failed(f"the services ended with status {process.returncode}, or logged an error")
    except (Failed, ServiceError, TimeoutError):
        console.print(escape(log.read_text()[-6000:]), style="dim")
        raise
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _gateway_address(process: asyncio.subprocess.Process, console: Console) -> str:
    address = ""
    assert process.stdout is not None
    while line := await process.stdout.readline():
        event = json.loads(line)
        if event["event"] == "up":
            console.print(f"{event['service']:8} up on {' '.join(event['addresses'])} after {event['seconds']} s")
            address = event["addresses"][0]
        elif event["event"] == "ready":
            return address
    raise Failed(f"`fusionkv serve all` ended with status {await process.wait()}")


async def load(client: AsyncClient, documents: list[Path], console: Console) -> None:
    """Ingests every folder as a corpus and encodes its chunks ahead of time, each behind similar ones."""
    columns = (TextColumn("{task.description:24}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("ingesting", total=len(documents))
        for document in documents:
            await client.ingest(document.parent.name, document.name, document.read_bytes())
            progress.advance(task)
        task = progress.add_task("encoding ahead of time", total=len(documents))
        for shelf in sorted({document.parent.name for document in documents}):
            async with contextlib.aclosing(client.precompute(shelf)) as steps:
                done = 0
                async for step in steps:
                    progress.advance(task, step.done - done)
                    done = step.done


def pick(corpus: Path, count: int) -> list[Question]:
    """`count` questions, from every task in turn."""
    by_task: dict[str, list[Question]] = {}
    for q in json.loads((corpus / "questions.json").read_text()):
        by_task.setdefault(q["task"], []).append(
            Question(q["shelf"], q["question"], q["answer"], q["task"], frozenset(q["needs"]))
        )
    turns = range(max(len(questions) for questions in by_task.values()))
    picked = [questions[turn] for turn in turns for questions in by_task.values() if turn < len(questions)]
    return picked[:count]


async def ask(client: AsyncClient, question: Question, recipe: str, asked: int) -> Row:
    answer = await client.ask(question.shelf, question.text, recipe=recipe, max_tokens=32)
    return Row(
        question=question.text,
        task=question.task,
        expected=question.answer,
        documents_needed=len(question.needs),
        documents_retrieved=len(question.needs & {passage.document for passage in answer.sources}),
        recipe=recipe,
        asked=asked,
        answer=answer.text.strip(),
        right=answer.text.strip() == question.answer,
        summary=fields(answer.summary),
    )


def table_of(rows: list[Row]) -> Table:
    """All answers to one question."""
    first = rows[0]
    title = f"[bold]{escape(first.question)}[/] {escape(first.expected)}  [dim]{first.task}, needs "
    title += f"{first.documents_needed} document(s), {first.documents_retrieved} retrieved[/]"
    table = Table(title=title, title_justify="left", title_style="", box=box.SIMPLE_HEAD)
    for header in ("recipe", "pass", "answer", "", "TTFT ms", "of which, ms"):
        table.add_column(header, justify="right" if header in ("pass", "TTFT ms") else "left")
    table.add_column("chunks\nexact / alt. / missed", justify="right", no_wrap=True)
    table.add_column("tokens\nlossless / reused / recomp.", justify="right", no_wrap=True)
    for row in rows:
        mark = "[green]right[/]" if row.right else "[red]wrong[/]"
        seconds, hits = row.summary["seconds"], {"exact": 0, "alternative": 0}
        for hit in row.summary["hits"]:
            hits[hit["kind"]] += hit["chunks"]
        stages = ", ".join(f"{name} {seconds[name] * 1e3:.1f}" for name in STAGES if seconds[name] >= 1e-4)
        chunks = f"{hits['exact']} / {hits['alternative']} / {row.summary['chunks_missed']}"
        tokens = " / ".join(str(row.summary[f"tokens_{kind}"]) for kind in ("lossless", "reused", "recomputed"))
        shown = row.answer if len(row.answer) <= SHOWN else row.answer[: SHOWN - 1] + "…"
        cells = (row.recipe, str(row.asked), escape(shown), mark, f"{seconds['ttft'] * 1e3:.1f}")
        table.add_row(*cells, stages, chunks, tokens)
    return table


def totals(rows: list[Row]) -> list[dict[str, Any]]:
    """One for each recipe and pass: answers right, median TTFT, and what became of the context's tokens."""
    kinds = ("context_tokens", "tokens_lossless", "tokens_reused", "tokens_recomputed", "tokens_encoded")
    lines = []
    for recipe, asked in ((recipe, asked) for recipe in RECIPES for asked in PASSES):
        chosen = [row for row in rows if (row.recipe, row.asked) == (recipe, asked)]
        ttft = statistics.median(row.summary["seconds"]["ttft"] for row in chosen)
        counts = {kind: sum(row.summary[kind] for row in chosen) for kind in kinds}
        right = sum(row.right for row in chosen)
        lines.append({"recipe": recipe, "pass": asked, "right": right, "of": len(chosen), "ttft": ttft, **counts})
    return lines


def table_of_totals(lines: list[dict[str, Any]]) -> Table:
    table = Table(title="[bold]Totals[/]", title_justify="left", title_style="", box=box.SIMPLE_HEAD)
    headers = ("recipe", "pass", "right", "TTFT ms, median", "context tokens", "lossless", "reused", "recomputed")
    for header in (*headers, "encoded first"):
        table.add_column(header, justify="left" if header == "recipe" else "right")
    for line in lines:
        recipe, asked, right, of, ttft, *counts = line.values()
        table.add_row(recipe, str(asked), f"{right} of {of}", f"{ttft * 1e3:.1f}", *map(str, counts))
    return table


async def run(
    model: Path, documents: list[Path], questions: list[Question], folder: Path, console: Console
) -> list[Row]:
    """Raises Failed, ServiceError, TimeoutError."""
    rows: list[Row] = []
    async with services(model, folder, console) as address, AsyncClient(address) as client:
        await load(client, documents, console)
        for question in questions:
            answers = [await ask(client, question, recipe, asked) for asked in PASSES for recipe in RECIPES]
            answers.sort(key=lambda row: (RECIPES.index(row.recipe), row.asked))
            console.print(table_of(answers))
            rows += answers
    return rows


def check(rows: list[Row]) -> None:
    """Raises Failed: the reference recipe missed an answer, or the cache failed a request."""
    for row in rows:
        if row.summary["degraded"]:
            raise Failed(f"degraded: {row.summary['degraded_reason']} ({row.recipe}: {row.question})")
        if row.recipe == "full_attention" and not row.right:
            raise Failed(f"full_attention answered {row.answer!r}, not {row.expected!r}, to: {row.question}")


def main() -> int:
    models = sorted(file.parent for file in (ROOT / "models").glob("*/config.json"))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=models[0] if models else None, help="(default: %(default)s)")
    parser.add_argument(
        "--corpus", type=Path, default=ROOT / "examples/corpus", help="folders of *.md, and questions.json"
    )
    parser.add_argument("--questions", type=int, default=18, help="how many to ask (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "build/demo.json", help="all rows (default: %(default)s)")
    flags = parser.parse_args()
    if flags.model is None:
        parser.error("there is no model in models/: name one with --model")
    if not (documents := sorted(flags.corpus.glob("*/*.md"))):
        parser.error(f"there are no folders of documents in {flags.corpus}")
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 180)
    started = time.monotonic()
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="demo-", dir=flags.out.parent))
    try:
        rows = asyncio.run(run(flags.model, documents, pick(flags.corpus, flags.questions), folder, console))
        lines = totals(rows)
        made = {"model": flags.model.name, "totals": lines, "rows": [asdict(row) for row in rows]}
        flags.out.write_text(json.dumps(made, indent=1) + "\n")
        console.print(table_of_totals(lines))
        console.print(f"{len(rows)} answers in {time.monotonic() - started:.0f} s; every row is in {flags.out}")
        check(rows)
    except (Failed, ServiceError, TimeoutError) as error:
        console.print(f"[red]demo failed:[/] {escape(str(error) or type(error).__name__)}")
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
