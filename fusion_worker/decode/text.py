"""Streaming detokenisation: whole characters only, and no text that may become part of a stop string."""

from collections.abc import Sequence

from tokenizers import Tokenizer

_MOST_BYTES = 4  # of a character


class Characters:
    """Decodes token ids to whole characters, one after another. Bytes that are no UTF-8 give U+FFFD."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        # Of the last text: without a token before it, one would lose its leading space.
        self._last: list[int] = []
        self._waiting: list[int] = []

    def step(self, token: int) -> str | None:
        """The text that this token completes; None if it completes no character."""
        self._waiting.append(token)
        piece = self._text(self._waiting)
        if piece and not piece.endswith("\ufffd"):
            self._last, self._waiting = self._waiting, []
            return piece
        if len(self._waiting) < _MOST_BYTES:
            return None
        # The first one is no part of a character that others complete.
        first = [self._waiting.pop(0)]
        piece = self._text(first)
        self._last = first if piece else self._last
        return piece or None

    def _text(self, ids: list[int]) -> str:
        """The text of tokens that follow the last ones."""
        before, after = (self._decoded(each) for each in (self._last, self._last + ids))
        # With a token for each byte (Mistral, Gemma), a byte that is no UTF-8 spoils the characters before it, too.
        return after[len(before) :] if after.startswith(before) else self._decoded(ids)

    def _decoded(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)


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
