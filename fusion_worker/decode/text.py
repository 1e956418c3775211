"""Streaming detokenisation: whole characters only, and no text that may become part of a stop string."""

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_MOST_BYTES = 4  # of a character


class Characters:
    """Decodes token ids to whole characters, one after another. Bytes that are no UTF-8 give U+FFFD, or nothing."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        # Of the last text, behind which a new stream begins: its first token would lose its leading space.
        self._last: list[int] = []
        self._begin()

    def _begin(self) -> None:
        self._stream = DecodeStream(skip_special_tokens=self._skip)
        self._waiting: list[int] = []
        for token in self._last:
            self._stream.step(self._tokenizer, token)

    def step(self, token: int) -> str | None:
        """The text that this token completes; None if it completes no character."""
        self._waiting.append(token)
        try:
            piece = self._stream.step(self._tokenizer, token)
        except Exception:  # tokenizers raises no other class
            # With a token for each byte (Mistral, Gemma), a byte that is no UTF-8 also spoils the characters right
            # before it, which were decoded already; DecodeStream then refuses the next token of text.
            self._last = [token]
            self._begin()
            self._waiting, piece = [token], self._stream.step(self._tokenizer, token)
        if piece is not None:
            self._last, self._waiting = self._waiting, []
        elif len(self._waiting) >= _MOST_BYTES:
            piece = self._give_up_first()
        return piece

    def _give_up_first(self) -> str | None:
        """The text of the first of the waiting tokens, which is no part of a character that others complete.

        DecodeStream decodes all that wait at each step: 8,000 of them, such as special tokens, took 7 to 20 s.
        """
        first, *rest = self._waiting
        ids = self._last, [*self._last, first]
        before, text = (self._tokenizer.decode(each, skip_special_tokens=self._skip) for each in ids)
        self._begin()
        return text[len(before) :] + "".join(self.step(each) or "" for each in rest) or None


class TextStream:
    """Turns token ids into text incrementally."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._characters = Characters(tokenizer, skip_special_tokens=True)
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Text that this token completes. Sets `stopped` at a stop string, before which the text ends."""
        self._held += self._characters.step(token) or ""
        matches = [at for at in (self._held.find(s) for s in self._stop) if at >= 0]
        if matches:
            self.stopped = True
            text, self._held = self._held[: min(matches)], ""
            return text
        keep = max((self._overlap(s) for s in self._stop), default=0)
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return text

    def flush(self) -> str:
        """Text that was held back as a possible start of a stop string."""
        text, self._held = self._held, ""
        return text

    def _overlap(self, stop: str) -> int:
        """Length of the longest suffix of the held text that is a prefix of `stop`."""
        for size in range(min(len(stop) - 1, len(self._held)), 0, -1):
            if self._held.endswith(stop[:size]):
                return size
        return 0
