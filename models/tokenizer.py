"""A byte-level BPE tokenizer over the generator's words, lossless on any UTF-8 text."""

from collections.abc import Iterable, Mapping

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from fusionkv.fusion_worker.evaluate.data import words

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
# Vocabulary size of CacheClip's auxiliary model: too small for every word and syllable that `build` has.
_LEARNT = 576
_SPACE = "Ġ"  # the space byte in byte-level tokenizers
_PIECES = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]|\s"  # words, single digits, single punctuation marks


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
    """Names of the link tokens after each chunk of a prompt, in order of chunks."""
    return [[f"<|link_{chunk}_{link}|>" for link in range(1, links + 1)] for chunk in range(1, chunks + 1)]


def anchor_tokens(percent: int, segment: int) -> list[str]:
    """Names of the anchor tokens after a segment of `segment` tokens, `percent` percent fewer.

    Raises:
        ValueError: the number of anchor tokens is not whole. A worker derives the segment's length from it.
    """
    if not 0 <= percent < 100 or segment < 1 or segment * (100 - percent) % 100:
        raise ValueError(f"{100 - percent}% of a segment of {segment} tokens is not a whole number of anchor tokens")
    return [f"<|anchor_{percent}_{number}|>" for number in range(1, segment * (100 - percent) // 100 + 1)]


def build(links: int = 0, pages: int = 0, anchors: Mapping[int, int] | None = None) -> PreTrainedTokenizerFast:
    """The tokenizer of the reference models.

    Frequent words are one token. Names consist of syllables, one token each, built by merges from a syllable's left
    end; syllables are consonant-vowel-consonant, so that no merge crosses a boundary. All 256 bytes are tokens, so
    any text can be encoded.

    Args:
        links: number of link tokens after each of `pages` pages (KVLink A.2).
        pages: number of pages with link tokens.
        anchors: length of the segments that anchor tokens follow, by the percentage that they save (KVLink 2.4).
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
    """Trains the tokenizer of CacheClip's auxiliary model on texts. It is lossless as well.

    It splits the pages of stories differently from `build`: into 1.2 times as many tokens, of which 7 in 10 are the
    same (tests/models/test_auxiliary.py). Rare words are split, and names are not split into syllables.
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
        add_bos_token=True,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )
