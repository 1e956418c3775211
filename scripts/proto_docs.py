"""Generates the documentation site's pages of the protos: every service, RPC, message and field with its comment."""

import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from google.protobuf import descriptor_pb2 as pb
from grpc_tools import protoc

ROOT = Path(__file__).parent.parent
PROTOS = ROOT / "protos"
# Field numbers in descriptor.proto, of which the paths of comments consist.
_MESSAGE, _ENUM, _SERVICE, _SYNTAX = 4, 5, 6, 12
_MEMBER = 2  # fields of a message, values of an enum, methods of a service
_INNER_ENUM = 4
_TYPES = pb.FieldDescriptorProto.Type
_REPEATED = pb.FieldDescriptorProto.LABEL_REPEATED


def pages() -> dict[str, str]:
    """Markdown pages by package, such as `gateway.v1`."""
    files = sorted(PROTOS.glob("*/v1/*.proto"))
    with tempfile.NamedTemporaryFile() as made:
        flags = ["--include_source_info", f"--descriptor_set_out={made.name}", f"-I{PROTOS}"]
        if protoc.main(["protoc", *flags, *map(str, files)]) != 0:
            raise SystemExit("protoc failed: see the messages above")
        found = pb.FileDescriptorSet.FromString(Path(made.name).read_bytes())
    made: dict[str, str] = {}
    for file in found.file:
        more = made.get(file.package, f"# {file.package}\n")
        made[file.package] = more + "\n" + "\n".join(_part(file))
    return made


def _part(file: pb.FileDescriptorProto) -> Iterator[str]:
    """The part of a package's page for one of its files."""
    locations = {tuple(at.path): at for at in file.source_code_info.location}

    def comment(*path: int) -> str:
        at = locations.get(path)
        return _markdown((at.leading_comments or at.trailing_comments) if at else "")

    yield f"{comment(_SYNTAX)}\n"
    for s, service in enumerate(file.service):
        yield f"## {service.name}\n\n{comment(_SERVICE, s)}\n"
        for m, method in enumerate(service.method):
            takes, gives = (
                f"{'stream ' if streams else ''}{_linked(type_)}"
                for type_, streams in (
                    (method.input_type, method.client_streaming),
                    (method.output_type, method.server_streaming),
                )
            )
            yield f"### {method.name}\n\n{takes} → {gives}\n\n{comment(_SERVICE, s, _MEMBER, m)}\n"
    yield f"## Messages of {file.name.rpartition('/')[2]}\n"
    for m, message in enumerate(file.message_type):
        yield f"### {message.name}\n\n{comment(_MESSAGE, m)}\n"
        comments = [comment(_MESSAGE, m, _MEMBER, f) for f in range(len(message.field))]
        yield from _table("field", "type", _fields(message, comments))
    enums = [(enum, (_ENUM, e)) for e, enum in enumerate(file.enum_type)]
    for m, message in enumerate(file.message_type):
        enums += [(enum, (_MESSAGE, m, _INNER_ENUM, e)) for e, enum in enumerate(message.enum_type)]
    for enum, path in enums:
        yield f"### {enum.name}\n\n{comment(*path)}\n"
        rows = [(v.name, str(v.number), comment(*path, _MEMBER, i)) for i, v in enumerate(enum.value)]
        yield from _table("value", "number", rows)


def _fields(message: pb.DescriptorProto, comments: Sequence[str]) -> list[tuple[str, str, str]]:
    rows, maps = [], {inner.name for inner in message.nested_type if inner.options.map_entry}
    for field, comment in zip(message.field, comments, strict=True):
        plain = _TYPES.Name(field.type).removeprefix("TYPE_").lower()
        kind = _linked(field.type_name) if field.type_name else plain
        if field.type_name.rpartition(".")[2] in maps:
            kind = "map of string to string"
        elif field.label == _REPEATED:
            kind = f"repeated {kind}"
        elif field.proto3_optional:
            kind = f"optional {kind}"
        elif field.HasField("oneof_index"):
            kind = f"{kind}, one of `{message.oneof_decl[field.oneof_index].name}`"
        rows.append((field.name, kind, comment))
    return rows


def _table(name: str, kind: str, rows: Sequence[tuple[str, str, str]]) -> Iterator[str]:
    if not rows:
        yield "No fields.\n"
        return
    yield f"| {name} | {kind} | what it is |\n|---|---|---|"
    for row in rows:
        yield f"| `{row[0]}` | {row[1]} | {' '.join(row[2].split())} |"
    yield ""


def _linked(type_name: str) -> str:
    """`.gateway.v1.Sources` as a link to its heading on the page of its package."""
    package, version, *_, name = type_name[1:].split(".")
    return f"[{name}]({package}.{version}.md#{name.lower()})"


def _markdown(comment: str) -> str:
    """A comment as Markdown; lines below `Errors:` become a list."""
    lines = [line.removeprefix(" ").rstrip() for line in comment.strip("\n").splitlines()]
    text = "\n".join(line.replace("<", "&lt;") if "`" not in line else line for line in lines)
    text = re.sub(r"^Errors:$", "Errors:\n", text, flags=re.MULTILINE)
    text = re.sub(r"^  (?! )([A-Z_]+): ", r"- `\1`: ", text, flags=re.MULTILINE)
    return re.sub(r"^    (?=\S)", "  ", text, flags=re.MULTILINE).strip()
