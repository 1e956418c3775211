"""Converts a GGUF file to a model directory with safetensors weights, using transformers' GGUF reader."""

import importlib.util
import os
from pathlib import Path
from typing import Any

from fusionkv.protos.runtime.errors import FailedPrecondition, first_line

_PACKAGES = ("gguf", "accelerate")
# GGUF pre-tokenisers that split digits first; transformers uses GPT-2's for every BPE vocabulary.
_DIGITS_APART = ("smollm",)


def check_packages() -> None:
    """Raises FailedPrecondition if a package that is needed to read GGUF files is not installed."""
    if missing := [name for name in _PACKAGES if importlib.util.find_spec(name) is None]:
        raise FailedPrecondition(f'reading a GGUF file needs {" and ".join(missing)}: pip install "fusionkv[gguf]"')


def convert(file: Path, into: Path) -> None:
    """Writes a GGUF file's configuration, bfloat16 weights, tokenizer and chat template to a folder.

    Raises:
        FailedPrecondition: the file is not a GGUF file, is damaged, or its model family is not supported.
    """
    check_packages()
    # transformers shows a bar for it that its own setting leaves on; tqdm reads this when it is imported.
    os.environ.setdefault("TQDM_DISABLE", "1")
    import gguf

    try:
        fields = gguf.GGUFReader(file).fields
        pre = fields["tokenizer.ggml.pre"].contents() if "tokenizer.ggml.pre" in fields else ""
        family = fields["general.architecture"].contents()
    except Exception as error:  # a parser of arbitrary bytes may raise anything
        raise FailedPrecondition(f"{file} is not a GGUF file, or is damaged: {first_line(error)}") from error
    try:
        _convert(file, into, pre)
    except FailedPrecondition:
        raise
    except Exception as error:
        raise FailedPrecondition(f"can't convert {file} of family {family!r}: {first_line(error)}") from error


def _convert(file: Path, into: Path, pre: str) -> None:
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    from fusionkv.fusion_worker.models import check_supported

    logging.disable_progress_bar()
    where: dict[str, Any] = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    config = AutoConfig.from_pretrained(**where)
    check_supported(config)
    tokenizer = AutoTokenizer.from_pretrained(**where)
    backend = tokenizer.backend_tokenizer
    if pre in _DIGITS_APART:
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), backend.pre_tokenizer])
    tokenizer.save_pretrained(into)
    # Without dequantisation the model may stay packed, and refuse to be saved.
    whole = GgufConfig(dequantize=True)
    network = AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.bfloat16, quantization_config=whole, use_safetensors=True
    )
    network.save_pretrained(into)
