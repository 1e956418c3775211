"""The demo: asks questions about documents, with full attention and with the default recipe (`make demo`)."""

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fusionkv import AsyncClient, ServiceError, as_dict

ROOT = Path(__file__).parent.parent
REAL_MODEL, EMBEDDER = "smollm2", "minilm"
WORDS_ALONE = {"EMBEDDER": "none"}
PROGRAM = Path(sys.executable).parent / "fusionkv"
RECIPES = BASELINE, DEFAULT = "full_attention", "default"
# The ratio at which a lost answer is asked for again; the default's is 0.2.
REMEDY = 0.4
START_SECONDS = 120
STOP_SECONDS = 60


@dataclass(frozen=True)
class Setting:
    """A model, and the corpora to ask it about.

    Attributes:
        model: directory or known name.
        corpora: folder of corpora, with questions.json.
        gateway: settings of the gateway.
        neighbours: number of neighbours to encode each chunk with; 0 encodes chunks alone.
        order: order of the chunks in the prompt. The reference models were trained on pages in the order of a story.
        documents: number of documents a question, which keeps the demo short; None: all that there are.
        sure: whether full attention has to answer every question right.
    """

    model: str
    corpora: Path
    gateway: dict[str, str]
    neighbours: int
    order: str
    sure: bool
    documents: int | None = None


@dataclass(frozen=True)
class Question:
    """An entry of questions.json; each of the answers is right."""

    corpus: str
    question: str
    answers: list[str]
    kind: str
    documents: list[str]


@dataclass(frozen=True)
class Row:
    """An answer, as stored in build/demo.json. summary: the gateway's, with stage times and counts."""

    question: str
    kind: str
    expected: list[str]
    documents_needed: int
    documents_retrieved: int
    recipe: str
    answer: str
    right: bool
    summary: dict[str, Any]


class Failed(Exception):
    """The demo can't continue, or gave a wrong result; the message says why."""


def choose(console: Console, model: str | None) -> Setting:
    """The real model with real documents, or the reference model if the real one can't be fetched."""
    references = sorted(file.parent for file in (ROOT / "models").glob("*/config.json"))
    # Names in the reports are invented, so lexical search suffices.
    small = Setting(
        str(references[0]) if references else "", ROOT / "examples/corpus", WORDS_ALONE, 10, "document", True
    )
    gateway = {"CHUNK_TOKENS": "512", "TOP_K": "7"}
    world = Setting(model or REAL_MODEL, ROOT / "examples/world", gateway, 0, "ends", False, documents=4)
    if model is not None and Path(model).resolve() in references:
        return replace(small, model=model)
    if model is not None and "/" not in model and not Path(model).exists() and not fetched(console, model):
        raise Failed(f"{model} is no directory, and could not be fetched: `fusionkv model list` names the models")
    if model is None and not fetched(console, REAL_MODEL):
        if not references:
            raise Failed(f"{REAL_MODEL} could not be fetched, and there is no model in models/")
        console.print(
            f"[yellow]{REAL_MODEL} could not be fetched.[/] This is the small demo instead: a reference model of "
            "this project, which only answers questions about generated reports."
        )
        return small
    if not fetched(console, EMBEDDER):
        console.print(f"[yellow]{EMBEDDER} could not be fetched:[/] documents are searched by words only.")
        return replace(world, gateway=world.gateway | WORDS_ALONE)
    return world


def fetched(console: Console, name: str) -> bool:
    console.print(f"fetching the model {name}, once")
    return subprocess.run([PROGRAM, "model", "get", name], stdin=subprocess.DEVNULL).returncode == 0


