"""Checks of a request's prompt template, and of its values for variables of the model's chat template."""

import json
import re
from collections.abc import Collection, Mapping

from fusionkv.protos.runtime.errors import InvalidArgument

_PLACE = re.compile(r"\{(?:passages|question)\}")
# Values for variables of a chat template. Texts can hold neither a control token nor the places of a template.
_MAX_VALUES, _MAX_NUMBER, _MAX_JSON = 16, 1 << 20, 1024
_TEXT = re.compile(r"[\w .,:;/+-]{0,64}")


def template_error(template: str) -> str:
    """What is wrong with a prompt template; empty if nothing is, or if there is no template."""
    if not template or _PLACE.findall(template) == ["{passages}", "{question}"]:
        return ""
    return "prompt_template must contain {passages} and, behind it, {question}, each once"


def template_values(given: Mapping[str, str]) -> dict[str, bool | float | str]:
    """Parses values for variables of a chat template, each of which is JSON.

    Raises InvalidArgument if there are too many, or one is neither true, false, a number nor a short text.
    """
    if len(given) > _MAX_VALUES:
        raise InvalidArgument(f"chat_template_kwargs has {len(given)} values; the maximum is {_MAX_VALUES}")
    return {name: _value(name, text) for name, text in given.items()}


def check_variables(names: Collection[str], known: Collection[str]) -> None:
    """Raises InvalidArgument for a variable that a chat template does not use. known: the variables that it uses."""
    if unknown := sorted({*names} - {*known}):
        used = ", ".join(sorted(known)) or "none"
        raise InvalidArgument(
            f"chat_template_kwargs: the model's chat template has no variable {unknown[0][:80]!r}; it has: {used}"
        )


def _value(name: str, text: str) -> bool | float | str:
    try:
        value = json.loads(text) if len(text) <= _MAX_JSON else None
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, int | float) and abs(value) <= _MAX_NUMBER:
        return value
    if isinstance(value, str) and _TEXT.fullmatch(value):
        return value
    raise InvalidArgument(
        f"chat_template_kwargs: {name[:80]!r} must be true, false, a number of at most {_MAX_NUMBER}, or a text of "
        "at most 64 letters, digits, spaces and .,:;/+-_"
    )
