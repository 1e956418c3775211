"""Metrics of an answer: text against expected answers, and logits against full attention.

All are per sample; a cell's score is the mean over samples. Text metrics are between 0 and 1.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_UNPRINTABLE = re.compile(r"[\x00-\x1f]")
_NO_SIGNS = str.maketrans("", "", string.punctuation)
# Words that begin sentences with a capital letter, and name nothing.
_FUNCTION_WORDS = (
    "all also although and as at based because both but by for from he her his however i if in is it its no not of "
    "on or our she since so some that their there these they this those to was we were what when where which while "
    "who with yes you your"
)
# Punctuation of Chinese, Arabic, Hindi and others, and guillemets.
_OTHER_SIGNS = re.compile(
    r"[\u00ab\u00bb\u060c\u061b\u061f\u06d4\u0964\u0965\u3000-\u303f\uff01-\uff0f\uff1a-\uff20\uff3b-\uff40\uff5b-\uff65]"
)
# A word, or a character of Thai, Burmese, Khmer, Chinese, Japanese or Korean, which have no spaces between all words.
_SINGLE = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17d3\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[{_SINGLE}]|[^\s{_SINGLE}]+")
# With the vowel signs of Hindi and its like.
_ROUGE_WORD = re.compile(rf"[{_SINGLE}]|(?:[^\W_{_SINGLE}]|[\u0900-\u0963\u0966-\u0dff])+")

Score = Callable[[str, Sequence[str]], float]


def normalize(text: str) -> str:
    """Lower case, without punctuation, English articles and double spaces (SQuAD's and LongBench's normalisation)."""
    return " ".join(_ARTICLES.sub(" ", _OTHER_SIGNS.sub("", text.lower().translate(_NO_SIGNS))).split())


def exact_match(answer: str, expected: Sequence[str]) -> float:
    """1 when the normalised answer is one of the expected ones (SQuAD)."""
    return float(normalize(answer) in {normalize(e) for e in expected})


def contains(answer: str, expected: Sequence[str]) -> float:
    """1 when the normalised answer has all words of an expected one, next to each other and in order.

    An expected answer of which nothing is left, as "the", must be equal.
    """
    text = f" {' '.join(_words(answer))} "
    return float(any(f" {' '.join(_words(e))} " in text for e in expected))


def f1(answer: str, expected: Sequence[str]) -> float:
    """F1 of words after normalisation, the best over the expected answers (SQuAD, LongBench's qa_f1_score).

    Texts without spaces are split into characters, while LongBench's scripts use a word segmenter for Chinese.
    """
    return max((_f1(_words(answer), _words(e)) for e in expected), default=0.0)


def string_match_all(answer: str, expected: Sequence[str]) -> float:
    """Share of the expected strings that the answer contains, ignoring case (RULER; all its tasks but QA)."""
    text = _printable(answer).lower()
    return sum(e.lower() in text for e in expected) / len(expected)


def string_match_part(answer: str, expected: Sequence[str]) -> float:
    """1 when the answer contains any of the expected strings, ignoring case (RULER's QA tasks)."""
    text = _printable(answer).lower()
    return float(any(e.lower() in text for e in expected))


def rouge_l(answer: str, expected: Sequence[str]) -> float:
    """F-measure of the longest common subsequence of words, the best over the expected answers (Lin 2004).

    Words are runs of letters and digits in lower case, not stemmed.
    """
    words = _ROUGE_WORD.findall(answer.lower())
    return max((_rouge_l(words, _ROUGE_WORD.findall(e.lower())) for e in expected), default=0.0)


def entities(answer: str, expected: Sequence[str]) -> float:
    """Share of an expected answer's entities whose words are in the answer, the best over the expected answers.

    Entities are words of names, and numbers: words that begin with a capital letter or a digit, without the function
    words with which sentences begin. Of an expected answer without any, all words count as one entity.
    """
    said = {normalize(word) for word in _bare_words(answer)}

    def share(text: str) -> float:
        capital = (normalize(word) for word in _bare_words(text) if word[:1].isupper() or word[:1].isdigit())
        names = {word for word in capital if word and word not in _FUNCTION_WORDS.split()}
        return len(names & said) / len(names) if names else contains(answer, [text])

    return max(map(share, expected), default=0.0)


def number_match(answer: str, expected: Sequence[str]) -> float:
    """Share of the answer's numbers that are expected (LongBench's passage retrieval and count)."""
    numbers = re.findall(r"\d+", answer)
    right = {number for e in expected for number in re.findall(r"\d+", e)[:1]}
    return sum(number in right for number in numbers) / len(numbers) if numbers else 0.0


_SCORES = (exact_match, contains, f1, string_match_all, string_match_part, rouge_l, entities, number_match)
SCORES: dict[str, Score] = {score.__name__: score for score in _SCORES}
"""Metrics of an answer's text, by name."""


def kl(reference: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """KL(reference || logits) in nats, float64 [...], of distributions given by logits, float [..., vocabulary]."""
    p, q = _log_softmax(reference), _log_softmax(logits)
    return np.maximum(0.0, (np.exp(p) * (p - q)).sum(-1))


def nll(logits: np.ndarray, tokens: Sequence[int]) -> float:
    """Mean negative log-likelihood of tokens in nats. logits: float [tokens, vocabulary], predicting each token."""
    return -float(_log_softmax(logits)[np.arange(len(tokens)), list(tokens)].mean())


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def _words(text: str) -> list[str]:
    return _WORD.findall(normalize(text))


def _bare_words(text: str) -> list[str]:
    """Words without signs around them and without a possessive s."""
    words = (word.strip(f"{string.punctuation}\u2018\u2019\u201c\u201d") for word in text.split())
    return [word.removesuffix("'s").removesuffix("\u2019s") for word in words]


def _f1(answer: list[str], expected: list[str]) -> float:
    if not answer or not expected:
        # SQuAD: an empty answer is right if the expected one is empty, too.
        return float(answer == expected)
    common = sum((Counter(answer) & Counter(expected)).values())
    return 2 * common / (len(answer) + len(expected))


def _rouge_l(answer: list[str], expected: list[str]) -> float:
    if not answer or not expected:
        return 0.0
    row = [0] * (len(expected) + 1)
    for word in answer:
        before = row
        row = [0]
        for i, other in enumerate(expected):
            row.append(before[i] + 1 if word == other else max(before[i + 1], row[i]))
    return 2 * row[-1] / (len(answer) + len(expected))


def _printable(text: str) -> str:
    return _UNPRINTABLE.sub("\n", text.strip())
