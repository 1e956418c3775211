"""From the command line's flags (flags.py) to a client."""

import argparse
import os
from pathlib import Path

from fusionkv.gateway.cli.files import UsageError
from fusionkv.gateway.cli.flags import TOKEN, TOKEN_FILE
from fusionkv.gateway.client.client import AsyncClient
from fusionkv.protos.runtime.tls import ClientTLS


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
    if file := os.environ.get(TOKEN_FILE):
        return Path(file)
    return os.environ.get(TOKEN) or None
