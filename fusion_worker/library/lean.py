"""Loads models without what a process that compiles nothing never uses of torch: 1 s and 150 MB less of it."""

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from typing import Any

_DYNAMO = "torch._dynamo"


@contextlib.contextmanager
def uncompiled(*, ranks: int = 1) -> Iterator[None]:
    """While inside, torch's compiler is not loaded to mark a function, and with it FSDP and Triton.

    transformers marks functions when it is imported, and torch when it makes a model. Without `ranks` that share a
    model, transformers is told too that torch can't be distributed, as it can't on some platforms. Where the compiler
    is loaded already nothing is changed; whoever needs it afterwards loads it.
    """
    import torch

    spec = importlib.util.find_spec(_DYNAMO)
    if _DYNAMO in sys.modules or spec is None:
        yield
        return
    available = torch.distributed.is_available
    # Never executed; modules below it are found all the same.
    marks: Any = importlib.util.module_from_spec(spec)
    marks.allow_in_graph = marks.assume_constant_result = marks.disable = _unmarked
    marks.__getattr__ = _loaded
    sys.modules[_DYNAMO] = marks
    try:
        if ranks == 1:
            torch.distributed.is_available = lambda: False
        importlib.import_module("transformers.modeling_utils")
        torch.distributed.is_available = available
        yield
    finally:
        torch.distributed.is_available = available
        if sys.modules[_DYNAMO] is marks:
            del sys.modules[_DYNAMO]


def _loaded(name: str) -> Any:
    """Of the compiler itself, for who wants more of it than to mark a function."""
    if name.startswith("__"):
        raise AttributeError(name)
    del sys.modules[_DYNAMO]
    return getattr(importlib.import_module(_DYNAMO), name)


def _unmarked(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:
    return function if function is not None else _unmarked
