"""Tiny models of every family, and what a worker must answer, in plain transformers."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from tests.kernels.inputs import rotation_matrix

Ids = Sequence[int]
Parts = tuple[Ids, Sequence[Ids], Ids]
# Of logits in float32, by `error`.
CLOSE = 1e-4
# Tiny shapes: a second thread costs more in waiting than it saves.
torch.set_num_threads(1)


def _rope(kind: str = "default", **more: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **more}


_ORIGINAL = {"factor": 4.0, "original_max_position_embeddings": 64}
_LLAMA3 = {**_ORIGINAL, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = _rope("yarn", **_ORIGINAL, truncate=False)
_MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_WINDOWED = {"use_sliding_window": True, "sliding_window": 24}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_NARROW = {**_EXPERTS, "moe_intermediate_size": 32}
_LATENT = {
    **_NARROW,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 24,
    "n_shared_experts": 2,
    "num_key_value_heads": 4,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
_MSCALE = _rope("yarn", **_ORIGINAL, mscale=0.7, mscale_all_dim=1.0)
_GROUPS = {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.0}
# Name -> (class of the configuration, what differs from `BASE`).
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"head_dim": 32}),
    "llama-linear": ("LlamaConfig", {"rope_parameters": _rope("linear", factor=2.0)}),
    "llama-llama3": ("LlamaConfig", {"rope_parameters": _rope("llama3", **_LLAMA3)}),
    "llama-yarn": ("LlamaConfig", {"rope_parameters": _rope("yarn", **_ORIGINAL)}),
    "mistral": ("MistralConfig", {"sliding_window": None, "head_dim": 24}),
    "mistral-window": ("MistralConfig", {"sliding_window": 24, "num_key_value_heads": 1}),
    "qwen2": ("Qwen2Config", {"num_key_value_heads": 4}),
    "qwen2-window": ("Qwen2Config", {**_WINDOWED, "max_window_layers": 1}),
    "qwen2-mixed": ("Qwen2Config", {**_WINDOWED, **_MIXED}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    # With RoPE as in Gemma 3's larger models.
    "gemma3": (
        "Gemma3TextConfig",
        {
            **_MIXED,
            "head_dim": 32,
            "num_key_value_heads": 1,
            "query_pre_attn_scalar": 20,
            "rope_parameters": {"full_attention": _rope("linear", factor=8.0), "sliding_attention": _rope()},
            "sliding_window": 24,
        },
    ),
    "mixtral": ("MixtralConfig", _EXPERTS),
    "qwen3-moe": ("Qwen3MoeConfig", {**_NARROW, "head_dim": 32, "norm_topk_prob": True}),
    "qwen2-moe": ("Qwen2MoeConfig", {**_NARROW, "shared_expert_intermediate_size": 48}),
    "gpt-oss": (
        "GptOssConfig",
        {**_EXPERTS, **_MIXED, "head_dim": 16, "sliding_window": 24, "rope_parameters": _YARN},
    ),
    "deepseek-v2": ("DeepseekV2Config", {**_LATENT, "q_lora_rank": None}),
    "deepseek-v2-yarn": (
        "DeepseekV2Config",
        {**_LATENT, **_GROUPS, "q_lora_rank": 40, "rope_parameters": _MSCALE},
    ),
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 0, 1], "pad_token_id": 0}),
    "phi3": ("Phi3Config", {"rope_parameters": _rope(partial_rotary_factor=0.75), "pad_token_id": 0}),
    "glm4": ("Glm4Config", {"head_dim": 32, "rope_parameters": _rope(partial_rotary_factor=0.5), "pad_token_id": 0}),
}
# One of each kind of attention and layers: the others differ in their RoPE or their sizes.
VARIED = ("llama", "mistral-window", "qwen2-mixed", "gemma3", "gpt-oss", "deepseek-v2", "smollm3", "glm4")
BASE: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    # Wide enough that attention is peaked and a stale copy differs from the fresh one by far more than rounding.
    "initializer_range": 0.2,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "attn_implementation": "eager",
}


def byte_tokenizer(**more: Any) -> transformers.PreTrainedTokenizerFast:
    """One token for each byte, so that characters beyond ASCII take several; 256 begins and 257 ends a sequence."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", **more)


