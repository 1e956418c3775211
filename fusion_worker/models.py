"""Loading an unmodified Hugging Face model, and refusing at start what can't be served right."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from fusionkv.fusion_worker.compute.packed_linear import computes, pack
from fusionkv.fusion_worker.library.cache import name_of
from fusionkv.fusion_worker.library.fingerprint import fingerprint
from fusionkv.fusion_worker.template import PromptTemplate
from fusionkv.fusion_worker.tensor_parallel import weights
from fusionkv.fusion_worker.tensor_parallel.ranks import ALONE, Ranks
from fusionkv.kernels.rope import Rotation
from fusionkv.protos.runtime.errors import FailedPrecondition

# model_type -> whether RoPE pairs neighbouring channels (GLM) instead of the two halves (Llama).
FAMILIES = {"llama": False, "mistral": False, "qwen2": False, "qwen3": False, "glm4": True, "gemma3_text": False}
# Rotations that depend on nothing but the position; `dynamic` and `longrope` change with the length of the prompt.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Bumped when the bytes of an entry are laid out otherwise.
LAYOUT = "layer,kv,token,kv_head,head_dim:1"


@dataclass(frozen=True, slots=True)
class KVShape:
    """The KV cache of one token: `[layers, 2, kv_heads, head_dim]` of `dtype`."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, config: Any, dtype: torch.dtype, ranks: int = 1) -> "KVShape":
        """One rank's part of what a model of this configuration caches."""
        heads = config.num_attention_heads
        return cls(
            layers=config.num_hidden_layers,
            kv_heads=(getattr(config, "num_key_value_heads", None) or heads) // ranks,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            dtype=dtype,
        )

    @property
    def token_bytes(self) -> int:
        return self.layers * 2 * self.kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Model:
    """A causal language model ready to serve.

    rotations: the RoPE of each layer as a difference, for placing chunks; layers with the same one share it.
    windowed: whether some layer sees no more than a window of positions.
    links: ids of the link tokens it was trained with (KVLink), of the first chunk of a prompt, the second, and so on;
        empty for a model without.
    anchors: ids of the anchor tokens behind a whole segment, by the percentage that they save (KVLink 2.4).
    fingerprint: SHA-256 over configuration, weights and tokenizer.
    ranks: who has the rest of the model. kv, network: this rank's heads.
    """

    name: str
    family: str
    network: Any
    tokenizer: Tokenizer
    tokenizer_json: bytes
    template: PromptTemplate
    bos: int | None
    ends: frozenset[int]
    rotations: tuple[Rotation, ...]
    kv: KVShape
    windowed: bool
    links: tuple[tuple[int, ...], ...]
    anchors: Mapping[int, tuple[int, ...]]
    vocabulary: int
    max_tokens: int
    fingerprint: bytes
    device: torch.device
    ranks: Ranks = ALONE

    @property
    def token_bytes(self) -> int:
        """KV of one token, all ranks' together."""
        return self.kv.token_bytes * self.ranks.count

    @property
    def settings(self) -> dict[str, str]:
        """What decides KV bytes besides the fingerprint (see kvcache_service.keys.namespace)."""
        return {"dtype": str(self.kv.dtype).removeprefix("torch."), "layout": LAYOUT}


def load(
    directory: Path, device: str = "auto", dtype: str = "auto", max_tokens: int = 0, ranks: Ranks = ALONE
) -> Model:
    """Loads a model directory, or one rank's part of it.

    Raises:
        FailedPrecondition: the directory is no model, or of a kind that is not served; the message says why.
    """
    transformers_logging.disable_progress_bar()
    config = configuration(directory)
    if not (directory / "tokenizer.json").is_file():
        raise FailedPrecondition(f"{directory} holds no tokenizer.json: save the model with its fast tokenizer")
    if not any(directory.glob("*.safetensors")):
        raise FailedPrecondition(f"{directory} holds no weights in safetensors: convert them, pickles are not loaded")
    where = _device(device)
    kind = DTYPES.get(dtype) if dtype != "auto" else _own_dtype(config, where)
    if kind is None:
        raise FailedPrecondition(f"unknown dtype {dtype!r}: use auto, {', '.join(DTYPES)}")
    try:
        network = _network(directory, kind, config, ranks).to(device=where).eval()
        # Not AutoTokenizer: for a qwen2 model it replaces tokenizer.json's own pre-tokeniser by the family's.
        tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    except (ValueError, OSError, KeyError, RuntimeError, SafetensorError) as error:
        raise FailedPrecondition(f"can't load the model in {directory}: {_line(error)}") from error
    limit = min(config.max_position_embeddings, max_tokens or config.max_position_embeddings)
    identity = fingerprint(directory) if ranks.rank == 0 else b""  # the others are never asked for it
    return wrap(name_of(directory), network, tokenizer, identity, limit, ranks)


