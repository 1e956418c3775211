"""Page tokens of List: each is good for one tenant and one listing, and for no other."""

import hashlib
import hmac

from fusionkv.protos.runtime.errors import InvalidArgument

_MARK_BYTES = 8


def token(tenant: str, corpus: str, last: str) -> str:
    """What continues a listing behind the item `last`; `tenant` is its salt, `corpus` may be empty."""
    return (_mark(tenant, corpus, last.encode()) + last.encode()).hex()


def last(tenant: str, corpus: str, token: str, most: int) -> str:
    """The item, of at most `most` bytes, that a token stands for; empty for the first page.

    Raises:
        InvalidArgument: it is no token that this tenant was given for this listing.
    """
    if not token:
        return ""
    try:
        raw = bytes.fromhex(token) if len(token) <= 2 * (_MARK_BYTES + most) else b""
        mark, name = raw[:_MARK_BYTES], raw[_MARK_BYTES:]
        if name and hmac.compare_digest(mark, _mark(tenant, corpus, name)):
            return name.decode()
    except ValueError:
        pass
    raise InvalidArgument(
        f"bad page token {token[:80]!r}: send the one of the reply before, unchanged, for the same listing"
    )


def _mark(tenant: str, corpus: str, name: bytes) -> bytes:
    return hmac.new(tenant.encode(), corpus.encode() + b"\0" + name, hashlib.sha256).digest()[:_MARK_BYTES]
