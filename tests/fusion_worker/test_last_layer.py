"""Rows that nobody looks at behind the last layer go no further than its keys and values."""

from typing import Any

import pytest

from tests.fusion_worker.oracle import error, oracle, random_ids


def count_rows(network: Any) -> list[int]:
    """Rows that each layer's MLP is given from now on, all steps together."""
    rows = [0] * len(network.model.layers)
    for number, layer in enumerate(network.model.layers):

        def counted(_: Any, given: tuple[Any, ...], number: int = number) -> None:
            rows[number] += given[0].shape[1]

        layer.mlp.register_forward_pre_hook(counted)
    return rows


@pytest.mark.parametrize("recipe", ["full_attention", "fusionrag", "prophetkv"])
async def test_one_row_of_a_prefill_goes_through_the_last_layer(recipe: str, family: str, start: Any) -> None:
    rig, plain = await start(family), oracle(family)
    parts = random_ids(6, 1), [random_ids(40, 2), random_ids(30, 3)], random_ids(9, 4)
    rows = count_rows(rig.model.network)
    answer = await rig.ask(*parts, recipe=recipe, ratio=1.0)
    whole = [*parts[0], *parts[1][0], *parts[1][1], *parts[2]]
    assert rows[0] >= len(whole)
    # Encoded chunks leave keys and values alone.
    assert rows[-1] == 1
    assert error(answer.logits[0], plain.logits(whole)) < 1e-4
    # All rows of a step that decodes are looked at.
    more = await rig.ask(*parts, recipe=recipe, ratio=1.0, max_tokens=4)
    assert rows[-1] == 1 + len(more.logits)
