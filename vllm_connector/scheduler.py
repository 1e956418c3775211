"""The connector in vLLM's scheduler: finds out which prompts have external KV, while others are computed."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from fusionkv.fusion_worker.library.cache import fingerprint
from fusionkv.fusion_worker.library.resolve import resolve
from fusionkv.kvcache_service import keys
from fusionkv.protos.runtime.errors import ServiceError
from fusionkv.vllm_connector.background import Background
from fusionkv.vllm_connector.options import ConnectorOptions
from fusionkv.vllm_connector.prompts import FusedPrompt, KVLayout, KVLoad, KVSave, Prefix, degraded
from fusionkv.vllm_connector.spans import PARAMETER, SpannedPrompt, ticket_of

log = logging.getLogger("vllm.fusionkv")
_LOOKUP_SECONDS = 2.0
# Maximum wait of an entry for its request to be scheduled and loaded.
_LEASE_MS = 60_000
_PREEMPTED = "vLLM preempted the request, and computed its prompt again"


@dataclass(slots=True)
class _RequestState:
    """A waiting or running request.

    Attributes: available: number of tokens, from the first, whose KV is available or can be made. tried: whether its
    load was started or is no longer needed. figures: of a request with spans, once they are known. ticket: of such a
    request.
    """

    source: FusedPrompt | Prefix | SpannedPrompt | None
    available: "Future[int] | None" = None
    namespaces: tuple[bytes, ...] = ()
    leases: list[int] = field(default_factory=list)
    tried: bool = False
    figures: dict[str, Any] = field(default_factory=dict)
    ticket: str = ""


class ConnectorScheduler:
    """Promises only KV that was confirmed recently, and never repeats a failed load."""

    def __init__(
        self,
        background: Background,
        model: str,
        altered: Mapping[str, str],
        layout: KVLayout,
        ranks: int,
        page_tokens: int,
        options: ConnectorOptions,
        separator: Sequence[int] = (),
    ) -> None:
        """Starts to compute the model's fingerprint.

        Args:
            model: directory or hub id of vLLM's model.
            altered: as `alterations` returns.
            ranks: number of ranks that share the heads.
            page_tokens: tokens of a page, vLLM's block size.
            separator: the option's token ids.
        """
        self._background = background
        self._layout, self._ranks = layout, ranks
        self._chunk_tokens, self._page_tokens, self._fuses = options.chunk_tokens, page_tokens, options.pool_bytes > 0
        self._altered, self._separator = dict(altered), tuple(separator)
        self._fingerprint = background.run(asyncio.to_thread(lambda: fingerprint(resolve(model))))
        self._requests: dict[str, _RequestState] = {}
        self._transfers: list[KVLoad | KVSave] = []
        self._told: dict[str, dict[str, Any]] = {}

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Number of tokens after the first `computed` whose KV can be loaded, and whether to load beside steps.

        The number is None while it is not known yet.
        """
        state = self._requests.get(request.request_id) or self._new(request)
        if state.tried or state.available is None:
            if state.tried and isinstance(state.source, SpannedPrompt) and computed < state.source.tokens:
                state.figures = state.figures if state.figures.get("degraded") else degraded(_PREEMPTED)
            return 0, False
        if not state.available.done():
            return None, False
        tokens = state.available.result()
        if tokens > computed and not (isinstance(state.source, SpannedPrompt) and self._repeats(tokens, computed)):
            return tokens - computed, True
        if isinstance(state.source, SpannedPrompt):
            state.figures = state.source.figures(computed)
        if tokens and isinstance(state.source, FusedPrompt):
            state.tried = True
            self._background.run(self._background.release(state.source, ""))  # vLLM's prefix cache holds all of it
        return 0, False

    def _repeats(self, tokens: int, computed: int) -> bool:
        """Whether vLLM's prefix cache has all whole pages of a fused prompt.

        vLLM computes the rest of its last page sooner than it would be fused, for which all of the prompt is.
        """
        return computed > 0 and tokens - computed < self._page_tokens

    def allocated(self, request: Any, pages: tuple[int, ...], tokens: int) -> None:
        """Schedules the load of `tokens` tokens after the computed ones, into the pages allocated for a request."""
        state = self._requests.get(request.request_id)
        if state is None or state.tried or state.available is None or state.source is None or tokens == 0:
            return
        state.tried = True
        stop = state.available.result()
        load = KVLoad(request.request_id, pages, stop - tokens, stop, state.source, state.namespaces)
        self._transfers.append(load)

    def fused(self, figures: Mapping[str, dict[str, Any]]) -> None:
        """Takes the figures of requests with spans from the workers."""
        for request, found in figures.items():
            if (state := self._requests.get(request)) is not None:
                state.figures = found

    def figures(self, request: Any) -> dict[str, Any] | None:
        """The figures of a request with spans; None without spans."""
        state = self._requests.get(request.request_id)
        return state.figures if state is not None and state.figures else None

    def transfers(self) -> list[KVLoad | KVSave]:
        transfers, self._transfers = self._transfers, []
        return transfers

    def told(self) -> dict[str, dict[str, Any]]:
        """The figures of requests that have ended since the last call, by their tickets."""
        told, self._told = self._told, {}
        return told

    def finished(self, request: Any, pages: tuple[int, ...], completed: bool) -> bool:
        """Handles the end of a request; returns whether its pages are needed until its prefix has been read.

        completed: whether the request was completed, so that its whole prompt was computed.
        """
        state = self._requests.pop(request.request_id, None)
        if state is None:
            return False
        if state.ticket:
            self._told[state.ticket] = state.figures
        if isinstance(state.source, Prefix) and state.available is not None:
            self._background.run(self._release_leases(state))
        if isinstance(state.source, FusedPrompt) and not state.tried:
            why = "the request ended before vLLM loaded its KV"
            self._background.run(self._background.release(state.source, why))
        prefix, loaded = state.source, state.available.result() if state.available and state.available.done() else 0
        if not completed or not isinstance(prefix, Prefix) or not state.namespaces:
            return False
        first = loaded // prefix.tokens
        if first == len(prefix.digests):
            return False
        self._transfers.append(KVSave(request.request_id, pages, first, prefix, state.namespaces))
        return True

    def _new(self, request: Any) -> _RequestState:
        source: FusedPrompt | Prefix | SpannedPrompt | None = None
        # Keys of the cache service and the digest of a fused prompt cover the model and the tokens, and nothing else.
        plain = not (request.lora_request or request.mm_features) and request.prompt_embeds is None
        figures: dict[str, Any] = {}
        try:
            source = self._spanned(request, plain) or FusedPrompt.of(request.kv_transfer_params)
        except ValueError as error:
            log.warning("%s: %s", request.request_id, error)
            source, figures = None, degraded(str(error))
        else:
            if source is None and self._background.cache is not None and plain:
                source = Prefix.of(request.prompt_token_ids, request.cache_salt or "", self._chunk_tokens)
        state = self._requests[request.request_id] = _RequestState(source, figures=figures)
        state.ticket = ticket_of(request.kv_transfer_params)
        if isinstance(source, SpannedPrompt):
            state.available = Future()
            state.available.set_result(source.tokens if source.reuses else 0)
        elif isinstance(source, FusedPrompt):
            prompt = list(request.prompt_token_ids) if plain else None
            state.available = self._background.run(self._available_prompt(source, prompt))
        elif source is not None and source.digests:
            state.available = self._background.run(self._available_prefix(state, source))
        return state

    def _spanned(self, request: Any, plain: bool) -> SpannedPrompt | None:
        """A request's prompt with its passages; None if it names and marks none.

        plain: whether its KV depends on its tokens alone. Raises ValueError if its passages can't be fused.
        """
        ids, salt = request.prompt_token_ids or (), request.cache_salt or ""
        source = SpannedPrompt.of(request.kv_transfer_params, ids, salt)
        if source is None and self._separator and PARAMETER not in (request.kv_transfer_params or {}):
            source = SpannedPrompt.separated(ids, self._separator, salt)
        if source is None:
            return None
        if not self._fuses:
            raise ValueError("vLLM fuses no passages: set pool_bytes in kv_connector_extra_config")
        if not plain:
            raise ValueError("the request has an adapter, images or embeddings, and passages are fused without")
        if not request.cache_salt and source.reuses:
            # vLLM files KV under the token ids: a plain request with the same ids would get the approximate KV.
            raise ValueError("a request with passages needs a cache_salt that no plain request has")
        return source

    async def _available_prompt(self, source: FusedPrompt, prompt: list[int] | None) -> int:
        """Number of tokens of a fused prompt, if its KV is available and fits the request; otherwise 0.

        prompt: None for a request whose KV depends on more than its tokens.
        """
        try:
            why = self._mismatch(source, await asyncio.wrap_future(self._fingerprint), prompt)
            if not why:
                async with self._background.worker(source.worker) as worker:
                    await worker.hold_prefill(bytes.fromhex(source.handle), _LOOKUP_SECONDS)
                return source.tokens
        except Exception as error:  # on any error: what `matched` raises ends vLLM's engine
            why = str(error)
        log.warning("vLLM prefills a prompt itself: %s", why)
        self._background.run(self._background.release(source, why))
        return 0

    def _mismatch(self, source: FusedPrompt, model: bytes, prompt: list[int] | None) -> str:
        """Why a fused prompt does not fit a request; empty if it does. prompt: as for `_available_prompt`."""
        for name in self._altered:
            if name != "quantization":  # KV of the weights as they are is what quantised ones come close to
                return f"vLLM's {name} makes another model of its files"
        if prompt is None:
            return "the request has an adapter, images or embeddings, and the KV has none"
        return source.mismatch(self._layout, model.hex(), prompt)

    async def _available_prefix(self, state: _RequestState, prefix: Prefix) -> int:
        """Number of tokens of a prefix that the cache service has for all ranks, leased."""
        try:
            model = await asyncio.wrap_future(self._fingerprint)
            state.namespaces = tuple(self._namespace(model, prefix, rank) for rank in range(self._ranks))
            chunks = len(prefix.digests)
            for namespace in state.namespaces:
                assert self._background.cache is not None
                path = [(digest, ()) for digest in prefix.path(chunks)]
                lookup = await self._background.cache.lookup(
                    namespace, path, lease_ms=_LEASE_MS, timeout=_LOOKUP_SECONDS
                )
                if lookup.lease:
                    state.leases.append(lookup.lease)
                chunks = min(chunks, prefix.exact_chunks(lookup))
        except Exception as error:  # as above
            log.warning("vLLM computes a prefix itself: %s", error)
            return 0
        return chunks * prefix.tokens

    async def _release_leases(self, state: _RequestState) -> None:
        """Releases the leases of a prefix, also those of lookups that are still to be answered."""
        assert self._background.cache is not None
        assert state.available is not None
        await asyncio.wrap_future(state.available)
        for lease in state.leases:
            with suppress(ServiceError):  # it expires
                await self._background.cache.release(lease)

    def _namespace(self, model: bytes, prefix: Prefix, rank: int) -> bytes:
        settings = {"engine": "vllm", "dtype": self._layout.dtype, "rank": f"{rank} of {self._ranks}"}
        return keys.namespace(model, settings | self._altered, prefix.tenant)
