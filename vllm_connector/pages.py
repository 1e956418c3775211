"""Reads and writes vLLM's paged KV cache by token, for any page layout of the attention backend."""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

# Base of the digits that encode positions in `_element_offsets`: exact in every dtype of KV.
_BASE = 128
_NUMBER = re.compile(r"\d+")


class Pages:
    """The attention layers of this rank with their pages, in the model's order."""

    def __init__(self, caches: Mapping[str, torch.Tensor], layers: Mapping[str, Any], blocks: int) -> None:
        """Detects the layout of the pages.

        Raises ValueError if the KV of some layer is not plain keys and values in the model's dtype.

        Args:
            caches, layers: KV cache and attention layer by the layer's name.
            blocks: number of pages of each layer.
        """
        self._layers: list[tuple[Any, torch.Tensor]] = []
        for name in sorted(caches, key=lambda name: [int(n) for n in _NUMBER.findall(name)]):
            layer, cache = layers[name], caches[name]
            if not hasattr(layer.impl, "do_kv_cache_update"):
                raise ValueError(f"{type(layer.impl).__name__} of {name} has no do_kv_cache_update")
            if cache.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                raise ValueError(f"the KV cache has dtype {cache.dtype}: set kv_cache_dtype to auto")
            self._layers.append((layer, cache))
        layer, cache = self._layers[0]
        self.dtype, self.device = cache.dtype, cache.device
        self.heads, self.head_dim = layer.num_kv_heads, layer.head_size
        (self._dim, *others) = [dim for dim, size in enumerate(cache.shape) if size == blocks]
        if others:
            raise ValueError(f"can't tell which dimension of {tuple(cache.shape)} is that of the {blocks} pages")
        self.page_tokens = cache.numel() // blocks // (2 * self.heads * self.head_dim)

    def __len__(self) -> int:
        return len(self._layers)

    def token_bytes(self) -> int:
        return len(self) * 2 * self.heads * self.head_dim * self.dtype.itemsize

    def write(self, kv: Iterable[Iterable[torch.Tensor]], pages: Sequence[int], start: int) -> Iterator[None]:
        """Writes tokens of a request from position `start` on: a layer with each item that is drawn.

        Args:
            kv: keys and values of each layer, `[tokens, kv_heads, head_dim]`, on any device.
            pages: the request's pages.
        """
        slots: torch.Tensor | None = None
        for (layer, cache), both in zip(self._layers, kv, strict=True):
            tensors = [x.to(self.device, self.dtype).contiguous() for x in both]
            slots = self._slots(pages, start, start + len(tensors[0])) if slots is None else slots
            # The backend's own write, because layouts differ: on CPU by instruction set, elsewhere by strides.
            with torch.cuda.device_of(cache):  # Triton launches kernels on the thread's own device
                layer.impl.do_kv_cache_update(layer, *tensors, cache, slots)
            yield

    def read(self, pages: Sequence[int], start: int, stop: int) -> torch.Tensor:
        """Reads tokens `[start, stop)` of a request, in the shape that `write` takes, into host memory."""
        first = start // self.page_tokens
        indices = torch.tensor(pages[first : -(-stop // self.page_tokens)], device=self.device)
        inside = slice(start - first * self.page_tokens, stop - first * self.page_tokens)
        out = torch.empty(len(self), 2, stop - start, self.heads, self.head_dim, dtype=self.dtype)
        for into, (_, cache) in zip(out, self._layers, strict=True):
            flat = cache.index_select(self._dim, indices).movedim(self._dim, 0).reshape(len(indices), -1)
            for tensor, order in zip(into, self._element_offsets, strict=True):
                tensor.copy_(flat[:, order].view(-1, self.heads, self.head_dim)[inside])
        return out

    def _slots(self, pages: Sequence[int], start: int, stop: int) -> torch.Tensor:
        at = torch.arange(start, stop)
        table = torch.tensor(pages, dtype=torch.int64)
        return (table[at // self.page_tokens] * self.page_tokens + at % self.page_tokens).to(self.device)

    @cached_property
    def _element_offsets(self) -> list[torch.Tensor]:
        """Where in a page each element of keys and of values lies: int64 `[page_tokens * kv_heads * head_dim]`.

        Found by writing a page of numbers through the backend, digit by digit.
        """
        layer, cache = self._layers[0]
        shape = list(cache.shape)
        shape[self._dim] = 1
        count = self.page_tokens * self.heads * self.head_dim
        numbers = torch.arange(count, device=self.device).view(self.page_tokens, self.heads, self.head_dim)
        slots = torch.arange(self.page_tokens, device=self.device)
        powers = range(next(digits for digits in itertools.count(1) if _BASE**digits >= count))
        orders = []
        for which in range(2):
            there = torch.zeros(2 * count, dtype=torch.int64, device=self.device)
            # The last digit marks the elements that were written at all.
            for digit in (*(numbers // _BASE**power % _BASE for power in reversed(powers)), torch.ones_like(numbers)):
                page = torch.zeros(shape, dtype=self.dtype, device=self.device)
                given = [torch.zeros(numbers.shape, dtype=self.dtype, device=self.device) for _ in range(2)]
                given[which].copy_(digit)
                with torch.cuda.device_of(cache):
                    layer.impl.do_kv_cache_update(layer, *given, page, slots)
                there = there * _BASE + page.movedim(self._dim, 0).reshape(-1).long()
            (written,) = (there % _BASE).nonzero(as_tuple=True)
            order = written[(there[written] // _BASE).argsort()]
            if len(order) != count:
                raise ValueError(f"{type(layer.impl).__name__} wrote {len(order)} of {count} elements of a page")
            orders.append(order)
        return orders
