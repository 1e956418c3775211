"""Public keys of a token issuer (JWKS), from a file or a URL; follows the issuer's key rotation."""

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
_MAX_BYTES = 1 << 20
_FETCH_SECONDS = 5.0
# Keys are fetched again at this age, or at once for an unknown key id, but at least _RETRY_SECONDS apart.
_FRESH_SECONDS = 300.0
_RETRY_SECONDS = 10.0
# Older keys are not trusted: an issuer that can't be reached may have withdrawn one of them.
_STALE_SECONDS = 3600.0
_LOCAL = {("http", "localhost"), ("http", "127.0.0.1"), ("http", "::1")}


class KeyFile:
    """Keys from a file, which is read again when it changes."""

    def __init__(self, file: Path) -> None:
        """Raises BadFile if the file can't be read or holds no usable key."""
        self._keys = Watched([file], lambda: _parsed(read_bytes(file, "the JWKS", _MAX_BYTES), str(file)))

    async def key(self, id: str | None) -> jwt.PyJWK | None:
        """The key with an id; without an id, the only key of the file, or None if there are several."""
        return _find(self._keys.value, id)


class KeyURL:
    """Keys from a URL, fetched at the first use."""

    def __init__(self, url: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises ValueError unless the URL is https or on this machine."""
        parts = urlsplit(url)
        if parts.scheme != "https" and (parts.scheme, parts.hostname) not in _LOCAL:
            raise ValueError(f"the JWKS {url} must be a file or an https:// URL")
        self._url = url
        self._clock = clock
        self._keys: dict[str | None, jwt.PyJWK] = {}
        self._fetched = self._tried = float("-inf")
        self._fetching: asyncio.Task[None] | None = None

    async def key(self, id: str | None) -> jwt.PyJWK | None:
        """As `KeyFile.key`.

        Raises:
            Unavailable: the last keys fetched are too old to be trusted.
        """
        age = self._clock() - self._fetched
        unknown = _find(self._keys, id) is None
        idle = self._fetching is None or self._fetching.done()
        if idle and (unknown or age > _FRESH_SECONDS) and self._clock() - self._tried > _RETRY_SECONDS:
            self._tried = self._clock()
            self._fetching = asyncio.create_task(self._fetch())
        if self._fetching is not None and (unknown or age > _STALE_SECONDS):
            await asyncio.shield(self._fetching)
        if self._clock() - self._fetched > _STALE_SECONDS:
            raise Unavailable(
                "the keys that verify tokens can't be fetched at the moment; try again", retry_after=_RETRY_SECONDS
            )
        return _find(self._keys, id)

    async def _fetch(self) -> None:
        try:
            async with asyncio.timeout(2 * _FETCH_SECONDS):  # urllib's timeout applies to each read only
                data = await asyncio.to_thread(_download, self._url)
            self._keys, self._fetched = _parsed(data, self._url), self._clock()
        except (OSError, HTTPException) as error:  # a timeout and BadFile are OSErrors too
            log.warning(
                "can't fetch the JWKS %s; keys fetched before remain valid for up to an hour: %s", self._url, error
            )


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: only the configured URL is trusted."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def _download(url: str) -> bytes:
    with urllib.request.build_opener(_NoRedirect).open(url, timeout=_FETCH_SECONDS) as reply:
        data: bytes = reply.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise BadFile(f"more than {_MAX_BYTES} bytes")
    return data


def _parsed(data: bytes, where: str) -> dict[str | None, jwt.PyJWK]:
    """The keys by id. Keys of unknown types are ignored, as RFC 7517 recommends."""
    try:
        keys = jwt.PyJWKSet.from_dict(json.loads(data)).keys
    except (jwt.PyJWTError, ValueError, TypeError, AttributeError, RecursionError):
        raise BadFile(f'the JWKS {where} is not of the form {{"keys": [...]}}, or holds no usable key') from None
    return {key.key_id: key for key in keys}


def _find(keys: dict[str | None, jwt.PyJWK], id: str | None) -> jwt.PyJWK | None:
    if id is None and len(keys) == 1:
        return next(iter(keys.values()))
    return keys.get(id)
