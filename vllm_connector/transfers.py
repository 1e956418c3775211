"""What the connector in the scheduler asks of those in the workers: KV to load into pages, and to save from them."""

from dataclasses import dataclass, field

from fusionkv.vllm.prefixes import Prefix
from fusionkv.vllm.prompts import FusedPrompt


@dataclass(frozen=True, slots=True)
class Load:
    """Tokens `[start, stop)` of a request, into its pages, from a fusion worker or from the cache service.

    namespaces: of each tensor-parallel rank, for a prefix.
    """

    request: str
    pages: tuple[int, ...]
    start: int
    stop: int
    source: FusedPrompt | Prefix
    namespaces: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Save:
    """Chunks of a request from the `first` on, from its pages, to the cache service."""

    request: str
    pages: tuple[int, ...]
    first: int
    prefix: Prefix
    namespaces: tuple[bytes, ...]


@dataclass(slots=True)
class Transfers:
    """Those of one step."""

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
