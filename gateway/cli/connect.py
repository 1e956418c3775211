"""Flags for the gateway's address and the caller's credentials, and the client that they describe."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from fusionkv.gateway.client import DEFAULT_ADDRESS

if TYPE_CHECKING:
    from fusionkv.gateway.client.client import AsyncClient
    from fusionkv.protos.runtime.tls import ClientTLS

_GATEWAY, _TOKEN, _TOKEN_FILE = "FUSIONKV_GATEWAY", "FUSIONKV_TOKEN", "FUSIONKV_TOKEN_FILE"


class UsageError(Exception):
    """Invalid command-line arguments, such as paths that match nothing or two documents with one name."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    about = f"address of the gateway: host:port or unix:/path (default: {_GATEWAY}, else {DEFAULT_ADDRESS})"
    add("--gateway", default=os.environ.get(_GATEWAY) or DEFAULT_ADDRESS, metavar="ADDRESS", help=about)
    add("--timeout", type=seconds, default=300.0, metavar="SECONDS", help="limit for one call (default: %(default)g)")
    one = parser.add_mutually_exclusive_group().add_argument
    one("--token", help=f"bearer token; visible to other users of this machine, unlike {_TOKEN} in the environment")
    one("--token-file", type=Path, metavar="PATH", help=f"file with the bearer token (or set {_TOKEN_FILE})")
    add("--tls-ca", type=Path, metavar="PATH", help="CA certificates (PEM) to trust; enables TLS")
    add("--tls-cert", type=Path, metavar="PATH", help="client certificate (PEM), if the gateway requires one")
    add("--tls-key", type=Path, metavar="PATH", help="private key (PEM) of --tls-cert")


def seconds(text: str) -> float:
    """Parses a flag's seconds, for argparse."""
    value = float(text)
    if not 0.1 <= value <= 86_400:
        raise argparse.ArgumentTypeError("must be from 0.1 to 86400")
    return value


def client(args: argparse.Namespace) -> "AsyncClient":
    """A client configured by flags, or by environment variables where flags are missing.

    Raises:
        UsageError: flags that can't be combined, or an invalid token.
        BadFile: a file can't be used.
    """
    from fusionkv.gateway.client.client import AsyncClient

    token: str | Path | None = args.token if args.token is not None else args.token_file
    if token is None:
        file = os.environ.get(_TOKEN_FILE)
        token = Path(file) if file else os.environ.get(_TOKEN) or None
    try:
        return AsyncClient(args.gateway, timeout=args.timeout, token=token, tls=tls(args))
    except ValueError as error:
        raise UsageError(str(error)) from error


def tls(args: argparse.Namespace) -> "ClientTLS | None":
    """The TLS settings. Raises as `client`."""
    from fusionkv.protos.runtime.tls import ClientTLS

    if args.tls_ca is None and (args.tls_cert is not None or args.tls_key is not None):
        raise UsageError("--tls-cert and --tls-key need --tls-ca, the CAs that sign the gateway's certificate")
    try:
        return ClientTLS.of(args.tls_ca, args.tls_cert, args.tls_key)
    except ValueError as error:
        raise UsageError(str(error)) from error
