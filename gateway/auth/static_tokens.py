"""Bearer tokens that a file lists by their SHA-256; the file is read anew when it changes."""

import hashlib
import hmac
from pathlib import Path
from typing import Any

from fusionkv.gateway.auth.access import TENANT_FORM, Caller, Role, is_tenant
from fusionkv.protos.runtime.settings import toml
from fusionkv.protos.runtime.watched import BadFile, Watched, read_bytes

_FIELDS = {"name", "role", "sha256", "tenant"}


class StaticTokens:
    """The tokens of one TOML file:

        [[token]]
        name = "shop"
        role = "app"
        tenant = "acme"
        sha256 = "the SHA-256 of the token, in hexadecimal"

    A plain hash is enough for a token of 32 random bytes: nobody can try them all. Nothing of a token is kept.
    """

    def __init__(self, file: Path) -> None:
        """Raises BadFile when the file can't be read or is not of this form."""
        self._file = file
        self._known = Watched([file], self._read)

    async def caller(self, token: str) -> Caller | None:
        digest = hashlib.sha256(token.encode()).digest()
        found = None
        # All of them, however early one fits: the time says nothing of which one, or how far it fits.
        for known, caller in self._known.value:
            if hmac.compare_digest(known, digest):
                found = caller
        return found

    def _read(self) -> list[tuple[bytes, Caller]]:
        try:
            table = toml(read_bytes(self._file, "the tokens").decode())
        except ValueError as error:
            # The parser's own words quote nothing but a character and its place.
            raise BadFile(f"the tokens {self._file}: no TOML: {error}") from None
        entries = table.get("token")
        if set(table) != {"token"} or not isinstance(entries, list):
            raise BadFile(f"the tokens {self._file}: it holds [[token]] tables and nothing else")
        known = [self._entry(number, entry) for number, entry in enumerate(entries, 1)]
        if len({digest for digest, _ in known}) < len(known):
            raise BadFile(f"the tokens {self._file}: two of them have one sha256")
        return known

    def _entry(self, number: int, entry: Any) -> tuple[bytes, Caller]:
        where = f"the tokens {self._file}: token {number}"
        whole = isinstance(entry, dict) and set(entry) == _FIELDS
        if not whole or not all(isinstance(value, str) for value in entry.values()):
            raise BadFile(f"{where} has not exactly these texts: {', '.join(sorted(_FIELDS))}")
        if entry["role"] not in set(Role):
            raise BadFile(f"{where} has none of the roles {', '.join(Role)}")
        if not is_tenant(entry["tenant"]):
            raise BadFile(f"{where} has a bad tenant: {TENANT_FORM}")
        try:
            digest = bytes.fromhex(entry["sha256"])
        except ValueError:
            digest = b""
        if len(digest) != hashlib.sha256().digest_size:
            raise BadFile(f"{where} has no SHA-256 of 64 hexadecimal digits: `printf %s TOKEN | sha256sum`")
        return digest, Caller(entry["name"], Role(entry["role"]), entry["tenant"])
