"""`fusionkv check`: the oracles on every family, what is safe, and the file that says so."""

import argparse
import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from fusionkv.fusion_worker import models
from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.fusion_worker.evaluate import check
from fusionkv.fusion_worker.evaluate.data import datasets
from fusionkv.fusion_worker.evaluate.data.samples import Block, Sample, Task
from fusionkv.fusion_worker.evaluate.judge import LEAST, Tally, judge, recommend
from fusionkv.fusion_worker.evaluate.oracles import compare
from fusionkv.fusion_worker.evaluate.report.cells import Cell, Measured
from fusionkv.fusion_worker.quality.verdict import FILE, PRIMED, SAFE, UNDECIDED, UNMEASURED, UNSAFE, Choice, Verdict
from fusionkv.protos.contract.recipes import find_recipe
from tests.fusion_worker.oracle import saved

PAGES = [f"The {a} stands by the {b}, and {a}s are counted there. " for a, b in zip("abcd", "efgh", strict=True)]
# Two over four short passages each: a model of bytes takes many tokens for a word.
QUESTIONS = [{"question": f"Where is {i}?", "answers": ["e"], "ctxs": [{"text": t} for t in PAGES]} for i in range(2)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return saved(tmp_path / "model")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "own.json").write_text(json.dumps(QUESTIONS))
    return tmp_path / "own.json"


async def compared(directory: Path, model: models.Model) -> Any:
    return await compare(directory, model, WorkerConfig(model=directory, pool_bytes=8 << 20))


async def test_the_engine_holds_to_every_family(family: str, tmp_path: Path) -> None:
    found = await compared(saved(tmp_path, family), models.load(tmp_path, "cpu"))
    assert max(found.full_attention, found.full_reuse) < 1e-4
    assert found.held


async def test_a_second_engine_over_latents_in_bfloat16(tmp_path: Path) -> None:
    """That of the questions: the first one compared them."""
    directory = saved(tmp_path, "deepseek-v2", torch.bfloat16)
    loaded = models.load(directory, "cpu", "bfloat16")
    for _ in range(2):
        assert (await compared(directory, loaded)).held


@pytest.fixture
def off(model: Path) -> models.Model:
    """The model with an engine that computes something else."""
    loaded = models.load(model, "cpu")
    with torch.no_grad():
        loaded.network.model.layers[1].self_attn.v_proj.weight *= 1.1
    return loaded


async def test_an_engine_that_is_off_is_found_out(model: Path, off: models.Model) -> None:
    assert not (await compared(model, off)).held


