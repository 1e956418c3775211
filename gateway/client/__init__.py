"""The Python clients."""

from fusionkv.gateway.client.client import AsyncClient, Client

__all__ = ["AsyncClient", "Client"]
