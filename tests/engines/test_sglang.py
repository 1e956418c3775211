"""SGLang's HiCache with our storage back-end: its own factory and host pools, over a cache service."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from fusionkv.kvcache_service.adapters import engine_blobs
from tests.waiting import wait_until

pytest.importorskip("sglang", reason="SGLang is not installed: make test-engines", exc_type=ImportError)

from sglang.srt.mem_cache.device_pool_info import (  # pyright: ignore[reportMissingImports]
    KVBufferLayout,
    KVBuffers,
    MambaStateBufferInfo,
    MHABufferInfo,
    MLABufferInfo,
)
from sglang.srt.mem_cache.hicache_storage import (  # pyright: ignore[reportMissingImports]
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool  # pyright: ignore[reportMissingImports]
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope  # pyright: ignore[reportMissingImports]
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost  # pyright: ignore[reportMissingImports]
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # pyright: ignore[reportMissingImports]
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost  # pyright: ignore[reportMissingImports]
from sglang.srt.mem_cache.storage import StorageBackendFactory  # pyright: ignore[reportMissingImports]

pytestmark = pytest.mark.system
PAGE, LAYERS, HEADS, DIM = 16, 4, 2, 64
SECONDS = 2.0
KEYS = [f"{n:064x}" for n in range(12)]
DIRECT = ["page_first", "page_first_direct", "page_head"]


def host_pool(layout: str = "page_first", seed: int = 0, heads: int = HEADS, dtype: Any = torch.bfloat16) -> Any:
    """SGLang's own pool in host memory, of 256 tokens and more; with content of its own, or empty (seed 0)."""
    device = [torch.zeros(128, heads, DIM, dtype=dtype) for _ in range(2 * LAYERS)]
    pointers = torch.tensor([each.data_ptr() for each in device], dtype=torch.uint64)
    buffers = KVBuffers(
        k=tuple(device[:LAYERS]), v=tuple(device[LAYERS:]), k_data_ptrs=pointers[:LAYERS],
        v_data_ptrs=pointers[LAYERS:], layout=KVBufferLayout.NHD,
    )  # fmt: skip
    info = MHABufferInfo(
        buffers=buffers, page_size=PAGE, head_num=heads, head_dim=DIM, v_head_dim=DIM, dtype=dtype,
        device=torch.device("cpu"),
    )  # fmt: skip
    with host_memory_budget_scope(1 << 30):
        pool = MHATokenToKVPoolHost(
            info, 2.0, 0, PAGE, layout, pin_memory=False, device_capacity_tokens=128, start_layer=0, end_layer=LAYERS
        )
    if seed:
        pool.kv_buffer.copy_(torch.rand(pool.kv_buffer.shape, generator=torch.Generator().manual_seed(seed)))
    else:
        pool.kv_buffer.zero_()
    return pool


def pages(pool: Any, indices: torch.Tensor) -> list[torch.Tensor]:
    return [pool.get_data_page(at) for at in indices[::PAGE].tolist()]


def indices_of(*numbers: int) -> torch.Tensor:
    """The tokens of pages of a pool."""
    return torch.cat([torch.arange(number * PAGE, (number + 1) * PAGE) for number in numbers])


