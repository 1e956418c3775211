"""Pydantic fields that the LangChain and LlamaIndex classes share: the connection, and the options of a question."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from fusionkv.gateway.client import requests
from fusionkv.gateway.client.client import DEFAULT_ADDRESS, AsyncClient, Client
from fusionkv.gateway.client.results import Passage
from fusionkv.protos.runtime import rpc
from fusionkv.protos.runtime.errors import InvalidArgument
from fusionkv.protos.runtime.tls import ClientTLS


class ConnectionFields(BaseModel):
    """How to reach a gateway. Each call opens its own connection, so there is nothing to close.

    Attributes:
        address: `host:port` or `unix:/path`.
        token: a bearer token; `api_key` is another name for it. Neither `repr` nor a serialised object contains it.
        tls: CAs to trust and a client certificate.
        timeout: limit of a call in seconds.
        max_retries: retries of a call that fails as UNAVAILABLE before its first response.
    """

    # Classes that also inherit a framework's class repeat this: its configuration takes precedence.
    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    # Arguments that a call takes in addition to the fields of `options`.
    _more: ClassVar[frozenset[str]] = frozenset({"timeout"})

    address: str = DEFAULT_ADDRESS
    token: str | None = Field(
        default=None, repr=False, exclude=True, validation_alias=AliasChoices("token", "api_key")
    )
    tls: ClientTLS | None = Field(default=None, exclude=True)
    timeout: float = Field(default=300.0, gt=0)
    max_retries: int = Field(default=rpc.MAX_RETRIES, ge=0, le=rpc.MAX_RETRIES)

    def client(self) -> Client:
        return Client(self.address, **self._reached())

    def async_client(self) -> AsyncClient:
        return AsyncClient(self.address, **self._reached())

    def _reached(self) -> dict[str, Any]:
        return {"timeout": self.timeout, "token": self.token, "tls": self.tls, "retries": self.max_retries}

    def caller(self) -> str:
        """A digest of the token and of the client certificate's path, which decide whose corpora are meant."""
        cert = self.tls.cert if self.tls else None
        identity = json.dumps(["fusionkv caller", self.token, str(cert)])
        return hashlib.sha256(identity.encode()).hexdigest()[:32]

    def options(self) -> dict[str, Any]:
        """The options of this object's fields that are set."""
        return {name: value for name in type(self)._options() if (value := getattr(self, name)) is not None}

    def call_options(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a call with these arguments, which take precedence over the fields.

        Raises:
            InvalidArgument: an unknown argument, or both names of one.
        """
        known = {*type(self)._options(), *self._more}
        named = {"top_k" if name == "k" else name: value for name, value in arguments.items()}
        if len(named) < len(arguments):
            raise InvalidArgument("k and top_k are the same option: give one of them")
        if unknown := sorted(named.keys() - known):
            raise InvalidArgument(f"unknown argument {unknown[0]!r}; known: {', '.join(sorted({*known, 'k'}))}")
        return {name: value for name, value in {**self.options(), **named}.items() if value is not None}

    @classmethod
    def _options(cls) -> Iterable[str]:
        """The names of the fields that are options of a request."""
        return cls.model_fields.keys() & requests.Options.__annotations__.keys()


class RetrievalFields(ConnectionFields):
    """Which passages are retrieved. Texts are not in `repr`, which frameworks pass on to tracers.

    Attributes:
        top_k: number of passages; by default the gateway's setting. `k` is another name for it.
        order: order of the passages, as in `requests.Options`.
        filter: metadata that a document must have.
    """

    top_k: int | None = Field(default=None, validation_alias=AliasChoices("top_k", "k"))
    order: str | None = None
    filter: dict[str, str] | None = Field(default=None, repr=False)


class QuestionFields(RetrievalFields):
    """A question's options, as in `requests.Options`; None uses the default of the gateway or the worker.

    Attributes:
        corpus: the corpus to answer over. Without one, a call is answered over its passages, if it has any.
    """

    _more: ClassVar[frozenset[str]] = frozenset({"timeout", "passages"})

    corpus: str = ""
    query: str | None = Field(default=None, repr=False)
    system: str | None = Field(default=None, repr=False)
    prompt_template: str | None = Field(default=None, repr=False)
    chat_template_kwargs: dict[str, Any] | None = None
    recipe: str | None = None
    ratio: float | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    sample_top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None

    def take_passages(self, options: dict[str, Any]) -> Sequence[Any] | None:
        """Takes the passages out of the options of a call; None if there are none but those of the corpus.

        Raises:
            InvalidArgument: they are no list.
        """
        passages = options.pop("passages", None if self.corpus else ())
        return passages if passages is None else requests.listed("passages", passages)


def with_metadata(sources: Sequence[Passage], metadata: Sequence[Mapping[str, Any]]) -> Iterable[tuple[Passage, Any]]:
    """Each source with its metadata: of the passage at its position in the request, if the request had any."""
    for source in sources:
        kept = metadata[source.position] if source.position < len(metadata) and not source.document else {}
        yield source, {**source.metadata, **kept}
