"""What was measured is found again under what it depends on, and nothing else; jobs measure the rest."""

import argparse
import fcntl
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fusionkv.fusion_worker.config import STORES, WorkerConfig
from fusionkv.fusion_worker.evaluate.data.samples import Library, Sample, Task
from fusionkv.fusion_worker.evaluate.data.tasks import shipped
from fusionkv.fusion_worker.evaluate.evaluation import RATIOS, _parser, _plan, _subject, main
from fusionkv.fusion_worker.evaluate.jobs import BLOCK, cells_of, missing
from fusionkv.fusion_worker.evaluate.report.cells import (
    NO_CONTEXT,
    Cell,
    Measured,
    Store,
    Subject,
    _read,
    key,
    locked,
    table,
)
from fusionkv.fusion_worker.library.cache import fingerprint
from fusionkv.fusion_worker.quality.verdict import FILE, Choice, Default, Verdict
from fusionkv.protos.contract.recipes import find_recipe
from fusionkv.protos.contract.selectors import CachedAttention, QuestionAttention
from fusionkv.protos.runtime.errors import InvalidArgument
from tests.processes import descendants, ended
from tests.waiting import wait_until

SUBJECT = Subject("m", "ab", "auto", 512)
TASK = Task("t", tuple(Sample("s", (f"page {i}",), "q", (str(i),)) for i in range(BLOCK + 5)))
CELL = Cell(find_recipe("prophetkv"), 0.1)


def measured(first: int, count: int) -> Measured:
    return Measured({"kl": [i / 4 for i in range(first, first + count)]})


def test_blocks_come_back_as_one_cell(tmp_path: Path) -> None:
    path = tmp_path / "deep/cells.jsonl"
    store, (first, second) = Store(path), list(TASK.blocks(BLOCK))
    store.append(SUBJECT, second, [(CELL, measured(BLOCK, 5))])
    assert list(table(SUBJECT, [first, second], [CELL], store)) == []
    store.append(SUBJECT, first, [(CELL, measured(0, BLOCK))])
    whole = measured(0, BLOCK + 5)
    for found in (store, Store(path)):
        assert list(table(SUBJECT, [first, second], [CELL], found)) == [(CELL, whole)]


def test_a_metric_that_a_block_lacks_is_left_out(tmp_path: Path) -> None:
    """As in a file that an earlier version began."""
    store, (first, second) = Store(tmp_path / "cells.jsonl"), list(TASK.blocks(BLOCK))
    more = Measured({**measured(0, BLOCK).values, "stored": [7.0] * BLOCK})
    for blocks in ((first, second), (second, first)):
        store.append(SUBJECT, blocks[0], [(CELL, more)])
        store.append(SUBJECT, blocks[1], [(CELL, Measured(measured(BLOCK, 5).values))])
        ((_, together),) = table(SUBJECT, [first, second], [CELL], store)
        assert set(together.values) == {"kl"}
        assert len(together.values["kl"]) == BLOCK + 5


FIRST = next(TASK.blocks(BLOCK))
KEY = key(SUBJECT, FIRST, CELL)
SELECT = replace(CELL.recipe, select=QuestionAttention(CachedAttention(first=1.0)))


@pytest.mark.parametrize(
    ("subject", "block", "cell"),
    [
        (replace(SUBJECT, fingerprint="ac"), FIRST, CELL),
        (replace(SUBJECT, dtype="float16"), FIRST, CELL),
        (replace(SUBJECT, chunk_tokens=256), FIRST, CELL),
        (SUBJECT, next(replace(TASK, metrics=("f1",)).blocks(BLOCK)), CELL),
        (SUBJECT, [*TASK.blocks(BLOCK)][1], CELL),
        (SUBJECT, FIRST, Cell(CELL.recipe, 0.2)),
        (SUBJECT, FIRST, Cell(SELECT, 0.1)),
    ],
)
def test_whatever_changes_a_figure_changes_its_key(subject: Subject, block: Any, cell: Cell) -> None:
    assert key(subject, block, cell) != KEY


def test_what_changes_no_figure_changes_no_key() -> None:
    """A second model counts where a recipe needs it, a file where neighbours come from it, and names never."""
    other, clip = replace(SUBJECT, auxiliary="cd"), Cell(find_recipe("cacheclip"), 0.1)
    assert key(SUBJECT, FIRST, clip) != key(other, FIRST, clip)
    assert key(other, FIRST, CELL) == KEY
    more = Library((*TASK.samples, Sample("s", ("another page",), "q", ("x",))))
    blocks = [next(replace(TASK, library=library).blocks(BLOCK)) for library in (Library(TASK.samples), more)]
    guided = Cell(find_recipe("fusionrag"), 0.1)
    assert [len({key(SUBJECT, block, cell) for block in blocks}) for cell in (guided, CELL)] == [2, 1]
    # So do primers.
    assert len({key(SUBJECT, block, Cell(find_recipe("prophetkv+primed"), 0.1)) for block in blocks}) == 2
    whole, part = (next(task.blocks(BLOCK)) for task in (TASK, TASK.first(BLOCK)))
    assert key(SUBJECT, whole, CELL) == key(SUBJECT, part, CELL)
    renamed = replace(CELL.recipe, description="said otherwise")
    assert key(replace(SUBJECT, model="moved"), FIRST, Cell(renamed, 0.1)) == KEY


