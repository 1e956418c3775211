"""Bearer tokens listed in a file by their SHA-256; the file is read again when it changes."""

import hashlib
import hmac
from pathlib import Path
from typing import Any

from fusionkv.gateway.auth.access import TENANT_FORM, Caller, Role, is_tenant
from fusionkv.protos.runtime.settings import toml
from fusionkv.protos.runtime.watched import BadFile, Watched, read_bytes

_FIELDS = {"name", "role", "sha256", "tenant"}


class StaticTokens:
    """Verifies tokens listed in a TOML file:

        [[token]]
        name = "shop"
        role = "app"
        tenant = "acme"
        sha256 = "the SHA-256 of the token, in hexadecimal"

    A plain hash is enough for tokens of 32 random bytes, which can't be guessed. Tokens themselves are not stored.
    """

    def __init__(self, file: Path) -> None:
        """Raises BadFile if the file can't be read or does not have this form."""
        self._file = file
        self._known = Watched([file], self._read)

    async def caller(self, token: str) -> Caller | None:
        digest = hashlib.sha256(token.encode()).digest()
        owner = None
        # Compare with every entry, so that the time taken reveals neither which one matches nor how much of it.
        for known, caller in self._known.value:
            if hmac.compare_digest(known, digest):
                owner = caller
        return owner

    def _read(self) -> list[tuple[bytes, Caller]]:
        try:
            table = toml(read_bytes(self._file, "the tokens").decode())
        except ValueError as error:
            # The TOML parser's message quotes only one character and its position, so no secret.
            raise BadFile(f"the tokens {self._file}: not valid TOML: {error}") from None
        entries = table.get("token")
        if set(table) != {"token"} or not isinstance(entries, list):
            raise BadFile(f"the tokens {self._file}: only [[token]] tables are allowed")
        known = [self._entry(number, entry) for number, entry in enumerate(entries, 1)]
        if len({digest for digest, _ in known}) < len(known):
            raise BadFile(f"the tokens {self._file}: two tokens have the same sha256")
        return known

    def _entry(self, number: int, entry: Any) -> tuple[bytes, Caller]:
        where = f"the tokens {self._file}: token {number}"
        complete = isinstance(entry, dict) and set(entry) == _FIELDS
        if not complete or not all(isinstance(value, str) for value in entry.values()):
            raise BadFile(f"{where} must have exactly these string fields: {', '.join(sorted(_FIELDS))}")
        if entry["role"] not in set(Role):
            raise BadFile(f"{where} must have one of the roles {', '.join(Role)}")
        if not is_tenant(entry["tenant"]):
            raise BadFile(f"{where} has an invalid tenant: {TENANT_FORM}")
        try:
            digest = bytes.fromhex(entry["sha256"])
        except ValueError:
            digest = b""
        if len(digest) != hashlib.sha256().digest_size:
            raise BadFile(f"{where} must have a sha256 of 64 hexadecimal digits: `printf %s TOKEN | sha256sum`")
        return digest, Caller(entry["name"], Role(entry["role"]), entry["tenant"])
