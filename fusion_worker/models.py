"""Loads unmodified Hugging Face models, and refuses those that can't be served correctly."""

import itertools
import logging
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from fusionkv.fusion_worker.compute.packed_linear import computes, pack
from fusionkv.fusion_worker.decode.plain import with_control
from fusionkv.fusion_worker.library import directory as files
from fusionkv.fusion_worker.library.cache import check_fetched, fingerprint, name_of
from fusionkv.fusion_worker.rendering import RENDERER
from fusionkv.fusion_worker.template import DATE, ChatTemplate, PromptTemplate, beginning
from fusionkv.kernels.gpu import MOST_CHANNELS
from fusionkv.kernels.segments import Rotation
from fusionkv.protos.fusion.v1.fusion_pb2 import Capabilities, GetModelResponse
from fusionkv.protos.runtime.errors import FailedPrecondition, first_line, printable

log = logging.getLogger(__name__)
# model_type -> whether RoPE pairs neighbouring channels (GLM) instead of the two halves (Llama).
FAMILIES = {
    "deepseek_v2": True,
    "gemma3_text": False,
    "glm4": True,
    "gpt_oss": False,
    "llama": False,
    "mistral": False,
    "mixtral": False,
    "phi3": False,
    "qwen2": False,
    "qwen2_moe": False,
    "qwen3": False,
    "qwen3_moe": False,
    "smollm3": False,
}
# Rotations that depend only on the position; those of `dynamic` and `longrope` also depend on the prompt's length.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Layout and version of an entry's bytes; bump the version when the layout changes.
LAYOUT = "layer,kv,token,kv_head,head_dim:1"
# Embedding and head are replicated, because rank 0 samples tokens alone.
_WHOLE = {"model.embed_tokens": "replicate", "lm_head": "replicate"}
# GLM-4's own plan makes every rank gather the gate and up projections of all ranks; split like this, a rank needs
# only its own channels.
_GLM4 = {"model.layers.*.mlp.gate_up_proj": "packed_colwise", "model.layers.*.mlp.down_proj": "rowwise"}
# Tokens of larger models of a family, which have no row here; in users' text they are characters.
_UNUSED = {"gemma3_text": ("<image_soft_token>",)}
# Tokens of the forward pass at the start.
_PROBED = 8


@dataclass(frozen=True, slots=True)
class Ranks:
    """Process `rank` of `count`. Each has an equal share of the model's heads.

    All ranks must call `total` and `least` in the same order. They raise RuntimeError when another rank ended, or did
    not answer within the timeout of torch.distributed's default group, which transformers' split layers use as well.
    """

    rank: int = 0
    count: int = 1

    def total(self, partial: torch.Tensor) -> torch.Tensor:
        """All-reduces a tensor in place: the sum over all ranks."""
        if self.count > 1:
            dist.all_reduce(partial)
        return partial

    def least(self, number: int, device: torch.device) -> int:
        """The minimum of a number over all ranks. device: of the rank."""
        if self.count == 1:
            return number
        there = torch.tensor(number, device=device)
        dist.all_reduce(there, dist.ReduceOp.MIN)
        return int(there)


ALONE = Ranks()


