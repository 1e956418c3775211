"""A cache service for engines, which can be started again."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ports import free_port
from tests.system.cache_process import flags

# PyPI's torchvision is built for CUDA, and can't load its operators without; its import needs these two declared.
# SGLang imports its transforms, and the host pools use none.
_OPERATORS = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _OPERATORS.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


@pytest.fixture
def start(launch: Any, tmp_path: Path) -> Any:
    """`start()` starts a cache service, always at the same address and over the same files."""
    listen = ("--listen", f"127.0.0.1:{free_port()}")
    return lambda: launch(*flags(tmp_path / "data", *listen, memory="64MiB"))


@pytest.fixture
def cache(start: Any) -> str:
    return start().address
