"""Loads cached chunks from host memory into the pool, layer by layer, while the model computes."""

from collections.abc import Iterable, Sequence

import torch

from fusionkv.bench.gpu.workload import Part


class HostCache:
    """KV of a prompt's chunks in pinned host memory: [chunks, layers, 2, tokens, kv_heads, head_dim].

    Layers are copied in order on a separate stream, and each layer of the model waits only for its own keys. Without
    CUDA, copies are synchronous.
    """

    def __init__(self, pool: torch.Tensor, parts: Sequence[Part], layers: Iterable[torch.nn.Module]) -> None:
        """pool: [layers, 2, slots, kv_heads, head_dim]. parts: slots of the chunks, all of the same length."""
        count, _, _, heads, dim = pool.shape
        size = (len(parts), count, 2, parts[0].length, heads, dim)
        self._cuda = pool.device.type == "cuda"
        host = torch.empty(size, dtype=pool.dtype, pin_memory=self._cuda)
        for chunk in host:
            # Generated on the device: the CPU would take seconds.
            chunk.copy_(torch.randn(chunk.shape, dtype=pool.dtype, device=pool.device))
        self.bytes = host.nbytes
        # Views are made once, because a chunk's slots are known before loading.
        self._sources = [[chunk[layer, kv] for chunk in host for kv in (0, 1)] for layer in range(count)]
        self._targets = [
            [pool[layer, kv, part.slot : part.slot + part.length] for part in parts for kv in (0, 1)]
            for layer in range(count)
        ]
        if self._cuda:
            self._stream = torch.cuda.Stream(pool.device)
            self._ready = [torch.cuda.Event() for _ in range(count)]
            for layer, event in zip(layers, self._ready, strict=True):
                layer.register_forward_pre_hook(lambda *_, event=event: torch.cuda.current_stream().wait_event(event))

    def load(self) -> None:
        """Launches all copies. They wait for the current stream, where an earlier forward may still read the pool."""
        if not self._cuda:
            for targets, sources in zip(self._targets, self._sources, strict=True):
                torch._foreach_copy_(targets, sources)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for targets, sources, event in zip(self._targets, self._sources, self._ready, strict=True):
                torch._foreach_copy_(targets, sources, non_blocking=True)
                event.record()