@dataclass(frozen=True, slots=True)
class KVShape:
    """The KV cache of one token: `[layers, tensors, kv_heads, head_dim]` of `dtype`.

    tensors: 2, keys and values; 1 for latents, which are keys and values of one KV head (compute/latent.py).
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    tensors: int = 2

    @classmethod
    def of(cls, config: Any, dtype: torch.dtype, ranks: int = 1) -> "KVShape":
        """The KV shape of one of `ranks` ranks of a model with this configuration."""
        heads = config.num_attention_heads
        if rank := getattr(config, "kv_lora_rank", None):
            return cls(config.num_hidden_layers, 1, config.qk_rope_head_dim + rank, dtype, tensors=1)
        return cls(
            layers=config.num_hidden_layers,
            kv_heads=(getattr(config, "num_key_value_heads", None) or heads) // ranks,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            dtype=dtype,
        )

    @property
    def token_bytes(self) -> int:
        return self.layers * self.tensors * self.kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Model:
    """A causal language model ready to serve.

    Attributes:
        network, kv: this rank's heads only.
        rotations: the RoPE of each layer, which moves cached keys to another position; equal ones are shared.
        windowed: whether some layer has sliding-window attention.
        links: ids of the trained link tokens (KVLink 2.3) of a prompt's first chunk, second chunk and so on; empty
            for a model without them.
        fingerprint: SHA-256 over configuration, weights and tokenizer.
        begin: control tokens that begin a prompt without the chat template.
        ranks: this process's rank among the tensor-parallel ranks.
    """

    name: str
    family: str
    network: Any
    tokenizer: Tokenizer
    tokenizer_json: bytes
    template: PromptTemplate
    chat: ChatTemplate
    begin: str
    ends: frozenset[int]
    rotations: tuple[Rotation, ...]
    kv: KVShape
    windowed: bool
    links: tuple[tuple[int, ...], ...]
    vocabulary: int
    max_tokens: int
    fingerprint: bytes
    device: torch.device
    ranks: Ranks = ALONE

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's KV over all ranks."""
        return self.kv.token_bytes * self.ranks.count

    def described(self, auxiliary: bool) -> GetModelResponse:
        """What decides whether a request can be answered. auxiliary: whether there is an auxiliary model."""
        return GetModelResponse(
            name=self.name,
            fingerprint=self.fingerprint,
            max_tokens=self.max_tokens,
            capabilities=Capabilities(
                layers=self.kv.layers,
                windowed=self.windowed,
                auxiliary=auxiliary,
                links=max(map(len, self.links), default=0),
                linked_chunks=len(self.links),
            ),
        )

    @property
    def settings(self) -> dict[str, str]:
        """What determines the KV bytes besides the fingerprint (see kvcache_service.keys.namespace)."""
        return {"dtype": str(self.kv.dtype).removeprefix("torch."), "layout": LAYOUT}


def load(
    directory: Path,
    device: str = "auto",
    dtype: str = "auto",
    max_tokens: int = 0,
    ranks: Ranks = ALONE,
    today: str = DATE,
) -> Model:
    """Loads a model directory, or one rank's part of it.

    Args:
        directory: a Hugging Face model with safetensors weights and a fast tokenizer.
        device: auto, cpu or cuda[:N].
        dtype: a key of `DTYPES`, or auto for the checkpoint's dtype where the device computes in it.
        max_tokens: maximum tokens of a prompt and its answer; 0 uses the model's limit.
        ranks: this process's rank among the tensor-parallel ranks.
        today: YYYY-MM-DD, the date that the chat template is told.

    Raises:
        FailedPrecondition: the directory holds no model, or one that is not supported; the message says why.
    """
    try:
        return _load(directory, device, dtype, max_tokens, ranks, today)
    except FailedPrecondition as error:
        # It quotes keys and values of the files.
        raise FailedPrecondition(printable(str(error))) from error


def _load(directory: Path, device: str, dtype: str, max_tokens: int, ranks: Ranks, today: str) -> Model:
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()  # what it would warn of is an error here
    config = configuration(directory)
    if not (directory / "tokenizer.json").is_file():
        raise FailedPrecondition(f"{directory} holds no tokenizer.json: save the model with its fast tokenizer")
    files.check_whole(directory)
    for file in (directory / "tokenizer.json", *directory.glob("*.safetensors")):
        check_fetched(file)
    files.check_sizes(config.to_dict(), files.weights(directory), directory / "config.json")
    where = device_of(device)
    kind = dtype_of(dtype, config)
    if dtype == "auto" and where.type == "cpu" and not computes(kind):
        kind = torch.float32  # a CPU emulates 16-bit dtypes 6 to 8 times slower
    if where.type == "cuda" and (dim := KVShape.of(config, kind).head_dim) > MOST_CHANNELS:
        raise FailedPrecondition(
            f"{directory.name} runs on CPUs only: a head of its KV has {dim} channels; GPUs take {MOST_CHANNELS}"
        )
    limit = min(config.max_position_embeddings, max_tokens or config.max_position_embeddings)
    try:
        # Not AutoTokenizer: for a qwen2 model it replaces the pre-tokeniser of tokenizer.json by the family's.
        tokenizer = PreTrainedTokenizerFast.from_pretrained(directory, trust_remote_code=False)
        if tokenizer.chat_template:
            RENDERER.start()  # while the weights are loaded
        network = _network(directory, kind, config, where, ranks).to(device=where).eval().requires_grad_(False)
        identity = fingerprint(directory) if ranks.rank == 0 else b""  # only rank 0 needs it
        _check_added(directory, tokenizer)
        for line in files.unused(directory) if ranks.rank == 0 else ():
            log.info(printable(line))
        pack(network)
        model = wrap(name_of(directory), network, tokenizer, identity, limit, ranks, today)
        _probe(model)
        return model
    except FailedPrecondition:
        raise
    except Exception as error:  # libraries may raise anything for values that nobody expected
        raise FailedPrecondition(f"can't load the model in {directory}: {first_line(error)}") from error


