"""Link tokens: their positions after each chunk, and how far they shift everything after them (KVLink 2.3)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fusionkv.fusion_worker.load.placement import LoadedChunk
from fusionkv.fusion_worker.prompt import Prompt


@dataclass(frozen=True, slots=True)
class Links:
    """`each` link tokens after every chunk of a prompt. They take positions: what follows a chunk shifts by `each`.

    Attributes:
        ends: int64 [chunks], the position after each chunk's last token, without links.
        ids: int64 [chunks * each].
    """

    ends: torch.Tensor
    ids: torch.Tensor
    each: int

    @classmethod
    def behind(cls, prompt: Prompt, tokens: Sequence[Sequence[int]], each: int) -> "Links":
        """Puts the first `each` of a model's link tokens, given by chunk, after the prompt's chunks; 0 puts none."""
        starts = zip(prompt.starts[1:], prompt.chunks, strict=True)
        ends = torch.tensor([start + len(chunk) for start, chunk in starts], dtype=torch.int64)
        used = tokens[: len(prompt.chunks)] if each else ()
        return cls(ends, torch.tensor([i for chunk in used for i in chunk[:each]], dtype=torch.int64), each)

    @property
    def positions(self) -> torch.Tensor:
        """int64 [chunks * each]: positions of the link tokens."""
        chunk = torch.arange(len(self.ends))
        return ((self.ends + self.each * chunk)[:, None] + torch.arange(self.each)).flatten()

    def moved(self, positions: torch.Tensor) -> torch.Tensor:
        """int64: the positions, with links, of tokens at `positions` without links."""
        return positions + self.each * torch.searchsorted(self.ends, positions, right=True)

    def placed(self, part: LoadedChunk) -> LoadedChunk:
        """The part at its position with links."""
        if not self.each:
            return part
        position = int(self.moved(torch.tensor(part.wanted.position)))
        return replace(part, wanted=replace(part.wanted, position=position))
