"""TLS and mTLS from PEM files, for servers and channels; files that are replaced are used without a restart."""

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import grpc

from fusionkv.protos.runtime.watched import BadFile, Watched, read_bytes

if TYPE_CHECKING:
    from cryptography import x509

C = TypeVar("C", grpc.Channel, grpc.aio.Channel)
# Calls in flight when a certificate changes end on the connection they began on; the longest answers take minutes.
_GRACE_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Identity:
    """A certificate chain and its key, both PEM."""

    chain: bytes
    key: bytes


@dataclass(frozen=True, slots=True)
class ServerTLS:
    """How a server shows itself, and whose callers it takes: all, or those with certificates of `client_ca`."""

    cert: Path
    key: Path
    client_ca: Path | None = None

    @classmethod
    def of(cls, cert: Path | None, key: Path | None, client_ca: Path | None) -> "ServerTLS | None":
        """The settings tls_cert, tls_key and tls_client_ca; None where none is set.

        Raises:
            ValueError: some are set and another one is missing.
        """
        if cert is not None and key is not None:
            return cls(cert, key, client_ca)
        if cert is not None or key is not None:
            raise ValueError("tls_cert and tls_key go together: set both")
        if client_ca is not None:
            raise ValueError("tls_client_ca needs tls_cert and tls_key: only TLS can ask a caller for a certificate")
        return None

    def credentials(self) -> grpc.ServerCredentials:
        """Credentials that use the newest files for every new connection.

        Raises:
            BadFile: a file is missing or is not what it should be, or the key is not the certificate's.
        """
        files = [self.cert, self.key, *([self.client_ca] if self.client_ca else [])]
        watched = Watched(files, self._read)
        used = watched.value

        def fetch() -> Any:
            """Called by gRPC before each handshake, in a thread of its own; None changes nothing."""
            nonlocal used
            newest = watched.value
            if newest is used:
                return None
            used = newest
            return _configuration(newest)

        return grpc.dynamic_ssl_server_credentials(
            _configuration(used), fetch, require_client_authentication=self.client_ca is not None
        )

    def context(self) -> ssl.SSLContext:
        """The same for a server that is not gRPC's. Raises as `credentials` does."""
        files = [self.cert, self.key, *([self.client_ca] if self.client_ca else [])]
        return _NewestContext(Watched(files, self._read_context))

    def _read_context(self) -> ssl.SSLContext:
        self._read()  # which says exactly what is wrong with a file
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.cert, self.key)
            if self.client_ca is not None:
                context.load_verify_locations(self.client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except (ssl.SSLError, OSError) as error:
            raise BadFile(f"the certificate {self.cert} or what goes with it can't be used for TLS") from error
        return context

    def _read(self) -> tuple[Identity, bytes | None]:
        return read_identity(self.cert, self.key), read_ca(self.client_ca) if self.client_ca else None


class _NewestContext(ssl.SSLContext):
    """Gives every new connection to the newest of the contexts that files make."""

    _watched: Watched[ssl.SSLContext]

    def __new__(cls, watched: Watched[ssl.SSLContext]) -> "_NewestContext":
        made = super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)
        made._watched = watched
        return made

    def wrap_bio(self, *given: Any, **named: Any) -> ssl.SSLObject:
        """What asyncio calls for each connection that it accepts."""
        return self._watched.value.wrap_bio(*given, **named)


class ClientTLS:
    """Whose servers a caller trusts, and how it shows itself to those that ask; for any number of channels."""

    def __init__(self, ca: Path, cert: Path | None = None, key: Path | None = None) -> None:
        """Reads the files.

        Raises:
            ValueError: only one of `cert` and `key` is given.
            BadFile: a file is missing or is not what it should be, or the key is not the certificate's.
        """
        if (cert is None) != (key is None):
            raise ValueError("a certificate and its key go together: give both")
        self._ca, self._cert, self._key = ca, cert, key
        self._credentials = Watched([file for file in (ca, cert, key) if file is not None], self._read)

    @classmethod
    def of(cls, ca: Path | None, cert: Path | None, key: Path | None) -> "ClientTLS | None":
        """The settings tls_ca, tls_cert and tls_key of a caller; without a CA its calls are not encrypted."""
        return cls(ca, cert, key) if ca is not None else None

    def channel(self, dial: Callable[[grpc.ChannelCredentials], C]) -> C:
        """What `dial` makes of the newest files: one channel, replaced for later calls when a file changes."""
        # It has what our callers use of either kind of channel.
        return cast(C, _Renewed(self._credentials, dial))

    def _read(self) -> grpc.ChannelCredentials:
        ca = read_ca(self._ca)
        if self._cert is None or self._key is None:
            return grpc.ssl_channel_credentials(ca)
        own = read_identity(self._cert, self._key)
        return grpc.ssl_channel_credentials(ca, own.key, own.chain)


