"""Tokenizers of plain text, for each place in a prompt: many mark the first word of a text that stands alone."""

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from tokenizers import Tokenizer, normalizers, pre_tokenizers

_FIRST, _NEVER = "first", "never"
# Their stubs lack __iter__.
_SEQUENCES: tuple[Any, ...] = (normalizers.Sequence, pre_tokenizers.Sequence)


class PlainTokenizers(NamedTuple):
    """Tokenizers of a model, in which "<eos>" is five characters. Equal ones are one object.

    A prompt is tokenised in parts. SentencePiece's tokenizers put "▁" in front of a text, and byte-level ones may put
    a space there. Within a prompt, the same text would have neither.

    Attributes:
        beginning: of a text that begins a prompt.
        after_control: of a text after a control token.
        within: of a text after other text, such as a chunk.
    """

    beginning: Tokenizer
    after_control: Tokenizer
    within: Tokenizer

    @classmethod
    def of(cls, as_json: str) -> "PlainTokenizers":
        """Those of a tokenizer.json."""
        within = _plain(as_json)
        schemes = _unmark(within)
        if not schemes:
            return cls(within, within, within)
        beginning = _plain(as_json)
        # With the scheme "first", the text before a control token counts as the first one.
        return cls(beginning, within if schemes == {_FIRST} else beginning, within)


def with_control(tokenizer: Tokenizer, template: str) -> str:
    """The tokenizer.json in which the tokens that a chat template writes are control tokens.

    Some files don't call them special, as those of DeepSeek-R1's distillations the roles: in a passage, such a token
    would end the user's message. Others are words or runs of spaces that stand whole.
    """
    added = (token.content for token in tokenizer.get_added_tokens_decoder().values() if not token.special)
    control = {text for text in added if text in template and text.strip() and not text[0].isalnum()}
    as_json = tokenizer.to_str()
    if not control:  # the common case: Gemma's 33 MB need not be parsed
        return as_json
    content = json.loads(as_json)
    for token in content["added_tokens"]:
        token["special"] |= token["content"] in control
    return json.dumps(content, ensure_ascii=False)


def _plain(as_json: str) -> Tokenizer:
    tokenizer = Tokenizer.from_str(as_json)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def _unmark(tokenizer: Tokenizer) -> set[str]:
    """Turns off what a tokenizer puts in front of a text; returns where it did so: "first" or "always"."""
    schemes = set()
    for each in (*_parts(tokenizer.normalizer), *_parts(tokenizer.pre_tokenizer)):
        if isinstance(each, normalizers.Prepend) and each.prepend:
            schemes.add("always")
            each.prepend = ""
        elif isinstance(each, pre_tokenizers.Metaspace) and each.prepend_scheme != _NEVER:
            schemes.add(each.prepend_scheme)
            each.prepend_scheme = _NEVER
        elif isinstance(each, pre_tokenizers.ByteLevel) and each.add_prefix_space:
            schemes.add("always")
            each.add_prefix_space = False
    return schemes


def _parts(step: Any) -> Iterable[Any]:
    """The steps of a sequence, or the single one; these share their settings with the tokenizer."""
    if step is None:
        return ()
    return step if isinstance(step, _SEQUENCES) else (step,)