def fallback_tokenizer() -> Tokenizer:
    """A token for each byte, as Mistral and Gemma have beside their tokens of text; 256 is "a", 257 is " b"."""
    raw = Tokenizer(models.BPE({**{f"<0x{byte:02X}>": byte for byte in range(256)}, "a": 256, "\u2581b": 257}, []))
    parts = decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    raw.decoder = decoders.Sequence([*parts])
    return raw


def random_ids(count: int, seed: int) -> list[int]:
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def prompt(*lengths: int) -> Parts:
    """A system prompt, chunks of different lengths, a question."""
    return random_ids(5, 0), [random_ids(n, n) for n in lengths], random_ids(6, 99)


@cache
def network(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model with random weights, eager attention.

    In bfloat16 tokens go to all experts: which ones are chosen may hang on the last bit, and changes the answer more
    than all roundings do.
    """
    name, more = FAMILIES[family]
    if dtype == torch.bfloat16 and "num_experts" in more:
        groups = {"topk_group": more["n_group"]} if "n_group" in more else {}
        more = {**more, **groups, "num_experts_per_tok": more["num_experts"]}
    torch.manual_seed(1)
    config = getattr(transformers, name)(**{**BASE, **more})
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for parameter_name, parameter in made.named_parameters():
        if (
            parameter.dim() == 1 or "bias" in parameter_name
        ):  # norms start as ones and biases as zeros: both would hide a missing one
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(parameter_name)))
            parameter.data += 0.2 * noise.to(dtype)
    return made


def saved(directory: Path, family: str = "llama", dtype: torch.dtype = torch.float32, **tokenizer: Any) -> Path:
    """Writes a model and its tokenizer as transformers does; returns the directory."""
    network(family, dtype).save_pretrained(directory)
    byte_tokenizer(**tokenizer).save_pretrained(directory)
    return directory


@dataclass
class Oracle:
    """What the worker must answer, from an untouched model: dense, one request at a time, no code of ours."""

    network: Any

    @property
    def latent(self) -> bool:
        return hasattr(self.network.config, "kv_lora_rank")

    @torch.inference_mode()
    def logits(self, ids: Ids, **more: Any) -> torch.Tensor:
        """float32 [vocabulary] after the last of `ids`."""
        return self.network(torch.tensor([ids]), **more).logits[0, -1].float()

    @torch.inference_mode()
    def kv(self, ids: Ids, past: "KV | DynamicCache | None" = None) -> "KV":
        """Keys and values of every layer, each [1, kv_heads, tokens, head_dim]; `past` comes first. Of DeepSeek-V2,
        latents and rotary keys."""
        found = past if isinstance(past, DynamicCache) else _cache_of(past)
        self.network(torch.tensor([ids]), past_key_values=found)
        return [(layer.keys, layer.values) for layer in found.layers]

    def rotated(self, keys: torch.Tensor, shift: int, layer: int) -> torch.Tensor:
        """Keys of a layer moved on by `shift` positions, by one explicit rotation matrix over all channels."""
        config, name = self.network.config, "inv_freq"
        if not getattr(config, "no_rope_layers", [1] * config.num_hidden_layers)[layer]:
            return keys
        if config.model_type == "gemma3_text":
            name = f"{config.layer_types[layer]}_inv_freq"
        inv_freq = getattr(self.network.model.rotary_emb, name).double()
        neighbours = config.model_type in ("glm4", "deepseek_v2")
        matrix = rotation_matrix(inv_freq, shift, keys.shape[-1], neighbours)
        return (keys.double() @ matrix.T).to(keys.dtype)

    def moved(self, kv: "KV", start: int, stop: int, shift: int) -> "KV":
        """Tokens `[start, stop)` of `kv`, moved on by `shift`."""
        parts = [(k[:, :, start:stop], v[:, :, start:stop]) for k, v in kv]
        if self.latent:
            return [(k, self.rotated(v, shift, i)) for i, (k, v) in enumerate(parts)]
        return [(self.rotated(k, shift, i), v) for i, (k, v) in enumerate(parts)]

    def alone(self, system: Ids, chunk: Ids, position: int) -> "KV":
        """A chunk as encoded after the system prompt alone, moved to `position`."""
        at = len(system)
        return self.moved(self.kv([*system, *chunk]), at, at + len(chunk), position - at)

    def reused(self, system: Ids, chunks: Sequence[Ids]) -> "KV":
        """System prompt and chunks by full reuse, at their places."""
        parts = [self.kv(system)] if system else []
        at = len(system)
        for chunk in chunks:
            parts.append(self.alone(system, chunk, at))
            at += len(chunk)
        return join(parts)

    def linked(self, system: Ids, chunks: Sequence[Ids], links: Sequence[Ids]) -> "KV":
        """The same with `links` behind each chunk, computed over all that stands before them (KVLink 2.3)."""
        kv = self.kv(system)
        for chunk, behind in zip(chunks, links, strict=True):
            kv = self.kv(behind, past=join([kv, self.alone(system, chunk, kv[0][0].shape[2])]))
        return kv

    def blocks(self, of: Sequence[int]) -> "Oracle":
        """The same model, of whose tokens those of block 0, 1, .. see their own block only; those of -1 see all."""
        block = torch.tensor(of)
        seen = (block[:, None] == -1) | (block[:, None] == block)

        def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **more: Any) -> Any:
            visible = seen & _causal(query, key, more.get("sliding_window"))
            return _attention(query, key, value, visible, scaling, more.get("s_aux"))

        return self._attending("masked", attend)

    def full_attention(self, parts: Parts) -> torch.Tensor:
        return self.logits(whole(parts))

    def full_reuse(self, parts: Parts) -> torch.Tensor:
        return self.after(self.reused(*parts[:2]), parts[2])

    def after(self, kv: "KV | None", question: Ids) -> torch.Tensor:
        """float32 [vocabulary]: the question computed over a given context."""
        return self.logits(question, past_key_values=_cache_of(kv)) if kv else self.logits(question)

    @torch.inference_mode()
    def attention(self, kv: "KV", question: Ids, layers: Sequence[int]) -> torch.Tensor:
        """float32 [context]: attention of the question into each context token, summed over rows, heads, layers."""
        out = self.network(torch.tensor([question]), past_key_values=_cache_of(kv), output_attentions=True)
        return torch.stack([out.attentions[i][0].float().sum((0, 1)) for i in layers]).sum(0)[: kv[0][0].shape[2]]

    def tempered(self, low: int, high: int, temperature: float, scale: float) -> "Oracle":
        """The same model, in which keys at `[low, high)` weigh exp(score / temperature) times their sum to the power
        of scale - 1."""

        def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **more: Any) -> Any:
            groups, at = query.shape[1] // key.shape[1], torch.arange(key.shape[2])
            seen, inside = _causal(query, key, more.get("sliding_window")), (at >= low) & (at < high)
            key, value = key.repeat_interleave(groups, 1).double(), value.repeat_interleave(groups, 1).double()
            scores = query.double() @ key.transpose(2, 3) * scaling
            weights = torch.where(inside, scores / temperature, scores).exp() * seen
            mass = (weights * inside).sum(-1, keepdim=True)
            weights = torch.where(inside & (mass > 0), weights * mass ** (scale - 1), weights)
            sinks = torch.full((query.shape[1],), float("-inf")) if more.get("s_aux") is None else more["s_aux"]
            out = weights / (weights.sum(-1, keepdim=True) + sinks.double().exp()[:, None, None]) @ value
            return out.transpose(1, 2).to(query.dtype), None

        return self._attending("tempered", attend)

    @torch.inference_mode()
    def kept(self, context: "KV", question: Ids, low: int, count: int) -> list[torch.Tensor]:
        """bool [kv_heads, context] of each layer: the `count` tokens from `low` on with the most of the question's
        attention, a mean over five neighbours, and all tokens before `low`."""
        out = self.network(torch.tensor([question]), past_key_values=_cache_of(context), output_attentions=True)
        found = []
        for weights, (keys, _) in zip(out.attentions, context, strict=True):
            votes = weights[0, :, :, low : keys.shape[2]].sum(1).unflatten(0, (keys.shape[1], -1)).sum(1)
            padded = torch.nn.functional.pad(votes, (2, 2))
            smooth = sum(padded[:, i : i + votes.shape[1]] for i in range(5))
            keep = torch.zeros(keys.shape[1], keys.shape[2], dtype=torch.bool)
            keep[:, :low] = True
            for head, row in enumerate(smooth):
                keep[head, low + row.sort(descending=True).indices[:count]] = True
            found.append(keep)
        return found

    def seeing(self, kept: list[torch.Tensor]) -> "Oracle":
        """The same model, of whose first tokens rows see only those kept, by layer and KV head."""

        def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **more: Any) -> Any:
            keep, seen = kept[module.layer_idx], _causal(query, key).repeat(key.shape[1], 1, 1)
            seen[:, :, : keep.shape[1]] &= keep[:, None]
            seen = seen.repeat_interleave(query.shape[1] // key.shape[1], 0)
            return _attention(query, key, value, seen, scaling, more.get("s_aux"))

        return self._attending("seeing", attend)

    def evicted(self, context: "KV", question: Ids, low: int, count: int) -> Callable[[list[int]], torch.Tensor]:
        """The logits behind an answer's tokens so far: the first token sees all of a context, the others what is
        `kept` of it."""
        shrunk, full = self.seeing(self.kept(context, question, low, count)), self.kv(question, past=context)
        return lambda said: shrunk.after(full, said) if said else self.after(context, question)

    def _attending(self, name: str, attend: Any) -> "Oracle":
        transformers.AttentionInterface.register(name, attend)
        network = copy.deepcopy(self.network)
        network.config._attn_implementation = name
        return Oracle(network)

    @torch.inference_mode()
    def scores(self, recipe: str, system: Ids, chunks: Sequence[Ids], question: Ids, kv: Any = None) -> torch.Tensor:
        """float32 [context and system]: how a recipe scores every token, from dense passes over the whole prompt."""
        ids, context = whole((system, chunks, question)), kv or self.reused(system, chunks)
        last, layers = len(ids) - len(question), self.network.config.num_hidden_layers
        starts = [len(system) + sum(map(len, chunks[:i])) for i in range(len(chunks))]
        before = torch.cat([torch.zeros(len(system)), *[torch.arange(len(c)).float() for c in chunks]])
        if recipe == "epic":
            return -before
        # The last one is of 3 layers.
        looked_at = {"prophetkv": range(layers), "fusionrag": [layers - 1], "deeplayer": [1, 2]}
        if recipe in looked_at:
            fade = 0.5 if recipe == "deeplayer" else 0.0
            return self.attention(context, question, looked_at[recipe]) / (1 + before) ** fade
        # Behind layer 0 every token is what full attention makes of it.
        weights = self.network(torch.tensor([ids]), output_attentions=True).attentions[1][0].sum(0)
        values = 0 if self.latent else 1
        away = (self.kv(ids)[1][values][0, :, :last] - context[1][values][0]).float()
        if recipe == "cacheblend":
            return away.square().sum((0, 2))
        if recipe == "kvshare":
            return away.abs().sum((0, 2)) * weights.sum(0)[:last]
        if recipe == "a3":
            return weights[last:].sum(0)[:last]
        assert recipe == "cache_craft"
        own = torch.bucketize(torch.arange(last), torch.tensor(starts), right=True)
        other = (own[:, None] != own) & (own > 0)
        return (weights[:last, :last] * other).sum(1)

    def chosen(
        self, recipe: str, system: Ids, chunks: Sequence[Ids], question: Ids, ratio: float, kv: Any = None
    ) -> torch.Tensor:
        """bool [context and system]: the share of the context that a recipe recomputes, the best by its scores, and
        of equals the first; none of the first chunk, which stands where it was encoded."""
        scores = self.scores(recipe, system, chunks, question, kv).clone()
        scores[: len(system) + len(chunks[0])] = float("-inf")
        fresh = torch.zeros(len(scores), dtype=torch.bool)
        best = sorted(range(len(scores)), key=lambda p: (-float(scores[p]), p))
        fresh[best[: round(ratio * sum(map(len, chunks)))]] = True
        return fresh

    def overlaid(self, ids: Ids, stale: "KV", fresh: torch.Tensor) -> torch.Tensor:
        """float32 [vocabulary]: all of `ids` computed densely, but in every layer the KV of context tokens that are
        not `fresh` (bool [context]) is replaced by the stale one before anything attends to it."""
        return self.logits(ids, past_key_values=overlay(stale, fresh))


KV = list[tuple[torch.Tensor, torch.Tensor]]


def _causal(query: Any, key: Any, window: int | None = None) -> torch.Tensor:
    """bool [rows, keys]: the keys of a layer that each row sees, itself the last."""
    at = torch.arange(key.shape[2])
    row = at[-query.shape[2] :, None]
    return (at <= row) & (at > row - (window or len(at)))


def _attention(query: Any, key: Any, value: Any, seen: torch.Tensor, scaling: float, sinks: Any) -> Any:
    """Softmax attention over the keys that are `seen`, bool [rows, keys], or by head, and over sinks [heads]."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1).double() for x in (key, value))
    scores = (query.double() @ key.transpose(2, 3) * scaling).masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(*scores.shape[:-1], 1)], -1)
    return (scores.softmax(-1)[..., : key.shape[2]] @ value).transpose(1, 2).to(query.dtype), None


