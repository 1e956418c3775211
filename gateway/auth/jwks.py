"""The public keys of whoever issues tokens (JWKS), from a file or a URL, kept fresh while the issuer rotates them."""

import asyncio
import json
import logging
import time
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jwt

from fusionkv.protos.runtime.errors import Unavailable
from fusionkv.protos.runtime.watched import BadFile, Watched, read_bytes

log = logging.getLogger(__name__)
_MOST_BYTES = 1 << 20
_FETCH_SECONDS = 5.0
# Fetched again after so long, or at once for a key that is not known yet, but no more often than the least.
_FRESH_SECONDS = 300.0
_LEAST_SECONDS = 10.0
# An issuer that is out of reach for longer may have withdrawn a key without our knowing.
_STALE_SECONDS = 3600.0
_LOCAL = {("http", "localhost"), ("http", "127.0.0.1"), ("http", "::1")}


class KeyFile:
    """Keys from a file, read anew when it changes."""

    def __init__(self, file: Path) -> None:
        """Raises BadFile when the file can't be read or holds no key that can be used."""
        self._keys = Watched([file], lambda: _parsed(read_bytes(file, "the JWKS", _MOST_BYTES), str(file)))

    async def key(self, id: str | None) -> jwt.PyJWK | None:
        """The key of that id; without an id the only key, if there is but one."""
        return _find(self._keys.value, id)


class KeyURL:
    """Keys from a URL, fetched on first use."""

    def __init__(self, url: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises ValueError for a URL that is not https, unless it leads to this machine."""
        parts = urlsplit(url)
        if parts.scheme != "https" and (parts.scheme, parts.hostname) not in _LOCAL:
            raise ValueError(f"the JWKS {url}: must be the path of a file, or a URL that begins with https://")
        self._url = url
        self._clock = clock
        self._keys: dict[str | None, jwt.PyJWK] = {}
        self._fetched = self._tried = float("-inf")
        self._fetching: asyncio.Task[None] | None = None

    async def key(self, id: str | None) -> jwt.PyJWK | None:
        """As KeyFile's.

        Raises:
            Unavailable: no keys could be fetched for longer than they may be trusted.
        """
        age = self._clock() - self._fetched
        unknown = _find(self._keys, id) is None
        idle = self._fetching is None or self._fetching.done()
        if idle and (unknown or age > _FRESH_SECONDS) and self._clock() - self._tried > _LEAST_SECONDS:
            self._tried = self._clock()
            self._fetching = asyncio.create_task(self._fetch())
        if self._fetching is not None and (unknown or age > _STALE_SECONDS):
            await asyncio.shield(self._fetching)
        if self._clock() - self._fetched > _STALE_SECONDS:
            raise Unavailable(
                "the keys that tokens are checked with can't be fetched now; try again", retry_after=_LEAST_SECONDS
            )
        return _find(self._keys, id)

    async def _fetch(self) -> None:
        try:
            async with asyncio.timeout(2 * _FETCH_SECONDS):  # a reply may come byte by byte
                data = await asyncio.to_thread(_download, self._url)
            self._keys, self._fetched = _parsed(data, self._url), self._clock()
        except (OSError, HTTPException) as error:  # a timeout and BadFile are OSErrors too
            log.warning("can't fetch the JWKS %s, the last one stays for up to an hour: %s", self._url, error)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The address in the configuration is the one that is trusted."""

    def redirect_request(self, *given: Any, **named: Any) -> None:
        return None


def _download(url: str) -> bytes:
    with urllib.request.build_opener(_NoRedirect).open(url, timeout=_FETCH_SECONDS) as reply:
        data: bytes = reply.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise BadFile(f"over {_MOST_BYTES} bytes")
    return data


def _parsed(data: bytes, where: str) -> dict[str | None, jwt.PyJWK]:
    """The keys by id. Keys of kinds that are not known are passed over, as the standard wants it."""
    try:
        found = jwt.PyJWKSet.from_dict(json.loads(data)).keys
    except (jwt.PyJWTError, ValueError, TypeError, AttributeError, RecursionError):
        raise BadFile(
            f'the JWKS {where} is not of the form {{"keys": [...]}}, or holds no key that can be used'
        ) from None
    return {key.key_id: key for key in found}


def _find(keys: dict[str | None, jwt.PyJWK], id: str | None) -> jwt.PyJWK | None:
    if id is None and len(keys) == 1:
        return next(iter(keys.values()))
    return keys.get(id)
