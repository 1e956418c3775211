"""Prints docs/configuration.md from the configuration dataclasses (`make docs`)."""

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
INTRODUCTION = """\
# Configuration

This page is written by `make docs` from the dataclasses that hold the settings; a test keeps it current.

A value comes from, the later the stronger: the default below; the table of the service in a TOML file
(`--config fusionkv.toml`); the environment, `FUSIONKV_<SERVICE>_<NAME>`; the flag, `--<name>` with hyphens. An
unknown key is an error. Sizes are written `512MiB`, `4GiB` or in bytes; lists with commas, in TOML also as arrays.

```toml
[kvcache]
memory_bytes = "4GiB"

[worker]
model = "models/my-model"
cache = "127.0.0.1:7070"
```

Telemetry is set by OpenTelemetry's own variables: `OTEL_EXPORTER_OTLP_ENDPOINT=http://host:4317` sends traces and
metrics of every service there, over gRPC; nothing is sent without it. `FUSIONKV_LOG=DEBUG` sets the log's level,
`FUSIONKV_LOG_FORMAT=json` makes it JSON. More: [observability.md](observability.md).
"""


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
    parts = [INTRODUCTION]
    for section, title, config in SECTIONS:
        parts += [f"## [{section}]", "", f"{title}.", ""]
        parts += ["| name | default | kind | what it does |", "|---|---|---|---|"]
        hints = typing.get_type_hints(config)
        for field in dataclasses.fields(config):
            what = f"{kind(field, hints[field.name])}{bounds(field)} | {field.metadata['help']}"
            parts.append(f"| `{field.name}` | `{settings.shown(field)}` | {what} |")
        parts.append("")
    return "\n".join(parts)


if __name__ == "__main__":
    print(page(), end="")