def _check_added(directory: Path, tokenizer: Any) -> None:
    """Raises FailedPrecondition for a token that tokenizer_config.json gives another id than tokenizer.json."""
    said = files.read_json(directory / "tokenizer_config.json").get("added_tokens_decoder") or {}
    for number, token in said.items():
        token_id = tokenizer.backend_tokenizer.token_to_id(token["content"])
        if token_id != int(number):
            raise FailedPrecondition(
                f"tokenizer_config.json in {directory} gives {token['content']!r} the id {number}, and "
                f"tokenizer.json {token_id}: use the files of one model"
            )


def _probe(model: Model) -> None:
    """Reads all weights (13 ms for SmolLM2), and computes the beginning of a prompt once, on all ranks.

    Raises FailedPrecondition if a token is not in the embedding, or the network computes numbers that are not finite.
    """
    known = model.tokenizer.get_vocab(with_added_tokens=True)
    for token in model.tokenizer.get_added_tokens_decoder().values():
        if token.special and token.content in _UNUSED.get(model.family, ()):
            known.pop(token.content, None)
    wrong = {token: id_ for token, id_ in known.items() if id_ >= model.vocabulary}
    wrong |= {f"id {id_} of the end of an answer": id_ for id_ in model.ends if id_ >= model.vocabulary}
    if wrong:
        raise FailedPrecondition(
            f"the embedding of {model.name} has {model.vocabulary} rows, and none for {min(wrong)!r} ({len(wrong)} "
            "such tokens): use the tokenizer, tokenizer_config.json and generation_config.json of these weights"
        )
    text = model.template.system + model.template.question
    ids = model.tokenizer.encode(text, add_special_tokens=False).ids[:_PROBED] or [0]
    with torch.inference_mode():
        given = torch.tensor([ids], device=model.device)
        logits = model.network(given, use_cache=False, logits_to_keep=1).logits
        # The pass reads few rows of an embedding, and with AVX-512 attention gives 0 for a query that is NaN.
        bounds = [torch.stack(each.aminmax()).float() for each in (logits, *model.network.parameters())]
        finite = torch.stack(bounds)
    if not finite.isfinite().all():
        wider = ", or they need --dtype bfloat16 or float32" if model.kv.dtype == torch.float16 else ""
        raise FailedPrecondition(
            f"the weights of {model.name} give numbers that are not finite: they are damaged{wider}"
        )


def check_shareable(directory: Path, count: int) -> None:
    """Raises FailedPrecondition if a directory's model can't be split evenly over `count` ranks."""
    name, config = directory.name, configuration(directory)
    plan, why = config.base_model_tp_plan, ""
    if not plan:
        why = f"transformers has no tp_plan for {config.model_type}"
    elif getattr(config, "quantization_config", None) is not None:
        why = "its weights are quantised"
    elif getattr(config, "kv_lora_rank", None):
        why = "its attention heads share a token's latent"
    elif any("self_attn" in part and style == "colwise_gather_output" for part, style in plan.items()):
        why = f"by transformers' tp_plan for {config.model_type}, each rank computes all attention heads"
    if why:
        raise FailedPrecondition(f"{name} can't be split over ranks: {why}")
    heads = config.num_attention_heads
    sizes = {"KV heads": getattr(config, "num_key_value_heads", None) or heads, "attention heads": heads}
    sizes |= {"MLP channels": config.intermediate_size}
    sizes |= {"channels of an expert": getattr(config, "moe_intermediate_size", count)}
    for what, size in sizes.items():
        if size % count:
            raise FailedPrecondition(
                f"{name} has {size} {what}, which can't be split evenly over {count} ranks: "
                f"set tensor_parallel to a divisor of {size}"
            )


def configuration(directory: Path) -> Any:
    """Makes the transformers configuration of a model directory. Raises FailedPrecondition as `load` does."""
    values = files.config_values(directory, FAMILIES)
    try:
        config = AutoConfig.for_model(**values)
    except Exception as error:  # as in `load`
        why = " ".join(str(error).split())  # the reason is on a later line
        raise FailedPrecondition(f"can't read the configuration in {directory}: {why}") from error
    check_supported(config)
    return config


