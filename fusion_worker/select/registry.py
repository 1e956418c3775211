"""All selectors by the names of their classes, and as text, for ranks that have to make the same one."""

import dataclasses
import importlib
import inspect
import json
import pkgutil
from functools import cache
from typing import Any

from fusionkv.fusion_worker import select
from fusionkv.fusion_worker.select.base import Selector


@cache
def known() -> dict[str, type[Selector[Any]]]:
    """Every selector that a file of this package defines, by the name of its class."""
    found = {}
    for file in pkgutil.iter_modules(select.__path__):
        module = importlib.import_module(f"{select.__name__}.{file.name}")
        for kind in vars(module).values():
            if isinstance(kind, type) and issubclass(kind, Selector) and not inspect.isabstract(kind):
                found[kind.__name__] = kind
    return found


def write(selector: Selector[Any]) -> str:
    """The selector as JSON: the name of its class, and its fields."""
    fields = {field.name: getattr(selector, field.name) for field in dataclasses.fields(selector)}  # type: ignore[arg-type]
    return json.dumps([type(selector).__name__, fields])


def read(text: str) -> Selector[Any]:
    """The selector that `write` wrote."""
    name, fields = json.loads(text)
    return known()[name](**fields)
