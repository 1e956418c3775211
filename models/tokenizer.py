"""A byte-level BPE tokenizer over the generator's words, lossless on any UTF-8 text."""

from collections.abc import Iterable, Mapping

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from fusionkv.models import words

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
# Tokens of CacheClip's second model, learnt from text: too few to learn every word and syllable that `build` has.
_LEARNT = 576
_SPACE = "Ġ"  # how byte-level tokenizers write the space byte
_PIECES = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]|\s"  # words, single digits, single signs


def _whole_words() -> list[str]:
    spaced = (
        words.FUNCTION
        + words.ITEMS
        + words.ROLES
        + words.ADJECTIVES
        + words.NOUNS
        + words.VERBS
        + words.PREPOSITIONS
        + words.DAYS
        + words.SHORT
        + list("0123456789")
    )
    return words.STARTS + [_SPACE + word for word in spaced]


def link_tokens(chunks: int, links: int) -> list[list[str]]:
    """The names of the link tokens behind each chunk of a prompt, the first chunk's first."""
    return [[f"<|link_{chunk}_{link}|>" for link in range(1, links + 1)] for chunk in range(1, chunks + 1)]


def anchor_tokens(percent: int, segment: int) -> list[str]:
    """The names of the anchor tokens behind a segment of so many tokens that save so much of it.

    ValueError for rates that are no whole number of tokens: a worker knows the names alone, and finds the segment's
    length from how many there are.
    """
    if not 0 <= percent < 100 or segment < 1 or segment * (100 - percent) % 100:
        raise ValueError(f"{100 - percent}% of a segment of {segment} tokens is no whole number of anchor tokens")
    return [f"<|anchor_{percent}_{number}|>" for number in range(1, segment * (100 - percent) // 100 + 1)]


def build(links: int = 0, pages: int = 0, anchors: Mapping[int, int] | None = None) -> PreTrainedTokenizerFast:
    """The tokenizer of every reference model; with `links` link tokens behind each of `pages` pages (KVLink A.2).

    anchors: length of the segments that anchor tokens stand behind, by the percentage that they save (KVLink 2.4).

    Frequent words are one token. Names are made of syllables, one token each, reached by merges that
    run through a syllable from its left end; syllables are consonant-vowel-consonant, so that no merge
    crosses a border. All 256 bytes are tokens, so that any text can be written.
    """
    vocab = {token: i for i, token in enumerate([PAD, BOS, EOS])}
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab.setdefault(symbol, len(vocab))
    for word in _whole_words():
        vocab.setdefault(word, len(vocab))
    merges: list[tuple[str, str]] = []
    for syllable in [_SPACE + s for s in words.FIRST] + words.SECOND + words.THIRD + words.PLACE:
        for end in range(1, len(syllable)):
            merge = (syllable[:end], syllable[end])
            if merge not in merges:
                merges.append(merge)
            vocab.setdefault(syllable[: end + 1], len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    if links:
        tokenizer.add_special_tokens([token for page in link_tokens(pages, links) for token in page])
    for percent, segment in (anchors or {}).items():
        tokenizer.add_special_tokens(anchor_tokens(percent, segment))
    return _wrapped(tokenizer)


def learn(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Another tokenizer, learnt from texts: that of CacheClip's second model. Lossless as well.

    It cuts every page of a story in another way than `build` does: into 1.2 times as many tokens, of which seven in
    ten are the same (tests/models/test_auxiliary.py). Rare words are in parts, and names fall into other parts than
    syllables.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=_LEARNT, special_tokens=[PAD, BOS, EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _wrapped(tokenizer)


def _wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )
