"""The connector in vLLM's workers: copies KV into and out of this rank's pages beside the model's steps."""

import asyncio
import logging
import mmap
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fusionkv.kvcache_service.client import HitKind
from fusionkv.protos.runtime.cancellation import to_the_end
from fusionkv.protos.runtime.checksum import checksum
from fusionkv.protos.runtime.errors import DataLoss, NotFound
from fusionkv.vllm_connector.background import Background
from fusionkv.vllm_connector.options import ConnectorOptions
from fusionkv.vllm_connector.pages import Pages
from fusionkv.vllm_connector.prompts import FusedPrompt, KVLoad, KVSave, Prefix, degraded
from fusionkv.vllm_connector.spans import SpannedPrompt

if TYPE_CHECKING:
    from fusionkv.vllm_connector.fusing import FusedPrefill

log = logging.getLogger("vllm.fusionkv")
# Limits host memory: requests whose pages are copied but not yet put. Further saves are dropped.
_MAX_SAVES = 8
_PUT_SECONDS = 30.0


class ConnectorWorker:
    """Loads and saves of one rank. All methods are called in vLLM's thread."""

    def __init__(
        self,
        background: Background,
        pages: Pages,
        rank: int,
        ranks: int,
        readers: int,
        options: ConnectorOptions,
        fusing: "FusedPrefill | None" = None,
    ) -> None:
        """The pages hold the KV heads of one of `ranks` ranks.

        Args:
            readers: number of ranks that load a prompt: more than `ranks` where several hold the same heads.
            fusing: makes the KV of prompts with spans; None without.
        """
        self._background, self._pages = background, pages
        self._rank, self._ranks, self._readers = rank, ranks, readers
        # After which a load is given up, and vLLM prefills the prompt itself.
        self._seconds, self._fuse_seconds, self._fusing = options.load_seconds, options.fuse_seconds, fusing
        self._fused: dict[str, asyncio.Task[Any] | None] = {}
        self._figures: dict[str, dict[str, Any]] = {}
        self._launched: torch.cuda.Event | None = None
        self._lock = threading.Lock()
        self._saved: set[str] = set()
        self._loaded: set[str] = set()
        self._failed_pages: set[int] = set()
        self._saves = 0

    def start(self, transfers: Sequence[KVLoad | KVSave]) -> None:
        if transfers and self._pages.device.type == "cuda":
            self._launched = torch.cuda.current_stream(self._pages.device).record_event()
        for transfer in transfers:
            if isinstance(transfer, KVSave):
                self._background.run(self._save(transfer))
                continue
            if isinstance(transfer.source, SpannedPrompt):
                self._fused[transfer.request] = None
            self._background.run(self._load(transfer))

    def run_steps(self, busy: bool) -> None:
        """Computes for prompts that are being fused. busy: whether vLLM has requests to compute."""
        if self._fusing is not None:
            self._fusing.run_steps(busy, lambda: bool(self._fused))

    def cancel(self, requests: Iterable[str]) -> None:
        """Stops fusing prompts of requests that have ended."""
        for request in requests:
            if request in self._fused:
                self._background.run(self._cancel(request))

    def tell(self, told: Mapping[str, dict[str, Any]]) -> None:
        """Passes the figures of requests that have ended to who holds their tickets."""
        if self._fusing is not None and told:
            self._background.run(self._fusing.tell(told))

    def figures(self) -> dict[str, dict[str, Any]]:
        """Figures of the prompts that were fused, or why they were not, since the last call."""
        with self._lock:
            figures, self._figures = self._figures, {}
        return figures

    def finished(self) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose pages have been read, and requests whose loads have ended or failed, since the last call."""
        with self._lock:
            saved, self._saved = self._saved, set()
            loaded, self._loaded = self._loaded, set()
        return saved or None, loaded or None

    def failed_pages(self) -> set[int]:
        """Pages that a load failed to fill, since the last call."""
        with self._lock:
            failed, self._failed_pages = self._failed_pages, set()
        return failed

    async def _load(self, load: KVLoad) -> None:
        try:
            if isinstance(load.source, FusedPrompt):
                await self._load_prompt(load, load.source)
            elif isinstance(load.source, Prefix):
                await self._load_prefix(load, load.source)
            else:
                await self._fuse(load, load.source)
        except Exception as error:  # on any error: the request must not wait forever
            log.warning("vLLM prefills a prompt itself: %s", error)
            with self._lock:
                self._failed_pages.update(load.pages[load.start // self._pages.page_tokens :])
        finally:
            with self._lock:
                self._loaded.add(load.request)
                self._fused.pop(load.request, None)

    async def _fuse(self, load: KVLoad, source: SpannedPrompt) -> None:
        assert self._fusing is not None
        steps = self._fusing.steps
        self._fused[load.request] = asyncio.current_task()

        async def write(kv: Iterable[Sequence[torch.Tensor]]) -> None:
            rows = slice(load.start, load.stop)
            layers = ([each[rows] for each in layer] for layer in kv)
            writing = self._pages.write(layers, load.pages, load.start)
            await to_the_end(asyncio.to_thread(steps.draw, writing))

        try:
            async with asyncio.timeout(self._fuse_seconds):
                figures = await self._fusing.fill(source, write)
        except Exception as error:
            why = _why(error, "fused prefill", self._fuse_seconds)
            with self._lock:
                self._figures[load.request] = degraded(why)
            raise RuntimeError(why) from error
        with self._lock:
            self._figures[load.request] = figures

    async def _cancel(self, request: str) -> None:
        if (task := self._fused.get(request)) is not None:
            task.cancel()

    async def _load_prompt(self, load: KVLoad, source: FusedPrompt) -> None:
        shape = (source.layers, 2, source.tokens, source.kv_heads, source.head_dim)
        dtype = getattr(torch, source.dtype)
        size = int(np.prod(shape)) * dtype.itemsize
        try:
            async with asyncio.timeout(self._seconds):
                data = await asyncio.to_thread(_mapped, source, size)
                if data is not None:
                    kv = torch.from_numpy(data).view(dtype).view(shape).chunk(self._ranks, dim=3)[self._rank]
                else:
                    own_heads = np.empty(size // self._ranks, np.uint8)
                    handle = bytes.fromhex(source.handle)
                    async with self._background.worker(source.worker) as worker:
                        await worker.fetch_prefill(handle, self._rank, self._ranks, own_heads.data, self._seconds)
                    if self._ranks == 1 and not await asyncio.to_thread(_verified, source, own_heads):
                        raise DataLoss("the KV of a prompt failed its checksum")
                    kv = torch.from_numpy(own_heads).view(dtype).view(*shape[:3], -1, source.head_dim)
                await self._write(kv[:, :, load.start : load.stop], load.pages, load.start)
        except BaseException as error:
            why = _why(error, "loading", self._seconds)
            self._background.run(self._background.release(source, why, self._readers))
            raise RuntimeError(why) from error
        self._background.run(self._background.release(source, "", self._readers))

    async def _load_prefix(self, load: KVLoad, prefix: Prefix) -> None:
        cache, namespace = self._background.cache, load.namespaces[self._rank]
        assert cache is not None
        size, tokens = prefix.tokens * self._pages.token_bytes(), prefix.tokens
        chunks = range(load.start // tokens, load.stop // tokens)
        path = [(digest, ()) for digest in prefix.path(chunks.stop)]
        async with asyncio.timeout(self._seconds):
            lookup = await cache.lookup(namespace, path, timeout=self._seconds)
            try:
                for chunk in chunks:
                    hit = lookup.hits[1 + chunk]
                    if hit.kind is not HitKind.EXACT or hit.entry is None or hit.entry.size != size:
                        raise NotFound("a prefix has been evicted since its lookup")
                    data = np.empty(size, np.uint8)
                    await cache.fetch(hit.entry, data.data, timeout=self._seconds)
                    if await asyncio.to_thread(checksum, data.data) != hit.entry.checksum:
                        raise DataLoss("a prefix failed its checksum")
                    kv = torch.from_numpy(data).view(self._pages.dtype)
                    kv = kv.view(len(self._pages), 2, tokens, self._pages.heads, self._pages.head_dim)
                    skipped = max(0, load.start - chunk * tokens)
                    await self._write(kv[:, :, skipped:], load.pages, chunk * tokens + skipped)
            finally:
                if lookup.lease:
                    # A lease that is not released expires.
                    self._background.run(cache.release(lookup.lease))

    async def _write(self, kv: Iterable[Iterable[torch.Tensor]], pages: Sequence[int], start: int) -> None:
        def write() -> None:
            if self._launched is not None:
                # A step that vLLM launched before it may still write to these pages, for a request that has ended.
                torch.cuda.current_stream(self._pages.device).wait_event(self._launched)
            for _ in self._pages.write(kv, pages, start):
                pass
            if self._pages.device.type == "cuda":
                torch.cuda.current_stream(self._pages.device).synchronize()

        # Completed even if the time for the load is over: vLLM writes to these pages afterwards.
        await to_the_end(asyncio.to_thread(write))

    async def _save(self, save: KVSave) -> None:
        cache, prefix = self._background.cache, save.prefix
        assert cache is not None
        self._saves += 1
        chunks = range(save.first, len(prefix.digests) if self._saves <= _MAX_SAVES else save.first)
        start, stop = chunks.start * prefix.tokens, chunks.stop * prefix.tokens
        try:
            try:
                kv = await asyncio.to_thread(self._pages.read, save.pages, start, stop) if chunks else None
            finally:
                with self._lock:
                    self._saved.add(save.request)
            for at, chunk in enumerate(chunks):
                assert kv is not None
                data = kv[:, :, at * prefix.tokens : (at + 1) * prefix.tokens].contiguous()
                await cache.put(
                    namespace=save.namespaces[self._rank],
                    path=prefix.path(chunk + 1),
                    tokens=prefix.tokens,
                    base=chunk * prefix.tokens,
                    data=data.view(-1).view(torch.uint8).numpy().data,
                    timeout=_PUT_SECONDS,
                )
        except Exception as error:
            log.warning("a prefix was not saved: %s", error)
        finally:
            self._saves -= 1


def _why(error: BaseException, what: str, seconds: float) -> str:
    if isinstance(error, TimeoutError) and not str(error):
        return f"{what} took longer than {seconds:g} s"
    return str(error) or type(error).__name__


def _mapped(source: FusedPrompt, size: int) -> "np.ndarray[Any, Any] | None":
    """A worker's KV from its file, verified; None if the file is not on this machine."""
    try:
        file = os.open(source.path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        # In another container, the path may be that of another process's file.
        if os.fstat(file).st_size != size:
            return None
        data = np.frombuffer(mmap.mmap(file, size, flags=mmap.MAP_PRIVATE), np.uint8)
    except (OSError, ValueError):
        return None
    finally:
        os.close(file)
    return data if _verified(source, data) else None


def _verified(source: FusedPrompt, data: "np.ndarray[Any, Any]") -> bool:
    return checksum(data.data) == bytes.fromhex(source.checksum)
