"""Flags for the gateway's address and the caller's credentials. Loads no client."""

import argparse
from pathlib import Path

from fusionkv.gateway.client.defaults import DEFAULT_ADDRESS

TOKEN, TOKEN_FILE = "FUSIONKV_TOKEN", "FUSIONKV_TOKEN_FILE"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of every command that calls a gateway."""
    parser.add_argument(
        "--gateway",
        default=DEFAULT_ADDRESS,
        metavar="ADDRESS",
        help="address of the gateway: host:port or unix:/path (default: %(default)s)",
    )
    parser.add_argument(
        "--timeout", type=float, default=300.0, metavar="SECONDS", help="limit for one call (default: %(default)g)"
    )
    token = parser.add_mutually_exclusive_group()
    token.add_argument(
        "--token", help=f"bearer token; visible to other users of this machine, unlike {TOKEN} in the environment"
    )
    token.add_argument(
        "--token-file", type=Path, metavar="PATH", help=f"file with the bearer token (or set {TOKEN_FILE})"
    )
    parser.add_argument("--tls-ca", type=Path, metavar="PATH", help="CA certificates (PEM) to trust; enables TLS")
    parser.add_argument(
        "--tls-cert", type=Path, metavar="PATH", help="client certificate (PEM), if the gateway requires one"
    )
    parser.add_argument("--tls-key", type=Path, metavar="PATH", help="private key (PEM) of --tls-cert")
