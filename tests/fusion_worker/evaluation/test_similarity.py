"""Neighbours by tf-idf, worked out by hand, and looked for in all of a file."""

import math
from pathlib import Path

import pytest

from fusionkv.bench.quality.data.neighbours import Neighbours
from fusionkv.bench.quality.data.prompts import Prompter
from fusionkv.bench.quality.data.samples import Library, Sample
from fusionkv.bench.quality.data.similarity import Similarity
from fusionkv.fusion_worker import models
from fusionkv.fusion_worker.prompt import Chunk

# 9 stands everywhere and says nothing; 7 is rare.
A, B, C, D, E = (Chunk(ids) for ids in ((9, 1, 2), (9, 1, 1, 3), (9, 2, 7), (9, 7, 7, 4), (9, 5)))


def cosine(a: dict[int, float], b: dict[int, float]) -> float:
    dot = sum(weight * b.get(token, 0.0) for token, weight in a.items())
    return dot / math.sqrt(sum(w * w for w in a.values()) * sum(w * w for w in b.values()))


def test_the_order_is_that_of_tf_idf_cosines() -> None:
    pool = [A, B, C, D, E]
    holders = {i: sum(i in chunk.ids for chunk in pool) for chunk in pool for i in chunk.ids}
    vectors = [{i: c.ids.count(i) * math.log(len(pool) / holders[i]) for i in set(c.ids)} for c in pool]
    for at, chunk in enumerate(pool):
        scores = [-round(cosine(vectors[at], other), 9) for other in vectors]
        wanted = sorted((i for i in range(len(pool)) if i != at), key=lambda i: (scores[i], i))
        assert Similarity(pool).nearest(chunk, 4) == [pool[i] for i in wanted]
    assert Similarity(pool).nearest(C, 1) == [D]


def test_equals_come_in_the_order_of_the_pool_and_nothing_twice() -> None:
    twin = Chunk((9, 1, 2, 8))
    pool = [E, A, twin, Chunk(A.ids), B]
    assert Similarity(pool).nearest(E, 9) == [A, twin, B]
    assert Similarity([E]).nearest(E, 3) == []
    assert Similarity([A, B]).nearest(Chunk((1, 400_000)), 1) == [A]  # none of its tokens tells A and B apart


@pytest.fixture(scope="module")
def neighbours(reference_model: Path) -> Neighbours:
    model = models.load(reference_model)
    return Neighbours(model.max_tokens, Prompter(model, 512))


def test_a_library_is_all_samples_of_a_file(neighbours: Neighbours) -> None:
    pages = ["Ada owns the lamp.", "Ben chose the rope.", "Ada owns the rope.", "The lake is wide."]
    samples = tuple(Sample("", (page,), "q", ("a",)) for page in pages)
    similarity = neighbours.among(Library(samples), ())
    assert len(similarity.chunks) == len(pages)
    assert neighbours.among(Library(samples), ()) is similarity, "read once"
    lamp, _, rope, _ = similarity.chunks
    assert similarity.nearest(lamp, 1) == [rope]
    assert neighbours.among(Library(samples[:2]), ()) is not similarity


def test_as_many_as_the_model_takes(neighbours: Neighbours) -> None:
    most = neighbours._max_tokens
    near = [Chunk((1,) * 10), Chunk((2,) * (most - 20)), Chunk((3,))]
    assert neighbours.before(Chunk((4,) * 5), Chunk((5,) * 5), near) == near[:2]
    assert neighbours.before(Chunk((4,) * 5), Chunk((5,) * 6), near) == near[:1]
