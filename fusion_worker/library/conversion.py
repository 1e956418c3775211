"""A GGUF file to a model directory in safetensors, by transformers' own reader."""

import importlib.util
from pathlib import Path
from typing import Any

from fusionkv.protos.runtime.errors import FailedPrecondition

_PACKAGES = ("gguf", "accelerate")
# transformers takes the pre-tokeniser of GPT-2 for every vocabulary of that kind; this one splits digits first.
_DIGITS_APART = ("smollm",)


def check_packages() -> None:
    """Raises FailedPrecondition when what reads GGUF files is not installed."""
    if missing := [name for name in _PACKAGES if importlib.util.find_spec(name) is None]:
        raise FailedPrecondition(f'reading a GGUF file needs {" and ".join(missing)}: pip install "fusionkv[gguf]"')


def convert(file: Path, into: Path) -> None:
    """Writes configuration, bfloat16 weights and tokenizer, with its chat template, of a GGUF file to a folder.

    Raises:
        FailedPrecondition: the file is no GGUF file, broken, or of a family that is not served.
    """
    check_packages()
    import gguf

    try:
        fields = gguf.GGUFReader(file).fields
        pre = fields["tokenizer.ggml.pre"].contents() if "tokenizer.ggml.pre" in fields else ""
        family = fields["general.architecture"].contents()
    except Exception as error:  # whatever a parser of bytes runs into
        raise FailedPrecondition(f"{file} is no GGUF file, or a broken one: {_line(error)}") from error
    try:
        _convert(file, into, pre)
    except FailedPrecondition:
        raise
    except Exception as error:
        raise FailedPrecondition(f"can't convert {file} of family {family!r}: {_line(error)}") from error


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
    # Packed, as it may stay otherwise, a model refuses to save itself.
    whole = GgufConfig(dequantize=True)
    network = AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.bfloat16, quantization_config=whole, use_safetensors=True
    )
    network.save_pretrained(into)


def _line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
