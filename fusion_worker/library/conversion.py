"""Converts a GGUF file to a model directory with safetensors weights; what it can't convert whole, it refuses."""

import hashlib
import importlib.metadata
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fusionkv.protos.runtime.errors import FailedPrecondition, first_line, printable

# Raise it when a conversion changes.
VERSION = 3
_PACKAGES = ("gguf", "accelerate")
# Tensors are held in memory until a file of weights is full.
_SHARD_BYTES = 1 << 30


def check_packages() -> None:
    """Raises FailedPrecondition if a package that is needed to read GGUF files is not installed."""
    if missing := [name for name in _PACKAGES if importlib.util.find_spec(name) is None]:
        raise FailedPrecondition(f'reading a GGUF file needs {" and ".join(missing)}: pip install "fusionkv[gguf]"')


def key(digest: str, libraries: bool = True) -> str:
    """Names a conversion: SHA-256 over the file's digest and the versions of what converts it; hexadecimal.

    libraries: whether those of transformers and gguf count. Without the file, nothing could be converted again.
    """
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("transformers", "gguf") if libraries]
    return hashlib.sha256("\n".join([digest, f"fusionkv {VERSION}", *versions]).encode()).hexdigest()


def convert(parts: Sequence[Path], into: Path) -> None:
    """Writes a GGUF file's configuration, bfloat16 weights, tokenizer and chat template to a folder.

    parts: all parts of the file, in order (see gguf_file.parts_of).
    Raises FailedPrecondition if it is no GGUF file, is damaged, lacks a tensor, or says anything that the directory
    can't express; the message names it.
    """
    check_packages()
    from fusionkv.fusion_worker.library import gguf_file

    try:
        _convert(gguf_file.read(parts), into)
    except Exception as error:  # libraries may raise anything for values that nobody expected
        why = str(error) if isinstance(error, FailedPrecondition) else first_line(error)
        # It quotes keys and values of the file.
        raise FailedPrecondition(printable(f"can't convert {parts[0]}: {why}")) from error


def _convert(model: Any, into: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.utils import logging

    from fusionkv.fusion_worker.library import gguf_config
    from fusionkv.fusion_worker.library.gguf_tokenizer import tokenizer_of
    from fusionkv.fusion_worker.models import check_supported

    logging.disable_progress_bar()
    config = gguf_config.config_of(model)
    check_supported(config)
    architecture = gguf_config.architecture_of(model)
    with torch.device("meta"):
        network: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
    names = _names(network, config, model, architecture)
    tokenizer, ends = tokenizer_of(model.metadata, architecture)
    if len(tokenizer) != config.vocab_size:
        raise FailedPrecondition(f"it has {len(tokenizer)} tokens, and embeddings of {config.vocab_size}")
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config.update(ids)
    config.architectures = [type(network).__name__]
    tokenizer.save_pretrained(into)
    config.save_pretrained(into)
    GenerationConfig(**ids).save_pretrained(into)
    _write(network, names, model, architecture, into)


def _names(network: Any, config: Any, model: Any, architecture: str) -> dict[str, str]:
    """The tensor of the file for each of the network's; a tied head has none.

    Raises FailedPrecondition unless they are the same tensors, of the same shapes.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    from fusionkv.fusion_worker.library.gguf_config import ROPE_FACTORS

    (number,) = (arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture)
    known = get_tensor_name_map(number, config.num_hidden_layers)
    tied = set(network._tied_weights_keys or ()) if config.tie_word_embeddings else set()
    names = {}
    for name, parameter in network.state_dict().items():
        if name in tied:
            continue
        stem, _, suffix = name.rpartition(".")
        source = f"{known.get_name(stem)}.{suffix}"
        if source not in model.tensors:
            raise FailedPrecondition(f"it lacks the tensor {source}, of which the model makes {name}")
        if (shape := model.tensors[source].shape) != tuple(parameter.shape):
            raise FailedPrecondition(f"{source} has the shape {list(shape)}, and {name} {list(parameter.shape)}")
        names[name] = source
    if unused := model.tensors.keys() - names.values() - {ROPE_FACTORS}:
        raise FailedPrecondition(
            f"its tensor {min(unused)} has no place in a {config.model_type} model ({len(unused)} such): what it "
            "changes would be lost"
        )
    return names


def _write(network: Any, names: dict[str, str], model: Any, architecture: str, into: Path) -> None:
    """Writes the weights, as many files as needed so that each takes at most a gigabyte of memory."""
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=network.config.to_dict())
    shapes = {name: parameter for name, parameter in network.state_dict().items() if name in names}
    plan = split_torch_state_dict_into_shards(shapes, max_shard_size=_SHARD_BYTES)
    for file, members in plan.filename_to_tensors.items():
        held = {name: _weights(processor, names[name], model.tensors[names[name]]) for name in members}
        save_file(held, into / file, metadata={"format": "pt"})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (into / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _weights(processor: Any, name: str, tensor: Any) -> Any:
    """A tensor as transformers lays it out, in bfloat16."""
    import torch
    from gguf import GGMLQuantizationType, dequantize

    kind = GGMLQuantizationType(tensor.kind)
    try:
        values = dequantize(tensor.data, kind)
    except NotImplementedError as error:
        raise FailedPrecondition(f"{name} is of type {kind.name}, which the package gguf can't read") from error
    values = processor.process(weights=values, name=name).weights
    return torch.from_numpy(values.copy() if not values.flags.writeable else values).to(torch.bfloat16).contiguous()
