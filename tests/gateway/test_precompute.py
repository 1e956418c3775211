"""What is encoded ahead of time is what the cache service has, whatever a corpus says of it."""

from pathlib import Path
from typing import Any

import pytest

from fusionkv.gateway.client.client import Client
from fusionkv.gateway.client.results import Summary
from fusionkv.protos.runtime.errors import InvalidArgument
from tests.gateway import sentence_models
from tests.gateway.conftest import Serve, Start
from tests.services import Launch, start_cache

pytestmark = pytest.mark.system


def test_the_default_recipe_reuses_chunks_as_they_were_encoded(stack: Any) -> None:
    """With neighbours where a corpus was encoded so, alone where it was not; by both names that the default has."""
    client: Client = stack.client
    for i in range(4):
        client.ingest("near", f"{i}.txt", f"The colour of Name{i} is {i}.")
        client.ingest("alone", f"{i}.txt", f"The taste of Name{i} is {i}.")
    [*client.precompute("near", "default", neighbours=2)]

    def asked(corpus: str, recipe: str = "", **more: Any) -> Summary:
        return client.ask(corpus, "Colour or taste of Name1?", recipe=recipe, max_tokens=1, **more).summary

    for name in ("", "default"):
        summary = asked("near", name)
        assert (summary.recipe, summary.ratio) == ("midlayer+corrected+similarity_guided(2)", 0.12)
        found = {hit.kind: hit.chunks for hit in summary.hits}
        # The first one stands where it was encoded as the others' neighbour: lossless, which is better still.
        assert (summary.chunks_missed, found) == (0, {"exact": 1, "alternative": 3})
        summary = asked("alone", name)
        assert (summary.recipe, summary.ratio) == ("midlayer+corrected", 0.12)
    assert asked("near", "prophetkv").recipe == "prophetkv"
    assert asked("near", ratio=1.0).tokens_reused == 0


def test_the_default_recipe_needs_nothing_but_chunks_encoded_alone(stack: Any) -> None:
    """Then its first question finds all of them, and the corpus's correction."""
    client: Client = stack.client
    for i in range(9):
        client.ingest("ahead", f"{i}.txt", f"Of Name{i}: " + f"a{i} b{i} c{i} " * 20)
    assert [[*client.precompute("ahead")][-1].skipped for _ in range(2)] == [0, 27]
    summary = client.ask("ahead", "Name1, a2, b3 and c4?", max_tokens=1).summary
    assert (summary.recipe, summary.chunks_missed, summary.tokens_encoded) == ("midlayer+corrected", 0, 0)
    assert summary.chunks_corrected > 0
    with pytest.raises(InvalidArgument, match="recipe 'prefix_cache' reuses no chunks"):
        [*client.precompute("ahead", "prefix_cache")]


def test_a_correction_is_learned_with_embeddings(cache: Any, start: Start, serve: Serve, tmp_path: Path) -> None:
    """It is read as what it was made with, the embedder among it."""
    worker = start(cache=cache)
    embedder = str(sentence_models.write(tmp_path / "embedder"))
    client, _ = serve(worker, "--embedder", embedder, "--embedder-threads", "1")
    for i in range(9):
        client.ingest("embedded", f"{i}.txt", f"Of Name{i}: " + f"a{i} b{i} c{i} " * 20)
    assert [[*client.precompute("embedded")][-1].skipped for _ in range(2)] == [0, 9]
    assert client.ask("embedded", "Name1, a2, b3 and c4?", max_tokens=1).summary.chunks_corrected > 0


def test_what_the_cache_lost_is_encoded_again(start: Start, launch: Launch, serve: Serve, tmp_path: Path) -> None:
    """Two caches, one after the other, below one gateway's corpora."""
    for name in ("first", "second"):
        client, gateway = serve(start(cache=start_cache(launch, tmp_path / name)))
        if name == "first":
            for i in range(3):
                client.ingest("c", f"{i}.txt", f"page {i} is about subject{i}")
        assert [[*client.precompute("c", "fusionrag")][-1].skipped for _ in range(2)] == [0, 3]
        summary = client.ask("c", "subject1?", recipe="fusionrag", max_tokens=1).summary
        assert (summary.degraded, summary.chunks_missed, summary.tokens_encoded) == (False, 0, 0)
        assert gateway.stop() == 0
