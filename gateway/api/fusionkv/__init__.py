"""The package `fusionkv`: all that an application needs to call a gateway, imported on first access.

    from fusionkv import Client

    with Client("127.0.0.1:7072") as client:
        client.ingest("notes", "a.txt", "The code of Bervek is 535.")
        print(client.ask("notes", "Code of Bervek?").text)

Calls raise a subclass of `ServiceError` for each gRPC status. `fusionkv.langchain` and `fusionkv.llama_index` are the
integrations. `BlobThread` stores opaque bytes of other engines in a cache service. All packages below `fusionkv` are
internal, and change without notice.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

# Services import this package too, and need no client: it takes half a second.
_NAMES = {
    "fusionkv.gateway.client": "DEFAULT_ADDRESS ORDER_NAMES",
    "fusionkv.gateway.client.client": "AsyncClient Client",
    "fusionkv.gateway.client.requests": "IngestOptions Message Options",
    "fusionkv.gateway.client.results": "Answer Deleted Event Explanation Ingested Item Model Passage Progress "
    "Sources Stats Summary Token as_dict",
    "fusionkv.kvcache_service.blobs": "BlobThread",
    "fusionkv.protos.runtime.errors": "AlreadyExists DataLoss DeadlineExceeded FailedPrecondition InvalidArgument "
    "NotFound PermissionDenied ResourceExhausted ServiceError Unauthenticated Unavailable",
    "fusionkv.protos.runtime.tls": "ClientTLS",
    "fusionkv.protos.runtime.watched": "BadFile",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

if TYPE_CHECKING:
    from fusionkv.gateway.client import DEFAULT_ADDRESS as DEFAULT_ADDRESS
    from fusionkv.gateway.client import ORDER_NAMES as ORDER_NAMES
    from fusionkv.gateway.client.client import AsyncClient as AsyncClient
    from fusionkv.gateway.client.client import Client as Client
    from fusionkv.gateway.client.requests import IngestOptions as IngestOptions
    from fusionkv.gateway.client.requests import Message as Message
    from fusionkv.gateway.client.requests import Options as Options
    from fusionkv.gateway.client.results import Answer as Answer
    from fusionkv.gateway.client.results import Deleted as Deleted
    from fusionkv.gateway.client.results import Event as Event
    from fusionkv.gateway.client.results import Explanation as Explanation
    from fusionkv.gateway.client.results import Ingested as Ingested
    from fusionkv.gateway.client.results import Item as Item
    from fusionkv.gateway.client.results import Model as Model
    from fusionkv.gateway.client.results import Passage as Passage
    from fusionkv.gateway.client.results import Progress as Progress
    from fusionkv.gateway.client.results import Sources as Sources
    from fusionkv.gateway.client.results import Stats as Stats
    from fusionkv.gateway.client.results import Summary as Summary
    from fusionkv.gateway.client.results import Token as Token
    from fusionkv.gateway.client.results import as_dict as as_dict
    from fusionkv.kvcache_service.blobs import BlobThread as BlobThread
    from fusionkv.protos.runtime.errors import AlreadyExists as AlreadyExists
    from fusionkv.protos.runtime.errors import DataLoss as DataLoss
    from fusionkv.protos.runtime.errors import DeadlineExceeded as DeadlineExceeded
    from fusionkv.protos.runtime.errors import FailedPrecondition as FailedPrecondition
    from fusionkv.protos.runtime.errors import InvalidArgument as InvalidArgument
    from fusionkv.protos.runtime.errors import NotFound as NotFound
    from fusionkv.protos.runtime.errors import PermissionDenied as PermissionDenied
    from fusionkv.protos.runtime.errors import ResourceExhausted as ResourceExhausted
    from fusionkv.protos.runtime.errors import ServiceError as ServiceError
    from fusionkv.protos.runtime.errors import Unauthenticated as Unauthenticated
    from fusionkv.protos.runtime.errors import Unavailable as Unavailable
    from fusionkv.protos.runtime.tls import ClientTLS as ClientTLS
    from fusionkv.protos.runtime.watched import BadFile as BadFile

    __version__: str
else:
    __all__ = [*_MODULES, "__version__"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib import metadata

        return metadata.version("fusionkv")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, "__version__"})
