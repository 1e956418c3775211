"""Opens the embedder and the reranker that the gateway's settings name."""

import importlib.util
import logging
from pathlib import Path

from fusionkv.fusion_worker.library import cache
from fusionkv.fusion_worker.library.catalog import EMBEDDER, KNOWN
from fusionkv.gateway.config import AUTO, NONE, GatewayConfig, secret
from fusionkv.gateway.embed.base import Embedder, Reranker
from fusionkv.gateway.embed.local import LocalEmbedder, LocalReranker
from fusionkv.protos.runtime.errors import FailedPrecondition
from fusionkv.protos.runtime.settings import extra

log = logging.getLogger(__name__)
_PACKAGES = ("torch", "transformers")


async def open_embedder(config: GatewayConfig) -> Embedder | None:
    """Opens the configured embedder; None if retrieval is by BM25 only, which is logged with the reason.

    Raises:
        ServiceError: the configured model can't be used.
        ValueError: a package is missing.
    """
    named = config.embedder
    if named == NONE:
        log.info("embedder = none: retrieval uses BM25 only")
        return None
    if named == AUTO:
        if remedy := _missing() or _remedy(EMBEDDER):
            log.warning("RETRIEVAL USES BM25 ONLY: %s and restart; `embedder = none` hides this warning", remedy)
            return None
        named = EMBEDDER
    if _is_url(named):
        with extra("http", "a URL"):
            from fusionkv.gateway.embed.url import URLEmbedder
        return await URLEmbedder.open(named, config.embedder_model, secret(config.embedder_token))
    embedder = await LocalEmbedder.start(_directory(named), config.embedder_threads)
    log.info("embedder: %s, %d dimensions", embedder.name, embedder.dim)
    return embedder


async def open_reranker(config: GatewayConfig) -> Reranker | None:
    """Opens the configured reranker, if any. Raises as `open_embedder`."""
    if not config.reranker:
        return None
    if _is_url(config.reranker):
        with extra("http", "a URL"):
            from fusionkv.gateway.embed.url import URLReranker
        token = secret(config.reranker_token)
        reranker: Reranker = URLReranker(config.reranker, config.reranker_model, token)
    else:
        reranker = await LocalReranker.start(_directory(config.reranker), config.embedder_threads)
    log.info("the best %d chunks are reranked by %s", config.rerank_depth, reranker.name)
    return reranker


def _missing() -> str:
    """The command that installs the packages of local models; empty if none is missing."""
    missing = any(importlib.util.find_spec(package) is None for package in _PACKAGES)
    return 'pip install "fusionkv[embed]"' if missing else ""


def _remedy(named: str) -> str:
    """The command that fetches a known embedder; empty if it has been fetched."""
    return "" if (cache.root() / named).is_dir() else f"run `fusionkv model get {named}`"


def _directory(named: str) -> Path:
    if install := _missing():
        raise ValueError(f"{named} needs torch and transformers: {install}")
    if named in KNOWN:
        if not KNOWN[named].embeds:
            raise FailedPrecondition(f"{named} is a language model, not an embedding model")
        if remedy := _remedy(named):
            raise FailedPrecondition(f"{named} has not been fetched yet: {remedy}")
        return cache.root() / named
    directory = Path(named).expanduser()
    if not directory.is_dir():
        raise FailedPrecondition(
            f"{named} is not a directory, a URL (http://, https://) or one of "
            f"{', '.join(name for name, model in KNOWN.items() if model.embeds)}"
        )
    return directory


def _is_url(named: str) -> bool:
    return named.startswith(("http://", "https://"))
