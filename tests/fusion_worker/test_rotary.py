"""RoPE of queries and keys together: what transformers computes, in one kernel, and for one instance of a model."""

import copy
import functools
import inspect
from typing import Any

import pytest
import torch
from transformers.utils.deprecation import deprecate_kwarg

from fusionkv.fusion_worker import models
from fusionkv.fusion_worker.compute.model_runner import position_embeddings
from fusionkv.kernels import rotary
from tests.fusion_worker.oracle import byte_tokenizer, network
from tests.kernels.inputs import HAS_KERNEL, rotated, there

# Pairs that are complex numbers.
OWN = ("deepseek-v2", "deepseek-v2-yarn")


@functools.cache
def installed(family: str, dtype: torch.dtype = torch.float32) -> models.Model:
    """A model whose attention modules rotate by plain torch."""
    made = models.wrap(family, copy.deepcopy(network(family, dtype)), byte_tokenizer(), bytes(32), 2048)
    for layer, rotation in enumerate(made.rotations):
        attention = made.network.model.layers[layer].self_attn
        rotary.install(attention, functools.partial(rotated, rotation), embeddings(made, layer))
    return made


def globals_of(attention: Any) -> dict[str, Any]:
    """The globals of transformers' code for attention."""
    return inspect.unwrap(type(attention).forward).__globals__


def embeddings(model: models.Model, layer: int) -> Any:
    """A layer's cosines and sines of seven positions."""
    decoder, positions = model.network.model, torch.tensor([[0, 1, 5, 6, 70, 1000, 2000]])
    return position_embeddings(decoder, decoder.layers[layer], model.network.lm_head.weight, positions)


def inputs(model: models.Model, layer: int) -> tuple[torch.Tensor, ...]:
    """Queries and keys of seven rows as their linear layers lay them out, with the layer's cosines and sines."""
    attention, generator = model.network.model.layers[layer].self_attn, torch.Generator().manual_seed(layer)
    made = torch.randn(7, 13, attention.head_dim, generator=generator).to(model.kv.dtype)
    q, k = (x.transpose(0, 1)[None] for x in (made[:, :10], made[:, 10:]))
    return q, k, *embeddings(model, layer)


def same(found: Any, theirs: Any, given: tuple[torch.Tensor, ...]) -> None:
    """Asserts what a rotation of `given` found, beside transformers' function in float64."""
    for mine, exact in zip(found, theirs(*(x.double() for x in given)), strict=True):
        assert mine.dtype == given[0].dtype
        rounding = torch.finfo(mine.dtype).eps
        torch.testing.assert_close(mine.double(), exact, rtol=rounding, atol=4 * rounding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_family_rotates_as_before(family: str, dtype: torch.dtype) -> None:
    model = installed(family, dtype)
    for layer, (rotation, each) in enumerate(zip(model.rotations, model.network.model.layers, strict=True)):
        attention = each.self_attn
        assert ("forward" in vars(attention)) == (family not in OWN)
        if family not in OWN:
            called = attention.forward.__func__.__globals__["apply_rotary_pos_emb"]
            assert (called.func, called.args) == (rotated, (rotation,))
            theirs = globals_of(attention)["apply_rotary_pos_emb"]
            given = inputs(model, layer)
            same(called(*given), theirs, given)


def test_only_the_loaded_instance_changes() -> None:
    """A copy calls its own code, and a model of the same class what it called before."""
    model, other = installed("llama"), copy.deepcopy(network("llama"))
    assert all("forward" not in vars(layer.self_attn) for layer in other.model.layers)
    copied = copy.deepcopy(model.network)
    for layer, before in zip(copied.model.layers, model.network.model.layers, strict=True):
        assert layer.self_attn.forward.__self__ is layer.self_attn is not before.self_attn


def test_a_class_that_renames_arguments_for_old_callers_rotates_by_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers from 5.24 on, and as it does where a class renames one more."""
    model = installed("llama")
    attention = copy.deepcopy(model.network.model.layers[0].self_attn)
    del attention.forward
    renames = deprecate_kwarg("former", version="99", new_name="hidden_states")
    monkeypatch.setattr(type(attention), "forward", renames(renames(type(attention).forward)))
    rotary.install(attention, functools.partial(rotated, model.rotations[0]), embeddings(model, 0))
    assert "forward" in vars(attention)


@pytest.mark.parametrize("changed", ["scale", "pairs", "partial"])
def test_what_computes_something_else_stays(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = installed("llama")
    attention = copy.deepcopy(model.network.model.layers[0].self_attn)
    del attention.forward
    theirs = globals_of(attention)["apply_rotary_pos_emb"]

    def other(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        if changed == "scale":
            return tuple(1.001 * x for x in theirs(q, k, cos, sin))
        if changed == "pairs":
            swapped = (x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for x in (q, k))
            return theirs(*swapped, cos, sin)
        return theirs(q, k, cos, sin)[0], k

    monkeypatch.setitem(globals_of(attention), "apply_rotary_pos_emb", other)
    rotary.install(attention, functools.partial(rotated, model.rotations[0]), embeddings(model, 0))
    assert "forward" not in vars(attention)


@pytest.mark.skipif(not HAS_KERNEL, reason="needs a GPU, or TRITON_INTERPRET=1 as test_interpreter.py sets it")
class TestKernel:
    # More than a block of heads; padded heads; part of the channels; neighbouring pairs; cosines of pairs alone.
    @pytest.mark.parametrize("kind", ["llama", "mistral", "phi3", "glm4", "gpt-oss", "gemma3"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_one_launch(self, kind: str, dtype: torch.dtype) -> None:
        from fusionkv.kernels.gpu import rotary_triton

        model = installed(kind, dtype)
        for layer, rotation in enumerate(model.rotations):
            theirs = globals_of(model.network.model.layers[layer].self_attn)["apply_rotary_pos_emb"]
            given = inputs(model, layer)
            found = rotary_triton.rotate(rotation, *map(there, given))
            same((each.cpu() for each in found), theirs, given)
