"""Handover of prefilled prompts to another engine: holds their KV in mappable memory until released or timed out."""

import asyncio
import hashlib
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from fusionkv.fusion_worker.compute.engine import TPGroup
from fusionkv.fusion_worker.compute.plan import PrefillPlan
from fusionkv.fusion_worker.models import Model
from fusionkv.fusion_worker.pool.kv_pool import KVPool
from fusionkv.fusion_worker.prompt import Prompt
from fusionkv.fusion_worker.transfer.pinned import locked
from fusionkv.kernels.segments import QuerySpan
from fusionkv.protos.fusion.v1 import fusion_pb2 as pb
from fusionkv.protos.runtime.cancellation import to_the_end
from fusionkv.protos.runtime.checksum import checksum
from fusionkv.protos.runtime.errors import InvalidArgument, NotFound, ResourceExhausted

HANDLE_BYTES = 16


class HeldPrompt:
    """A prompt's KV, `[layers, 2, tokens, kv_heads of all ranks, head_dim]`, in anonymous memory (memfd).

    Attributes:
        expires: when it is dropped, on the monotonic clock.
        outcome: set on release: why the KV could not be used; empty if it was.
    """

    def __init__(self, size: int) -> None:
        """Raises OSError when out of file descriptors or memory."""
        self.handle = os.urandom(HANDLE_BYTES)
        self._file = os.memfd_create("fusionkv-prompt")
        try:
            os.truncate(self._file, size)
            self.data = memoryview(mmap.mmap(self._file, size))
        except OSError:
            os.close(self._file)
            raise
        self.expires = time.monotonic()
        self.outcome: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._released = 0

    @property
    def path(self) -> str:
        """A path for processes of the same user on this machine, outside separate containers."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def release(self, ranks: int, error: str) -> None:
        """Releases the KV for one of `ranks` ranks. error: why that rank could not use it; empty if it did."""
        self._released += 1
        if not self.outcome.done() and (error or self._released >= ranks):
            self.outcome.set_result(error)

    def close(self) -> None:
        """Closes the file. The memory is freed when the last mapping or stream ends."""
        os.close(self._file)
        # In a thread: freeing 1 GiB takes 0.2 s.
        last = [self.data]
        del self.data
        asyncio.get_running_loop().run_in_executor(None, last.clear)


class Handover:
    """The prompts that a worker holds for other engines."""

    def __init__(self, pool: KVPool, model: Model, tp: TPGroup, max_bytes: int, seconds: float) -> None:
        """max_bytes: of all held prompts together. seconds: how long a prompt is kept after `fill` or a `hold`."""
        self._pool, self._model, self._tp = pool, model, tp
        self._max_bytes, self._seconds = max_bytes, seconds
        self._held: dict[bytes, HeldPrompt] = {}
        self.bytes = 0

    @contextmanager
    def room(self, tokens: int) -> Iterator[HeldPrompt]:
        """Allocates memory for a prompt's KV, and frees it on exit. Its handle is unknown until `fill`.

        Raises ResourceExhausted if the size limit is reached, or the process is out of file descriptors or memory.
        """
        size = tokens * self._model.token_bytes
        if self.bytes + size > self._max_bytes:
            raise ResourceExhausted(
                f"the prompt's KV takes {size} bytes, and prompts that are not yet fetched take {self.bytes} of "
                f"{self._max_bytes} bytes: try again, or raise prefill_bytes"
            )
        try:
            held = HeldPrompt(size)
        except OSError as error:
            raise ResourceExhausted(f"there is no room for the prompt's KV of {size} bytes: {error}") from error
        self.bytes += size
        try:
            yield held
        finally:
            self._held.pop(held.handle, None)
            self.bytes -= size
            held.close()

    async def fill(self, held: HeldPrompt, plan: PrefillPlan, prompt: Prompt) -> pb.PrefilledKV:
        """Copies a prompt's KV from the pool, and makes its handle known. The plan's parts must be in the pool."""
        shape, ranks = self._model.kv, self._tp.ranks.count
        span = QuerySpan(0, 1, plan.positions[-1:], plan.visible())
        numbers = np.frombuffer(held.data, np.uint8)
        whole = torch.from_numpy(numbers).view(shape.dtype)
        whole = whole.view(shape.layers, 2, prompt.tokens, shape.kv_heads * ranks, shape.head_dim)

        def copy() -> bytes:
            if ranks == 1:
                with locked(held.data, self._pool.kv.device):
                    copy_prompt(span, self._pool.kv, self._model, whole)
            else:
                parts = self._tp.copy(partial(read_prompt, span, self._pool.kv, self._model))
                for heads, part in zip(whole.chunk(ranks, dim=3), parts, strict=True):
                    heads.copy_(part.view(shape.dtype).view_as(heads))
            return checksum(held.data)

        # Runs to the end even if the caller is cancelled, so that the slots are not reused while they are read.
        sum_of_all = await to_the_end(asyncio.to_thread(copy))
        held.expires = time.monotonic() + self._seconds
        self._held[held.handle] = held
        return pb.PrefilledKV(
            handle=held.handle,
            tokens=prompt.tokens,
            prompt_digest=hashlib.sha256(prompt.ids.numpy().astype("<u4").tobytes()).digest(),
            model_fingerprint=self._model.fingerprint,
            dtype=str(shape.dtype).removeprefix("torch."),
            layers=shape.layers,
            kv_heads=shape.kv_heads * ranks,
            head_dim=shape.head_dim,
            checksum=sum_of_all,
            path=held.path,
        )

    async def released(self, held: HeldPrompt) -> str:
        """Waits until the KV is released or times out. Returns why it was not used; empty if it was."""
        while (left := held.expires - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(left):
                    return await asyncio.shield(held.outcome)
            except TimeoutError:
                continue
        return f"the prompt's KV was not fetched within {self._seconds:g} s"

    def hold(self, handle: bytes) -> None:
        """Restarts a prompt's timeout. Raises NotFound when the prompt is gone."""
        self._find(handle).expires = time.monotonic() + self._seconds

    async def read(self, handle: bytes, rank: int, ranks: int) -> memoryview:
        """The bytes of a prompt, or of the heads of one of `ranks` ranks.

        Raises:
            NotFound: the prompt is unknown or gone.
            InvalidArgument: the heads can't be split over so many ranks, or there is no such rank.
        """
        data, shape = self._find(handle).data, self._model.kv
        heads = shape.kv_heads * self._tp.ranks.count
        if ranks < 1 or heads % ranks or rank >= ranks:
            raise InvalidArgument(f"rank {rank} of {ranks}: no such share of {heads} KV heads")
        if ranks == 1:
            return data
        cut = np.frombuffer(data, np.uint8).reshape(-1, ranks, heads // ranks * shape.head_dim * shape.dtype.itemsize)
        own = await asyncio.to_thread(np.ascontiguousarray, cut[:, rank])
        return own.reshape(-1).data

    def release(self, handle: bytes, ranks: int, error: str) -> None:
        """Releases a prompt for one of `ranks` ranks; an unknown handle is ignored."""
        if (held := self._held.get(handle)) is not None:
            held.release(ranks, error)

    def _find(self, handle: bytes) -> HeldPrompt:
        held = self._held.get(handle)
        if held is None or held.expires < time.monotonic():
            raise NotFound("no KV with this handle: it was released, or timed out")
        return held


def prompt_layers(span: QuerySpan, kv: torch.Tensor, model: Model) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields keys, at their positions, and values that a row sees, [tokens, kv_heads, head_dim], of each layer."""
    for pool, rotation in zip(kv, model.rotations, strict=True):
        order = span.in_order(rotation, kv.device)
        yield order.keys(pool[0]), pool[1][order.slots]


def copy_prompt(span: QuerySpan, kv: torch.Tensor, model: Model, into: torch.Tensor) -> None:
    """Writes the KV that a row sees to `into`, [layers, 2, tokens, kv_heads, head_dim]."""
    for out, layer in zip(into, prompt_layers(span, kv, model), strict=True):
        for tensor, found in zip(out, layer, strict=True):
            tensor.copy_(found, non_blocking=True)
    if kv.is_cuda and not into.is_cuda:
        torch.cuda.current_stream(kv.device).synchronize()


def read_prompt(span: QuerySpan, kv: torch.Tensor, model: Model) -> torch.Tensor:
    """This rank's heads of the KV that a row sees, uint8 in host memory."""
    tokens = int(span.positions[-1]) + 1
    out = torch.empty(kv.shape[0], 2, tokens, *kv.shape[3:], dtype=kv.dtype, pin_memory=kv.is_cuda)
    copy_prompt(span, kv, model, out)
    return out.view(-1).view(torch.uint8)
