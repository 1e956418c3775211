"""What a worker can be told."""

from dataclasses import dataclass
from pathlib import Path

from fusionkv.protos.runtime.settings import setting
from fusionkv.protos.runtime.tls import ClientTLS, ServerTLS

STORES = ("plain", "int8", "fp8")


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    model: Path = setting(
        Path("models/eased-3"),
        "model directory, *.gguf file, Hugging Face hub id, or a name of `fusionkv model list`",
    )
    listen: tuple[str, ...] = setting(("127.0.0.1:7071",), "addresses to serve on: host:port or unix:/path")
    cache: str = setting("", "address of the cache service, or `none`; empty takes this machine's, if one runs")
    device: str = setting("auto", "auto, cpu or cuda[:N]")
    dtype: str = setting("auto", "float32, bfloat16, float16, or auto: the checkpoint's if the device computes in it")
    threads: int = setting(0, "CPU threads for computing; 0 takes all cores that this process may use", low=0)
    tensor_parallel: int = setting(
        1, "processes that share the model by heads, each with its own GPU, or with its share of the threads", low=1
    )
    rank_timeout: float = setting(
        120.0, "seconds that these processes wait for one another before the worker ends", low=1
    )
    pool_bytes: int = setting(1 << 30, "size of the KV pool on each device", bytes=True, low=1 << 20)
    page_tokens: int = setting(16, "tokens of one page of the pool", low=1, high=1024)
    max_prompt_tokens: int = setting(0, "longest prompt with its answer; 0 takes the model's own limit", low=0)
    max_new_tokens: int = setting(256, "answer tokens when a request names no number", low=1)
    max_requests: int = setting(32, "requests worked on at once", low=1)
    max_queue: int = setting(256, "requests that may wait; more are refused", low=0)
    max_step_tokens: int = setting(4096, "rows of one step of the engine; longer prefills take several", low=16)
    max_mixed_tokens: int = setting(
        512, "rows of a step while answers are streamed: their next token waits for it", low=16
    )
    max_loads: int = setting(8, "chunks fetched at once, those of the oldest request first", low=1)
    store: str = setting(
        "plain", "how KV is stored: plain, or in one byte a number (int8, fp8), which is stale everywhere"
    )
    lookup_timeout: float = setting(1.0, "seconds before a silent cache service counts as down", low=0.001)
    fetch_timeout: float = setting(
        5.0, "seconds for fetching a request's chunks, after which it is answered by plain prefill", low=0.001
    )
    cache_seconds: float = setting(
        6.0, "seconds that a request waits for the cache service in all, after which it is plain prefill's", low=0.001
    )
    max_puts: int = setting(64, "chunks waiting to be put back to the cache; more are dropped", low=0)
    auxiliary: str = setting("", "a small second model that chooses tokens (recipe cacheclip), named as `model` is")
    auxiliary_pool_bytes: int = setting(1 << 28, "size of its KV pool in host memory", bytes=True, low=1 << 20)
    shadow_share: float = setting(0.0, "share of greedy answers made again by full attention if idle", low=0, high=1)
    shadow_floor: float = setting(
        0.0, "share of those that must be the same; below it a recipe recomputes more (0: never)", low=0, high=1
    )
    drain_seconds: float = setting(30.0, "how long answers in flight may take after SIGTERM", low=0)
    metrics_listen: str = setting(
        "", "host:port of a Prometheus scrape endpoint (/metrics), without TLS or token; empty serves none"
    )
    signing_keys: Path | None = setting(
        None,
        "keys (64 hex digits a line) that stored KV is signed with: the first signs, all verify, and what none of "
        "them signed is a miss; without it nothing is signed, and everything is accepted",
    )
    tls_cert: Path | None = setting(
        None, "certificate chain (PEM): ports then speak TLS; also shown to services that ask for one"
    )
    tls_key: Path | None = setting(None, "private key (PEM) of tls_cert")
    tls_client_ca: Path | None = setting(None, "CAs (PEM): callers must then show a certificate of one of them")
    tls_ca: Path | None = setting(None, "CAs (PEM) of the services that this one calls; calls to ports then use TLS")

    def __post_init__(self) -> None:
        if self.store not in STORES:
            raise ValueError(f"store must be one of {', '.join(STORES)}, not {self.store!r}")
        if self.tensor_parallel > 1 and self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"with tensor_parallel, rank i takes GPU i: device can't be {self.device!r}")
        ServerTLS.of(self.tls_cert, self.tls_key, self.tls_client_ca)

    @property
    def server_tls(self) -> ServerTLS | None:
        return ServerTLS.of(self.tls_cert, self.tls_key, self.tls_client_ca)

    def client_tls(self) -> ClientTLS | None:
        """How to call other services; reads the files. Raises BadFile."""
        return ClientTLS.of(self.tls_ca, self.tls_cert, self.tls_key)
