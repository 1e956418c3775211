"""Models of embeddings and rerankers, run with transformers and without sentence-transformers."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from fusionkv.fusion_worker.library import directory as files

_KNOWN = ("Transformer", "Pooling", "Normalize")


class Unsupported(Exception):
    """A directory that can't be used, with the reason."""


class SentenceModel:
    """Computes the same vectors as SentenceTransformer(directory).encode, by mean or first-token pooling."""

    def __init__(self, directory: Path) -> None:
        """Raises Unsupported, or any error of transformers."""
        modules = {Path(m["type"].replace(".", "/")).name: m["path"] for m in _json(directory / "modules.json")}
        if unknown := modules.keys() - set(_KNOWN):
            raise Unsupported(f"{directory} has the unknown module {min(unknown)}; known: {', '.join(_KNOWN)}")
        if not {"Transformer", "Pooling"} <= modules.keys():
            raise Unsupported(f"{directory}/modules.json has no Transformer or no Pooling module")
        inner = directory / modules["Transformer"]
        pooling = _json(directory / modules["Pooling"] / "config.json")
        modes = {name for name, on in pooling.items() if name.startswith("pooling_mode_") and on is True}
        modes |= {f"pooling_mode_{pooling['pooling_mode']}_tokens"} if "pooling_mode" in pooling else set()
        self._first = modes in ({"pooling_mode_cls_token"}, {"pooling_mode_cls_tokens"})
        if not self._first and modes != {"pooling_mode_mean_tokens"}:
            names = ", ".join(sorted(modes)) or "none"
            raise Unsupported(f"{directory} has the unknown pooling mode {names}; known: mean, cls")
        prompts = _json(directory / "config_sentence_transformers.json", {}).get("prompts", {})
        self._prompts = prompts.get("document") or prompts.get("passage") or "", prompts.get("query") or ""
        limits = _json(inner / "sentence_bert_config.json", {})
        self._tokenizer, self._model = _loaded(AutoModel, inner)
        model_limit = min(self._tokenizer.model_max_length, self._model.config.max_position_embeddings)
        self._max_tokens = min(model_limit, limits.get("max_seq_length") or model_limit)
        self.dim: int = self._model.config.hidden_size
        self.name = f"{directory.resolve().name}@{_digest(inner, pooling)}"

    def embed(self, texts: Sequence[str], question: bool) -> np.ndarray:
        """Vectors of unit length, float32 `[text, dim]`; texts are truncated to the model's length."""
        prompted = [self._prompts[question] + text for text in texts]
        batch = self._tokenizer(
            prompted, padding=True, truncation=True, max_length=self._max_tokens, return_tensors="pt"
        )
        with torch.inference_mode():
            hidden = self._model(**batch).last_hidden_state
            mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
            # Models that pad on the left have their first token in a later row.
            first = hidden[torch.arange(len(texts)), batch["attention_mask"].argmax(1)]
            pooled = first if self._first else (hidden * mask).sum(1) / mask.sum(1)
            return torch.nn.functional.normalize(pooled, dim=1).numpy()


class CrossEncoder:
    """Scores a question and a passage read together, like sentence-transformers' CrossEncoder.

    Its activation is left out, which does not change the order.
    """

    def __init__(self, directory: Path) -> None:
        """Raises Unsupported, or any error of transformers."""
        if not (directory / "config.json").is_file():
            raise Unsupported(f"{directory} is not the directory of a cross-encoder: config.json is missing")
        self._tokenizer, self._model = _loaded(AutoModelForSequenceClassification, directory)
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


def _loaded(kind: Any, directory: Path) -> tuple[Any, Any]:
    """A directory's tokenizer and model; nothing in it is run as code."""
    files.check_code(directory)
    files.check_whole(directory)
    tokenizer: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    model, report = kind.from_pretrained(
        directory,
        dtype=torch.float32,
        local_files_only=True,
        output_loading_info=True,
        trust_remote_code=False,
        use_safetensors=True,
    )
    # transformers initialises missing tensors randomly; this one pools, which no embedder here uses.
    if missing := sorted(name for name in report["missing_keys"] if not name.startswith("pooler.")):
        raise Unsupported(f"the weights in {directory} lack {len(missing)} tensors: {missing[0]}, ...")
    return tokenizer, model.eval()


def _json(file: Path, default: Any = None) -> Any:
    if default is not None and not file.is_file():
        return default
    if not file.is_file():
        raise Unsupported(f"{file.parent} is not a Sentence-Transformers directory: {file.name} is missing")
    return json.loads(file.read_text(encoding="utf-8"))


def _digest(inner: Path, pooling: dict[str, Any]) -> str:
    """Eight hexadecimal digits that depend on the weights, the tokenizer and the pooling."""
    digest = hashlib.sha256(json.dumps(pooling, sort_keys=True).encode())
    for file in sorted([*inner.glob("*.safetensors"), inner / "tokenizer.json"]):
        if file.is_file():
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:8]