def test_a_line_cut_short_is_measured_again_and_harms_no_other(tmp_path: Path) -> None:
    path, (first, second) = tmp_path / "cells.jsonl", list(TASK.blocks(BLOCK))
    store = Store(path)
    store.append(SUBJECT, first, [(CELL, measured(0, BLOCK))])
    store.append(SUBJECT, second, [(CELL, measured(BLOCK, 5))])
    path.write_bytes(path.read_bytes()[:-30])
    config = WorkerConfig()
    (job,) = missing(SUBJECT, config, [(TASK, [CELL])], Store(path))
    assert [(part.block, part.cells) for part in job.parts] == [(second, (CELL,))]
    Store(path).append(SUBJECT, second, [(CELL, measured(BLOCK, 5))])
    assert list(missing(SUBJECT, config, [(TASK, [CELL])], Store(path))) == []


def test_tasks_of_the_same_contexts_share_a_job(tmp_path: Path) -> None:
    store = Store(tmp_path / "cells.jsonl")
    one, two = (replace(TASK, name=name, contexts="stories") for name in ("one", "two"))
    plan = [(task, [CELL]) for task in (one, TASK, two)]
    jobs = missing(SUBJECT, WorkerConfig(), plan, store)
    found = [[(part.block.task.name, part.block.start) for part in job.parts] for job in jobs]
    assert found == [[("one", 0), ("two", 0)], [("one", BLOCK), ("two", BLOCK)], [("t", 0)], [("t", BLOCK)]]


def test_cells_are_ratios_where_a_recipe_leaves_them_open() -> None:
    names = ("full_attention", "full_reuse", "prophetkv", "fusionrag")
    found = cells_of(TASK, [find_recipe(name) for name in names], (0.1, 0.2))
    assert [str(cell) for cell in found] == [
        *("full_attention r=1", "full_reuse r=0", "prophetkv r=0.1", "prophetkv r=0.2"),
        *("fusionrag r=0", "fusionrag r=0.1", "fusionrag r=0.2"),
    ]
    words, reuse = replace(TASK, metrics=("f1",)), find_recipe("full_reuse")
    assert cells_of(words, [reuse], (0.1,)) == [Cell(reuse, 0.0), NO_CONTEXT]


def test_the_default_is_that_of_each_model(reference_model: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(reference_model, tmp_path / "measured"))
    Verdict(fingerprint(directory).hex(), {}, default=Default(Choice("a3", 0.1), "")).write(directory / FILE)
    for models, wanted in (
        ([reference_model], {"deeplayer+primed+window"}),
        ([directory], {"a3+window"}),
        ([directory, reference_model], {"deeplayer+primed+window", "a3+window"}),
    ):
        args = _parser().parse_args(
            [*map(str, models), "--tasks", "chain2", "--n", "1", "--recipes", "default+window"]
        )
        ((_, cells),) = _plan(args)
        assert {cell.recipe.name for cell in cells} - {"full_attention", "full_reuse", "no_context"} == wanted


def test_files_have_ratios_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "pages.json").write_text('[{"ctxs": [{"text": "p"}], "question": "q", "answers": ["a"]}]')
    for flags, wanted in (([], {0.05, 0.15, 0.3}), (["--ratios", "0.2"], {0.2})):
        args = _parser().parse_args(["--data", str(tmp_path), "--recipes", "epic", *flags])
        ((task, cells),) = _plan(args)
        assert task.library == Library(task.samples)
        assert {cell.ratio for cell in cells if cell.recipe.name == "epic"} == wanted
    reference_cells = _plan(_parser().parse_args(["--tasks", "chain2", "--n", "1"]))[0][1]
    for name in ("epic", "deeplayer+primed"):
        assert {cell.ratio for cell in reference_cells if cell.recipe.name == name} == set(RATIOS)


def test_long_answers_need_files() -> None:
    with pytest.raises(InvalidArgument, match="give --data"):
        _plan(_parser().parse_args(["--long"]))


def test_what_was_measured_belongs_to_one_way_of_storing_and_one_kind_of_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    args = argparse.Namespace(auxiliary=None, device="cpu", dtype="auto", chunk_tokens=512)
    subjects = [_subject(shipped()[0], store, args) for store in STORES]
    keys = {key(subject, FIRST, CELL) for subject in subjects}
    assert len(keys) == len({subject.model for subject in subjects}) == len(STORES)
    # The dtype `auto` is another on a GPU.
    monkeypatch.setattr("fusionkv.fusion_worker.evaluate.evaluation.on_cpu", lambda device: device == "cpu")
    args.device = "cuda"
    assert key(_subject(shipped()[0], "plain", args), FIRST, CELL) not in keys