class _Renewed:
    """A channel that is dialled anew when its credentials change."""

    def __init__(
        self, credentials: Watched[grpc.ChannelCredentials], dial: Callable[[grpc.ChannelCredentials], Any]
    ) -> None:
        self._credentials = credentials
        self._dial = dial
        self._used = credentials.value
        self._channel = dial(self._used)
        self._closing: set[asyncio.Task[None]] = set()

    def current(self) -> Any:
        newest = self._credentials.value
        if newest is not self._used:
            old, self._used = self._channel, newest
            self._channel = self._dial(newest)
            if isinstance(old, grpc.aio.Channel):
                closing = asyncio.get_running_loop().create_task(old.close(_GRACE_SECONDS))
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)
            # A blocking channel is kept by the calls that run on it, and closes with the last of them.
        return self._channel

    def unary_unary(self, *given: Any, **named: Any) -> "_Method":
        return _Method(self.current, "unary_unary", given, named)

    def unary_stream(self, *given: Any, **named: Any) -> "_Method":
        return _Method(self.current, "unary_stream", given, named)

    def stream_unary(self, *given: Any, **named: Any) -> "_Method":
        return _Method(self.current, "stream_unary", given, named)

    def stream_stream(self, *given: Any, **named: Any) -> "_Method":
        return _Method(self.current, "stream_stream", given, named)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        state: grpc.ChannelConnectivity = self.current().get_state(try_to_connect)
        return state

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self.current().wait_for_state_change(last_observed_state)

    def close(self) -> Any:
        """Ends the connection and all calls; to be awaited where the channel is an asynchronous one."""
        for closing in self._closing:
            closing.cancel()
        return self._channel.close()

    async def __aenter__(self) -> "_Renewed":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def __enter__(self) -> "_Renewed":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Method:
    """One RPC on whatever channel is the current one when it is called."""

    def __init__(self, current: Callable[[], Any], kind: str, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._current = current
        self._kind, self._given, self._named = kind, given, named
        self._channel: Any = None
        self._call: Callable[..., Any] | None = None

    def __call__(self, *given: Any, **named: Any) -> Any:
        channel = self._current()
        if channel is not self._channel or self._call is None:
            self._channel = channel
            self._call = getattr(channel, self._kind)(*self._given, **self._named)
        return self._call(*given, **named)


def read_identity(cert: Path, key: Path) -> Identity:
    """A certificate chain, the own certificate first, and the private key to it.

    Raises:
        BadFile: one can't be read or is not PEM of its kind, the key has a password, or it is another one's.
    """
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

    chain, secret = read_bytes(cert, "the certificate"), read_bytes(key, "the key")
    own = _certificates(chain, "the certificate", cert)[0]
    private = None
    # The library's own words could quote what it read.
    with contextlib.suppress(ValueError, TypeError):
        private = load_pem_private_key(secret, password=None)
    if private is None:
        raise BadFile(f"the key {key} is no private key in PEM form without a password")
    form = Encoding.DER, PublicFormat.SubjectPublicKeyInfo
    if private.public_key().public_bytes(*form) != own.public_key().public_bytes(*form):
        raise BadFile(f"the key {key} is not that of the certificate {cert}")
    return Identity(chain, secret)


def read_ca(file: Path) -> bytes:
    """The certificates of authorities, PEM.

    Raises:
        BadFile: the file can't be read or holds none.
    """
    data = read_bytes(file, "the CA certificates")
    _certificates(data, "the CA certificates", file)
    return data


def _certificates(data: bytes, what: str, file: Path) -> "list[x509.Certificate]":
    # Not for those who use no TLS: it takes as long to load as gRPC.
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificates(data)
    except ValueError as error:
        raise BadFile(f"{what} {file}: no PEM certificate in it that can be read") from error


def _configuration(state: tuple[Identity, bytes | None]) -> grpc.ServerCertificateConfiguration:
    own, client_ca = state
    return grpc.ssl_server_certificate_configuration([(own.key, own.chain)], client_ca)
