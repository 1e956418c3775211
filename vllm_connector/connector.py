"""The KV connector that vLLM loads: `kv_connector_module_path` is fusionkv.vllm_connector.connector.

Written for vLLM 0.17 to 0.33. With sliding-window layers, vLLM keeps all pages of all layers, because the connector
does not declare support for its hybrid memory manager.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import base  # pyright: ignore[reportMissingImports]
from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # pyright: ignore[reportMissingImports]
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from fusionkv.fusion_worker.library.cache import fingerprint
from fusionkv.fusion_worker.library.resolve import resolve
from fusionkv.protos.runtime import settings
from fusionkv.protos.runtime.errors import FailedPrecondition
from fusionkv.protos.runtime.tls import ClientTLS
from fusionkv.vllm_connector.background import Background
from fusionkv.vllm_connector.options import ConnectorOptions
from fusionkv.vllm_connector.pages import Pages
from fusionkv.vllm_connector.prompts import KVLayout, KVLoad, KVSave, alterations
from fusionkv.vllm_connector.scheduler import ConnectorScheduler
from fusionkv.vllm_connector.spans import PARAMETER
from fusionkv.vllm_connector.worker import ConnectorWorker

if TYPE_CHECKING:
    from fusionkv.vllm_connector.fusing import FusedPrefill


@dataclass
class _Metadata(KVConnectorMetadata):
    transfers: list[KVLoad | KVSave]
    told: dict[str, dict[str, Any]]


@dataclass
class _Figures(getattr(base, "KVConnectorWorkerMetadata", KVConnectorMetadata)):  # type: ignore[misc]
    """Of fused prompts, by request. Versions of vLLM without its base class don't take them."""

    figures: dict[str, dict[str, Any]]

    def aggregate(self, other: "_Figures") -> "_Figures":
        return _Figures(self.figures | other.figures)


def _check_fusing(config: Any, altered: Mapping[str, str]) -> None:
    """Raises ValueError if passages can't be fused under vLLM's configuration."""
    uses = {
        "tensor parallelism": config.parallel_config.tensor_parallel_size > 1,
        "LoRA": config.lora_config is not None,
        "speculative decoding": config.speculative_config is not None,
        **dict.fromkeys(altered, True),
    }
    if used := [name for name, there in uses.items() if there]:
        raise ValueError(f"vLLM can't fuse passages with {used[0]}: remove it, or pool_bytes")


