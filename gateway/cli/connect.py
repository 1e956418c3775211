"""Creates a client from command-line flags (flags.py)."""

import argparse
import os
from pathlib import Path

from fusionkv.gateway.cli.files import UsageError
from fusionkv.gateway.cli.flags import TOKEN, TOKEN_FILE
from fusionkv.gateway.client.client import AsyncClient
from fusionkv.protos.runtime.tls import ClientTLS


def client(args: argparse.Namespace) -> AsyncClient:
    """A client configured by flags, or by environment variables where flags are missing.

    Raises:
        UsageError: flags that can't be combined, or an invalid token.
        BadFile: a file can't be used.
    """
    try:
        return AsyncClient(args.gateway, timeout=args.timeout, token=_token(args), tls=tls(args))
    except ValueError as error:
        raise UsageError(str(error)) from error


def tls(args: argparse.Namespace) -> ClientTLS | None:
    """The TLS settings. Raises as `client`."""
    if args.tls_ca is None and (args.tls_cert is not None or args.tls_key is not None):
        raise UsageError("--tls-cert and --tls-key need --tls-ca, the CAs that sign the gateway's certificate")
    try:
        return ClientTLS.of(args.tls_ca, args.tls_cert, args.tls_key)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _token(args: argparse.Namespace) -> str | Path | None:
    if args.token is not None or args.token_file is not None:
        return args.token if args.token is not None else args.token_file
    if file := os.environ.get(TOKEN_FILE):
        return Path(file)
    return os.environ.get(TOKEN) or None