@contextmanager
def storage(address: str, pool: Any, rank: dict[str, Any] | None = None, **extra: Any) -> Iterator[Any]:
    """Our back-end, as SGLang makes it."""
    place = {"module_path": "fusionkv.kvcache_service.adapters.sglang", "class_name": "FusionKVStorage"}
    extra = {"backend_name": "fusionkv", **place, "interface_v1": 1, "cache": address, "seconds": SECONDS, **extra}
    ranks = {
        "tp_rank": 0, "tp_size": 2, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
        "is_mla_model": False, "enable_storage_metrics": False, "model_name": "m", **(rank or {}),
    }  # fmt: skip
    config = HiCacheStorageConfig(**ranks, is_page_first_layout=True, extra_config=extra)
    made = StorageBackendFactory.create_backend("dynamic", config, pool)
    try:
        made.register_mem_pool_host(pool)
        made.on_host_pools_registered()
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("layout", [*DIRECT, "layer_first"])
def test_pages_of_one_instance_are_loaded_by_another(cache: str, layout: str) -> None:
    first, second = host_pool(layout, seed=1), host_pool(layout)
    out, into = indices_of(*range(8)), indices_of(*range(7, -1, -1))
    with storage(cache, first) as one, storage(cache, second) as other:
        assert other.batch_exists(KEYS[:8]) == 0
        assert other.batch_get_v1(KEYS[:8], into) == [False] * 8
        assert one.batch_set_v1(KEYS[:8], out) == [True] * 8
        assert one.batch_set_v1(KEYS[:8], out) == [True] * 8
        assert other.batch_exists(KEYS) == 8
        assert other.exists(KEYS[7])
        assert other.batch_get_v1(KEYS[:9], indices_of(*range(9))) == [True] * 8 + [False]
        assert other.batch_get_v1(KEYS[:8], into) == [True] * 8
        assert all(map(torch.equal, pages(first, out), pages(second, into)))
        assert other.batch_get_v1(KEYS[:8], into[1:]) == [False] * 8
        assert one.batch_set_v1(KEYS[8:], into[1:]) == [False] * 4
        one.clear()
        assert other.batch_exists(KEYS) == 0


@pytest.mark.parametrize("layout", DIRECT)
def test_bytes_come_from_the_pool_and_go_into_it(cache: str, layout: str, monkeypatch: Any) -> None:
    pool = host_pool(layout, seed=1)
    with storage(cache, pool) as made:
        for name in ("get_data_page", "get_dummy_flat_data_page", "set_from_flat_data_page"):
            monkeypatch.delattr(MHATokenToKVPoolHost, name)
        assert made.batch_set_v1(KEYS[:2], indices_of(0, 1)) == [True, True]
        assert made.batch_get_v1(KEYS[:2], indices_of(2, 3)) == [True, True]


def test_whole_pages_without_interface_v1(cache: str) -> None:
    """As SGLang's controller does it: by tensors of its own."""
    first, second = host_pool(seed=1), host_pool()
    with storage(cache, first, interface_v1=0) as one, storage(cache, second, interface_v1=0) as other:
        assert one.batch_set(KEYS[:3], pages(first, indices_of(0, 1, 2)))
        assert one.set(KEYS[3], pages(first, indices_of(3))[0])
        assert other.batch_exists(KEYS) == 4
        found = other.batch_get(KEYS[:5], [second.get_dummy_flat_data_page() for _ in range(5)])
        assert found[4] is None
        assert all(map(torch.equal, found[:4], pages(first, indices_of(0, 1, 2, 3))))
        assert other.get(KEYS[9], second.get_dummy_flat_data_page()) is None


@pytest.mark.parametrize(
    ("pool", "rank", "extra"),
    [
        ({"dtype": torch.float16}, {}, {}),
        ({"heads": 4}, {}, {}),
        ({"layout": "page_first_direct"}, {}, {}),
        ({}, {"tp_rank": 1}, {}),
        ({}, {"tp_size": 4}, {}),
        ({}, {"pp_size": 2}, {}),
        ({}, {"attn_cp_size": 2}, {}),
        ({}, {"model_name": "n"}, {}),
        ({}, {}, {"tenant": "t"}),
        ({}, {}, {"weights": "2"}),
        ({}, {}, {"interface_v1": 0}),
    ],
    ids=str,
)
def test_others_miss(cache: str, pool: dict[str, Any], rank: dict[str, Any], extra: dict[str, Any]) -> None:
    with storage(cache, host_pool(seed=1)) as made, storage(cache, host_pool(**pool), rank, **extra) as other:
        assert made.batch_set_v1(KEYS[:2], indices_of(0, 1)) == [True, True]
        assert made.batch_exists(KEYS[:2]) == 2
        assert other.batch_exists(KEYS[:2]) == 0
        assert other.batch_get_v1(KEYS[:2], indices_of(0, 1)) == [False, False]


def test_pools_beside_kv(cache: str) -> None:
    """An anchor without bytes, a pool with every page, and one with the last pages of prefixes."""
    anchor, every, last = LogicalHostPool(256, PAGE), host_pool(seed=1), host_pool(seed=2)
    with storage(cache, anchor) as made:
        for pool, name in ((anchor, PoolName.KV), (every, PoolName.DRAFT), (last, PoolName.SWA)):
            made.register_mem_host_pool_v2(pool, name)
        assert made.batch_exists(KEYS) == 12
        assert made.batch_set_v1(KEYS, indices_of(*range(12))) == made.batch_get_v1(KEYS, None) == [True] * 12
        given = [
            PoolTransfer(PoolName.DRAFT, indices_of(*range(9)), keys=KEYS[:9]),
            PoolTransfer(PoolName.SWA, indices_of(1, 2, 5, 6), keys=[*KEYS[1:3], *KEYS[5:7]]),
        ]
        assert made.batch_set_v2(given) == {PoolName.DRAFT: [True] * 9, PoolName.SWA: [True] * 4}
        asked = [
            PoolTransfer(PoolName.DRAFT),
            PoolTransfer(PoolName.SWA, keys=KEYS[:2], hit_policy=PoolHitPolicy.TRAILING_PAGES),
        ]
        found = made.batch_exists_v2(KEYS, asked)
        assert found.restorable_prefix_pages == [3, 7]
        assert found.kv_hit_pages == 7
        assert found.extra_pool_hit_pages == {PoolName.KV: 12, PoolName.DRAFT: 9, PoolName.SWA: 7}
        assert made.batch_exists_v2(KEYS[:7], asked[:1]).restorable_prefix_pages == [*range(1, 8)]
        before = pages(last, indices_of(5, 6))
        last.kv_buffer.zero_()
        transfer = PoolTransfer(PoolName.SWA, indices_of(8, 9), keys=KEYS[5:7])
        assert made.batch_get_v2([transfer]) == {PoolName.SWA: [True, True]}
        assert all(map(torch.equal, before, pages(last, indices_of(8, 9))))
        with pytest.raises(ValueError, match="not supported"):
            made.batch_exists_v2(KEYS, [PoolTransfer(PoolName.SWA, hit_policy=PoolHitPolicy.BLOCK_GROUPS)])


def mla_pool(seed: int = 0) -> Any:
    """As `host_pool`, of a model with MLA."""
    device = tuple(torch.zeros(128, 1, DIM, dtype=torch.bfloat16) for _ in range(LAYERS))
    info = MLABufferInfo(
        buffers=device, data_ptrs=torch.tensor([each.data_ptr() for each in device], dtype=torch.uint64),
        layer_indices=tuple(range(LAYERS)), device_layer_num=LAYERS, page_size=PAGE, kv_lora_rank=DIM - 16,
        qk_rope_head_dim=16, kv_cache_dim=DIM, dtype=torch.bfloat16, device=torch.device("cpu"),
    )  # fmt: skip
    with host_memory_budget_scope(1 << 30):
        pool = MLATokenToKVPoolHost(
            info, 2.0, 0, PAGE, "page_first", pin_memory=False, device_capacity_tokens=128, start_layer=0,
            end_layer=LAYERS, target_layer_num=LAYERS,
        )  # fmt: skip
    pool.kv_buffer.copy_(torch.rand(pool.kv_buffer.shape, generator=torch.Generator().manual_seed(seed)) * bool(seed))
    return pool


def mamba_pool(seed: int = 0, slot_states: bool = False) -> Any:
    """SGLang's pool of recurrent states, two kinds of which a slot holds, or three."""
    more = (torch.zeros(16, 8),) if slot_states else ()
    info = MambaStateBufferInfo(
        temporal=torch.zeros(3, 16, 4, 8), conv=(torch.zeros(3, 16, 6, dtype=torch.bfloat16),),
        extra_checkpoint_buffers=more,
    )  # fmt: skip
    with host_memory_budget_scope(1 << 30):
        pool = MambaPoolHost(info, 2.0, 0, device_capacity=16, pin_memory=False, layout="page_first")
    for buffer in (pool.temporal_buffer, *pool.conv_buffer, *pool.slot_state_buffers):
        buffer.copy_(torch.rand(buffer.shape, generator=torch.Generator().manual_seed(seed)) * bool(seed))
    return pool


