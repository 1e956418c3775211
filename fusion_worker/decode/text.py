"""Streaming detokenisation: whole characters only, and no text that may become part of a stop string."""

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class TextStream:
    """Turns token ids into text incrementally."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._decode = DecodeStream(skip_special_tokens=True)
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Text that this token completes. Sets `stopped` at a stop string, before which the text ends."""
        self._held += self._decode.step(self._tokenizer, token) or ""
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
