"""Training: taken up again as if it had never stopped, and the same model in all processes that share a batch."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fusionkv.models.crew import Crew, means
from fusionkv.models.train import Run
from tests.commands import run_python

STEPS = 2


def parameters(run: Run) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in run.model.state_dict().items()}


@pytest.mark.long
@pytest.mark.slow
def test_a_run_that_is_taken_up_goes_on_as_it_would_have(tmp_path: Path) -> None:
    whole = Run("eased", 5, Crew())
    for _ in range(STEPS):
        whole.step(0.0)
    whole.store(tmp_path / "state.pt")
    first = parameters(whole)
    whole.step(0.0)
    again = Run("eased", 6, Crew())
    again.restore(tmp_path / "state.pt")
    assert all(value.equal(first[name]) for name, value in parameters(again).items())
    again.step(0.0)
    assert all(value.equal(parameters(whole)[name]) for name, value in parameters(again).items())
    assert (again.steps, again.smooth) == (whole.steps, whole.smooth)


# A process of two; leaves its parameters, and the gradients that it had of its own and together.
PART = """
import sys
from pathlib import Path

import torch

from fusionkv.models.crew import Crew
from fusionkv.models.train import Run

rank, steps, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
torch.set_num_threads(1)
run = Run("eased", 5, Crew(rank, 2, folder / "meeting"))
had, average = [], run.crew.average

def gradients():
    return torch.cat([p.grad.view(-1) for p in run.model.parameters() if p.grad is not None])

def noted(parameters):
    had.append(gradients())
    average(parameters)
    had.append(gradients())

run.crew.average = noted
for _ in range(steps):
    run.step(0.0)
run.store(folder / "state.pt")
torch.save((run.model.state_dict(), had, run.smooth), folder / f"{rank}.pt")
run.crew.close()
"""


@pytest.mark.long
@pytest.mark.slow
def test_two_processes_have_one_model(tmp_path: Path) -> None:
    parts = [
        subprocess.Popen([sys.executable, "-P", "-c", PART, str(rank), str(STEPS), str(tmp_path)]) for rank in (0, 1)
    ]
    assert [part.wait(timeout=280) for part in parts] == [0, 0]
    (one, mine, smooth), (other, theirs, seen) = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert all(value.equal(other[name]) for name, value in one.items())
    assert smooth == seen
    for n in range(0, 2 * STEPS, 2):
        assert not mine[n].equal(theirs[n]), "each has samples of its own"
        torch.testing.assert_close(mine[n + 1], (mine[n] + theirs[n]) / 2)
        assert mine[n + 1].equal(theirs[n + 1])
    with pytest.raises(SystemExit, match="resume it with --processes 2"):
        Run("eased", 5, Crew()).restore(tmp_path / "state.pt")


def test_means_by_name() -> None:
    assert means([{"a": 1.0, "b": 0.5}, {"a": 0.0}]) == {"a": 0.5, "b": 0.5}


@pytest.mark.long
@pytest.mark.slow
def test_the_command_writes_a_model(tmp_path: Path) -> None:
    flags = ("--recipe", "eased", "--processes", "2", "--minutes", "0.02", "--out", str(tmp_path / "model"))
    done = run_python("-m", "fusionkv.models.train", *flags, timeout=280)
    assert "saved" in done.stdout.splitlines()[-1]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {p.name for p in (tmp_path / "model").iterdir()}
