"""Prints docs/configuration.md: its text, then tables of the settings (`make docs`)."""

import dataclasses
import typing
from pathlib import Path

from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.gateway.config import GatewayConfig
from fusionkv.kvcache_service.config import Config
from fusionkv.protos.runtime import settings

SECTIONS: tuple[tuple[str, str, type], ...] = (
    ("kvcache", "The cache service: `fusionkv serve kvcache`", Config),
    ("worker", "The fusion worker: `fusionkv serve worker`", WorkerConfig),
    ("gateway", "The gateway: `fusionkv serve gateway`", GatewayConfig),
)
PAGE = Path(__file__).parent.parent / "docs/configuration.md"


def kind(field: dataclasses.Field[typing.Any], hint: typing.Any) -> str:
    if field.metadata["bytes"]:
        return "size"
    if typing.get_origin(hint) is tuple:
        return "list"
    hint = settings.plain(hint)
    return {bool: "true or false", int: "integer", float: "number", Path: "path"}.get(hint, "text")


def bounds(field: dataclasses.Field[typing.Any]) -> str:
    low, high = field.metadata["low"], field.metadata["high"]
    if low is None and high is None:
        return ""
    shown = settings.format_bytes if field.metadata["bytes"] else str
    return f", {'' if low is None else shown(low)}..{'' if high is None else shown(high)}"


def page() -> str:
    parts = [PAGE.read_text().partition("\n## [")[0]]
    for section, title, config in SECTIONS:
        parts += [f"## [{section}]", "", f"{title}.", ""]
        parts += ["| name | default | kind | what it does |", "|---|---|---|---|"]
        hints = typing.get_type_hints(config)
        for field in settings.declared(config):
            what = f"{kind(field, hints[field.name])}{bounds(field)} | {field.metadata['help']}"
            parts.append(f"| `{field.name}` | `{settings.shown(field)}` | {what} |")
        parts.append("")
    return "\n".join(parts)


if __name__ == "__main__":
    print(page(), end="")
