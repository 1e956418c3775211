"""`fusionkv check`: the oracles on every family, the verdict, and what a worker makes of it."""

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from fusionkv.bench.quality import check
from fusionkv.bench.quality.check import Score
from fusionkv.bench.quality.data.needles import KINDS, needles
from fusionkv.bench.quality.oracles import compare
from fusionkv.bench.quality.runner import Runner
from fusionkv.fusion_worker import models
from fusionkv.fusion_worker.client import WorkerClient
from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.fusion_worker.quality import verdict
from fusionkv.fusion_worker.quality.verdict import FILE, Judged, Verdict
from fusionkv.fusion_worker.recipes.modifiers import find
from fusionkv.fusion_worker.recipes.recipes import Recipe
from fusionkv.protos.fusion.v1 import fusion_pb2 as pb
from fusionkv.protos.runtime.errors import FailedPrecondition
from tests.fusion_worker.oracle import byte_tokenizer, network


def test_the_engine_holds_to_every_family(family: str, tmp_path: Path) -> None:
    network(family).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    model = models.load(tmp_path, "cpu")
    found = asyncio.run(compare(tmp_path, model, WorkerConfig(model=tmp_path, pool_bytes=8 << 20)))
    assert max(found.full_attention, found.full_reuse) < 1e-4
    assert found.held


def test_an_engine_that_is_off_is_found_out(tmp_path: Path) -> None:
    network("llama").save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    model = models.load(tmp_path, "cpu")
    with torch.no_grad():
        model.network.model.layers[1].self_attn.v_proj.weight *= 1.1
    found = asyncio.run(compare(tmp_path, model, WorkerConfig(model=tmp_path, pool_bytes=8 << 20)))
    assert not found.held


@pytest.mark.parametrize("kind", KINDS)
def test_needles_hold_their_answers(kind: str) -> None:
    task = needles(kind, 20)
    assert task == needles(kind, 20)
    for sample in task.samples:
        text = "".join(sample.passages)
        assert all(text.count(answer) == 1 for answer in sample.answers)
        assert len(sample.passages) == 8
    assert len({sample.answers for sample in task.samples}) > 15


@pytest.mark.parametrize(
    ("score", "safe", "why"),
    [
        (Score(18, 20, 0, 30), True, "it keeps 18 of 20 right answers"),
        (Score(17, 20, 30, 30), False, "it keeps 17 of 20 right answers"),
        (Score(0, 0, 27, 30), True, "the model answers no task; 27 of 30 first tokens are full attention's"),
        (Score(0, 0, 26, 30), False, "the model answers no task; 26 of 30 first tokens are full attention's"),
    ],
)
def test_what_is_safe(score: Score, safe: bool, why: str) -> None:
    assert score.judge(0.2) == Judged(safe, 0.2, why)


def test_a_verdict_beside_its_model(tmp_path: Path) -> None:
    made = Verdict(b"f".hex(), {"epic": Judged(False, 0.2, "bad"), "a3": Judged(True, 0.15, "good")})
    made.write(tmp_path / FILE)
    read = verdict.read(tmp_path, b"f")
    assert read == made
    for name in ("a3", "a3+window", "prophetkv", "full_attention"):
        read.check(find(name), 0.2)
    for name in ("epic", "epic+window"):
        with pytest.raises(FailedPrecondition, match=r"failed `fusionkv check` on this model: bad\. Use another"):
            read.check(find(name), 0.9)
    with pytest.raises(FailedPrecondition, match="is of another model, or this one was changed"):
        verdict.read(tmp_path, b"g")


def test_ratios_that_were_not_judged() -> None:
    recipes = {"epic": Judged(False, 0.2, ""), "a3": Judged(True, 0.15, ""), "full_reuse": Judged(False, 0.0, "")}
    found = Verdict("", recipes)
    found.check(find("epic"), 1.0)
    found.check(find("full_reuse"), 1.0)
    for ratio in (0.15, 0.5, 1.0):
        found.check(find("a3+window"), ratio)
    for ratio in (0.0, 0.14):
        with pytest.raises(FailedPrecondition, match=r"full reuse is not: ask for 0\.15 or more instead of 0"):
            found.check(find("a3+window"), ratio)
    recipes["full_reuse"] = Judged(True, 0.0, "")
    for ratio in (0.0, 0.14):
        found.check(find("a3"), ratio)