def check_shareable(directory: Path, count: int) -> None:
    """Raises FailedPrecondition when `count` ranks can't have equal parts of the model of a directory."""
    name, config = directory.name, configuration(directory)
    if not config.base_model_tp_plan:
        raise FailedPrecondition(
            f"{name} can't be shared by ranks: transformers has no tp_plan for {config.model_type}"
        )
    heads = config.num_attention_heads
    sizes = {"KV heads": getattr(config, "num_key_value_heads", None) or heads, "attention heads": heads}
    for what, size in (sizes | {"MLP channels": config.intermediate_size}).items():
        if size % count:
            raise FailedPrecondition(
                f"{name} has {size} {what}, which {count} ranks can't share evenly: "
                f"set tensor_parallel to a divisor of {size}"
            )


def configuration(directory: Path) -> Any:
    """transformers' configuration of the model in a directory. Raises FailedPrecondition as `load` does."""
    if not (directory / "config.json").is_file():
        raise FailedPrecondition(f"{directory} holds no config.json: give the directory of a Hugging Face model")
    try:
        config = AutoConfig.from_pretrained(directory)
    except (ValueError, OSError, KeyError) as error:
        raise FailedPrecondition(f"can't read the configuration in {directory}: {_line(error)}") from error
    check_supported(config)
    return config


def _network(directory: Path, dtype: torch.dtype, config: Any, ranks: Ranks) -> Any:
    """The rank's network. Raises as transformers does, and FailedPrecondition when weights are missing."""
    part = {} if ranks.count == 1 else {"distributed_config": weights.part_of(config, ranks.count)}
    # Of safetensors only: the older .bin files are pickles, which can run code.
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, output_loading_info=True, use_safetensors=True, **part
    )
    network, report = loaded
    if ranks.count > 1:
        weights.settle(network)
    if missing := sorted(report["missing_keys"]):
        # transformers makes up random ones and only warns.
        raise FailedPrecondition(f"the weights in {directory} lack {len(missing)} tensors: {missing[0]}, ...")
    return network


def on_cpu(device: str) -> bool:
    """Whether a device of this name, auto included, is the CPU. Raises as `load` does."""
    return _device(device).type == "cpu"


def rank_device(device: str, rank: int) -> torch.device:
    """The device of one rank of several: rank i has GPU i. Raises as `load` does."""
    if on_cpu(device) and torch.cuda.is_available():
        raise FailedPrecondition("transformers puts the ranks' parts on GPUs: hide these by CUDA_VISIBLE_DEVICES=")
    return _device("cpu" if on_cpu(device) else f"cuda:{rank}")


def _own_dtype(config: Any, device: torch.device) -> torch.dtype:
    """The checkpoint's; float32 in place of 16 bits on a CPU that emulates them, which takes 6 to 8 times as long."""
    kind: torch.dtype = getattr(config, "dtype", None) or torch.float32
    return torch.float32 if device.type == "cpu" and not computes(kind) else kind


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=torch.device(name)).device
    except (RuntimeError, AssertionError) as error:
        raise FailedPrecondition(f"can't compute on device {name!r}: {_line(error)}") from error


def _line(error: Exception) -> str:
    """An error in one line, for a message that names it."""
    return str(error).strip().split("\n")[0] or type(error).__name__