def test_what_a_report_could_not_tell_apart_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """RULER has files of the same name for every length of context."""
    for length in ("4096", "8192"):
        (tmp_path / length).mkdir()
        record = {"input": f"Look.\n{length} words.\nWhich?", "outputs": [length]}
        (tmp_path / length / "niah.jsonl").write_text(json.dumps(record))
    with pytest.raises(InvalidArgument, match="two of the task ruler/niah, "):
        _plan(_parser().parse_args(["--data", str(tmp_path)]))
    assert len(_plan(_parser().parse_args(["--tasks", "single", "single", "--n", "1"]))) == 1
    models = [tmp_path / run / "model" for run in ("first", "second")]
    for model in models:
        model.mkdir(parents=True)
        (model / "config.json").write_text(json.dumps({"run": model.parent.name}))
    flags = ("--tasks", "single", "--n", "1", "--out", str(tmp_path / "out"))
    assert main([*map(str, models), *flags]) == 1
    assert "two of the model model, " in capsys.readouterr().err


def test_a_folder_that_another_process_measures_into(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--tasks", "single", "single", "--n", "1", "--out", str(tmp_path)]
    file = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(file, fcntl.LOCK_EX)
    assert main(flags) == 1
    assert capsys.readouterr().err == (
        f"fusionkv eval: {tmp_path} is in use by another process: give each one an --out of its own\n"
    )
    os.close(file)
    with locked(tmp_path), pytest.raises(OSError, match="in use"), locked(tmp_path):
        pass


@pytest.mark.long
@pytest.mark.slow
def test_an_evaluation_that_is_killed_leaves_no_process(reference_model: Path, tmp_path: Path) -> None:
    flags = ("--tasks", "single", "--processes", "2", "--out", str(tmp_path))
    command = (sys.executable, "-P", "-m", "fusionkv.gateway.cli.main", "eval", str(reference_model), *flags)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as started:
        wait_until(lambda: len(descendants(started.pid)) >= 3, 120)  # the third one tracks resources
        found = descendants(started.pid)
        started.kill()
    wait_until(lambda: all(map(ended, found)), 30)


@pytest.mark.long
@pytest.mark.slow
def test_after_a_kill_the_same_command_goes_on(reference_model: Path, tmp_path: Path) -> None:
    pages = [f"Report Balban. The code of Dorfek is {code}. The lake is wide." for code in range(112, 128)]
    asked = {"question": "Report Balban: code of Dorfek?", "answers": ["123"]}
    (tmp_path / "p.json").write_text(json.dumps([{**asked, "ctxs": [{"text": page}] * 2} for page in pages]))
    flags = ("--data", str(tmp_path / "p.json"), "--recipes", "full_reuse", "--n", "15", "--processes", "1")
    command = (sys.executable, "-P", "-m", "fusionkv.gateway.cli.main", "eval", str(reference_model), *flags)
    path = tmp_path / "cells.jsonl"
    with subprocess.Popen((*command, "--out", str(tmp_path)), stderr=subprocess.DEVNULL) as started:
        wait_until(lambda: path.exists() and path.stat().st_size > 0, 240)
        started.kill()
    kept = path.read_bytes().rpartition(b"\n")[0]
    before = [tuple(json.loads(line)["key"]) for line in kept.splitlines()]
    done = subprocess.run((*command, "--out", str(tmp_path)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert path.read_bytes().startswith(kept)
    found = [tuple(json.loads(line)["key"]) for line in path.read_text().splitlines() if _read(line) is not None]
    assert 0 < len(before) < len(found) == len({*found}) == 8 * 3, "each once: blocks of two, three cells"
    left = 3 * 15 - sum(len(json.loads(line)["values"]["f1"]) for line in kept.splitlines())
    assert f"{left} of {left} samples x cells in " in done.stderr
    (row,) = (
        row
        for row in json.loads((tmp_path / "report.json").read_text())
        if (row["recipe"], row["metric"]) == ("full_reuse", "kept")
    )
    assert row["n"] <= 15


@pytest.mark.long
@pytest.mark.slow
def test_a_process_that_is_killed_is_told(reference_model: Path, tmp_path: Path) -> None:
    flags = ("--tasks", "single", "--processes", "2", "--out", str(tmp_path))
    command = (sys.executable, "-P", "-m", "fusionkv.gateway.cli.main", "eval", str(reference_model), *flags)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as started:
        wait_until(lambda: len(descendants(started.pid, "spawn_main")) == 2, 120)
        descendants(started.pid, "spawn_main")[0].kill()
        _, said = started.communicate(timeout=60)
    assert started.returncode == 1
    assert said.endswith("use --processes 1; finished measurements are kept\n")
