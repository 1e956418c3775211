"""TLS and mTLS from PEM files, for servers and channels; replaced files are used without a restart."""

import asyncio
import contextlib
import datetime
import functools
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import grpc

from fusionkv.protos.observe import rejected
from fusionkv.protos.runtime.cancellation import background
from fusionkv.protos.runtime.watched import BadFile, Watched, read_bytes

if TYPE_CHECKING:
    from cryptography import x509

C = TypeVar("C", grpc.Channel, grpc.aio.Channel)
# The kernel encrypts where it and OpenSSL can, from Python 3.12 on.
_KERNEL_TLS = getattr(ssl, "OP_ENABLE_KTLS", 0)
# After a certificate changes, calls in flight complete on their connection; the longest answers take minutes.
_GRACE_SECONDS = 3600.0
# For so long a client stays connected whose certificate is no longer trusted; calls in flight complete.
MAX_AGE_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class ServerTLS:
    """A server's certificate, and the CAs of its clients; without `client_ca`, any client may connect."""

    cert: Path
    key: Path
    client_ca: Path | None = None

    @classmethod
    def of(cls, cert: Path | None, key: Path | None, client_ca: Path | None) -> "ServerTLS | None":
        """The settings tls_cert, tls_key and tls_client_ca; None if none is set.

        Raises ValueError if only some of the required settings are set.
        """
        if cert is not None and key is not None:
            return cls(cert, key, client_ca)
        if cert is not None or key is not None:
            raise ValueError("tls_cert and tls_key must be set together")
        if client_ca is not None:
            raise ValueError("tls_client_ca needs tls_cert and tls_key")
        return None

    def credentials(self) -> grpc.ServerCredentials:
        """Credentials that use the latest files for every new connection.

        Raises BadFile if a file is missing or invalid, or the key does not belong to the certificate.
        """
        watched = Watched(self._files(), self._read)
        used = watched.value

        def fetch() -> Any:
            """Called by gRPC before each handshake, in its own thread; None keeps the configuration."""
            nonlocal used
            before, used = used, watched.value
            return None if used is before else used

        return grpc.dynamic_ssl_server_credentials(
            used, fetch, require_client_authentication=self.client_ca is not None
        )

    def context(self) -> ssl.SSLContext:
        """The same for servers other than gRPC's, for asyncio and for `wrap_socket`. Raises as `credentials`."""
        return _NewestContext(Watched(self._files(), self._read_context))

    def _files(self) -> list[Path]:
        return [self.cert, self.key, *([self.client_ca] if self.client_ca else [])]

    def _read_context(self) -> ssl.SSLContext:
        self._read()  # for its precise errors
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.options |= _KERNEL_TLS
        context.sslobject_class, context.sslsocket_class = _Counted, _CountedSocket
        try:
            context.load_cert_chain(self.cert, self.key)
            if self.client_ca is not None:
                context.load_verify_locations(self.client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except (ssl.SSLError, OSError) as error:
            raise BadFile(f"the certificate {self.cert}, its key or the client CA can't be used for TLS") from error
        return context

    def _read(self) -> grpc.ServerCertificateConfiguration:
        identity = read_identity(self.cert, self.key)
        client_ca = read_ca(self.client_ca) if self.client_ca else None
        return grpc.ssl_server_certificate_configuration([identity], client_ca)


@contextlib.contextmanager
def _counted() -> Iterator[None]:
    """Counts and logs a failed handshake."""
    try:
        yield
    except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
        raise
    except ssl.SSLError as error:
        rejected.note("tls_handshake", getattr(error, "verify_message", "") or error.reason or "")
        raise


class _Counted(ssl.SSLObject):
    def do_handshake(self) -> None:
        with _counted():
            super().do_handshake()


@contextlib.contextmanager
def _cleared() -> Iterator[None]:
    """Clears OpenSSL's errors of the thread after an error of the system, which Python leaves there."""
    try:
        yield
    except ssl.SSLError:
        raise
    except OSError:
        with contextlib.suppress(ssl.SSLError):
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).set_ciphers("none")
        raise


class _Socket(ssl.SSLSocket):
    """Keeps its errors to itself.

    With OpenSSL 3.4 and later, the next socket of the thread that can't be read or written at once would get a broken
    one's error, too (https://github.com/python/cpython/issues/148594).
    """

    def recv_into(self, *args: Any, **kwargs: Any) -> int:
        with _cleared():
            return super().recv_into(*args, **kwargs)

    def send(self, *args: Any, **kwargs: Any) -> int:
        with _cleared():
            return super().send(*args, **kwargs)

    def do_handshake(self, block: bool = False) -> None:
        with _cleared():
            super().do_handshake(block)


class _CountedSocket(_Socket):
    def do_handshake(self, block: bool = False) -> None:
        with _counted():
            super().do_handshake(block)


class _NewestContext(ssl.SSLContext):
    """Uses the context of the latest files for every new connection."""

    _watched: Watched[ssl.SSLContext]

    def __new__(cls, watched: Watched[ssl.SSLContext]) -> "_NewestContext":
        context = super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)
        context._watched = watched
        return context

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        """Called by asyncio for each accepted connection."""
        return self._watched.value.wrap_bio(*args, **kwargs)

    def wrap_socket(self, *args: Any, **kwargs: Any) -> ssl.SSLSocket:
        return self._watched.value.wrap_socket(*args, **kwargs)


