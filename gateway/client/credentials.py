"""The bearer token and deadline that a client attaches to its calls."""

import logging
import os
from pathlib import Path
from typing import Any

from fusionkv.protos.runtime.watched import BadFile, Watched, read_bytes

log = logging.getLogger(__name__)
_LOCAL = ("127.0.0.1:", "localhost:", "[::1]:", "unix:")


class Credentials:
    """The current bearer token, and the default timeout of calls."""

    def __init__(
        self, address: str, token: str | os.PathLike[str] | None, timeout: float, *, encrypted: bool
    ) -> None:
        """Reads the token.

        Args:
            token: the token itself, or the path of a file that contains it.

        Raises:
            BadFile: the file can't be read, or contains no token.
            ValueError: the token is malformed.
        """
        self._timeout = timeout
        self._token: str | Watched[str] | None
        if token is None or isinstance(token, str):
            self._token = token if token is None else _checked(token)
        else:
            file = Path(token)
            self._token = Watched([file], lambda: _from_file(file))
        if token is not None and not encrypted and not address.startswith(_LOCAL):
            log.warning("the bearer token is sent to %s unencrypted: use TLS, or a proxy that does", address)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """gRPC metadata of every call."""
        token = self._token.value if isinstance(self._token, Watched) else self._token
        return () if token is None else (("authorization", f"Bearer {token}"),)

    def options(self, timeout: float | None) -> dict[str, Any]:
        """Timeout and metadata of one call."""
        return {"timeout": timeout or self._timeout, "metadata": self.metadata()}


def _from_file(file: Path) -> str:
    try:
        return _checked(read_bytes(file, "the token").decode().strip())
    except ValueError:
        raise BadFile(f"the token {file} is not one line of printable ASCII characters") from None


def _checked(token: str) -> str:
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError("the token is not one word of printable ASCII characters")
    return token