def test_ctrl_c_ends_a_check_that_loads_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(name: Path) -> None:
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the check goes on")

    monkeypatch.setattr(check, "resolve", resolve)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert check.main(["model"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)


def test_questions_that_come_with_the_check() -> None:
    (task,) = datasets.load(check.PASSAGES)
    assert len({sample.question for sample in task.samples}) == len(task.samples) >= 24
    behind_another = 0
    for sample in task.samples:
        assert len({*sample.passages}) == len(sample.passages) == 8
        assert not any(answer in sample.question for answer in sample.answers)
        holding = [text for text in sample.passages if any(answer in text for answer in sample.answers)]
        assert holding, sample.question
        # The names of the question, which a passage has to hold to be found by it alone.
        words = sample.question.split("Question: ")[1].split()[1:]
        names = {word.strip("?,'") for word in words if word[0].isupper()}
        behind_another += not any(all(name in text for name in names) for text in holding)
    assert behind_another >= len(task.samples) // 4


@pytest.mark.parametrize(
    ("kl", "verdict", "decided"),
    [
        ([0.0] * 12, SAFE, True),
        ([0.0] * 11, UNDECIDED, False),
        ([0.02, 0.07, 0.05, 0.03] * 3, SAFE, True),
        ([0.01, 0.14, 0.05, 0.08] * 3, SAFE, False),
        ([0.3, 0.2, 0.1, 0.4] * 3, UNSAFE, True),
        ([0.01, 0.3, 0.05, 0.2] * 3, UNDECIDED, False),
        ([0.02, 0.07, 0.05, 0.03] * 2, UNDECIDED, False),
    ],
)
def test_what_is_safe(kl: list[float], verdict: str, decided: bool) -> None:
    tally = Tally(Cell(find_recipe("epic"), 0.2), kl, [0.5] * len(kl))
    found = tally.judge()
    assert (found.verdict, found.ratio, found.answers, tally.decided) == (verdict, 0.2, len(kl), decided)
    assert found.low <= found.kl
    assert found.why.endswith(f"{len(kl)} of its answers, bound 0.1; 50% of their tokens stay the most likely")


async def test_recipes_that_are_decided_are_asked_no_more() -> None:
    sample = Sample("", ("a", "b"), "q", ("x",))
    tasks = [Task("one", (sample,) * 12, ("f1",)), Task("two", (sample,) * 8, ("f1",))]
    asked: list[tuple[str, int, int]] = []
    shares = {"full_attention": (0.0, 0.0), "epic": (0.02, 0.04), "a3": (0.5, 0.6), "full_reuse": (0.0, 0.2)}

    class Runner:
        async def measure(self, block: Block, cells: Sequence[Cell], **_: Any) -> list[Measured]:
            asked.append((block.task.name, len(block.samples), len(cells)))
            values = [[shares[cell.recipe.name][i % 2] for i in range(len(block.samples))] for cell in cells]
            return [Measured({"answer_agreement": v, "answer_kl": v}) for v in values]

    rounds: list[tuple[int, int]] = []
    cells = [Cell(find_recipe(name), find_recipe(name).ratio) for name in ("epic", "a3", "full_reuse")]
    given: Any = (Runner(), tasks, cells, lambda *at: rounds.append(at))
    found = {tally.choice.recipe: tally.judge() for tally in await judge(*given)}
    assert asked == [("one", 6, 4), ("two", 6, 4), ("one", 6, 2), ("two", 2, 2)]
    assert rounds == [(0, 3), (6, 3), (12, 1), (18, 1)]
    verdicts = {"epic": (SAFE, LEAST), "a3": (UNSAFE, LEAST), "full_reuse": (UNDECIDED, 20)}
    assert {name: (judged.verdict, judged.answers) for name, judged in found.items()} == verdicts
    # Without time, as many as a verdict takes.
    found = {tally.choice.recipe: tally.judge() for tally in await judge(*given, seconds=0)}
    assert {judged.answers for judged in found.values()} == {LEAST}


def tally(name: str, ratio: float, kl: float = 0.01, kept: int = 30, off: int = 0, answers: int = 36) -> Tally:
    """So many answers with a mean divergence, `off` of which are other answers."""
    shares = [1.0] * kept + [0.9] * (answers - kept)
    return Tally(Cell(find_recipe(name), ratio), [2.0] * off + [kl] * (answers - off), shares)


BASE = tally("deeplayer+primed", 0.2)


@pytest.mark.parametrize(
    ("others", "choice"),
    [
        ([], PRIMED),
        ([tally("deeplayer+primed", 0.1)], Choice("deeplayer+primed", 0.1)),
        ([tally("deeplayer+primed", 0.1), tally("deeplayer+primed", 0.05)], Choice("deeplayer+primed", 0.05)),
        ([tally("full_reuse+primed", 0.0)], Choice("full_reuse+primed", 0.0)),
        # As cheap, and better.
        ([tally("prophetkv", 0.2, kept=31)], Choice("prophetkv", 0.2)),
        ([tally("deeplayer+primed", 0.1, kept=29)], PRIMED),
        ([tally("deeplayer+primed", 0.1, off=1)], PRIMED),
        ([tally("deeplayer+primed", 0.1, kl=0.2)], PRIMED),
        ([tally("deeplayer+primed", 0.1, answers=12, kept=12)], PRIMED),
        ([tally("epic", 0.15)], PRIMED),
    ],
)
def test_the_cheapest_that_keeps_as_many_answers(others: list[Tally], choice: Choice) -> None:
    found = recommend([BASE, *others])
    assert found.choice == choice
    assert "at least as many of 36 answers as deeplayer+primed at 0.2" in found.why


def test_where_nothing_is_safe_and_where_too_few_were_asked() -> None:
    found = recommend([tally("deeplayer+primed", 0.2, kl=0.3), tally("deeplayer", 0.3, kl=0.2)])
    assert found.choice == PRIMED
    assert "no recipe up to a ratio of 0.3 is safe" in found.why
    assert found.why.endswith("deeplayer+primed at 0.2, which is unsafe: full attention answers instead")
    better = recommend([tally("deeplayer+primed", 0.2, kl=0.3), tally("prophetkv", 0.3, kl=0.01)])
    assert better.choice == Choice("prophetkv", 0.3)
    assert recommend([tally("deeplayer+primed", 0.2, answers=11, kept=5), tally("prophetkv", 0.2)]) == UNMEASURED


def parsed(*flags: object) -> argparse.Namespace:
    return check._parser().parse_args([*map(str, flags), "--pool-bytes", "64MiB", "--json"])


async def test_a_check_of_own_questions(model: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert await check._check(parsed(model, "--data", data), Console(stderr=True)) == 0
    said = json.loads(capsys.readouterr().out)
    assert Verdict.read(model, bytes.fromhex(said["fingerprint"])).recipes.keys() == said["recipes"].keys()
    assert {PRIMED.recipe, "prophetkv", "epic", "prefix_cache"} <= said["recipes"].keys()
    assert not {"cacheclip", "kvlink"} & said["recipes"].keys()
    assert said["recipes"]["prefix_cache"][0]["verdict"] == "safe"
    assert said["default"]["choice"] == {"recipe": "deeplayer+primed", "ratio": 0.2}
    assert said["default"]["why"] == UNMEASURED.why, "two questions are too few"
    assert [judged["ratio"] for judged in said["recipes"]["deeplayer"]] == [0.2, 0.3]
    (reuse,) = said["recipes"]["full_reuse"]
    assert (reuse["verdict"], reuse["answers"]) == ("not enough evidence", 2)
    assert 0 < reuse["low"] <= reuse["kl"] <= reuse["high"]
    assert 0 <= reuse["agreement"] <= 1


async def test_what_was_found_is_said_where_it_cannot_be_written(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked_for: list[Any] = []

    async def judged(runner: Any, tasks: Any, cells: Sequence[Cell], *_: Any) -> list[Tally]:
        asked_for.append(tasks)
        return [Tally(cell, [0.0] * 12, [1.0] * 12) for cell in cells]

    monkeypatch.setattr(check, "judge", judged)
    asked, console = (model, "--data", data, "--out"), Console(stderr=True)
    with pytest.raises(OSError, match=r"can't write the verdicts: .*nowhere.*; set another file with --out"):
        await check._check(parsed(*asked, tmp_path / "nowhere/x.json"), console)
    said = json.loads(capsys.readouterr().out)
    assert said["recipes"]["epic"][0]["verdict"] == "safe"
    assert said["default"]["choice"]["recipe"] == "full_reuse", "the cheapest"
    own = tmp_path / "verdict.json"
    assert await check._check(parsed(model, "--out", own), console, QUESTIONS) == 0
    samples, others = ([sample for task in tasks for sample in task.samples] for tasks in asked_for)
    assert samples == others, "questions of a corpus are asked as those of a file"
    assert json.loads(own.read_text())["recipes"] == said["recipes"]
    assert not (model / FILE).exists()
    assert "cacheclip" not in said["recipes"]
    assert await check._check(parsed(*asked, own, "--auxiliary", model), console) == 0
    found = json.loads(own.read_text())
    assert set(found["recipes"]) == {*said["recipes"], "cacheclip"}
    assert found["auxiliary"] == found["fingerprint"]


async def test_nothing_is_safe_with_an_engine_that_is_off(
    model: Path, off: models.Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(models, "load", lambda *_: off)
    assert await check._check(parsed(model), Console(stderr=True)) == 1
    said = json.loads(capsys.readouterr().out)["recipes"].values()
    assert {judged["verdict"] for (judged,) in said} == {"unsafe"}
    assert all("from those of the model's own code" in judged["why"] for (judged,) in said)


def test_questions_that_cannot_be_read(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main([str(model), "--data", str(tmp_path / "none.json")]) == 1
    assert capsys.readouterr().err.startswith(f"fusionkv check: {tmp_path}/none.json: can't be read")
