"""Configuration as frozen dataclasses, in ascending precedence: defaults, file, environment, flags.

A field is declared once, with `setting(default, "what it does")`; the TOML key, the environment variable
`FUSIONKV_<SECTION>_<FIELD>`, the flag `--<field>` and the line in `--help` follow from it. Unknown keys are errors.
"""

import argparse
import contextlib
import dataclasses
import math
import os
import re
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
_UNITS = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)},
}


class SettingsError(ValueError):
    """An invalid configuration; the message names the key and its source."""


def setting(
    default: Any, help: str, *, bytes: bool = False, low: float | None = None, high: float | None = None
) -> Any:
    """A dataclass field with its help text, whether it is a size ("512MiB"), and its inclusive bounds."""
    return dataclasses.field(default=default, metadata={"help": help, "bytes": bytes, "low": low, "high": high})


@contextlib.contextmanager
def extra(name: str, what: str, error: type[Exception] = ValueError) -> Iterator[None]:
    """Raises `error` if an import inside fails because a package of an optional extra is not installed.

    what: what needs the package, such as a setting or a flag.
    """
    try:
        yield
    except ModuleNotFoundError as missing:
        raise error(f"{what} needs the package {missing.name}: pip install 'fusionkv[{name}]'") from missing


def parse_bytes(text: str) -> int:
    """Parses a size in bytes: "123", "64KiB", "1.5 GB"."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"not a size: {text!r} (write 512MiB, 4GiB or a number of bytes)")
    return int(Fraction(match[1]) * _UNITS[match[2].lower()])


def format_bytes(size: int) -> str:
    """Formats a size for parse_bytes: "512MiB", or a plain number if no unit divides it."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size and size % _UNITS[unit.lower()] == 0:
            return f"{size // _UNITS[unit.lower()]}{unit}"
    return str(size)


