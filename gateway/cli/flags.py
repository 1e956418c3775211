"""The flags that say where the gateway is and how to show oneself to it; loads no client."""

import argparse
from pathlib import Path

from fusionkv.gateway.client.defaults import DEFAULT_ADDRESS

TOKEN, TOKEN_FILE = "FUSIONKV_TOKEN", "FUSIONKV_TOKEN_FILE"


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
        "--token", help=f"bearer token; others on this machine can see it, unlike {TOKEN} in the environment"
    )
    token.add_argument(
        "--token-file", type=Path, metavar="PATH", help=f"file with the bearer token (or {TOKEN_FILE})"
    )
    parser.add_argument("--tls-ca", type=Path, metavar="PATH", help="CAs (PEM) of the gateway: calls then use TLS")
    parser.add_argument("--tls-cert", type=Path, metavar="PATH", help="own certificate (PEM), if the gateway asks")
    parser.add_argument("--tls-key", type=Path, metavar="PATH", help="private key (PEM) of --tls-cert")
