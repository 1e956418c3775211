"""Quantised weights of a model directory: by which methods they may be, and what loads them."""

import inspect
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fusionkv.protos.runtime.errors import FailedPrecondition

# Methods whose weights are dequantised as they are loaded, so that every device computes the same KV.
DEQUANTISED = ("fp8", "mxfp4")
# Method -> the packages with which transformers loads it.
PACKAGES = {
    "awq": ("accelerate", "gptqmodel"),
    "bitsandbytes": ("accelerate", "bitsandbytes"),
    "fp8": ("accelerate",),
    "gptq": ("accelerate", "gptqmodel", "optimum"),
    "mxfp4": ("accelerate",),
}


def settings(file: Path, said: Any) -> dict[str, Any]:
    """What transformers is told of the `quantization_config` of a config.json.

    Raises FailedPrecondition if the method is not supported, a package is missing, or a key would be ignored.
    """
    method = said.get("quant_method") if isinstance(said, Mapping) else None
    if not isinstance(method, str) or method not in PACKAGES:
        raise refused(file, f"by {method!r}; supported methods: {', '.join(PACKAGES)}")
    if missing := [name for name in PACKAGES[method] if find_spec(name) is None]:
        raise refused(file, f"by {method}, which needs pip install {' '.join(missing)}")
    if said.get("load_in_8bit") or said.get("_load_in_8bit"):
        raise refused(file, "by bitsandbytes to 8 bits, with which tokens change the products of other tokens")
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    made = AUTO_QUANTIZATION_CONFIG_MAPPING["bitsandbytes_4bit" if method == "bitsandbytes" else method]
    known = inspect.signature(made).parameters.keys() - {"kwargs"}
    if said.get("fmt", "e4m3") != "e4m3":
        raise refused(file, f"by {method} with the format {said['fmt']!r}, which transformers takes for e4m3")
    # bitsandbytes also writes two keys with an underscore before them.
    for key in said.keys() - known - {"quant_method", "fmt", "_load_in_4bit", "_load_in_8bit"}:
        raise refused(file, f"by {method}, with the key {key!r}, which transformers ignores")
    return {**said, **({"dequantize": True} if method in DEQUANTISED else {})}


def refused(file: Path, why: str) -> FailedPrecondition:
    """The error that names a file whose weights are quantised, and why they are not loaded."""
    return FailedPrecondition(
        f"{file}: the weights are quantised {why}; or use the model in bfloat16, float16 or float32, or a GGUF file"
    )