class ClientTLS:
    """The CAs that a client trusts, and its certificate for servers that require one; for any number of channels."""

    def __init__(self, ca: Path, cert: Path | None = None, key: Path | None = None) -> None:
        """Reads the files.

        Raises:
            ValueError: only one of `cert` and `key` is given.
            BadFile: a file is missing or invalid, or the key does not belong to the certificate.
        """
        if (cert is None) != (key is None):
            raise ValueError("a certificate and its key must be given together")
        self._ca, self.cert, self._key = ca, cert, key
        files = [file for file in (ca, cert, key) if file is not None]
        self._credentials = Watched(files, self._read)
        self._context = Watched(files, self._read_context)

    @classmethod
    def of(cls, ca: Path | str | None, cert: Path | str | None, key: Path | str | None) -> "ClientTLS | None":
        """The settings tls_ca, tls_cert and tls_key of a client; without a CA, its calls are not encrypted."""
        return cls(Path(ca), Path(cert) if cert else None, Path(key) if key else None) if ca else None

    def channel(self, dial: Callable[[grpc.ChannelCredentials], C]) -> C:
        """A channel that `dial` creates with the latest files; it is replaced for later calls when a file changes."""
        # It implements what callers use of both kinds of channels.
        return cast(C, _Renewed(self._credentials, dial))

    def context(self) -> ssl.SSLContext:
        """The same for a connection other than gRPC's, with the latest files."""
        return self._context.value

    def _read_context(self) -> ssl.SSLContext:
        self._read()  # for its precise errors
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.options |= _KERNEL_TLS
        context.sslsocket_class = _Socket
        try:
            context.load_verify_locations(self._ca)
            if self.cert is not None:
                context.load_cert_chain(self.cert, self._key)
        except (ssl.SSLError, OSError) as error:
            raise BadFile(f"the CA certificates {self._ca}, or the certificate can't be used for TLS") from error
        return context

    def _read(self) -> grpc.ChannelCredentials:
        ca = read_ca(self._ca)
        if self.cert is None or self._key is None:
            return grpc.ssl_channel_credentials(ca)
        return grpc.ssl_channel_credentials(ca, *read_identity(self.cert, self._key))


class _Renewed(contextlib.AbstractContextManager["_Renewed"], contextlib.AbstractAsyncContextManager["_Renewed"]):
    """A channel that is replaced when its credentials change."""

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
                background(self._closing, old.close(_GRACE_SECONDS))
                self._channel.get_state(try_to_connect=True)  # the caller may still watch the old channel
            # A blocking channel is kept alive by its calls, and closes with the last of them.
        return self._channel

    def _method(self, kind: str, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """An RPC of a kind, on the channel that is current when it is called."""
        bound = functools.lru_cache(maxsize=1)(lambda channel: getattr(channel, kind)(*args, **kwargs))
        return lambda *request, **options: bound(self.current())(*request, **options)

    unary_unary = functools.partialmethod(_method, "unary_unary")
    unary_stream = functools.partialmethod(_method, "unary_stream")
    stream_unary = functools.partialmethod(_method, "stream_unary")
    stream_stream = functools.partialmethod(_method, "stream_stream")

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self.current().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self.current().wait_for_state_change(last_observed_state)

    def close(self) -> Any:
        """Closes the connection and ends all calls; await the result if the channel is asynchronous."""
        for closing in self._closing:
            closing.cancel()
        return self._channel.close()

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def __exit__(self, *exc: object) -> None:
        self.close()


def read_identity(cert: Path, key: Path) -> tuple[bytes, bytes]:
    """Reads a private key and its certificate chain, the leaf certificate first, both PEM.

    Raises BadFile if a file can't be read or is not PEM of its kind, the key has a password or is another's, or the
    certificate has expired.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    chain, secret = read_bytes(cert, "the certificate"), read_bytes(key, "the key")
    certificate = _certificates(chain, "the certificate", cert)[0]
    try:
        private = load_pem_private_key(secret, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        # Without the library's error, which could quote the key.
        raise BadFile(f"the key {key} is not a PEM private key without a password") from None
    if private.public_key() != certificate.public_key():
        raise BadFile(f"the key {key} does not belong to the certificate {cert}")
    if (end := certificate.not_valid_after_utc) < datetime.datetime.now(datetime.UTC):
        raise BadFile(f"the certificate {cert} expired at {end:%Y-%m-%d %H:%M} UTC")
    return secret, chain


def read_ca(file: Path) -> bytes:
    """Reads CA certificates in PEM. Raises BadFile if the file can't be read or contains none."""
    data = read_bytes(file, "the CA certificates")
    _certificates(data, "the CA certificates", file)
    return data


def _certificates(data: bytes, what: str, file: Path) -> "list[x509.Certificate]":
    # Imported only when TLS is used: it takes as long to load as gRPC.
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificates(data)
    except ValueError as error:
        raise BadFile(f"{what} {file}: contains no valid PEM certificate") from error
