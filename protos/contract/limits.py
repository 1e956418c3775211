"""Limits of the fields of a request."""

from collections.abc import Sequence

from fusionkv.protos.runtime.errors import InvalidArgument

MAX_RECIPE = 256  # characters of a recipe's name
MAX_MODIFIERS = 8
MOST_VERSIONS = 16  # versions of a chunk behind one system prompt
# Variants of a chunk. Lookups run on the event loop; with this limit, one takes less than a millisecond per chunk.
MAX_VARIANTS = 64
MAX_FOUND = 4096  # digests in a Find
MAX_READ = 256  # entries that one call of the data plane reads
DIGEST_BYTES = 32
_MAX_LABEL = 256


def check_label(name: str, what: str) -> None:
    """Raises InvalidArgument if the name of a tenant or a corpus is too long."""
    if len(name) > _MAX_LABEL:
        raise InvalidArgument(f"the {what}'s name is longer than {_MAX_LABEL} characters")


def check_variants(variants: Sequence[bytes], what: str) -> None:
    """Raises InvalidArgument if a chunk has too many variants, or one is not a digest. what: names the chunk."""
    if len(variants) > MAX_VARIANTS:
        raise InvalidArgument(f"{what} has {len(variants)} variants, more than {MAX_VARIANTS}")
    if any(len(variant) != DIGEST_BYTES for variant in variants):
        raise InvalidArgument(f"a variant of {what} is not {DIGEST_BYTES} bytes long")