@pytest.mark.parametrize("slot_states", [False, True])
def test_recurrent_states(cache: str, slot_states: bool) -> None:
    first, second = mamba_pool(1, slot_states), mamba_pool(0, slot_states)
    with storage(cache, host_pool()) as one, storage(cache, host_pool()) as other:
        one.register_mem_host_pool_v2(first, PoolName.MAMBA)
        other.register_mem_host_pool_v2(second, PoolName.MAMBA)
        given = PoolTransfer(PoolName.MAMBA, torch.tensor([3, 5]), keys=KEYS[:2])
        assert one.batch_set_v2([given]) == {PoolName.MAMBA: [True, True]}
        asked = PoolTransfer(PoolName.MAMBA, torch.tensor([9, 8, 7]), keys=KEYS[:3])
        assert other.batch_get_v2([asked]) == {PoolName.MAMBA: [True, True, False]}
        for there, here in ((3, 9), (5, 8)):
            assert torch.equal(first.get_data_page(there), second.get_data_page(here))
        assert first.get_data_page(3).any()


def test_ranks_with_mla_share_its_kv_and_nothing_of_their_own(cache: str) -> None:
    mla, first, second = {"is_mla_model": True}, mla_pool(seed=1), mla_pool()
    with storage(cache, first, mla) as one, storage(cache, second, {**mla, "tp_rank": 1}) as other:
        assert one.batch_set_v1(KEYS[:3], indices_of(0, 1, 2)) == [True] * 3
        assert other.batch_exists(KEYS) == 3
        assert other.batch_get_v1(KEYS[:3], indices_of(4, 5, 6)) == [True] * 3
        assert all(map(torch.equal, pages(first, indices_of(0, 1, 2)), pages(second, indices_of(4, 5, 6))))
        for made in (one, other):
            made.register_mem_host_pool_v2(host_pool(seed=1), PoolName.DRAFT)
            made.register_mem_host_pool_v2(mamba_pool(seed=1), PoolName.MAMBA)
        draft = PoolTransfer(PoolName.DRAFT, indices_of(0, 1), keys=KEYS[:2])
        states = PoolTransfer(PoolName.MAMBA, torch.tensor([0, 1]), keys=KEYS[:2])
        assert one.batch_set_v2([draft, states]) == {PoolName.DRAFT: [True, True], PoolName.MAMBA: [True, True]}
        assert other.batch_get_v2([draft, states]) == {PoolName.DRAFT: [False, False], PoolName.MAMBA: [False, False]}


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_faults_are_misses_in_time(start: Any, fault: signal.Signals, monkeypatch: Any) -> None:
    """Struck in the middle of loads; afterwards, the service is used again."""
    monkeypatch.setattr(engine_blobs, "_AWAY_SECONDS", 0.1)
    service, first, second = start(), host_pool(seed=1), host_pool()
    places = indices_of(*range(12))
    right = pages(first, places)
    with storage(service.address, first) as one, storage(service.address, second) as other:
        assert all(one.batch_set_v1(KEYS, places))

        def load() -> bool:
            """Whether all are loaded; those that are have the right bytes."""
            second.kv_buffer.zero_()
            done = other.batch_get_v1(KEYS, places)
            assert all(torch.equal(a, b) for a, b, hit in zip(pages(second, places), right, done, strict=True) if hit)
            return all(done)

        threading.Timer(0.3, lambda: service.process.send_signal(fault)).start()
        began = time.monotonic()
        while load():
            began = time.monotonic()
        assert time.monotonic() - began < SECONDS + 1
        began = time.monotonic()
        assert other.batch_exists(KEYS) == 0
        assert not any(one.batch_set_v1([f"new {key}" for key in KEYS], places))
        assert other.batch_exists_v2(KEYS, []).kv_hit_pages == 0
        assert time.monotonic() - began < 3 * SECONDS + 1
        if fault == signal.SIGSTOP:
            service.process.send_signal(signal.SIGCONT)
        else:
            start()
        wait_until(load)


@pytest.mark.parametrize(
    ("rank", "extra", "why"),
    [
        ({}, {"cachee": "x"}, "extra-config.cachee is not one of cache, tenant, weights"),
        ({"tp_lcm_size": 4}, {}, "tp_lcm_size is not supported"),
        ({"model_name": None}, {}, "set weights"),
    ],
)
def test_wrong_configuration(rank: dict[str, Any], extra: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why), storage("127.0.0.1:1", host_pool(), rank, **extra):
        pass
