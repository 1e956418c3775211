"""Transfers that the connector in the scheduler requests from those in the workers."""

from dataclasses import dataclass, field

from fusionkv.vllm.prefixes import Prefix
from fusionkv.vllm.prompts import FusedPrompt


@dataclass(frozen=True, slots=True)
class Load:
    """Loads tokens `[start, stop)` of a request into its pages, from a fusion worker or the cache service.

    Attributes:
        namespaces: cache namespace of each tensor-parallel rank, for a prefix.
    """

    request: str
    pages: tuple[int, ...]
    start: int
    stop: int
    source: FusedPrompt | Prefix
    namespaces: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Save:
    """Saves the chunks of a request from `first` on, from its pages to the cache service."""

    request: str
    pages: tuple[int, ...]
    first: int
    prefix: Prefix
    namespaces: tuple[bytes, ...]


@dataclass(slots=True)
class Transfers:
    """The transfers of one step."""

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
