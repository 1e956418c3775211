"""The fusion worker's settings: table `[worker]` of the configuration file."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from fusionkv.fusion_worker.library.catalog import KNOWN
from fusionkv.fusion_worker.library.resolve import resolve
from fusionkv.protos.contract.template import template_error
from fusionkv.protos.runtime import process, settings
from fusionkv.protos.runtime.errors import FailedPrecondition
from fusionkv.protos.runtime.settings import setting
from fusionkv.protos.serving import CallingConfig

log = logging.getLogger(__name__)
# The default address of `fusionkv serve kvcache`.
_CACHE = "127.0.0.1:7070"
# The reference model of a clone of the repository, and the known model that is served without a clone.
_MODEL, _FETCHED = Path("models/eased-3"), "smollm2"
_MIN_POOL_BYTES = 1 << 20
STORES = ("plain", "int8", "fp8", "int4")


@dataclass(frozen=True, slots=True)
class WorkerConfig(CallingConfig):
    model: Path = setting(
        _MODEL,
        "model to serve: a directory, a *.gguf file, a Hugging Face hub id, or a name from `fusionkv model list`. "
        "Outside of a clone the default is smollm2, if it has been fetched",
    )
    system: str = setting(
        "",
        "system prompt of requests that bring none; empty uses the chat template's. Each system prompt has stored KV "
        "of its own",
    )
    prompt_template: str = setting(
        "",
        "user message within the chat template, with {passages} and {question}; empty uses the sentence `Answer the "
        "question using the passages.`, the passages, and `Question: {question}`. What is before {passages} belongs "
        "to the system prompt",
    )
    template_date: str = setting(
        "2026-01-01",
        "date (YYYY-MM-DD) of a chat template that states today's. Under another date, stored KV can't be used",
    )
    listen: tuple[str, ...] = setting(("127.0.0.1:7071",), "addresses to listen on: host:port or unix:/path")
    cache: str = setting(
        "", "address of the cache service; empty uses one of this user or root on this machine, `none` uses none"
    )
    device: str = setting("auto", "device to compute on: auto, cpu or cuda[:N]")
    dtype: str = setting(
        "auto", "float32, bfloat16, float16 or auto (the checkpoint's dtype if the device supports it)"
    )
    threads: int = setting(
        0, "CPU threads for computing; 0 uses every core available to the process", low=0, high=1024
    )
    tensor_parallel: int = setting(
        1,
        "tensor-parallel ranks: processes that split the model by heads, each with a GPU or a share of the threads",
        low=1,
    )
    rank_timeout: float = setting(120.0, "seconds that ranks wait for one another before the worker exits", low=1)
    pool_bytes: int = setting(
        0,
        "size of the paged KV pool on each device; 0 takes a GPU's free memory, less a tenth of all its memory, and "
        "1GiB on a CPU",
        bytes=True,
        low=0,
    )
    page_tokens: int = setting(16, "tokens in a page of the pool", low=1, high=1024)
    max_prompt_tokens: int = setting(
        0, "maximum tokens of a prompt and its answer together; 0 uses the model's limit", low=0
    )
    max_new_tokens: int = setting(256, "maximum tokens of an answer when the request sets no limit", low=1)
    max_requests: int = setting(32, "maximum number of requests processed at the same time", low=1)
    max_queue: int = setting(256, "maximum number of waiting requests; further requests are refused", low=0)
    max_step_tokens: int = setting(4096, "maximum tokens in one forward pass; longer prefills are split", low=16)
    max_mixed_tokens: int = setting(
        512, "maximum tokens in a forward pass while other answers are being decoded, which wait for it", low=16
    )
    deterministic: bool = setting(
        False,
        "compute one request at a time in each forward pass: greedy answers are then the same alone and under load, "
        "and fewer answers a second are decoded",
    )
    max_loads: int = setting(8, "maximum number of chunks fetched at the same time, oldest request first", low=1)
    store: str = setting(
        "plain",
        "storage format of KV: plain, int8, fp8 or int4. Quantised KV is lossy, so even an exact hit is stale",
    )
    lookup_timeout: float = setting(
        1.0, "maximum seconds for a lookup; past it, the prompt is prefilled in full", low=0.001
    )
    fetch_timeout: float = setting(
        5.0,
        "maximum seconds to store a chunk, and to fetch a request's chunks; past it, the prompt is prefilled in full",
        low=0.001,
    )
    cache_seconds: float = setting(
        6.0,
        "maximum seconds that a request waits for the cache in total; past it, the prompt is prefilled in full",
        low=0.001,
    )
    max_puts: int = setting(
        64, "maximum number of chunks waiting to be written to the cache; further chunks are dropped", low=0
    )
    prefill_bytes: int = setting(
        1 << 30, "maximum size of prefilled prompts that wait for vLLM to fetch them", bytes=True, low=0
    )
    prefill_seconds: float = setting(
        30.0, "seconds that a prefilled prompt waits for vLLM before it is dropped", low=0.1
    )
    auxiliary: str = setting(
        "", "small auxiliary model that selects tokens for the recipe cacheclip; same forms as `model`"
    )
    auxiliary_pool_bytes: int = setting(
        1 << 28, "size of the auxiliary model's KV pool in host memory", bytes=True, low=1 << 20
    )
    shadow_share: float = setting(
        0.0, "share of greedy answers that an idle worker repeats with full attention, to compare them", low=0, high=1
    )
    shadow_floor: float = setting(
        0.0,
        "minimum share of compared answers that must match; below it, a recipe recomputes more (0: never)",
        low=0,
        high=1,
    )
    signing_keys: Path | None = setting(
        None,
        "file of keys (64 hex digits a line) that sign stored KV: the first key signs, all keys verify, and an entry "
        "that none of them signed is a miss. Without a file, nothing is signed and every entry is accepted",
    )

    def __post_init__(self) -> None:
        if self.store not in STORES:
            raise ValueError(f"store must be one of {', '.join(STORES)}, not {self.store!r}")
        if self.tensor_parallel > 1 and self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"with tensor_parallel, rank i takes GPU i: device can't be {self.device!r}")
        if self.cache not in ("", "none") and not process.is_address(self.cache):
            raise ValueError(f"cache must be host:port, unix:/path or none, not {self.cache!r}")
        process.check_sockets([self.cache])
        if error := template_error(self.prompt_template):
            raise ValueError(error)
        try:
            date.fromisoformat(self.template_date)
        except ValueError as invalid:
            raise ValueError(f"template_date must be YYYY-MM-DD: {invalid}") from invalid
        CallingConfig.__post_init__(self)


def configured(file: Path | None, flags: Mapping[str, Any]) -> WorkerConfig:
    """Loads a worker's settings and resolves model names to directories.

    Raises:
        SettingsError: a setting is unknown or has an invalid value.
        FailedPrecondition: the default model is not in this folder and smollm2 not fetched, or as `resolve`.
        OSError: as `resolve`.
    """
    config = settings.load(WorkerConfig, "worker", file=file, flags=flags)
    if 0 < config.pool_bytes < _MIN_POOL_BYTES:
        raise settings.SettingsError(f"pool_bytes must be 0 or at least 1MiB, not {config.pool_bytes}")
    if config.shadow_floor and not config.shadow_share:
        raise settings.SettingsError("shadow_floor needs shadow_share: no answers are compared")
    if config.model == _MODEL and not _MODEL.is_dir():
        # On the Hugging Face hub, a model of this name would be somebody else's.
        if not KNOWN[_FETCHED].directory.is_dir():
            raise FailedPrecondition(
                f"{_MODEL}, the default model, is only in a clone of the repository: start there, or run `fusionkv "
                f"model get {_FETCHED}`, which is then the default, or set --model"
            )
        config = replace(config, model=Path(_FETCHED))
    auxiliary = str(resolve(config.auxiliary)) if config.auxiliary else ""
    return replace(config, model=resolve(config.model), auxiliary=auxiliary)


def cache_address(setting: str) -> str:
    """The cache service's address: `setting`, or a service found on this machine if it is empty.

    Returns host:port or unix:/path; empty if `setting` is `none` or no service was found.
    """
    if setting:
        return "" if setting == "none" else setting
    addresses = filter(process.listens, (f"unix:{Path('.fusionkv/run/kvcache.sock').absolute()}", _CACHE))
    if address := next(addresses, ""):
        if not process.is_ours(address):
            # Whoever answers lookups decides what this worker computes with.
            log.warning("%s belongs to another user: it is not used; if it is a cache service, set --cache", address)
            return ""
        log.info("using the cache service on this machine, at %s", address)
    else:
        log.warning(
            "no cache service at %s: this worker keeps chunks only in its own pool, while there is room. Start one "
            "with `fusionkv serve kvcache`, set its address with --cache, or disable it with --cache none",
            _CACHE,
        )
    return address