def test_cacheclip_is_judged_by_the_second_model_in_use(tmp_path: Path) -> None:
    made = Verdict("66", {"cacheclip": Judged(False, 0.2, ""), "epic": Judged(False, 0.2, "")}, b"second".hex())
    made.write(tmp_path / FILE)
    assert verdict.read(tmp_path, b"f", b"second") == made
    assert list(verdict.read(tmp_path, b"f", b"third").recipes) == ["epic"]


async def test_what_was_found_is_said_where_it_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    network("llama").save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)

    async def judge(runner: Runner, recipes: Sequence[Recipe], *rest: Any) -> dict[str, Judged]:
        await runner.close()
        return {recipe.name: Judged(True, recipe.ratio, "it is said") for recipe in recipes}

    monkeypatch.setattr(check, "_judge", judge)
    asked = [str(tmp_path), "--pool-bytes", "8MiB", "--json", "--out"]
    console = Console(stderr=True)
    with pytest.raises(OSError, match=r"the verdict is not written: .*nowhere.*; --out FILE takes another place"):
        await check._check(check._parser().parse_args([*asked, str(tmp_path / "nowhere/x.json")]), console)
    said = json.loads(capsys.readouterr().out)
    assert said["recipes"]["epic"]["why"] == "it is said"
    own = tmp_path / "own.json"
    assert await check._check(check._parser().parse_args([*asked, str(own)]), console) == 0
    assert json.loads(own.read_text())["recipes"] == said["recipes"]
    assert not (tmp_path / FILE).exists()
    assert "cacheclip" not in said["recipes"]
    asked = [*asked, str(own), "--auxiliary", str(tmp_path)]
    assert await check._check(check._parser().parse_args(asked), console) == 0
    found = json.loads(own.read_text())
    assert set(found["recipes"]) == {*said["recipes"], "cacheclip"}
    assert found["auxiliary"] == found["fingerprint"]


@pytest.mark.parametrize("count", ["0", "-1"])
def test_no_samples_are_no_check(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        check._parser().parse_args(["m", "--n", count])
    assert "--n" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"fingerprint": "66", "recipes": {"a": 1}}', "\x00"])
def test_a_verdict_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(FailedPrecondition, match="run `fusionkv check"):
        verdict.read(tmp_path, b"f")


def test_no_verdict_refuses_nothing(tmp_path: Path) -> None:
    verdict.read(tmp_path, b"f").check(find("epic"), 0.0)


@pytest.mark.system
async def test_a_worker_refuses_what_failed(reference_model: Path, tmp_path: Path, launch: Any) -> None:
    model = tmp_path / "model"
    shutil.copytree(reference_model, model)
    argv = [sys.executable, "-P", "-m", "fusionkv.gateway.cli.main", "check", str(model), "--n", "4", "--json"]
    done = await asyncio.to_thread(subprocess.run, argv, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["oracles"]["full_attention"] < 1e-4
    assert not said["recipes"]["full_reuse"]["safe"], "the reference models need their chunks fused"
    worker = launch("fusionkv.fusion_worker", "--listen", "127.0.0.1:0", "--model", str(model))
    client = WorkerClient(worker.address)
    try:
        asked = {"chunks": [pb.Chunk(ids=[5, 6])], "question": pb.Tokens(ids=[7])}
        with pytest.raises(FailedPrecondition, match="recipe 'full_reuse' failed `fusionkv check` on this model"):
            _ = [r async for r in client.generate(pb.GenerateRequest(recipe="full_reuse", **asked))]
        with pytest.raises(FailedPrecondition, match=r"ask for 0\.2 or more instead of 0,"):
            _ = [r async for r in client.generate(pb.GenerateRequest(recipe="prophetkv", ratio=0.0, **asked))]
        for recipe in ("full_attention", "prophetkv"):
            assert [r async for r in client.generate(pb.GenerateRequest(recipe=recipe, **asked))]
        for recipe in said["recipes"]:
            if recipe not in ("full_reuse", "ape"):
                assert [r async for r in client.generate(pb.GenerateRequest(recipe=recipe, ratio=1.0, **asked))]
    finally:
        await client.close()