class FusionKVConnector(KVConnectorBase_V1):
    """Implements vLLM's connector interface with `ConnectorScheduler` and `ConnectorWorker`."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if self._kv_transfer_config.kv_load_failure_policy != "recompute":
            raise ValueError(
                "FusionKV needs kv_load_failure_policy = recompute in --kv-transfer-config: otherwise, requests fail "
                "if their KV can't be loaded"
            )
        config, parallel = vllm_config.model_config, vllm_config.parallel_config
        if parallel.pipeline_parallel_size > 1:
            raise ValueError("FusionKV does not support pipeline parallelism")
        if vllm_config.cache_config.cache_dtype != "auto":
            raise ValueError("FusionKV loads KV in the model's dtype only: set kv_cache_dtype to auto")
        options = ConnectorOptions.of(self._kv_transfer_config.kv_connector_extra_config)
        dtype = str(config.dtype).removeprefix("torch.")
        layers, heads = config.get_num_layers(parallel), config.get_total_num_kv_heads()
        layout = KVLayout(layers, heads, config.get_head_size(), dtype)
        # With more ranks than KV heads, several ranks hold the same head.
        self._ranks = min(parallel.tensor_parallel_size, heads)
        size = vllm_config.cache_config.block_size
        if options.chunk_tokens % size:
            raise ValueError(f"chunk_tokens ({options.chunk_tokens}) is not a multiple of vLLM's block size, {size}")
        self._options, self._layout = options, layout
        altered = alterations(config)
        if options.pool_bytes:
            _check_fusing(vllm_config, altered)
        tls = ClientTLS.of(options.tls_ca, options.tls_cert, options.tls_key)
        self._background = Background(options.cache, tls, options.tls_worker)
        self._busy = False
        self._fusing: FusedPrefill | None = None
        self._scheduler: Any = None
        self._worker: Any = None
        if role == KVConnectorRole.SCHEDULER:
            separator: list[int] = []
            if options.separator:
                from tokenizers import Tokenizer

                tokenizer = Tokenizer.from_file(str(resolve(config.model) / "tokenizer.json"))
                separator = tokenizer.encode(options.separator, add_special_tokens=False).ids
            self._scheduler = ConnectorScheduler(
                self._background, config.model, altered, layout, self._ranks, size, options, separator
            )

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # KV that is not saved is only a later miss

    # Scheduler side

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._scheduler.allocated(request, tuple(blocks.get_block_ids()[0]), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return _Metadata(self._scheduler.transfers(), self._scheduler.told())

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        completed = request.status.name in ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")
        figures = self._scheduler.figures(request)
        told = {PARAMETER: figures} if figures else None
        return self._scheduler.finished(request, tuple(block_ids), completed), told

    def update_connector_output(self, connector_output: Any) -> None:
        if (told := connector_output.kv_connector_worker_meta) is not None:
            self._scheduler.fused(told.figures)

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank  # pyright: ignore[reportMissingImports]

        layers = self._vllm_config.compilation_config.static_forward_context
        pages = Pages(kv_caches, layers, self._kv_cache_config.num_blocks)
        actual = (len(pages), pages.heads, pages.head_dim)
        if actual != (self._layout.layers, self._layout.kv_heads // self._ranks, self._layout.head_dim):
            raise ValueError(f"a rank's KV has (layers, heads, head_dim) {actual}, which does not fit {self._layout}")
        ranks = self._vllm_config.parallel_config.tensor_parallel_size
        rank = get_tensor_model_parallel_rank() * self._ranks // ranks
        fusing = self._fused_prefill(layers) if self._options.pool_bytes else None
        self._worker = ConnectorWorker(self._background, pages, rank, self._ranks, ranks, self._options, fusing)

    def _fused_prefill(self, layers: Mapping[str, torch.nn.Module]) -> "FusedPrefill":
        """The engine on vLLM's weights. layers: vLLM's attention layers. Raises ValueError if they don't fit it."""
        # The image of the connector has no engine.
        try:
            from fusionkv.fusion_worker.config import WorkerConfig
            from fusionkv.vllm_connector.fusing import FusedPrefill
            from fusionkv.vllm_connector.network import model_among, model_over
            from fusionkv.vllm_connector.steps import VLLMSteps
        except ImportError as error:
            why = f"pool_bytes needs the worker's packages beside vLLM: pip install 'fusionkv[worker]' ({error})"
            raise ValueError(why) from error
        config, options = self._vllm_config, self._options
        directory = resolve(config.model_config.model)
        dtype, longest = config.model_config.dtype, config.model_config.max_model_len
        # Timeouts, the storage format and the like come from the worker's environment variables.
        own = {name: getattr(options, name) or None for name in ("tls_ca", "tls_cert", "tls_key")}
        own |= {"model": directory, "pool_bytes": options.pool_bytes}
        rows = config.scheduler_config.max_num_batched_tokens
        worker = settings.load(WorkerConfig, "worker", flags=own | {"max_step_tokens": rows})
        # A row of a fused prompt attends to more keys than one of vLLM's own chunked prefill of as many tokens.
        worker = replace(worker, cache=options.cache, max_mixed_tokens=min(worker.max_mixed_tokens, rows // 2))
        theirs, date = model_among(layers), worker.template_date
        try:
            model = model_over(theirs, directory, fingerprint(directory), dtype, longest, date)
        except FailedPrecondition as error:
            raise ValueError(str(error)) from error

        async def made() -> "FusedPrefill":
            return FusedPrefill(worker, model, VLLMSteps(model.device), options.listen)

        self._fusing = self._background.run(made()).result()
        return self._fusing

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._busy = forward_context.attn_metadata is not None
        metadata = self._get_connector_metadata()
        self._worker.start(metadata.transfers)
        self._worker.tell(metadata.told)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: loads run beside steps, and a request's first step comes after its load."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Does nothing: pages are read after a request has ended."""

    def wait_for_save(self) -> None:
        """Does nothing: a request's pages are kept until they have been read."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        self._worker.cancel(finished_req_ids)
        self._worker.run_steps(self._busy)
        return self._worker.finished()

    def build_connector_worker_meta(self) -> "_Figures | None":
        figures = self._worker.figures()
        return _Figures(figures) if figures else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.failed_pages()

    def shutdown(self) -> None:
        if self._fusing is not None:
            self._background.run(self._fusing.close()).result(5.0)
        self._background.close()
