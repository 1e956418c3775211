"""Tokens that continue a listing, each valid for one tenant and one listing only."""

import hashlib
import hmac

from fusionkv.gateway.retrieval.base import MAX_NAME
from fusionkv.protos.runtime.errors import InvalidArgument

_MAX_NAME_BYTES = 4 * MAX_NAME
_MARK_BYTES = 8


def encode(salt: str, corpus: str, last: str) -> str:
    """The token that continues a listing after the item `last`.

    Args:
        salt: the tenant's.
        corpus: the corpus that is listed; empty for the listing of corpora.
    """
    return (_mark(salt, corpus, last.encode()) + last.encode()).hex()


def decode(salt: str, corpus: str, token: str) -> str:
    """The item that a token continues after; empty for an empty token, of the first page.

    Raises InvalidArgument if the token was not issued to this tenant for this listing.
    """
    if not token:
        return ""
    try:
        raw = bytes.fromhex(token) if len(token) <= 2 * (_MARK_BYTES + _MAX_NAME_BYTES) else b""
        mark, name = raw[:_MARK_BYTES], raw[_MARK_BYTES:]
        if name and hmac.compare_digest(mark, _mark(salt, corpus, name)):
            return name.decode()
    except ValueError:
        pass
    raise InvalidArgument(
        f"bad page token {token[:80]!r}: send next_page_token of the previous reply unchanged, for the same listing"
    )


def _mark(salt: str, corpus: str, name: bytes) -> bytes:
    return hmac.new(salt.encode(), corpus.encode() + b"\0" + name, hashlib.sha256).digest()[:_MARK_BYTES]