@contextlib.asynccontextmanager
async def services(setting: Setting, folder: Path, console: Console) -> AsyncIterator[str]:
    """Runs cache service, worker and gateway with `fusionkv serve`; yields the gateway's address.

    Raises:
        Failed: the services did not start, failed, or logged an error.
    """
    log = folder / "services.log"
    flags = ("--json", "--model", setting.model, "--data-dir", str(folder / "data"), "--listen", "127.0.0.1:0")
    with log.open("w") as errors:
        process = await asyncio.create_subprocess_exec(
            *(PROGRAM, "serve", "all", *flags),
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            env=os.environ | {f"FUSIONKV_GATEWAY_{name}": value for name, value in setting.gateway.items()},
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


async def load(client: AsyncClient, setting: Setting, documents: list[Path], console: Console) -> None:
    """Ingests every document into the corpus of its folder, and encodes the chunks ahead of time."""
    columns = (TextColumn("{task.description:36}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("ingesting documents", total=len(documents))
        for document in documents:
            await client.ingest(document.parent.name, document.name, document.read_bytes())
            progress.advance(task)
        task = progress.add_task("encoding chunks ahead of time", total=None)
        before = 0
        for corpus in sorted({document.parent.name for document in documents}):
            async with contextlib.aclosing(client.precompute(corpus, neighbours=setting.neighbours)) as steps:
                async for step in steps:
                    progress.update(task, completed=before + step.done, total=before + step.total)
            before += step.total


def pick(corpora: Path, count: int) -> list[Question]:
    """Picks `count` questions, from all kinds in turn."""
    by_kind: dict[str, list[Question]] = {}
    for line in json.loads((corpora / "questions.json").read_text()):
        by_kind.setdefault(line["kind"], []).append(Question(**line))
    turns = range(max(len(questions) for questions in by_kind.values()))
    picked = [questions[turn] for turn in turns for questions in by_kind.values() if turn < len(questions)]
    return picked[:count]


def gather(corpora: Path, setting: Setting, questions: list[Question]) -> list[Path]:
    """The documents of all corpora in a folder; of a `setting` with fewer, those first that the questions are on."""
    on = {(question.corpus, name) for question in questions for name in question.documents}
    documents = sorted(corpora.glob("*/*.md"), key=lambda path: ((path.parent.name, path.name) not in on, path))
    return documents if setting.documents is None else documents[: setting.documents * len(questions)]


async def ask(client: AsyncClient, question: Question, recipe: str, order: str, ratio: float | None = None) -> Row:
    """Asks a question, and compares the answer with the expected ones."""
    answer = await client.ask(
        question.corpus, question.question, recipe=recipe, ratio=ratio, order=order, max_tokens=32
    )
    return Row(
        question=question.question,
        kind=question.kind,
        expected=question.answers,
        documents_needed=len(question.documents),
        documents_retrieved=len({*question.documents} & {passage.document for passage in answer.sources}),
        recipe=recipe if ratio is None else f"{recipe}, {ratio}",
        answer=answer.text.strip(),
        right=any(expected.lower() in answer.text.lower() for expected in question.answers),
        summary=as_dict(answer.summary),
    )


def show(console: Console, rows: list[Row]) -> None:
    """Prints a question with its answers."""
    full = rows[0].summary
    console.print(f"\n[bold]{escape(rows[0].question)}[/] [dim]{full['context_tokens']:,} tokens of context[/]")
    for row in rows:
        mark = "[green]right[/]" if row.right else "[red]wrong[/]"
        ttft, note = row.summary["seconds"]["ttft"], ""
        if row is not rows[0]:
            faster = full["seconds"]["ttft"] / ttft
            note = f"  [dim]{faster:.1f}x faster, {row.summary['tokens_recomputed']:,} tokens recomputed[/]"
        console.print(f"  {row.recipe:16}{ttft:6.2f} s  {mark}  {escape(' '.join(row.answer.split()))}{note}")


def summarize(setting: Setting, rows: list[Row]) -> dict[str, Any]:
    """For each recipe, the number of right answers, the median seconds to the first token, and token counts."""
    made: dict[str, Any] = {"model": Path(setting.model).name, "questions": len(rows) // len(RECIPES)}
    for recipe in RECIPES:
        chosen = [row for row in rows if row.recipe == recipe]
        made[recipe] = {
            "right": sum(row.right for row in chosen),
            "ttft_median_s": statistics.median(row.summary["seconds"]["ttft"] for row in chosen),
            "context_tokens": sum(row.summary["context_tokens"] for row in chosen),
            "tokens_computed": sum(
                row.summary["tokens_recomputed"] + row.summary["tokens_encoded"] for row in chosen
            ),
            "recipes": dict(Counter(row.summary["recipe"] for row in chosen)),
        }
    right = zip(*([row.right for row in rows if row.recipe == recipe] for recipe in RECIPES), strict=True)
    both = Counter(right)
    made["kept"], made["gained"] = both[True, True], both[False, True]
    return made


def conclude(console: Console, made: dict[str, Any]) -> None:
    full, chosen = (made[recipe] for recipe in RECIPES)
    console.print(f"\n[bold]{made['model']}, {made['questions']} questions[/]")
    for recipe in RECIPES:
        one = made[recipe]
        share = one["tokens_computed"] / one["context_tokens"]
        console.print(
            f"  {recipe:16}{one['right']:3} of {made['questions']} right, {one['ttft_median_s']:.2f} s to the first "
            f"token (median), {share:.0%} of the context computed"
        )
    named = ", ".join(f"{recipe} ({count})" for recipe, count in chosen["recipes"].items())
    console.print(
        f"  the default keeps [bold]{made['kept']} of {full['right']}[/] right answers of full attention, has "
        f"{made['gained']} others right, and is [bold]{full['ttft_median_s'] / chosen['ttft_median_s']:.1f} times "
        f"faster[/]: {named}"
    )


def advise(console: Console, setting: Setting, made: dict[str, Any], again: list[Row], page: Path) -> None:
    """Says what to do about answers that were lost, and what to do next."""
    model = setting.model if Path(setting.model).is_dir() else made["model"]
    for row in again:
        remedy = f"right with `--ratio {REMEDY}`" if row.right else "use `--recipe full_attention`"
        console.print(f"[yellow]lost:[/] {escape(row.question)} [bold]{remedy}[/]")
    if again:
        console.print(f"`fusionkv check {model}` measures which recipes are safe on this model.")
    console.print(
        f"A page that explains one answer token by token: {page}\n\n"
        "[bold]With your own documents[/] (docs/tutorial.md):\n"
        "  source .venv/bin/activate\n"
        f"  fusionkv serve all --model {model}\n"
        "and in another terminal:\n"
        "  fusionkv ingest notes FOLDER\n"
        "  fusionkv ask notes 'QUESTION' --explain answer.html"
    )


async def run(
    setting: Setting, documents: list[Path], questions: list[Question], out: Path, console: Console
) -> tuple[list[Row], list[Row]]:
    """Runs the services, and asks all questions with each recipe, and those that the second one lost once more.

    Returns:
        The answers, in turn by recipe; and the answers at `REMEDY` to the questions that were lost.

    Raises:
        Failed, ServiceError, TimeoutError, OSError: the services failed, or a file can't be written.
    """
    rows, again = list[Row](), list[Row]()
    folder = Path(tempfile.mkdtemp(prefix="demo-", dir=out.parent))
    try:
        async with services(setting, folder, console) as address, AsyncClient(address) as client:
            await load(client, setting, documents, console)
            for question in questions:
                answers = [await ask(client, question, recipe, setting.order) for recipe in RECIPES]
                rows += answers
                if answers[0].right and not answers[1].right:
                    again.append(await ask(client, question, DEFAULT, setting.order, REMEDY))
                    answers.append(again[-1])
                show(console, answers)
            # Explain the first question that both recipes answer right, if there is one.
            right = [all(row.right for row in pair) for pair in zip(rows[::2], rows[1::2], strict=True)]
            shown = questions[right.index(True) if True in right else 0]
            await explain(address, shown, setting, out.with_suffix(".html"))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return rows, again


async def explain(address: str, question: Question, setting: Setting, page: Path) -> None:
    """Writes the page that explains an answer, with `fusionkv ask --explain`."""
    command = (PROGRAM, "ask", question.corpus, question.question, "--gateway", address)
    process = await asyncio.create_subprocess_exec(
        *command,
        "--order",
        setting.order,
        "--recipe",
        DEFAULT,
        "--max-tokens",
        "32",
        "--explain",
        str(page),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await process.communicate()
    if process.returncode:
        raise Failed(f"`fusionkv ask --explain` failed: {errors.decode()}")


def check(setting: Setting, rows: list[Row]) -> None:
    """Raises Failed if an answer was degraded, or full attention answered wrongly where it must not."""
    for row in rows:
        if row.summary["degraded"]:
            raise Failed(f"degraded: {row.summary['degraded_reason']} ({row.recipe}: {row.question})")
        if setting.sure and row.recipe == BASELINE and not row.right:
            raise Failed(f"full_attention answered {row.answer!r}, not {row.expected}, to: {row.question}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", help=f"directory, or a name of `fusionkv model list` (default: {REAL_MODEL} if it can be fetched)"
    )
    parser.add_argument("--corpora", type=Path, help="folders of *.md, and questions.json (default: examples/world)")
    about = "number of questions; examples/world has four documents for each (default: %(default)s)"
    parser.add_argument("--questions", type=int, default=10, help=about)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build/demo.json", help="file for all answers (default: %(default)s)"
    )
    flags = parser.parse_args()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    try:
        setting = choose(console, flags.model)
        started, folder = time.monotonic(), flags.corpora or setting.corpora
        questions = pick(folder, flags.questions)
        documents = gather(folder, setting, questions)
        if folder == ROOT / "examples/world":
            console.print(
                f"asking {len(questions)} questions, first those that {REAL_MODEL} can answer, about "
                f"{len(documents)} documents"
            )
        rows, again = asyncio.run(run(setting, documents, questions, flags.out, console))
        made = summarize(setting, rows)
        stored = {"summary": made, "rows": [asdict(row) for row in rows], "again": [asdict(row) for row in again]}
        flags.out.write_text(json.dumps(stored, indent=1) + "\n")
        conclude(console, made)
        console.print(f"\n{time.monotonic() - started:.0f} s in total; all answers are in {flags.out}")
        advise(console, setting, made, again, flags.out.with_suffix(".html"))
        check(setting, rows)
    except (Failed, ServiceError, TimeoutError, OSError) as error:
        console.print(f"[red]demo failed:[/] {escape(str(error) or type(error).__name__)}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
