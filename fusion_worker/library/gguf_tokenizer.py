"""A fast tokenizer from a GGUF file's metadata; each key is used, has no effect here, or is refused."""

import re
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import GemmaTokenizer, LlamaTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.tokenization_utils_base import generate_merges

from fusionkv.fusion_worker.library.gguf_config import Keys
from fusionkv.protos.runtime.errors import FailedPrecondition

# Pre-tokenisers of BPE that transformers does not name: GPT-2's own, and those that split digits before it.
_GPT2 = ("gpt-2", "mpt", "olmo")
_DIGITS_APART = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
# Those of Llama 3 take a word that is a token as it is, whatever the merges say, and begin with a BOS token.
_WHOLE_WORDS = (
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1"),
    *("pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
)
_UNKNOWN, _CONTROL, _OWN = 2, 3, 4  # types of tokens: unknown, control and user-defined
# Recovering merges takes time by the square of a token's characters; Gemma's longest token has 31.
_LONGEST = 512
# Tokens and templates that nothing here asks for.
_HARMLESS = re.compile(
    r"tokenizer\.(chat_templates|chat_template\..+|huggingface\.json"
    r"|ggml\.((fim_\w+|seperator|mask|cls|prefix|suffix|middle)_(token_)?id|token_type_count))"
)
_ENDS = ("eos", "eot", "eom")


def tokenizer_of(metadata: dict[str, Any], architecture: str) -> tuple[Any, list[int]]:
    """The tokenizer with its chat template, and the ids of all tokens that end an answer.

    Raises FailedPrecondition if the file describes no tokenizer, or one that can't be built.
    """
    keys = Keys(metadata, "tokenizer.")
    kind = keys.get("ggml.model", str)
    if kind not in ("gpt2", "llama"):
        raise keys.refused("ggml.model", "only gpt2 (BPE) and llama (SentencePiece) are supported")
    tokens = keys.get("ggml.tokens", list)
    if len(set(tokens)) != len(tokens):
        raise FailedPrecondition("tokenizer.ggml.tokens has a token twice")
    types = keys.get("ggml.token_type", np.ndarray, np.ones(len(tokens), np.int32))
    if len(types) != len(tokens):
        raise FailedPrecondition(f"tokenizer.ggml.token_type has {len(types)} values for {len(tokens)} tokens")
    named = {
        name: tokens[_id(keys, key, tokens)]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if f"tokenizer.ggml.{key}_token_id" in metadata
    }
    ends = [_id(keys, key, tokens) for key in _ENDS if f"tokenizer.ggml.{key}_token_id" in metadata]
    keys.only("ggml.add_eos_token", False)
    keys.only("ggml.add_sep_token", False)
    keys.only("ggml.remove_extra_whitespaces", False)
    backend, begins = _bpe(keys, tokens, types) if kind == "gpt2" else _pieces(keys, tokens, named, architecture)
    begins = keys.get("ggml.add_bos_token", bool, begins)
    template = keys.get("chat_template", str, "")
    if named_templates := [] if template else sorted(key for key in metadata if ".chat_template." in key):
        raise FailedPrecondition(f"it has {named_templates[0]}, but no tokenizer.chat_template")
    keys.finish(_HARMLESS)
    _add(backend, tokens, types)
    made = _made(backend, named, template, begins and "bos" in named)
    if len(made) != len(tokens):
        raise FailedPrecondition(f"the tokenizer has {len(made)} tokens, and the model {len(tokens)}")
    return made, sorted(set(ends))


def _made(backend: Tokenizer, named: dict[str, str], template: str, begins: bool) -> Any:
    special = {f"{name}_token": token for name, token in named.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=template or None,
        add_bos_token=begins,
        clean_up_tokenization_spaces=False,
        **({"bos_token": None, "eos_token": None} | special),
    )


def _id(keys: Keys, key: str, tokens: list[str]) -> int:
    name = f"ggml.{key}_token_id"
    token: int = keys.get(name, int)
    if not 0 <= token < len(tokens):
        raise keys.refused(name, f"there are {len(tokens)} tokens")
    return token


def _bpe(keys: Keys, tokens: list[str], types: np.ndarray) -> tuple[Tokenizer, bool]:
    """Byte-level BPE, and whether such tokenizers begin with a BOS token unless they say otherwise."""
    pre = keys.get("ggml.pre", str)
    keys.only("ggml.add_space_prefix", False)
    keys.get("ggml.scores", np.ndarray, np.empty(0))  # of no use to BPE
    spelling = bytes_to_unicode()
    alphabet = set(spelling.values())

    def spelled(token: str, kind: int) -> str:
        if kind in (_CONTROL, _OWN) or alphabet.issuperset(token):
            return token
        return "".join(spelling[byte] for byte in token.encode())

    vocabulary = {spelled(token, kind): index for index, (token, kind) in enumerate(zip(tokens, types, strict=True))}
    pairs = [tuple(merge.split(" ")) for merge in keys.get("ggml.merges", list)]
    if unknown := next(
        (pair for pair in pairs if len(pair) != 2 or not vocabulary.keys() >= {*pair, "".join(pair)}), None
    ):
        raise FailedPrecondition(f"tokenizer.ggml.merges has {' '.join(unknown)[:50]!r}, not a pair of tokens")
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre in _WHOLE_WORDS))
    backend.decoder = decoders.ByteLevel()
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre in GGUF_PRE_TOKENIZER_SPLITS:
        split = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[pre]), behavior="isolated")
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, plain])
    elif pre in _DIGITS_APART:
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), plain])
    elif pre in _GPT2:
        backend.pre_tokenizer = plain
    else:
        raise keys.refused("ggml.pre", "this pre-tokenizer is not known")
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    return backend, pre in (*_WHOLE_WORDS, "tekken")


