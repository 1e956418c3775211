"""From the command line to a client: the flags that say where the gateway is and how to show oneself to it."""

import argparse
import os
from pathlib import Path

from fusionkv.gateway.cli.files import UsageError
from fusionkv.gateway.client.client import DEFAULT_ADDRESS, AsyncClient
from fusionkv.protos.runtime.tls import ClientTLS

_TOKEN, _TOKEN_FILE = "FUSIONKV_TOKEN", "FUSIONKV_TOKEN_FILE"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of every command that talks to a gateway."""
    parser.add_argument(
        "--gateway", default=DEFAULT_ADDRESS, metavar="ADDRESS", help="host:port or unix:/path (default: %(default)s)"
    )
    parser.add_argument(
        "--timeout", type=float, default=300.0, metavar="SECONDS", help="for one call (default: %(default)g)"
    )
    token = parser.add_mutually_exclusive_group()
    token.add_argument(
        "--token", help=f"bearer token; others on this machine can see it, unlike {_TOKEN} in the environment"
    )
    token.add_argument(
        "--token-file", type=Path, metavar="PATH", help=f"file with the bearer token (or {_TOKEN_FILE})"
    )
    parser.add_argument("--tls-ca", type=Path, metavar="PATH", help="CAs (PEM) of the gateway: calls then use TLS")
    parser.add_argument("--tls-cert", type=Path, metavar="PATH", help="own certificate (PEM), if the gateway asks")
    parser.add_argument("--tls-key", type=Path, metavar="PATH", help="private key (PEM) of --tls-cert")


def client(args: argparse.Namespace) -> AsyncClient:
    """A client as the flags, or else the environment, say.

    Raises:
        UsageError: flags that don't go together, or a token that can't be one.
        BadFile: a file can't be used.
    """
    try:
        return AsyncClient(args.gateway, timeout=args.timeout, token=_token(args), tls=tls(args))
    except ValueError as error:
        raise UsageError(str(error)) from error


def tls(args: argparse.Namespace) -> ClientTLS | None:
    """Whom to trust; raises as `client` does."""
    if args.tls_ca is None and (args.tls_cert is not None or args.tls_key is not None):
        raise UsageError("--tls-cert and --tls-key need --tls-ca, which says whose gateway to trust")
    try:
        return ClientTLS.of(args.tls_ca, args.tls_cert, args.tls_key)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _token(args: argparse.Namespace) -> str | Path | None:
    if args.token is not None or args.token_file is not None:
        return args.token if args.token is not None else args.token_file
    if file := os.environ.get(_TOKEN_FILE):
        return Path(file)
    return os.environ.get(_TOKEN) or None
