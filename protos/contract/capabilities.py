"""Which recipes a worker can follow, by what GetModel says of its model."""

from fusionkv.protos.contract.recipes import Recipe
from fusionkv.protos.contract.selectors import FreshLayer, SecondModel
from fusionkv.protos.fusion.v1.fusion_pb2 import GetModelResponse
from fusionkv.protos.runtime.errors import FailedPrecondition


def check_usable(recipe: Recipe, chunks: int, model: GetModelResponse) -> None:
    """Raises FailedPrecondition if a worker can't follow a recipe with so many chunks."""
    if reason := unusable(recipe, chunks, model):
        raise FailedPrecondition(reason)


def unusable(recipe: Recipe, chunks: int, model: GetModelResponse) -> str:
    """Why a worker can't follow a recipe with so many chunks; empty if it can, or does not say what it can do."""
    if not model.HasField("capabilities"):
        return ""
    has, name = model.capabilities, model.name
    if recipe.needs == FreshLayer() and has.layers < 2:
        return f"{name} has one layer; {recipe.name} scores tokens at a second"
    if recipe.needs == SecondModel() and not has.auxiliary:
        return f"{recipe.name} chooses tokens by a small second model: start the worker with --auxiliary DIRECTORY"
    if recipe.keep is not None and has.windowed:
        return f"{name} sees a window of its context; {recipe.name} would keep tokens outside of it"
    if recipe.links > has.links:
        use = f"use +linked({has.links})" if has.links else "it was not trained with any"
        return f"{name} has {has.links} link tokens for a chunk; {recipe.name} takes {recipe.links}: {use}"
    if recipe.links and chunks > has.linked_chunks:
        return f"{name} has link tokens for {has.linked_chunks} chunks; {recipe.name} is asked to link {chunks}"
    return ""
