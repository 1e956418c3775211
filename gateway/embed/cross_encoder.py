"""A cross-encoder run with transformers: scores a question and a passage read together."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from fusionkv.gateway.embed.sentence_model import Unsupported


class CrossEncoder:
    """Scores like sentence-transformers' CrossEncoder, without its activation, which does not change the order."""

    def __init__(self, directory: Path) -> None:
        """Raises Unsupported, or any error of transformers."""
        self._tokenizer: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        self._model: Any = AutoModelForSequenceClassification.from_pretrained(
            directory, local_files_only=True, use_safetensors=True, dtype=torch.float32
        ).eval()
        if self._model.config.num_labels != 1:
            raise Unsupported(f"{directory} outputs {self._model.config.num_labels} scores; a reranker outputs one")
        self._max_tokens = min(self._tokenizer.model_max_length, self._model.config.max_position_embeddings)
        self.name = directory.resolve().name

    def score(self, question: str, passages: Sequence[str]) -> list[float]:
        batch = self._tokenizer(
            [question] * len(passages),
            [*passages],
            padding=True,
            truncation="longest_first",
            max_length=self._max_tokens,
            return_tensors="pt",
        )
        with torch.inference_mode():
            return self._model(**batch).logits[:, 0].tolist()
