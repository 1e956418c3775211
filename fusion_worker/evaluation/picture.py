"""What a recipe chose in one sample, token by token, for drawing (FusionRAG, fig. 8)."""

from typing import Any

import torch
from tokenizers import Tokenizer

from fusionkv.fusion_worker.engine.fused import Fused
from fusionkv.fusion_worker.engine.prompt import Prompt
from fusionkv.fusion_worker.evaluation.samples import Sample


def picture(prompt: Prompt, sample: Sample, fused: Fused, tokenizer: Tokenizer) -> dict[str, Any]:
    """Tokens of every chunk, which of them were chosen and by what score; scores as ranks from 0 to 1."""
    chosen = torch.zeros(prompt.question_start, dtype=torch.bool)
    chosen[fused.chosen] = True
    ranks = torch.zeros(prompt.question_start)
    if fused.scores is not None and (stale := fused.stale).any():
        order = fused.scores[stale].argsort().argsort().float()
        ranks[stale] = order / max(1, len(order) - 1)
    chunks = []
    for start, chunk in zip(prompt.starts[1:], prompt.chunks, strict=True):
        inside = slice(start, start + len(chunk))
        chunks.append(
            {
                "tokens": [tokenizer.decode([i], skip_special_tokens=False) for i in chunk.ids],
                "chosen": chosen[inside].nonzero()[:, 0].tolist(),
                "scores": [round(s, 2) for s in ranks[inside].tolist()],
            }
        )
    return {"question": sample.question.strip(), "answers": list(sample.answers), "chunks": chunks}