def _pieces(keys: Keys, tokens: list[str], named: dict[str, str], architecture: str) -> tuple[Tokenizer, bool]:
    """SentencePiece's BPE. It begins with a BOS token unless it says otherwise."""
    keys.get("ggml.pre", str, "default")  # which is for byte-level BPE
    gemma = architecture == "gemma3"
    prefix = keys.get("ggml.add_space_prefix", bool, not gemma)
    if gemma and prefix:
        raise keys.refused("ggml.add_space_prefix", "Gemma's tokenizer has no prefix")
    if gemma:  # whose file spells runs of spaces as such
        tokens = ["▁" * len(token) if " " in token and not token.strip() else token for token in tokens]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    scores = keys.get("ggml.scores", np.ndarray, np.empty(0))
    merges = keys.get("ggml.merges", list, [])
    if merges:
        pairs = [tuple(merge.split(" ")) for merge in merges]
    else:
        if (longest := max(map(len, tokens), default=0)) > _LONGEST:
            raise FailedPrecondition(f"tokenizer.ggml.tokens has a token of {longest} characters")
        if not gemma and len(scores) != len(tokens):
            raise FailedPrecondition(f"tokenizer.ggml.scores has {len(scores)} values for {len(tokens)} tokens")
        # Gemma's scores do not follow the order of its merges; the order of its tokens does.
        order = -np.arange(len(tokens)) if gemma else scores
        pairs = generate_merges(vocabulary, dict(zip(tokens, order.tolist(), strict=True)))
    special = {f"{name}_token": token for name, token in named.items()}
    if missing := {"bos_token", "eos_token", "unk_token"} - special.keys():
        raise FailedPrecondition(f"the tokenizer lacks {', '.join(sorted(missing))}")
    if gemma:
        kind: Any = GemmaTokenizer
        made = kind(vocabulary, pairs, **special, mask_token=None)
    else:
        made = LlamaTokenizer(vocabulary, pairs, **special, add_prefix_space=prefix)
    return made.backend_tokenizer, True


def _add(backend: Tokenizer, tokens: list[str], types: np.ndarray) -> None:
    """Adds the tokens that stand whole in a text: control tokens, which are special, and user-defined ones."""
    vocabulary = backend.get_vocab()  # which lacks Gemma's runs of spaces as its file spells them
    added = [
        AddedToken(token, normalized=False, special=kind != _OWN)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_UNKNOWN, _CONTROL, _OWN) and token in vocabulary
    ]
    backend.add_tokens([token for token in added if not token.special])
    backend.add_special_tokens([token for token in added if token.special])
