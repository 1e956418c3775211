"""Settings of the gateway."""

import re
from dataclasses import dataclass
from pathlib import Path

from fusionkv.gateway.auth.access import TENANT_FORM, is_tenant
from fusionkv.protos.contract.names import DEFAULT, full_name
from fusionkv.protos.contract.recipes import find_recipe
from fusionkv.protos.contract.requests import RequestedRecipe
from fusionkv.protos.runtime import process
from fusionkv.protos.runtime.errors import ServiceError
from fusionkv.protos.runtime.settings import setting
from fusionkv.protos.serving import CallingConfig

# Values of `embedder` that are not a model.
AUTO, NONE = "auto", "none"
# An origin as browsers send it, or all.
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[a-z0-9.:\[\]_-]+")
# Languages that the embedded retrieval engine can stem.
LANGUAGES = (
    *("arabic", "danish", "dutch", "english", "finnish", "french", "german", "greek", "hungarian", "italian"),
    *("norwegian", "portuguese", "romanian", "russian", "spanish", "swedish", "tamil", "turkish"),
)


def secret(file: Path | None) -> str:
    """The secret that a setting's file holds; empty without a file. Raises OSError."""
    return file.read_text().strip() if file else ""


@dataclass(frozen=True)
class GatewayConfig(CallingConfig):
    """Settings of the gateway: table [gateway] of the configuration file."""

    listen: tuple[str, ...] = setting(("127.0.0.1:7072",), "addresses to listen on: host:port or unix:/path")
    http_listen: tuple[str, ...] = setting(
        (), "addresses of the OpenAI-compatible HTTP endpoint: host:port or unix:/path; empty disables it"
    )
    http_allowed_origins: tuple[str, ...] = setting(
        (),
        "origins of web pages that may call http_listen from a browser (CORS), such as https://app.example; * allows "
        "all pages; by default, none may",
    )
    http_connections: int = setting(512, "maximum open HTTP connections; further ones are refused", low=1)
    http_connections_per_address: int = setting(
        384,
        "maximum open connections from one IP address (IPv6: one /64 network); a proxy counts as one address",
        low=1,
    )
    http_head_seconds: float = setting(
        10.0, "maximum seconds for the TLS handshake, and again for the headers of a request", low=0.1
    )
    http_body_seconds: float = setting(30.0, "maximum seconds for the body of an HTTP request", low=0.1)
    http_send_seconds: float = setting(
        30.0, "maximum seconds that sending a response may stall because the HTTP client does not read", low=0.1
    )
    http_idle_seconds: float = setting(75.0, "seconds after which an idle HTTP connection is closed", low=0.1)
    workers: tuple[str, ...] = setting(
        ("127.0.0.1:7071",),
        "addresses of the fusion workers; dns:HOST:PORT means every address that HOST resolves to",
    )
    data_dir: Path = setting(
        Path(".fusionkv/gateway"), "directory of the embedded retrieval engine, which stores the corpora"
    )
    milvus_url: str = setting(
        "", "http:// or https:// URL of a Milvus server that stores the corpora instead; several gateways may use it"
    )
    milvus_token: Path | None = setting(None, "file with the credentials for Milvus: user:password or an API key")
    milvus_database: str = setting("default", "name of the Milvus database")
    tenant: str = setting(
        "", "tenant of calls without a token, whose operators see the counts of all; tenants never share KV entries"
    )

    chunk_tokens: int = setting(256, "maximum size of a chunk in tokens of the worker's model", low=8, high=65536)
    overlap_tokens: int = setting(0, "number of tokens that a chunk repeats from the end of the previous one", low=0)
    max_document_bytes: int = setting(
        32 << 20, "maximum size of a document, or of a call's JSON lines", bytes=True, low=1, high=60 << 20
    )
    max_ingest_bytes: int = setting(
        256 << 20,
        "maximum total size of the documents being ingested at the same time; further ones are refused",
        bytes=True,
        low=1,
    )
    max_document_chunks: int = setting(
        10_000, "maximum number of chunks in a document, or in a call's JSON lines", low=1
    )
    parse_seconds: float = setting(60.0, "maximum seconds to parse and split a document", low=0.01)
    parsers: int = setting(2, "number of documents parsed at the same time, each in its own process", low=1, high=64)
    parse_memory_bytes: int = setting(
        1 << 30,
        "maximum address space of a parser process, of which the process itself takes 120 MiB",
        bytes=True,
        low=512 << 20,
    )
    max_text_bytes: int = setting(
        16 << 20,
        "maximum size of a document's text, which is also limited to 50 times the document's size",
        bytes=True,
        low=1,
    )

    top_k: int = setting(8, "number of chunks retrieved for a request that sets no top_k", low=1)
    # With the system prompt, no more than a cache service takes by default (its setting max_path).
    max_top_k: int = setting(
        128, "maximum top_k of a request, and maximum number of passages in a request", low=1, high=255
    )
    language: str = setting(
        "english", f"language of new corpora, for stemming and, in English only, stop words: {', '.join(LANGUAGES)}"
    )
    embedder: str = setting(
        AUTO,
        "embedding model: a name from `fusionkv model list`, a Sentence-Transformers directory, or the URL of an "
        "OpenAI-compatible /v1/embeddings. `auto` uses minilm if it has been fetched; `none` searches by BM25 only",
    )
    embedder_model: str = setting("", "model name in requests to the embedder's URL")
    embedder_token: Path | None = setting(None, "file with the bearer token for the embedder's URL")
    embedder_threads: int = setting(2, "CPU threads each of a local embedder and a local reranker", low=1, high=256)
    dense_weight: float = setting(
        0.6, "weight of embeddings in retrieval: 0 ranks by BM25 only, 1 by embeddings only", low=0, high=1
    )
    reranker: str = setting(
        "", "cross-encoder that reranks the best chunks: a directory, or the URL of a /v1/rerank; empty disables it"
    )
    reranker_model: str = setting("", "model name in requests to the reranker's URL")
    reranker_token: Path | None = setting(None, "file with the bearer token for the reranker's URL")
    rerank_depth: int = setting(32, "number of chunks that the reranker scores for a question", low=1, high=1000)

    recipe: str = setting(
        DEFAULT,
        "recipe of requests that name none or `default`; it is adapted to how the chunks were encoded ahead of time. "
        "`default` is what `fusionkv check` recommended for the model, else `deeplayer+primed` at 0.2",
    )
    decode: str = setting(
        "worker",
        "decoder of answers: `worker`, or `vllm` with FusionKV's KV connector, for which workers prefill the prompts",
    )
    vllm_url: str = setting(
        "", "URL of the vLLM server, such as http://127.0.0.1:8000; for https, `tls_ca` is trusted if set"
    )
    vllm_model: str = setting("", "model name in requests to vLLM, if it serves several models")
    vllm_token: Path | None = setting(None, "file with the API key for vLLM")
    vllm_prefill_seconds: float = setting(
        30.0,
        "maximum seconds that vLLM waits for a worker's prefill; after that, vLLM prefills the prompt itself",
        low=0.1,
    )
    max_requests: int = setting(
        256, "maximum number of requests processed at the same time; further requests are refused", low=1
    )
    request_seconds: float = setting(300.0, "deadline in seconds of requests that set none", low=0.1)
    precompute_concurrency: int = setting(
        4, "number of chunks that one Precompute call encodes at the same time", low=1
    )

    auth_tokens: Path | None = setting(
        None, "file of bearer tokens (TOML, docs/security.md); calls then require a token"
    )
    auth_jwks: str = setting(
        "", "keys of an OIDC provider (JWKS): a file or an https URL; calls then require a token"
    )
    auth_issuer: str = setting("", "issuer (iss) of tokens signed by auth_jwks")
    auth_audience: str = setting("", "audience (aud) of tokens signed by auth_jwks")
    auth_role_claim: str = setting(
        "role", "claim of tokens signed by auth_jwks that holds the role: app, operator or worker"
    )
    auth_tenant_claim: str = setting("tenant", "claim of tokens signed by auth_jwks that holds the tenant")
    tenant_key: Path | None = setting(
        None,
        "file with at least 32 random bytes, the same for all gateways; hides tenant names from workers and caches. "
        "Under another key, stored KV can't be used",
    )
    quotas: Path | None = setting(None, "file of limits per tenant (TOML, docs/security.md)")

    def __post_init__(self) -> None:
        if bool(self.auth_jwks) != bool(self.auth_issuer) or bool(self.auth_jwks) != bool(self.auth_audience):
            raise ValueError("auth_jwks, auth_issuer and auth_audience must be set together")
        super().__post_init__()
        self._check_limits()
        self._check_engines()
        for origin in self.http_allowed_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"http_allowed_origins: {origin!r} is not an origin such as https://app.example:8443, in lower "
                    "case and without a path, nor *"
                )
        if self.tenant and not is_tenant(self.tenant):
            raise ValueError(f"tenant {self.tenant!r} is invalid: {TENANT_FORM}")
        process.check_sockets(self.workers)
        for address in self.workers:
            if not process.is_address(address.removeprefix("dns:")):
                raise ValueError(f"workers: {address!r} is not host:port, unix:/path or dns:HOST:PORT")

    def _check_limits(self) -> None:
        if self.overlap_tokens >= self.chunk_tokens:
            raise ValueError(
                f"overlap_tokens ({self.overlap_tokens}) must be less than chunk_tokens ({self.chunk_tokens})"
            )
        if self.max_document_bytes > self.max_ingest_bytes:
            raise ValueError("max_document_bytes exceeds max_ingest_bytes")
        if self.top_k > self.max_top_k:
            raise ValueError(f"top_k ({self.top_k}) exceeds max_top_k ({self.max_top_k})")

    def _check_engines(self) -> None:
        """Of retrieval and of decoding."""
        if self.milvus_url and not self.milvus_url.startswith(("http://", "https://")):
            raise ValueError("milvus_url must begin with http:// or https://")
        if self.milvus_token and not self.milvus_url:
            raise ValueError("milvus_token needs milvus_url")
        if not self.embedder:  # as of a variable that is not set: not the working directory
            raise ValueError("embedder is empty: write none to search by BM25 only")
        if self.language not in LANGUAGES:
            raise ValueError(f"language {self.language!r} is not one of {', '.join(LANGUAGES)}")
        if self.milvus_url and self.language != "english":
            raise ValueError(f"language ({self.language!r}) applies to corpora in data_dir, not to milvus_url")
        if self.decode not in ("worker", "vllm"):
            raise ValueError(f"decode must be worker or vllm, not {self.decode!r}")
        if self.decode == "vllm" and not self.vllm_url.startswith(("http://", "https://")):
            raise ValueError("decode = vllm needs vllm_url, beginning with http:// or https://")
        try:  # a worker decides what `default` means: any recipe that takes modifiers stands for it
            requested = RequestedRecipe(self.recipe, find_recipe(full_name(self.recipe, "deeplayer")))
            if self.decode == "vllm":
                requested.check_portable()
        except ServiceError as error:
            raise ValueError(f"recipe: {error}") from error

    @property
    def several_tenants(self) -> bool:
        """Whether bearer tokens identify tenants; otherwise all calls belong to one tenant."""
        return bool(self.auth_tokens or self.auth_jwks)
