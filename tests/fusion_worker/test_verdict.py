"""What a worker makes of the verdicts beside its model."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from fusionkv.fusion_worker.client import WorkerClient
from fusionkv.fusion_worker.library.fingerprint import fingerprint
from fusionkv.fusion_worker.quality import verdict
from fusionkv.fusion_worker.quality.verdict import FILE, SAFE, UNDECIDED, UNSAFE, Judged, Verdict
from fusionkv.fusion_worker.recipes.modifiers import find
from fusionkv.protos.answer.v1.answer_pb2 import Explanation, Summary
from fusionkv.protos.fusion.v1 import fusion_pb2 as pb
from fusionkv.protos.runtime.errors import FailedPrecondition


def test_a_verdict_beside_its_model(tmp_path: Path) -> None:
    made = Verdict(
        b"f".hex(), {"epic": Judged(UNSAFE, 0.2, "bad", 0.5, 0.4, 0.6, 1.0, 8), "a3": Judged(SAFE, 0.15, "")}
    )
    made.write(tmp_path / FILE)
    assert verdict.read(tmp_path, b"f") == made
    with pytest.raises(FailedPrecondition, match="is for another model, or this model has changed"):
        verdict.read(tmp_path, b"g")


def test_only_what_is_unsafe_has_consequences() -> None:
    found = Verdict(
        "", {"epic": Judged(UNSAFE, 0.2, "bad"), "a3": Judged(SAFE, 0.15, ""), "ape": Judged(UNDECIDED, 0.0, "")}
    )
    for name in ("a3", "a3+window", "ape", "prophetkv", "full_attention", "prefix_cache"):
        assert found.unsafe(find(name), 0.2) == ""
    assert found.unsafe(find("epic"), 0.9) == "recipe 'epic' is unsafe on this model by `fusionkv check`: bad"
    assert found.unsafe(find("epic+window"), 0.2).startswith("recipe 'epic+window' at ratio 0.2 counts as 'epic': ")
    # All recomputed is full attention, unless a part alone is kept.
    assert found.unsafe(find("epic"), 1.0) == ""
    assert found.unsafe(find("epic+snapkv"), 1.0)


def test_a_recipe_with_modifiers_may_have_a_verdict_of_its_own() -> None:
    recipes = {"prophetkv": Judged(UNSAFE, 0.2, "bad"), "prophetkv+corrected": Judged(SAFE, 0.2, "")}
    found = Verdict("", recipes)
    assert found.unsafe(find("prophetkv"), 0.2)
    assert found.unsafe(find("prophetkv+window"), 0.2)
    assert found.unsafe(find("prophetkv+corrected"), 0.2) == ""
    assert found.unsafe(find("prophetkv+corrected+window(8,5)"), 0.2) == ""


@pytest.mark.parametrize("own", [SAFE, UNDECIDED])
def test_ratios_that_were_not_judged(own: str) -> None:
    recipes = {"a3": Judged(own, 0.15, ""), "full_reuse": Judged(UNSAFE, 0.0, "bad")}
    found = Verdict("", recipes)
    for ratio in (0.15, 0.5, 1.0):
        assert found.unsafe(find("a3+window"), ratio) == ""
    for ratio in (0.0, 0.14):
        why = found.unsafe(find("a3+window"), ratio)
        assert why.startswith(f"recipe 'a3+window' at ratio {ratio:g} counts as 'full_reuse': ")
    for reuse in (SAFE, UNDECIDED):
        recipes["full_reuse"] = Judged(reuse, 0.0, "")
        assert found.unsafe(find("a3"), 0.0) == ""


def test_cacheclip_is_judged_by_the_second_model_in_use(tmp_path: Path) -> None:
    made = Verdict("66", {"cacheclip": Judged(UNSAFE, 0.2, ""), "epic": Judged(UNSAFE, 0.2, "")}, b"second".hex())
    made.write(tmp_path / FILE)
    assert verdict.read(tmp_path, b"f", b"second") == made
    assert list(verdict.read(tmp_path, b"f", b"third").recipes) == ["epic"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"fingerprint": "66", "recipes": {"a": 1}}',
        '{"fingerprint": "66", "auxiliary": "", "recipes": {"a": {"verdict": "good", "ratio": 0.5, "why": ""}}}',
        '{"fingerprint": "66", "auxiliary": "", "recipes": {"a": {"verdict": "safe", "ratio": "", "why": ""}}}',
        "\x00",
    ],
)
def test_a_verdict_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(FailedPrecondition, match="run `fusionkv check"):
        verdict.read(tmp_path, b"f")


def test_no_verdict_replaces_nothing(tmp_path: Path) -> None:
    assert verdict.read(tmp_path, b"f").unsafe(find("epic"), 0.0) == ""


@pytest.mark.slow
@pytest.mark.system
async def test_a_worker_answers_with_full_attention_in_place_of_what_is_unsafe(
    reference_model: Path, tmp_path: Path, launch: Any
) -> None:
    model = tmp_path / "model"
    shutil.copytree(reference_model, model)
    recipes = {
        "full_reuse": Judged(UNSAFE, 0.0, "it strays"),
        "prophetkv": Judged(SAFE, 0.2, "it holds"),
        "epic": Judged(UNDECIDED, 0.2, "who knows"),
    }
    Verdict(fingerprint(model).hex(), recipes).write(model / FILE)
    worker = launch("fusionkv.fusion_worker", "--listen", "127.0.0.1:0", "--model", str(model))
    client = WorkerClient(worker.address)
    try:
        told = {found.recipe: (found.verdict, found.ratio, found.why) for found in (await client.model()).verdicts}
        assert told == {name: (judged.verdict, judged.ratio, judged.why) for name, judged in recipes.items()}

        async def ask(recipe: str, **more: Any) -> tuple[list[int], Summary, Explanation]:
            chunks = [pb.Chunk(ids=[5, 6, 7, 8, 9]), pb.Chunk(ids=[9, 8, 7, 6])]
            asked = pb.GenerateRequest(
                recipe=recipe, chunks=chunks, question=pb.Tokens(ids=[7]), explain=True, **more
            )
            answers = [r async for r in client.generate(asked)]
            return [r.token.id for r in answers if r.HasField("token")], answers[-1].summary, answers[0].explanation

        full, summary, explained = await ask("full_attention")
        assert (summary.recipe, summary.recipe_replaced) == ("full_attention", "")
        assert {found.recipe: found.verdict for found in explained.verdicts} == {
            n: j.verdict for n, j in recipes.items()
        }
        for recipe, more in (("full_reuse", {}), ("full_reuse+corrected", {}), ("prophetkv", {"ratio": 0.0})):
            ids, summary, _ = await ask(recipe, **more)
            assert ids == full
            assert summary.recipe == "prefix_cache"
            assert summary.recipe_replaced.endswith(
                "recipe 'full_reuse' is unsafe on this model by `fusionkv check`: it strays"
            )
            assert not summary.degraded
        for recipe in ("prophetkv", "epic", "a3"):
            _, summary, _ = await ask(recipe)
            assert (summary.recipe, summary.recipe_replaced) == (recipe, "")
    finally:
        await client.close()
    assert "fusionkv check: full_reuse at ratio 0: unsafe, it strays" in worker.log
