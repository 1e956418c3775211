"""A network of transformers over the layers of vLLM's model, without a second copy of the weights."""

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from vllm.model_executor.layers.vocab_parallel_embedding import (  # pyright: ignore[reportMissingImports]
    VocabParallelEmbedding,
)

from fusionkv.fusion_worker import models
from fusionkv.fusion_worker.library.cache import name_of


class _Shared:
    """A linear layer of vLLM that computes several layers of transformers, such as `qkv_proj`.

    It is called, and its weight is not viewed: on CPUs, vLLM packs weights and drops the original ones.
    """

    def __init__(self, layer: torch.nn.Module, channels: int) -> None:
        """channels: of the output, of all parts."""
        self._layer, self._channels = layer, channels
        self._input: torch.Tensor | None = None
        self._output = torch.empty(0)

    def part(self, x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Channels `[start, stop)` of the output, which is computed for the first part and kept up to the last."""
        if x is not self._input:
            # Layers of vLLM return a bias that they did not add, too; without such a bias it is None.
            self._input, (self._output, *_) = x, self._layer(x)
        output = self._output
        if stop == self._channels:
            self._input, self._output = None, torch.empty(0)
        return output[..., start:stop]


class _Part(torch.nn.Module):
    """A linear layer of transformers: some channels of a layer of vLLM."""

    def __init__(self, shared: _Shared, start: int, stop: int) -> None:
        super().__init__()
        self._shared, self._start, self._stop = shared, start, stop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._shared.part(x, self._start, self._stop)


def model_among(layers: Mapping[str, torch.nn.Module]) -> torch.nn.Module:
    """vLLM's model that has these attention layers. vLLM gives connectors the layers alone.

    Raises ValueError if there is none.
    """
    name, layer = next(iter(layers.items()))
    for found in gc.get_objects():
        # Not isinstance: it would make other libraries' lazy objects load what they stand for.
        if issubclass(type(found), torch.nn.Module) and hasattr(found, "packed_modules_mapping"):
            try:
                if found.get_submodule(name) is layer:
                    return found
            except AttributeError:
                continue
    raise ValueError("FusionKV does not find the model in vLLM's worker")


def model_over(
    theirs: torch.nn.Module, directory: Path, fingerprint: bytes, dtype: torch.dtype, max_tokens: int, today: str
) -> models.Model:
    """The worker's model over the layers of vLLM's.

    Args:
        theirs: vLLM's model, on one rank.
        directory: of the model's files; fingerprint: theirs.
        max_tokens: maximum tokens of a prompt and its answer.
        today: YYYY-MM-DD, the date that the chat template is told.

    Raises:
        FailedPrecondition: the files are of a model that the worker does not support.
        ValueError: vLLM's model has other layers than that of transformers.
    """
    network = _network(theirs, models.configuration(directory), dtype)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory, trust_remote_code=False)
    return models.wrap(name_of(directory), network, tokenizer, fingerprint, max_tokens, today=today)


def _network(theirs: Any, config: Any, dtype: torch.dtype) -> Any:
    with torch.device("meta"):
        network: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False).eval()
    _fill_buffers(network, next(theirs.parameters()).device)
    fused = {part: (name, parts) for name, parts in theirs.packed_modules_mapping.items() for part in parts}
    shared: dict[str, _Shared] = {}
    used: set[str] = set()
    for name, module in list(network.named_modules()):
        parent, _, own = name.rpartition(".")
        if type(module) is torch.nn.Linear and own != "lm_head":
            there, parts = fused.get(own, (own, [own]))
            at, ours = f"{parent}.{there}", network.get_submodule(parent)
            sizes = [getattr(ours, part).out_features for part in parts] if at not in shared else []
            if at not in shared:
                shared[at] = _Shared(_linear(theirs, at, module.in_features, sum(sizes)), sum(sizes))
                begins = [sum(sizes[:i]) for i in range(len(parts))]
                for part, begin, size in zip(parts, begins, sizes, strict=True):
                    setattr(ours, part, _Part(shared[at], begin, begin + size))
            used.add(at)
        elif dict(module.named_parameters(recurse=False)):
            _view(module, theirs, name)
            used.add(name)
    _check_whole(network, theirs, used)
    return network


def _fill_buffers(network: Any, device: torch.device) -> None:
    """Computes what a network does not load, such as the frequencies of RoPE, while its weights are on no device."""
    for module in network.modules():
        if buffers := dict(module.named_buffers(recurse=False)):
            module._buffers.update({name: torch.empty_like(old, device=device) for name, old in buffers.items()})
            network._init_weights(module)


def _linear(theirs: Any, name: str, inputs: int, outputs: int) -> torch.nn.Module:
    layer = _module(theirs, name)
    if (layer.input_size, layer.output_size) != (inputs, outputs):
        raise ValueError(
            f"vLLM's {name} has {layer.input_size} inputs and {layer.output_size} outputs, not {inputs} and {outputs}"
        )
    return layer


def _view(module: torch.nn.Module, theirs: Any, name: str) -> None:
    """Makes the parameters of a module views of vLLM's."""
    there = _module(theirs, name)
    for own, weight in list(module.named_parameters(recurse=False)):
        given = getattr(there, own, None)
        if isinstance(there, VocabParallelEmbedding) and given is not None:
            given = given[: len(weight)]  # without the rows that vLLM pads it with
        if given is None or given.shape != weight.shape:
            raise ValueError(f"vLLM has no {name}.{own} of the shape {list(weight.shape)} that transformers has")
        setattr(module, own, torch.nn.Parameter(given.detach(), requires_grad=False))


def _module(theirs: Any, name: str) -> Any:
    try:
        return theirs.get_submodule(name)
    except AttributeError:
        raise ValueError(f"{type(theirs).__name__} of vLLM has no {name}, which transformers has") from None


def _check_whole(network: Any, theirs: Any, used: set[str]) -> None:
    """Raises ValueError if a tensor of the network is missing, or one of vLLM's is not in the network."""
    missing = [name for name, tensor in (*network.named_parameters(), *network.named_buffers()) if tensor.is_meta]
    if missing:
        raise ValueError(f"{type(theirs).__name__} of vLLM has no {missing[0]}, which transformers has")
    for name, module in theirs.named_modules():
        if name not in used and dict(module.named_parameters(recurse=False)):
            raise ValueError(f"{type(theirs).__name__} of vLLM has {name}, which transformers has not")
