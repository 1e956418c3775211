"""What a gateway can be told."""

from dataclasses import dataclass
from pathlib import Path

from fusionkv.fusion_worker.client import DEFAULT_RECIPE
from fusionkv.protos.runtime.settings import setting
from fusionkv.protos.runtime.tls import ClientTLS, ServerTLS

# What `embedder` may be besides a model.
AUTO, NONE = "auto", "none"
# Those that have stemmers and lists of stop words in both retrieval engines.
LANGUAGES = (
    *("arabic", "danish", "dutch", "english", "finnish", "french", "german", "greek", "hungarian", "italian"),
    *("norwegian", "portuguese", "romanian", "russian", "spanish", "swedish", "tamil", "turkish"),
)


@dataclass(frozen=True)
class GatewayConfig:
    """The table [gateway] of the configuration."""

    listen: tuple[str, ...] = setting(("127.0.0.1:7072",), "addresses to serve on, host:port or unix:/path")
    http_listen: tuple[str, ...] = setting(
        (), "addresses of the OpenAI-compatible HTTP endpoint, host:port or unix:/path; none serves none"
    )
    admin_listen: tuple[str, ...] = setting(
        (), "addresses of the pages that explain answers to operators, host:port or unix:/path; none serves none"
    )
    admin_answers: int = setting(20, "answers that those pages show, of each tenant", low=1, high=1000)
    http_connections: int = setting(
        512, "HTTP connections open at once, at http_listen and at admin_listen each; more are refused", low=1
    )
    http_connections_per_address: int = setting(
        384, "of these, from one IP address (IPv6: one /64 network); callers behind one proxy count as one", low=1
    )
    http_head_seconds: float = setting(10.0, "time for the TLS handshake, and for a request's headers", low=0.1)
    http_body_seconds: float = setting(30.0, "time for the body of an HTTP request", low=0.1)
    http_send_seconds: float = setting(
        30.0, "time in which an HTTP caller must read on, while a response waits for it", low=0.1
    )
    http_idle_seconds: float = setting(75.0, "time that an HTTP connection stays open without a request", low=0.1)
    workers: tuple[str, ...] = setting(
        ("127.0.0.1:7071",), "addresses of the fusion workers; dns:HOST:PORT is every address that the name has"
    )
    data_dir: Path = setting(Path(".fusionkv/gateway"), "where the embedded retrieval engine keeps the corpora")
    milvus_url: str = setting(
        "",
        "Milvus that keeps the corpora, in place of the embedded engine; gateways may share it; http:// or https://",
    )
    milvus_token: Path | None = setting(None, "file with user:password or an API key for milvus_url")
    milvus_database: str = setting("default", "database of milvus_url")
    tenant: str = setting("", "whose KV this gateway uses; entries of one tenant are never found by another")

    chunk_tokens: int = setting(256, "largest chunk, in the model's tokens", low=8, high=65536)
    overlap_tokens: int = setting(0, "tokens that a chunk repeats from the one before it", low=0)
    max_document_bytes: int = setting(32 << 20, "largest document", bytes=True, low=1, high=60 << 20)
    max_ingest_bytes: int = setting(256 << 20, "documents in work at once; more are refused", bytes=True, low=1)
    max_document_chunks: int = setting(10_000, "most chunks of one document", low=1)
    parse_seconds: float = setting(60.0, "time to parse and split one document", low=0.01)
    parsers: int = setting(2, "documents parsed at once, each in a process of its own", low=1, high=64)
    parse_memory_bytes: int = setting(
        1 << 30, "address space of such a process, of which 250 MiB are its own", bytes=True, low=512 << 20
    )
    max_text_bytes: int = setting(
        16 << 20, "most text of one document, which may also be at most 50 times the document", bytes=True, low=1
    )

    top_k: int = setting(8, "chunks retrieved for a question that does not say", low=1)
    max_top_k: int = setting(128, "most chunks that a question may ask for, or passages that it may bring", low=1)
    language: str = setting(
        "english", f"language of the corpora that are made, for stems and stop words: {', '.join(LANGUAGES)}"
    )
    embedder: str = setting(
        AUTO,
        "model of embeddings: one of `fusionkv model list`, a Sentence-Transformers directory, or the URL of an "
        "OpenAI-compatible /v1/embeddings; auto is minilm if it was fetched, and none matches words alone",
    )
    embedder_model: str = setting("", "model that an embedder's URL is asked for")
    embedder_token: Path | None = setting(None, "file with the bearer token for an embedder's URL")
    embedder_threads: int = setting(2, "threads of an embedder, and of a reranker, on this machine", low=1, high=256)
    dense_weight: float = setting(
        0.7, "weight of embeddings against words in retrieval; 0 ranks by words alone, 1 by embeddings", low=0, high=1
    )
    reranker: str = setting(
        "", "cross-encoder that ranks the best chunks anew: a directory, or the URL of a /v1/rerank; empty ranks none"
    )
    reranker_model: str = setting("", "model that a reranker's URL is asked for")
    reranker_token: Path | None = setting(None, "file with the bearer token for a reranker's URL")
    rerank_depth: int = setting(32, "chunks that a reranker reads for a question", low=1, high=1000)

    recipe: str = setting(
        DEFAULT_RECIPE,
        "recipe for a request that names none, or `default`; chunks are reused as they were encoded",
    )
    max_requests: int = setting(256, "requests answered at once; more are refused", low=1)
    request_seconds: float = setting(300.0, "deadline of a request that brings none", low=0.1)
    precompute_concurrency: int = setting(4, "chunks that one Precompute encodes at once", low=1)
    drain_seconds: float = setting(30.0, "time that calls in flight get when the gateway stops", low=0)
    metrics_listen: str = setting(
        "", "host:port of a Prometheus scrape endpoint (/metrics), without TLS or token; empty serves none"
    )

    auth_tokens: Path | None = setting(None, "bearer tokens (TOML, docs/security.md): calls then need a token")
    auth_jwks: str = setting("", "keys of an OIDC provider (JWKS), a file or an https URL: calls then need a token")
    auth_issuer: str = setting("", "issuer (iss) of the tokens that auth_jwks signs")
    auth_audience: str = setting("", "audience (aud) that those tokens are for")
    auth_role_claim: str = setting("role", "claim of those tokens that names the role: app, operator or worker")
    auth_tenant_claim: str = setting("tenant", "claim of those tokens that names the tenant")
    tenant_key: Path | None = setting(
        None, "32 random bytes or more, the same for all gateways: workers and caches then learn no tenant's name"
    )
    quotas: Path | None = setting(None, "limits by tenant (TOML, docs/security.md)")

    tls_cert: Path | None = setting(
        None, "certificate chain (PEM): ports then speak TLS; also shown to services that ask for one"
    )
    tls_key: Path | None = setting(None, "private key (PEM) of tls_cert")
    tls_client_ca: Path | None = setting(None, "CAs (PEM): callers must then show a certificate of one of them")
    tls_ca: Path | None = setting(None, "CAs (PEM) of the services that this one calls; calls to ports then use TLS")

    def __post_init__(self) -> None:
        if bool(self.auth_jwks) != bool(self.auth_issuer) or bool(self.auth_jwks) != bool(self.auth_audience):
            raise ValueError("auth_jwks, auth_issuer and auth_audience go together: set all three")
        ServerTLS.of(self.tls_cert, self.tls_key, self.tls_client_ca)
        if self.overlap_tokens >= self.chunk_tokens:
            raise ValueError(
                f"overlap_tokens ({self.overlap_tokens}) must be under chunk_tokens ({self.chunk_tokens})"
            )
        if self.max_document_bytes > self.max_ingest_bytes:
            raise ValueError("max_document_bytes is over max_ingest_bytes")
        if self.top_k > self.max_top_k:
            raise ValueError(f"top_k ({self.top_k}) is over max_top_k ({self.max_top_k})")
        if self.milvus_url and not self.milvus_url.startswith(("http://", "https://")):
            raise ValueError("milvus_url must begin with http:// or https://")
        if self.milvus_token and not self.milvus_url:
            raise ValueError("milvus_token is for a milvus_url: set that as well")
        if self.language not in LANGUAGES:
            raise ValueError(f"language {self.language!r} is none of {', '.join(LANGUAGES)}")
        if not self.workers:
            raise ValueError("workers names no fusion worker")

    @property
    def several_tenants(self) -> bool:
        """Whether tokens tell tenants apart; otherwise all calls are one tenant's."""
        return bool(self.auth_tokens or self.auth_jwks)

    @property
    def server_tls(self) -> ServerTLS | None:
        return ServerTLS.of(self.tls_cert, self.tls_key, self.tls_client_ca)

    def client_tls(self) -> ClientTLS | None:
        """How to call other services; reads the files. Raises BadFile."""
        return ClientTLS.of(self.tls_ca, self.tls_cert, self.tls_key)