def wrap(name: str, network: Any, tokenizer: Any, fingerprint: bytes, max_tokens: int, ranks: Ranks = ALONE) -> Model:
    """A Model around a network and a fast tokenizer that are in memory already; packs the network's linear layers.

    ranks: among whom the network's heads are shared out already.
    """
    check_supported(network.config)
    config = network.config
    parameter = next(network.parameters())
    ends = getattr(network.generation_config, "eos_token_id", None) or config.eos_token_id
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    pack(network)
    return Model(
        name=name,
        family=config.model_type,
        network=network,
        tokenizer=tokenizer.backend_tokenizer,
        tokenizer_json=tokenizer.backend_tokenizer.to_str().encode(),
        template=PromptTemplate.of(tokenizer),
        bos=tokenizer.bos_token_id,
        ends=frozenset(ends),
        rotations=_rotations(network),
        kv=KVShape.of(config, parameter.dtype, ranks.count),
        windowed=getattr(config, "sliding_window", None) is not None
        and "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"]),
        links=_links(tokenizer.backend_tokenizer),
        anchors=_anchors(tokenizer.backend_tokenizer),
        vocabulary=config.vocab_size,
        max_tokens=max_tokens,
        fingerprint=fingerprint,
        device=parameter.device,
        ranks=ranks,
    )


def _rotations(network: Any) -> tuple[Rotation, ...]:
    config, rotary = network.config, network.model.rotary_emb
    interleaved = FAMILIES[config.model_type]
    if hasattr(rotary, "inv_freq"):
        return (Rotation(rotary.inv_freq, interleaved),) * config.num_hidden_layers
    # One for each kind of layer, as in Gemma 3.
    kinds = {kind: Rotation(getattr(rotary, f"{kind}_inv_freq"), interleaved) for kind in set(config.layer_types)}
    return tuple(kinds[kind] for kind in config.layer_types)


def _links(tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Ids of the tokens `<|link_CHUNK_NUMBER|>`: counted from 1, as many for every chunk as for the first."""

    first = _numbered(tokenizer, "link_1")
    rows = (_numbered(tokenizer, f"link_{chunk}") for chunk in itertools.count(1))
    return tuple(itertools.takewhile(lambda ids: len(ids) == len(first), rows)) if first else ()


def _anchors(tokenizer: Tokenizer) -> dict[int, tuple[int, ...]]:
    """Ids of the tokens `<|anchor_PERCENT_NUMBER|>`, by the percentage."""
    rows = ((percent, _numbered(tokenizer, f"anchor_{percent}")) for percent in range(1, 100))
    return {percent: ids for percent, ids in rows if ids}


def _numbered(tokenizer: Tokenizer, name: str) -> tuple[int, ...]:
    """Ids of the tokens `<|NAME_1|>`, `<|NAME_2|>` and so on."""
    found: list[int] = []
    while (token := tokenizer.token_to_id(f"<|{name}_{len(found) + 1}|>")) is not None:
        found.append(token)
    return tuple(found)


def check_supported(config: Any) -> None:
    """Refuses what the engine can't hold to its oracles.

    Raises:
        FailedPrecondition: another family, a RoPE that changes with the prompt's length, or attention that is not
            causal or whose scores are capped.
    """
    family = config.model_type
    if family not in FAMILIES:
        raise FailedPrecondition(f"model family {family!r} is not served; served are: {', '.join(sorted(FAMILIES))}")
    rope = getattr(config, "rope_parameters", None) or {}
    # Of all layers, or by the kind of layer.
    ropes = [rope[kind] for kind in rope if kind.endswith("_attention")] or [rope]
    for kind in (each.get("rope_type", "default") for each in ropes):
        if kind not in ROPE_TYPES:
            raise FailedPrecondition(
                f"RoPE of type {kind!r} is not served, since its rotation is not a fixed function of the position; "
                f"served are: {', '.join(ROPE_TYPES)}"
            )
    for option in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if getattr(config, option, None):
            raise FailedPrecondition(f"a model with {option} is not served")
