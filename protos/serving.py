"""The settings that all services have."""

from dataclasses import dataclass
from pathlib import Path

from fusionkv.protos.runtime import process
from fusionkv.protos.runtime.settings import setting
from fusionkv.protos.runtime.tls import ClientTLS, ServerTLS


@dataclass(frozen=True, slots=True)
class ServingConfig:
    """Of a service that calls no other."""

    listen: tuple[str, ...] = setting((), "addresses to listen on: host:port or unix:/path")
    drain_seconds: float = setting(30.0, "seconds that running calls may take to finish after SIGTERM", low=0)
    health_listen: str = setting(
        "", "host:port that answers gRPC health checks without TLS or token, for probes; empty disables it"
    )
    metrics_listen: str = setting(
        "", "host:port of a Prometheus scrape endpoint (/metrics) without TLS or token; empty disables it"
    )
    tls_cert: Path | None = setting(None, "certificate chain (PEM): enables TLS on ports")
    tls_key: Path | None = setting(None, "private key (PEM) of tls_cert")
    tls_client_ca: Path | None = setting(
        None, "CA certificates (PEM): clients must then present a certificate signed by one of them"
    )

    def __post_init__(self) -> None:
        ServerTLS.of(self.tls_cert, self.tls_key, self.tls_client_ca)
        # Without a port, gRPC would listen at 443.
        if (address := self.health_listen) and (address.startswith("unix:") or not process.is_address(address)):
            raise ValueError(f"health_listen must be host:port, such as 127.0.0.1:8080, not {address!r}")

    def check_ports(self) -> None:
        """Checks the addresses that the service binds when it is ready. Raises as `process.check_ports`."""
        process.check_ports(self.listen, "--listen")
        process.check_ports([self.health_listen] if self.health_listen else [], "--health-listen")

    @property
    def server_tls(self) -> ServerTLS | None:
        return ServerTLS.of(self.tls_cert, self.tls_key, self.tls_client_ca)


@dataclass(frozen=True, slots=True)
class CallingConfig(ServingConfig):
    """Of a service that calls others."""

    tls_cert: Path | None = setting(
        None, "certificate chain (PEM): enables TLS on ports; also presented to services that ask for a certificate"
    )
    tls_ca: Path | None = setting(
        None, "CA certificates (PEM) of the services that this one calls; enables TLS for those calls"
    )

    def client_tls(self) -> ClientTLS | None:
        """TLS for calls to other services, read from the files. Raises BadFile."""
        return ClientTLS.of(self.tls_ca, self.tls_cert, self.tls_key)
