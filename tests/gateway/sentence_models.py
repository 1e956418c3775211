"""Tiny models with random weights: a Sentence-Transformers directory, and a cross-encoder."""

import json
from pathlib import Path
from typing import Any

WIDTH = 16
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *_LETTERS, "?", ":", *(f"##{letter}" for letter in _LETTERS)]


def _bert(folder: Path, seed: int, kind: str, **more: Any) -> None:
    import torch
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    config = transformers.BertConfig(
        vocab_size=len(WORDS), hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=40, **more,
    )  # fmt: skip
    torch.manual_seed(seed)
    getattr(transformers, kind)(config).save_pretrained(folder)
    transformers.BertTokenizerFast(vocab_file=str(folder / "vocab.txt"), model_max_length=40).save_pretrained(folder)


def write(
    folder: Path, *, seed: int = 0, pooling: str = "mean", prompts: dict[str, str] | None = None, modules: Any = ()
) -> Path:
    """A directory as sentence-transformers saves it; modules: names of more than the usual ones."""
    _bert(folder, seed, "BertModel")
    places = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"} | dict.fromkeys(modules, "3")
    listed = [{"path": path, "type": f"sentence_transformers.models.{name}"} for name, path in places.items()]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 32, "do_lower_case": False}))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modes = {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token", "max": "pooling_mode_max_tokens"}
    settings = {"word_embedding_dimension": WIDTH} | {name: mode == pooling for mode, name in modes.items()}
    (folder / "1_Pooling/config.json").write_text(json.dumps(settings))
    if prompts:
        (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))
    return folder


def write_reranker(folder: Path, *, labels: int = 1) -> Path:
    _bert(folder, 0, "BertForSequenceClassification", num_labels=labels)
    return folder
