"""The connector in vLLM's scheduler: which prompts have KV elsewhere, found out while others are computed."""

import asyncio
import logging
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from fusionkv.fusion_worker.library.fingerprint import fingerprint
from fusionkv.fusion_worker.library.resolve import resolve
from fusionkv.kvcache_service import keys
from fusionkv.protos.runtime.errors import ServiceError
from fusionkv.vllm.background import Background
from fusionkv.vllm.prefixes import Prefix
from fusionkv.vllm.prompts import FusedPrompt, KVLayout
from fusionkv.vllm.transfers import Load, Save, Transfers

log = logging.getLogger("vllm.fusionkv")
_ASK_SECONDS = 2.0
# As long as an entry may wait for its request to be scheduled and loaded.
_LEASE_MS = 60_000


@dataclass(slots=True)
class _Known:
    """A request that waits or runs. asked: tokens from the first on whose KV is there. tried: whether to load it."""

    source: FusedPrompt | Prefix | None
    asked: "Future[int] | None" = None
    namespaces: tuple[bytes, ...] = ()
    leases: list[int] = field(default_factory=list)
    tried: bool = False


class Scheduling:
    """Never promises KV that was not confirmed a moment ago, and never tries a load again that failed."""

    def __init__(self, background: Background, model: str, layout: KVLayout, ranks: int, chunk_tokens: int) -> None:
        """model: whose fingerprint is compared: a directory or a hub id. ranks: how many share the heads."""
        self._background = background
        self._layout, self._ranks, self._chunk_tokens = layout, ranks, chunk_tokens
        self._fingerprint = background.run(asyncio.to_thread(lambda: fingerprint(resolve(model))))
        self._requests: dict[str, _Known] = {}
        self._next = Transfers()

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Tokens behind the first `computed` whose KV can be loaded, beside steps; None: ask again."""
        known = self._requests.get(request.request_id) or self._new(request)
        if known.tried or known.asked is None:
            return 0, False
        if not known.asked.done():
            return None, False
        tokens = known.asked.result()
        if tokens > computed:
            return tokens - computed, True
        if tokens and isinstance(known.source, FusedPrompt):
            known.tried = True
            self._release(known.source, "")  # vLLM's prefix cache has all of it
        return 0, False

    def allocated(self, request: Any, pages: tuple[int, ...], tokens: int) -> None:
        """A request has its pages: so many tokens, behind those that were computed, are to be loaded."""
        known = self._requests.get(request.request_id)
        if known is None or known.tried or known.asked is None or known.source is None or tokens == 0:
            return
        known.tried = True
        stop = known.asked.result()
        load = Load(request.request_id, pages, stop - tokens, stop, known.source, known.namespaces)
        self._next.loads.append(load)

    def transfers(self) -> Transfers:
        """Those of the next step."""
        now, self._next = self._next, Transfers()
        return now

    def finished(self, request: Any, pages: tuple[int, ...], whole: bool) -> bool:
        """A request has ended; whether its pages are needed until what is saved of them was read.

        whole: whether it came to its end, so that all of its prompt was computed.
        """
        known = self._requests.pop(request.request_id, None)
        if known is None:
            return False
        for lease in known.leases:
            self._background.run(self._end(lease))
        if isinstance(known.source, FusedPrompt) and not known.tried:
            self._release(known.source, "the request ended before vLLM loaded its KV")
        prefix, there = known.source, known.asked.result() if known.asked and known.asked.done() else 0
        if not whole or not isinstance(prefix, Prefix) or not known.namespaces:
            return False
        first = there // prefix.tokens
        if first == len(prefix.digests):
            return False
        self._next.saves.append(Save(request.request_id, pages, first, prefix, known.namespaces))
        return True

    def _new(self, request: Any) -> _Known:
        try:
            source: FusedPrompt | Prefix | None = FusedPrompt.of(request.kv_transfer_params)
        except ValueError as error:
            log.warning("%s: %s", request.request_id, error)
            source = None
        else:
            if source is None and self._background.cache is not None:
                source = Prefix.of(request.prompt_token_ids, request.cache_salt or "", self._chunk_tokens)
        known = self._requests[request.request_id] = _Known(source)
        if isinstance(source, FusedPrompt):
            known.asked = self._background.run(self._held(source, list(request.prompt_token_ids)))
        elif source is not None and source.digests:
            known.asked = self._background.run(self._found(known, source))
        return known

    async def _held(self, source: FusedPrompt, prompt: list[int]) -> int:
        """Tokens of a fused prompt that is there, and this request's; 0 if it is not."""
        try:
            model = await asyncio.wrap_future(self._fingerprint)
            why = source.mismatch(self._layout, model.hex(), prompt)
            if not why:
                worker = self._background.worker(source.worker)
                await worker.hold_prefill(bytes.fromhex(source.handle), _ASK_SECONDS)
                return source.tokens
        except (ServiceError, OSError) as error:
            why = str(error)
        log.warning("vLLM computes a prompt itself: %s", why)
        self._release(source, why)
        return 0

    async def _found(self, known: _Known, prefix: Prefix) -> int:
        """Tokens of a prefix that the cache service has for all ranks, leased."""
        try:
            model = await asyncio.wrap_future(self._fingerprint)
            known.namespaces = tuple(self._namespace(model, prefix, rank) for rank in range(self._ranks))
            chunks = len(prefix.digests)
            for namespace in known.namespaces:
                assert self._background.cache is not None
                path = [(digest, ()) for digest in prefix.path(chunks)]
                lookup = await self._background.cache.lookup(
                    namespace, path, lease_ms=_LEASE_MS, timeout=_ASK_SECONDS
                )
                if lookup.lease:
                    known.leases.append(lookup.lease)
                chunks = min(chunks, prefix.found(lookup))
        except (ServiceError, OSError) as error:
            log.warning("vLLM computes a prefix itself: %s", error)
            return 0
        return chunks * prefix.tokens

    def _namespace(self, model: bytes, prefix: Prefix, rank: int) -> bytes:
        settings = {"engine": "vllm", "dtype": self._layout.dtype, "rank": f"{rank} of {self._ranks}"}
        return keys.namespace(model, settings, prefix.tenant)

    def _release(self, source: FusedPrompt, why: str) -> None:
        async def release() -> None:
            handle = bytes.fromhex(source.handle)
            await self._background.worker(source.worker).release_prefill(handle, error=why[:500])

        self._background.run(release())

    async def _end(self, lease: int) -> None:
        assert self._background.cache is not None
        await self._background.cache.release(lease)
