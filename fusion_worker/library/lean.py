"""Loads models without torch's compiler, which saves 1 s and 150 MB in processes that compile nothing."""

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from typing import Any

_DYNAMO = "torch._dynamo"


@contextlib.contextmanager
def uncompiled(*, ranks: int = 1) -> Iterator[None]:
    """A context in which decorators of torch's compiler do not load the compiler, FSDP and Triton.

    transformers uses such decorators when it is imported, and torch when it makes a model. With a single rank,
    torch.distributed is also reported as not available while transformers is imported, as on some platforms. Has no
    effect if the compiler is loaded already. Afterwards the compiler loads as usual.
    """
    import torch

    spec = importlib.util.find_spec(_DYNAMO)
    if _DYNAMO in sys.modules or spec is None:
        yield
        return
    available = torch.distributed.is_available
    # The module is never executed, but its submodules can be imported.
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
    """Loads the compiler for any attribute other than the decorators."""
    if name.startswith("__"):
        raise AttributeError(name)
    del sys.modules[_DYNAMO]
    return getattr(importlib.import_module(_DYNAMO), name)


def _unmarked(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:
    return function if function is not None else _unmarked