def _network(directory: Path, dtype: torch.dtype, config: Any, where: torch.device, ranks: Ranks) -> Any:
    """The rank's network. Raises as transformers does, and FailedPrecondition unless all weights are used."""
    part: dict[str, Any] = {}
    if ranks.count > 1:
        from transformers.distributed import DistributedConfig

        # transformers splits the weights by the family's `tp_plan`, including the plan's all-reduces.
        plan = _WHOLE | (_GLM4 if config.model_type == "glm4" else {})
        part = {"distributed_config": DistributedConfig(tp_size=ranks.count, tp_plan=plan)}
    settings = getattr(config, "quantization_config", None)
    if settings is not None and not settings.get("dequantize"):
        part = {"device_map": {"": where}}  # its tensors can't be moved later
    # Only safetensors: the older .bin files are pickles, which can run code.
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        directory,
        config=config,
        dtype=dtype,
        generation_config=_generation_config(directory),
        ignore_mismatched_sizes=True,  # reported below
        local_files_only=True,
        output_loading_info=True,
        trust_remote_code=False,
        use_safetensors=True,
        **part,
    )
    network, report = loaded
    if settings is not None and settings["quant_method"] == "fp8":
        # transformers leaves other tensors in the checkpoint's dtype. RoPE's buffers stay in float32.
        for parameter in network.parameters():
            parameter.data = parameter.data.to(dtype)
    if ranks.count > 1:
        _localise(network)
    # transformers initialises missing tensors randomly, and ignores others.
    if missing := sorted(report["missing_keys"]):
        raise FailedPrecondition(f"the weights in {directory} lack {len(missing)} tensors: {missing[0]}, ...")
    if unexpected := sorted(report["unexpected_keys"]):
        raise FailedPrecondition(
            f"the weights in {directory} hold {len(unexpected)} tensors that a model of the family "
            f"{config.model_type} does not have: {unexpected[0]}, ...; correct config.json, or remove the tensors"
        )
    if wrong := sorted(report["mismatched_keys"]):
        name, shape, expected = wrong[0]
        raise FailedPrecondition(
            f"the weights in {directory} do not fit config.json, by which {name} has the shape {list(expected)}, "
            f"not {list(shape)} ({len(wrong)} such tensors)"
        )
    if config.tie_word_embeddings and not network.all_tied_weights_keys:
        raise FailedPrecondition(
            f"by config.json in {directory} the head is tied to the embedding, but the weights hold another one: set "
            "tie_word_embeddings to false, or remove lm_head.weight"
        )
    return network


def _generation_config(directory: Path) -> GenerationConfig:
    """What generation_config.json says of the ends of an answer. The rest is up to each request."""
    file = directory / "generation_config.json"
    ends = files.token_ids(files.read_json(file).get("eos_token_id"), f"{file}: eos_token_id")
    return GenerationConfig(eos_token_id=sorted(ends))


def _localise(network: Any) -> None:
    """Replaces DTensors by plain tensors. Layers split by columns keep transformers' forward, which all-reduces."""
    # Imported late: it loads SymPy, among others.
    from torch.distributed.tensor import DTensor

    for module in network.modules():
        for name, value in list(module.named_parameters(recurse=False)):
            if isinstance(value, DTensor):
                setattr(module, name, torch.nn.Parameter(value.to_local(), requires_grad=False))
                if name == "weight" and not value.placements[0].is_shard(1):
                    del module.forward  # Split by rows, its forward does extra work only for training.


def on_cpu(device: str) -> bool:
    """Whether a device name, including auto, means the CPU. Raises as `load` does."""
    return device_of(device).type == "cpu"


def rank_device(device: str, rank: int) -> torch.device:
    """The device of a tensor-parallel rank: rank i takes GPU i. Raises as `load` does."""
    if on_cpu(device) and torch.cuda.is_available():
        raise FailedPrecondition(
            "transformers would place tensor-parallel ranks on GPUs: hide the GPUs by CUDA_VISIBLE_DEVICES="
        )
    return device_of("cpu" if on_cpu(device) else f"cuda:{rank}")


def dtype_of(name: str, config: Any) -> torch.dtype:
    """The dtype of a name, of which auto is the checkpoint's. Raises FailedPrecondition for an unknown one."""
    kind = DTYPES.get(name) if name != "auto" else getattr(config, "dtype", None) or torch.float32
    if kind is None:
        raise FailedPrecondition(f"unknown dtype {name!r}: use auto, {', '.join(DTYPES)}")
    return kind


