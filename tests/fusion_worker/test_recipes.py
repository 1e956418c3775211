"""Recipes by name: what a modifier changes, and names that are none."""

import pytest
import torch

from fusionkv.fusion_worker.select.base import choose
from fusionkv.protos.contract.capabilities import unusable
from fusionkv.protos.contract.names import full_name
from fusionkv.protos.contract.recipes import RECIPES, Isolated, SimilarityGuided, Versions
from fusionkv.protos.contract.recipes import find_recipe as find
from fusionkv.protos.contract.selectors import Window
from fusionkv.protos.fusion.v1.fusion_pb2 import Capabilities, GetModelResponse
from fusionkv.protos.runtime.errors import InvalidArgument


def test_a_name_without_modifiers_is_a_row_of_the_table() -> None:
    for name, recipe in RECIPES.items():
        assert find(name) == recipe


def test_modifiers_fill_one_slot_each() -> None:
    base, made = RECIPES["fusionrag"], find("fusionrag+isolated+window(4, 2)")
    assert (base.encode, base.choose) == (SimilarityGuided(10), None)
    assert (made.encode, made.choose, made.name) == (Isolated(), Window(4, 2), "fusionrag+isolated+window(4, 2)")
    assert (made.select, made.ratio) == (base.select, base.ratio)
    names = ("a3+similarity_guided", "a3+similarity_guided(3)", "fusionrag+versions")
    assert [find(name).neighbours for name in names] == [10, 3, 0]
    assert (find("cache_craft+versions").encode, find("a3+versions(16)").encode) == (Versions(3), Versions(16))
    assert (find("kvlink").links, find("kvlink+linked(0)").links, find("a3+linked").links) == (5, 0, 5)
    assert find("kvlink+linked(1)").ratio_for(None) == find("kvlink+linked(1)").ratio_for(0.0) == 0.0
    with pytest.raises(InvalidArgument, match=r"has the fixed ratio 0, not 0\.5: omit the ratio"):
        find("kvlink+linked(1)").ratio_for(0.5)
    assert (find("a3+window").choose, find("a3+window(16)").choose) == (Window(8, 5), Window(16, 5))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "unknown recipe ''; known: full_attention, "),
        ("magic", "unknown recipe 'magic'"),
        ("a3+magic", "unknown recipe modifier 'magic'; known: isolated, "),
        ("a3+", "unknown recipe modifier ''"),
        ("a3+window(", "unknown recipe modifier"),
        ("a3+window()", "unknown recipe modifier"),
        ("a3+window(1234567)", "unknown recipe modifier"),
        ("a3+" + "window" * 40, "unknown recipe modifier"),
        ("a3+" + "window" * 50, "name has 303 characters; the maximum is 256"),
        ("a3" + "+window" * 9, "9 modifiers, more than 8"),
        ("a3+window(1,2,3)", "window takes 2 numbers"),
        ("a3+window(0)", r"at least 1;"),
        ("a3+window(4,5)", "a window of 4 tokens can't hold 5"),
        ("a3+similarity_guided(0)", "similarity_guided takes 1 numbers"),
        ("a3+versions(0)", "versions takes 1 numbers"),
        ("a3+versions(17)", r"versions\(17\): at most 16"),
        ("full_attention+window", "full_attention is full attention"),
        ("ape+snapkv(8)", r"ape attends to its whole context at a temperature: it takes no snapkv"),
        ("full_reuse+primed(3)", r"primed\(3\): primed takes no numbers$"),
        ("prefix_cache+a3", "unknown recipe modifier 'a3'"),
        ("prefix_cache+snapkv", "prefix_cache is full attention .* such as snapkv; .* attention at a ratio of 1"),
    ],
)
def test_names_that_are_none(name: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        find(name)


def test_a_second_layer_is_asked_for_unless_a_worker_does_not_say_what_it_can_do() -> None:
    said = GetModelResponse(name="m", capabilities=Capabilities(layers=1))
    assert unusable(find("a3"), 0, said) == "m has one layer; a3 scores tokens at a second"
    assert not unusable(find("prophetkv"), 0, said)
    assert not unusable(find("a3"), 0, GetModelResponse(name="m"))


def test_windows_are_counted_from_the_first_stale_token() -> None:
    stale = torch.tensor([False] * 3 + [True] * 12)
    scores = torch.tensor([9.0] * 3 + [5, 1, 5, 1, 1, 1, 1, 5, 5, 5, 5, 1])
    assert choose(None, scores, stale, 6).tolist() == [3, 5, 10, 11, 12, 13]
    # Windows of 4 begin at 3, 7 and 11: the first holds two chosen tokens, the second one, the third three.
    for least, chosen in ((2, [3, 5, 11, 12, 13]), (3, [11, 12, 13]), (4, [])):
        assert choose(Window(4, least), scores, stale, 6).tolist() == chosen


def test_default_stands_for_the_gateways_recipe() -> None:
    asked = ["default", "default+snapkv(64)", "epic", "defaults"]
    full = ["a3+window", "a3+window+snapkv(64)", "epic", "defaults"]
    assert [full_name(name, "a3+window") for name in asked] == full