def oracle(family: str, dtype: torch.dtype = torch.float32) -> Oracle:
    return Oracle(network(family, dtype))


def whole(parts: Parts) -> list[int]:
    """A prompt's system prompt, chunks and question in a row."""
    system, chunks, question = parts
    return [*system, *(i for chunk in chunks for i in chunk), *question]


def windows(chosen: torch.Tensor, first: int, size: int, least: int) -> torch.Tensor:
    """Of the tokens that are `chosen`, those in windows of `size` from `first` on that hold `least` of them."""
    kept = chosen.clone()
    for low in range(first, len(chosen), size):
        kept[low : low + size] &= chosen[low : low + size].sum() >= least
    return kept


def last_of(kv: KV, tokens: int) -> KV:
    return [(k[:, :, -tokens:], v[:, :, -tokens:]) for k, v in kv]


def join(parts: Sequence[KV]) -> KV:
    return [
        (torch.cat([k for k, _ in layer], 2), torch.cat([v for _, v in layer], 2))
        for layer in zip(*parts, strict=True)
    ]


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, relative to the largest expected value."""
    return float((found - expected).abs().max() / expected.abs().max())


def overlay(stale: KV, fresh: torch.Tensor) -> DynamicCache:
    """The cache of `Oracle.overlaid`. `Oracle.kv` over it gives the KV that all of a mixed context has."""
    found = DynamicCache()
    found.layers = [_Overlay(k, v, fresh) for k, v in stale]
    return found


def _cache_of(kv: KV | None) -> DynamicCache:
    found = DynamicCache()
    for i, (k, v) in enumerate(kv or []):
        found.update(k, v, i)
    return found


class _Overlay(DynamicLayer):
    def __init__(self, keys: torch.Tensor, values: torch.Tensor, fresh: torch.Tensor) -> None:
        super().__init__()
        self._stale, self._fresh = (keys, values), fresh[:, None]

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *rest: Any, **more: Any) -> Any:
        context = len(self._fresh)
        laid = [
            torch.cat([torch.where(self._fresh, new[:, :, :context], old), new[:, :, context:]], 2)
            for new, old in zip((key_states, value_states), self._stale, strict=True)
        ]
        return super().update(laid[0], laid[1], *rest, **more)
