"""What the services of a secured chaos run have: certificates, which all ask for, and keys for encrypted disks."""

import datetime
import secrets
from pathlib import Path

from fusionkv.protos.runtime.tls import ClientTLS
from tests.chaos.network import Place
from tests.conftest import Authority

# Clocks jump by 400 days.
_VALID = datetime.timedelta(days=1000)


class Secured:
    """Certificates and keys in a folder, and the flags that name them."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._authority = Authority(folder, "chaos", _VALID)
        self._issued: dict[str, Place] = {}
        self._keys = folder / "disk.keys"
        self.renew_key()
        self.tls = ClientTLS(self._authority.ca, *self._authority.issue("callers"))

    def flags(self, name: str, place: Place) -> tuple[str, ...]:
        """Of a service: TLS at its port, for callers with a certificate alone, and towards those that it calls."""
        self._issued[name] = place
        cert, key = self._authority.issue(name, (place.address,))
        ca = str(self._authority.ca)
        calls = () if name.startswith("cache") else ("--tls-ca", ca)
        return "--tls-cert", str(cert), "--tls-key", str(key), "--tls-client-ca", ca, *calls

    @property
    def disk(self) -> tuple[str, ...]:
        """Of a cache service."""
        return "--disk-keys", str(self._keys)

    def renew_certificate(self, name: str) -> None:
        """Its files are written over, one after the other, as many tools do it."""
        self._authority.issue(name, (self._issued[name].address,))

    def renew_key(self) -> None:
        """From now on another key encrypts; those before it still open what they encrypted."""
        before = self._keys.read_text() if self._keys.exists() else ""
        fresh = self._keys.with_suffix(".new")
        fresh.write_text(f"{secrets.token_hex(32)}\n{before}")
        fresh.replace(self._keys)
