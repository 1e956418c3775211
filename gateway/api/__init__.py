"""The public names of the package `fusionkv`: the gateway's clients, imported on first access, and the version."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.metadata import version

    from fusionkv.gateway.client.client import AsyncClient as AsyncClient
    from fusionkv.gateway.client.client import Client as Client

    __version__ = version("fusionkv")

__all__ = ["AsyncClient", "Client", "__version__"]


def __getattr__(name: str) -> Any:
    # On first access only: services import this package too, but do not need the clients.
    if name == "__version__":
        from importlib import metadata

        return metadata.version("fusionkv")
    if name in __all__:
        from fusionkv.gateway.client import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
