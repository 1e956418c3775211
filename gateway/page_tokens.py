"""Page tokens of List, each valid for one tenant and one listing only."""

import hashlib
import hmac

from fusionkv.protos.runtime.errors import InvalidArgument

_MARK_BYTES = 8


def token(tenant: str, corpus: str, last: str) -> str:
    """The token that continues a listing after the item `last`; `tenant` is its salt, `corpus` may be empty."""
    return (_mark(tenant, corpus, last.encode()) + last.encode()).hex()


def last(tenant: str, corpus: str, token: str, limit: int) -> str:
    """The item, of at most `limit` bytes, that a page token continues after; empty for the first page.

    Raises:
        InvalidArgument: the token was not issued to this tenant for this listing.
    """
    if not token:
        return ""
    try:
        raw = bytes.fromhex(token) if len(token) <= 2 * (_MARK_BYTES + limit) else b""
        mark, name = raw[:_MARK_BYTES], raw[_MARK_BYTES:]
        if name and hmac.compare_digest(mark, _mark(tenant, corpus, name)):
            return name.decode()
    except ValueError:
        pass
    raise InvalidArgument(
        f"bad page token {token[:80]!r}: send next_page_token of the previous reply unchanged, for the same listing"
    )


def _mark(tenant: str, corpus: str, name: bytes) -> bytes:
    return hmac.new(tenant.encode(), corpus.encode() + b"\0" + name, hashlib.sha256).digest()[:_MARK_BYTES]
