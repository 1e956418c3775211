"""A document as it was parsed, and how much text and metadata one may have."""

from collections.abc import Mapping
from dataclasses import dataclass

from fusionkv.protos.runtime.errors import InvalidArgument

# Characters of keys and values together.
_MOST_METADATA = 4096
Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Document:
    """name, title, metadata (sorted by key): what a JSON line says of it, and empty for others, as is its line."""

    text: str
    markdown: bool = False
    name: str = ""
    title: str = ""
    metadata: Pairs = ()
    line: int = 0


def check_text(size: int, most: int) -> None:
    """Raises InvalidArgument when text of `size` characters or bytes is too long."""
    if size > most:
        raise InvalidArgument(f"the document has more than {most} bytes of text: split it, or raise max_text_bytes")


def metadata_pairs(metadata: Mapping[str, str]) -> Pairs:
    """Metadata as chunks have it, sorted by key. Raises InvalidArgument."""
    if any(not key or "=" in key for key in metadata):
        raise InvalidArgument("a key of metadata is empty or holds `=`")
    if sum(map(len, (*metadata.keys(), *metadata.values()))) > _MOST_METADATA:
        raise InvalidArgument(f"the metadata has over {_MOST_METADATA} characters")
    return tuple(sorted(metadata.items()))