def device_of(name: str) -> torch.device:
    """The device of a name: auto, cpu or cuda[:N]. Raises as `load` does."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=torch.device(name)).device
    except (RuntimeError, AssertionError) as error:
        raise FailedPrecondition(f"can't compute on device {name!r}: {first_line(error)}") from error


def wrap(
    name: str,
    network: Any,
    tokenizer: Any,
    fingerprint: bytes,
    max_tokens: int,
    ranks: Ranks = ALONE,
    today: str = DATE,
) -> Model:
    """Makes a Model of a network and a fast tokenizer in memory; freezes the network's weights.

    network: a transformers model, already split if there are several ranks. max_tokens: maximum tokens of a prompt
    and its answer. Raises as `check_supported`.
    """
    check_supported(network.config)
    config = network.config
    parameter = next(network.parameters())
    ends = (network.generation_config.eos_token_id, config.eos_token_id, tokenizer.eos_token_id)
    template = PromptTemplate.of(tokenizer, today=today)
    network.requires_grad_(False)
    return Model(
        name=name,
        family=config.model_type,
        network=network,
        tokenizer=tokenizer.backend_tokenizer,
        tokenizer_json=with_control(tokenizer.backend_tokenizer, "".join(astuple(template))).encode(),
        template=template,
        chat=ChatTemplate(tokenizer, today=today),
        begin=beginning(tokenizer),
        ends=frozenset().union(*(files.token_ids(each, "eos_token_id") for each in ends)),
        rotations=_rotations(network),
        kv=KVShape.of(config, parameter.dtype, ranks.count),
        windowed=getattr(config, "sliding_window", None) is not None
        and "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"]),
        links=_links(tokenizer.backend_tokenizer),
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
        turning, still = (Rotation(rotary.inv_freq * factor, interleaved) for factor in (1, 0))
        # Layers without RoPE, as in SmolLM3, don't rotate.
        uses = getattr(config, "no_rope_layers", None) or [1] * config.num_hidden_layers
        return tuple(turning if use else still for use in uses)
    # One RoPE for each layer type, as in Gemma 3.
    kinds = {kind: Rotation(getattr(rotary, f"{kind}_inv_freq"), interleaved) for kind in set(config.layer_types)}
    return tuple(kinds[kind] for kind in config.layer_types)


def _links(tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Ids of the tokens `<|link_CHUNK_NUMBER|>`, both counted from 1, up to the first chunk that has fewer tokens."""
    first = _numbered(tokenizer, "link_1")
    rows = (_numbered(tokenizer, f"link_{chunk}") for chunk in itertools.count(1))
    return tuple(itertools.takewhile(lambda ids: len(ids) == len(first), rows)) if first else ()


def _numbered(tokenizer: Tokenizer, name: str) -> tuple[int, ...]:
    """Ids of the tokens `<|NAME_1|>`, `<|NAME_2|>` and so on."""
    ids: list[int] = []
    while (token := tokenizer.token_to_id(f"<|{name}_{len(ids) + 1}|>")) is not None:
        ids.append(token)
    return tuple(ids)


def check_supported(config: Any) -> None:
    """Raises FailedPrecondition for a model configuration that the engine does not support.

    That is one of an unknown family, with a RoPE that depends on the prompt's length, with attention that is not
    causal, or with soft-capped logits.
    """
    family = config.model_type
    if family not in FAMILIES:
        supported = ", ".join(sorted(FAMILIES))
        raise FailedPrecondition(f"model family {family!r} is not supported; supported families: {supported}")
    rope = getattr(config, "rope_parameters", None) or {}
    # One for all layers, or one for each layer type.
    ropes = [rope[kind] for kind in rope if kind.endswith("_attention")] or [rope]
    for each in ropes:
        kind = each.get("rope_type", "default")
        # Some longrope divides by the same factors at all lengths, such as that of a GGUF file of Llama 3.
        same = kind == "longrope" and each.get("short_factor") == each.get("long_factor")
        if kind not in ROPE_TYPES and not same:
            raise FailedPrecondition(
                f"RoPE type {kind!r} is not supported, because its rotation does not depend on the position alone; "
                f"supported types: {', '.join(ROPE_TYPES)}"
            )
    for option in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if getattr(config, option, None):
            raise FailedPrecondition(f"a model with {option} is not supported")
