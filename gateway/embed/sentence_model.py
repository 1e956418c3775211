"""A Sentence-Transformers directory, run with transformers: mean or first-token pooling, vectors of unit length."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer

_KNOWN = ("Transformer", "Pooling", "Normalize")


class Unsupported(Exception):
    """A directory that can't be used; the message says why."""


class SentenceModel:
    """As SentenceTransformer(directory).encode, whose code is not needed."""

    def __init__(self, directory: Path) -> None:
        """Raises Unsupported, or whatever transformers raises."""
        modules = {Path(m["type"].replace(".", "/")).name: m["path"] for m in _json(directory / "modules.json")}
        if unknown := modules.keys() - set(_KNOWN):
            raise Unsupported(f"{directory} has the module {min(unknown)}; known are {', '.join(_KNOWN)}")
        if not {"Transformer", "Pooling"} <= modules.keys():
            raise Unsupported(f"{directory}/modules.json lacks a Transformer or a Pooling module")
        inner = directory / modules["Transformer"]
        pooling = _json(directory / modules["Pooling"] / "config.json")
        modes = {name for name, on in pooling.items() if name.startswith("pooling_mode_") and on is True}
        modes |= {f"pooling_mode_{pooling['pooling_mode']}_tokens"} if "pooling_mode" in pooling else set()
        self._first = modes in ({"pooling_mode_cls_token"}, {"pooling_mode_cls_tokens"})
        if not self._first and modes != {"pooling_mode_mean_tokens"}:
            raise Unsupported(f"{directory} pools by {', '.join(sorted(modes)) or 'nothing'}; known are mean and cls")
        prompts = _json(directory / "config_sentence_transformers.json", {}).get("prompts", {})
        self._prompts = prompts.get("document") or prompts.get("passage") or "", prompts.get("query") or ""
        limits = _json(inner / "sentence_bert_config.json", {})
        self._tokenizer: Any = AutoTokenizer.from_pretrained(inner, local_files_only=True)
        self._model: Any = AutoModel.from_pretrained(
            inner, local_files_only=True, use_safetensors=True, dtype=torch.float32
        ).eval()
        own = min(self._tokenizer.model_max_length, self._model.config.max_position_embeddings)
        self._most = min(own, limits.get("max_seq_length") or own)
        self.dim: int = self._model.config.hidden_size
        self.name = f"{directory.resolve().name}@{_digest(inner, pooling)}"

    def embed(self, texts: Sequence[str], question: bool) -> np.ndarray:
        """float32 `[text, dim]`, of unit length; a text's tokens over the model's length do not count."""
        prompted = [self._prompts[question] + text for text in texts]
        batch = self._tokenizer(prompted, padding=True, truncation=True, max_length=self._most, return_tensors="pt")
        with torch.inference_mode():
            hidden = self._model(**batch).last_hidden_state
            mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
            # Of a model that pads on the left the first token is not the first row.
            first = hidden[torch.arange(len(texts)), batch["attention_mask"].argmax(1)]
            pooled = first if self._first else (hidden * mask).sum(1) / mask.sum(1)
            return torch.nn.functional.normalize(pooled, dim=1).numpy()


def _json(file: Path, default: Any = None) -> Any:
    if default is not None and not file.is_file():
        return default
    if not file.is_file():
        raise Unsupported(f"{file.parent} is no Sentence-Transformers directory: it has no {file.name}")
    return json.loads(file.read_text(encoding="utf-8"))


def _digest(inner: Path, pooling: dict[str, Any]) -> str:
    """Eight hexadecimal digits that change with the weights, the tokenizer and the pooling."""
    made = hashlib.sha256(json.dumps(pooling, sort_keys=True).encode())
    for file in sorted([*inner.glob("*.safetensors"), inner / "tokenizer.json"]):
        if file.is_file():
            with file.open("rb") as stream:
                made.update(hashlib.file_digest(stream, "sha256").digest())
    return made.hexdigest()[:8]
