"""The tokens that a recipe chose in a sample, for drawing (FusionRAG, fig. 8)."""

from typing import Any

from tokenizers import Tokenizer

from fusionkv.bench.quality.data.samples import Sample
from fusionkv.fusion_worker.compute.prefill_plan import PrefillPlan
from fusionkv.fusion_worker.prompt import Prompt
from fusionkv.fusion_worker.quality import explain


def picture(prompt: Prompt, sample: Sample, fused: PrefillPlan, tokenizer: Tokenizer) -> dict[str, Any]:
    """The tokens of every chunk, the chosen ones, and scores as ranks from 0 to 1."""
    chunks = [
        {
            "tokens": explain.texts(tokenizer, chunk.ids),
            "chosen": found,
            "scores": scores or [0.0] * len(chunk),
        }
        for chunk, (found, scores) in zip(prompt.chunks, explain.chosen(prompt, fused), strict=True)
    ]
    return {"question": sample.question.strip(), "answers": list(sample.answers), "chunks": chunks}
