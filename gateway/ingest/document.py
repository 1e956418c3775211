"""A parsed document, and limits on its text and metadata."""

from collections.abc import Mapping
from dataclasses import dataclass

from fusionkv.protos.runtime.errors import InvalidArgument

# Characters of all keys and values.
_MAX_METADATA = 4096
Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Document:
    """A document's text; name, title, metadata (sorted by key) and line are set for JSON lines only."""

    text: str
    markdown: bool = False
    name: str = ""
    title: str = ""
    metadata: Pairs = ()
    line: int = 0


def check_text(size: int, limit: int) -> None:
    """Raises InvalidArgument if a text of `size` characters or bytes exceeds the limit."""
    if size > limit:
        raise InvalidArgument(f"the document has more than {limit} bytes of text: split it, or raise max_text_bytes")


def metadata_pairs(metadata: Mapping[str, str]) -> Pairs:
    """Metadata as stored with chunks: pairs sorted by key. Raises InvalidArgument."""
    if any(not key or "=" in key for key in metadata):
        raise InvalidArgument("a metadata key is empty or contains `=`")
    if sum(map(len, (*metadata.keys(), *metadata.values()))) > _MAX_METADATA:
        raise InvalidArgument(f"the metadata has more than {_MAX_METADATA} characters")
    return tuple(sorted(metadata.items()))
