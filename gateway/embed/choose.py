"""Which embedder and which reranker a gateway's settings name."""

import importlib.util
import logging
from pathlib import Path
from types import ModuleType

from fusionkv.fusion_worker.library import cache
from fusionkv.fusion_worker.library.catalog import EMBEDDER, KNOWN
from fusionkv.gateway.config import AUTO, NONE, GatewayConfig
from fusionkv.gateway.embed.base import Embedder, Reranker
from fusionkv.gateway.embed.local import LocalEmbedder, LocalReranker
from fusionkv.protos.runtime.errors import FailedPrecondition

log = logging.getLogger(__name__)
_PACKAGES = ("torch", "transformers")


async def open_embedder(config: GatewayConfig) -> Embedder | None:
    """None: questions are matched by words alone, and the log says why.

    Raises:
        ServiceError: what the settings name can't be used.
        ValueError: a package is missing.
    """
    named = config.embedder
    if named == NONE:
        log.info("no embedder is wanted: retrieval is by words alone")
        return None
    if named == AUTO:
        if lacking := _lacking():
            log.warning("RETRIEVAL IS BY WORDS ALONE: %s, then start again; `embedder = none` wants no more", lacking)
            return None
        named = EMBEDDER
    if _is_url(named):
        return await _urls().URLEmbedder.open(named, config.embedder_model, _token(config.embedder_token))
    made = await LocalEmbedder.start(_directory(named), config.embedder_threads)
    log.info("embeddings are %s's, %d wide", made.name, made.dim)
    return made


async def open_reranker(config: GatewayConfig) -> Reranker | None:
    """None: there is none. Raises as `open_embedder` does."""
    if not config.reranker:
        return None
    if _is_url(config.reranker):
        made: Reranker = _urls().URLReranker(config.reranker, config.reranker_model, _token(config.reranker_token))
    else:
        made = await LocalReranker.start(_directory(config.reranker), config.embedder_threads)
    log.info("the best %d chunks are ranked by %s", config.rerank_depth, made.name)
    return made


def _lacking() -> str:
    """What is to be done before the default embedder can be used; empty when it can."""
    if any(importlib.util.find_spec(package) is None for package in _PACKAGES):
        return 'pip install "fusionkv[embed]"'
    if not (cache.root() / EMBEDDER).is_dir():
        return f"run `fusionkv model get {EMBEDDER}`"
    return ""


def _directory(named: str) -> Path:
    if any(importlib.util.find_spec(package) is None for package in _PACKAGES):
        raise ValueError(f'{named} needs torch and transformers: pip install "fusionkv[embed]"')
    if named in KNOWN:
        if not KNOWN[named].embeds:
            raise FailedPrecondition(f"{named} answers questions, and makes no embeddings")
        if not (cache.root() / named).is_dir():
            raise FailedPrecondition(f"{named} was not fetched yet: run `fusionkv model get {named}`")
        return cache.root() / named
    directory = Path(named).expanduser()
    if not directory.is_dir():
        raise FailedPrecondition(
            f"{named} is neither a directory nor a URL (http://, https://), and none of "
            f"{', '.join(name for name, model in KNOWN.items() if model.embeds)}"
        )
    return directory


def _urls() -> ModuleType:
    """The module that asks URLs, whose library is an option."""
    try:
        from fusionkv.gateway.embed import url
    except ModuleNotFoundError as error:
        raise ValueError(f"a URL needs the package {error.name}: pip install 'fusionkv[http]'") from error
    return url


def _is_url(named: str) -> bool:
    return named.startswith(("http://", "https://"))


def _token(file: Path | None) -> str:
    return file.read_text().strip() if file else ""