def load(
    cls: type[T],
    section: str,
    *,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> T:
    """Builds `cls` from the table `[section]` of a TOML file, the environment and the flags.

    Raises SettingsError for an unknown key, a value of the wrong type or out of bounds, or an unreadable file.
    """
    fields = {f.name: f for f in declared(cls)}
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for key, value in _file_table(file, section).items():
        if key not in fields:
            raise SettingsError(f"{file}: unknown key {key!r} in [{section}]; known: {', '.join(sorted(fields))}")
        values[key] = _convert(fields[key], hints[key], value, f"{file}: [{section}] {key}")
    prefix = f"FUSIONKV_{section.upper()}_"
    for name, text in (os.environ if environ is None else environ).items():
        if not name.startswith(prefix):
            continue
        key = name[len(prefix) :].lower()
        if key not in fields:
            raise SettingsError(
                f"unknown environment variable {name}; known: {', '.join(prefix + k.upper() for k in fields)}"
            )
        values[key] = _convert(fields[key], hints[key], text, name)
    for key, value in (flags or {}).items():
        if value is not None and key in fields:
            values[key] = _convert(fields[key], hints[key], value, f"--{key.replace('_', '-')}")
    try:
        return cls(**values)
    except (TypeError, ValueError) as error:
        raise SettingsError(f"[{section}]: {error}") from error


def of(cls: type[T], given: Mapping[str, Any], where: str) -> T:
    """Builds `cls` from what another program's configuration has at `where`; None stands for the default.

    Raises SettingsError for an unknown key, or a value of the wrong type or out of bounds.
    """
    fields, hints = {f.name: f for f in declared(cls)}, typing.get_type_hints(cls)
    if unknown := sorted(given.keys() - fields.keys()):
        raise SettingsError(f"{where}.{unknown[0]} is not one of {', '.join(sorted(fields))}")
    values = {key: value for key, value in given.items() if value is not None}
    return cls(**{key: _convert(fields[key], hints[key], value, f"{where}.{key}") for key, value in values.items()})


def declared(cls: type) -> list[dataclasses.Field[Any]]:
    """The settings of a configuration: its own, and then those that it shares with others."""
    every = {f.name: f for f in dataclasses.fields(cls)}
    return [every[name] for name in dict.fromkeys((*cls.__annotations__, *every))]


def add_flags(parser: argparse.ArgumentParser, cls: type) -> None:
    """Adds a flag for each field, with its default in the help text; absent flags stay None."""
    hints = typing.get_type_hints(cls)
    for f in declared(cls):
        kind = plain(hints[f.name])
        help = f"{f.metadata['help']} (default: {shown(f)})".replace("%", "%%")
        flag = "--" + f.name.replace("_", "-")
        if kind is bool:
            parser.add_argument(flag, dest=f.name, default=None, action=argparse.BooleanOptionalAction, help=help)
        else:
            parser.add_argument(flag, dest=f.name, default=None, metavar=_metavar(f, kind), help=help)


def _file_table(file: Path | None, section: str) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise SettingsError(f"can't read the configuration {file}: {error}") from error
    unknown = set(table) - {"kvcache", "worker", "gateway"}
    if unknown:
        raise SettingsError(f"{file}: unknown table [{sorted(unknown)[0]}]; known: [kvcache], [worker], [gateway]")
    values = table.get(section, {})
    if not isinstance(values, dict):
        raise SettingsError(f"{file}: [{section}] is not a table")
    return values


def plain(hint: Any) -> Any:
    """The type inside `X | None`."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return next(a for a in typing.get_args(hint) if a is not type(None))
    return hint


def _convert(field: dataclasses.Field[Any], hint: Any, value: Any, where: str) -> Any:
    try:
        result = _parsed(field, hint, value)
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: `~user` without a home directory
        raise SettingsError(f"{where}: {error}") from error
    low, high = field.metadata["low"], field.metadata["high"]
    if (low is not None and result < low) or (high is not None and result > high):
        raise SettingsError(
            f"{where}: {result} is outside {low if low is not None else ''}..{high if high is not None else ''}"
        )
    return result


def _parsed(field: dataclasses.Field[Any], hint: Any, value: Any) -> Any:
    kind = plain(hint)
    if typing.get_origin(kind) is tuple:
        parts = [p.strip() for p in value.split(",") if p.strip()] if isinstance(value, str) else value
        if not parts and field.default:
            raise ValueError("name at least one address")
        return tuple(map(_text, parts))
    if kind is bool:
        return value if isinstance(value, bool) else _bool(str(value))
    if kind is int:
        if isinstance(value, (bool, float)):
            raise ValueError(f"not an integer: {value!r}")
        return parse_bytes(str(value)) if field.metadata["bytes"] else int(value)
    if kind is float:
        return _number(value)
    if kind is Path:
        return _path(value, optional=kind is not hint)
    return _text(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):  # `false` would be the text "False"
        raise ValueError(f"not text: {value!r}")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError(f"not a number: {value!r}")
    if not math.isfinite(number := float(value)):
        raise ValueError(f"not a finite number: {number!r}")
    if number > 1e9:  # with ten times as many seconds, a call of gRPC ends at once, and sockets take no such timeout
        raise ValueError(f"not a number up to 1e9: {number!r}")
    return number


def _path(value: Any, optional: bool) -> Path | None:
    """An empty value resets an optional path that the file sets."""
    if value != "":
        return Path(value).expanduser()
    if not optional:  # as of a variable that is not set: not the working directory
        raise ValueError("the path is empty")
    return None


def _bool(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"not a boolean: {text!r} (write true or false)")


def positive(text: str) -> int:
    """Parses a flag's integer of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def shown(field: dataclasses.Field[Any]) -> str:
    """A field's default as users write it: "1GiB", "a,b"; "empty" for none, as some settings have a value `none`."""
    value = field.default
    if field.metadata["bytes"] and isinstance(value, int):
        return format_bytes(value)
    if isinstance(value, tuple):
        return ",".join(value) or "empty"
    return "empty" if value is None or value == "" else str(value)


def _metavar(field: dataclasses.Field[Any], kind: Any) -> str:
    if field.metadata["bytes"]:
        return "SIZE"
    if typing.get_origin(kind) is tuple:
        return "A,B"
    return {int: "N", float: "X", Path: "PATH"}.get(kind, "TEXT")
