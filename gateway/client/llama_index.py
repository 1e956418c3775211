"""LlamaIndex integration: a retriever over a corpus, an LLM, and a response synthesizer that reuses nodes' KV."""

from collections.abc import AsyncGenerator, Generator, Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
)
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import LLM
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore, QueryBundle, TextNode
from pydantic import ConfigDict, Field

from fusionkv.gateway.client.client import DEFAULT_ADDRESS, AsyncClient, Client
from fusionkv.gateway.client.results import Event, Passage, Sources, Summary, Token, fields
from fusionkv.protos.runtime.errors import InvalidArgument
from fusionkv.protos.runtime.tls import ClientTLS

# The text so far, the new text and, in the last part, the sources and the summary.
_Part = tuple[str, str, dict[str, Any]]


class FusionKVRetriever(BaseRetriever):
    """Retrieves passages of a corpus, best first.

    Raises the errors of `fusionkv.protos.runtime.errors`.

    Args:
        top_k: number of passages; 0 uses the gateway's setting.
        connection: arguments of `fusionkv.Client`, such as address, token and tls.
    """

    def __init__(self, corpus: str, *, top_k: int = 0, **connection: Any) -> None:
        self._corpus = corpus
        self._top_k = top_k
        self._connection = connection
        super().__init__()

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        with Client(**self._connection) as client:
            return [_node(p) for p in client.retrieve(self._corpus, query_bundle.query_str, top_k=self._top_k)]

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        async with AsyncClient(**self._connection) as client:
            return [_node(p) for p in await client.retrieve(self._corpus, query_bundle.query_str, top_k=self._top_k)]


class FusionKV(LLM):
    """Answers over a corpus, or over the `passages` of a call: `llm.complete(question, passages=[...])`.

    Passages are texts, `Passage`s or nodes; the source of a node has its id. `additional_kwargs` of an answer holds
    its sources and its summary. Raises the errors of `fusionkv.protos.runtime.errors`.

    Attributes:
        options: `fusionkv.gateway.client.requests.Options`, such as recipe, ratio, top_k and max_tokens.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)
    corpus: str = ""
    options: dict[str, Any] = Field(default_factory=dict)
    address: str = DEFAULT_ADDRESS
    token: str | None = Field(default=None, repr=False)
    tls: ClientTLS | None = None
    timeout: float = 300.0

    @classmethod
    def class_name(cls) -> str:
        return "FusionKV"

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(model_name="fusionkv", is_chat_model=True)

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        *_, last = self._parts(kwargs, messages=messages)
        return _message(*last)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        *_, last = [part async for part in self._aparts(kwargs, messages=messages)]
        return _message(*last)

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        return (_message(*part) for part in self._parts(kwargs, messages=messages))

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        return (_message(*part) async for part in self._aparts(kwargs, messages=messages))

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        *_, last = self._parts(kwargs, prompt)
        return _completion(*last)

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        *_, last = [part async for part in self._aparts(kwargs, prompt)]
        return _completion(*last)

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        return (_completion(*part) for part in self._parts(kwargs, prompt))

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        return (_completion(*part) async for part in self._aparts(kwargs, prompt))

    def _call_options(self, given: dict[str, Any], question: str, messages: Sequence[ChatMessage]) -> dict[str, Any]:
        turns = [_turn(number, message) for number, message in enumerate(messages)]
        options = {**self.options, **given}
        passages = [_passage(passage) for passage in options.pop("passages", ())]
        if not self.corpus and not passages:
            raise InvalidArgument(
                "there is neither a corpus nor passages: set `corpus`, or give `passages`; in a query engine, use "
                "FusionKVSynthesizer, which sends the nodes as passages"
            )
        return {**options, "passages": passages, **({"messages": turns} if turns else {"question": question})}

    def _parts(
        self, given: dict[str, Any], question: str = "", messages: Sequence[ChatMessage] = ()
    ) -> Generator[_Part]:
        read = _Reader()
        with Client(self.address, timeout=self.timeout, token=self.token, tls=self.tls) as client:
            for event in client.stream(self.corpus, **self._call_options(given, question, messages)):
                if (part := read(event)) is not None:
                    yield part

    async def _aparts(
        self, given: dict[str, Any], question: str = "", messages: Sequence[ChatMessage] = ()
    ) -> AsyncGenerator[_Part]:
        read = _Reader()
        async with AsyncClient(self.address, timeout=self.timeout, token=self.token, tls=self.tls) as client:
            async for event in client.stream(self.corpus, **self._call_options(given, question, messages)):
                if (part := read(event)) is not None:
                    yield part


class FusionKVSynthesizer(BaseSynthesizer):
    """Answers a query over the nodes that a query engine has retrieved; each node is a passage whose KV is reused.

    Example: `RetrieverQueryEngine(index.as_retriever(), FusionKVSynthesizer(FusionKV()))`
    """

    def __init__(self, llm: FusionKV, *, streaming: bool = False) -> None:
        super().__init__(llm=llm, streaming=streaming)

    def _get_prompts(self) -> dict[str, Any]:
        return {}

    def _update_prompts(self, prompts: dict[str, Any]) -> None:
        """Does nothing: the worker's template is the prompt. The LLM's option `system` sets the system prompt."""

    def get_response(self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any) -> Any:
        given = {**response_kwargs, "passages": list(text_chunks)}
        if self._streaming:
            return (part.delta or "" for part in self._llm.stream_complete(query_str, **given))
        return self._llm.complete(query_str, **given).text

    async def aget_response(self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any) -> Any:
        given = {**response_kwargs, "passages": list(text_chunks)}
        if self._streaming:
            return (part.delta or "" async for part in await self._llm.astream_complete(query_str, **given))
        return (await self._llm.acomplete(query_str, **given)).text


def _node(passage: Passage) -> NodeWithScore:
    metadata = {"document": passage.document, "position": passage.position, **passage.metadata}
    hidden = [*metadata]
    if passage.title:
        hidden = [key for key in metadata if key != "title"]
        metadata["title"] = passage.title
    # With the title alone above the text, the chunk and its KV are the same wherever the text comes from.
    node = TextNode(
        text=passage.text,
        metadata=metadata,
        excluded_llm_metadata_keys=hidden,
        metadata_template="{value}",
        text_template="{metadata_str}\n{content}",
    )
    return NodeWithScore(node=node, score=passage.score)


def _turn(number: int, message: ChatMessage) -> dict[str, str]:
    """A message of a request. Raises InvalidArgument for one with an image, for example."""
    for block in message.blocks if message.role != MessageRole.ASSISTANT else ():
        if block.block_type != "text":
            raise InvalidArgument(f"message {number} has a part of type {block.block_type!r}: only text is supported")
    return {"role": message.role.value, "content": message.content or ""}


def _passage(given: str | Passage | BaseNode | NodeWithScore) -> str | Passage:
    node = given.node if isinstance(given, NodeWithScore) else given
    if isinstance(node, BaseNode):
        return Passage(text=node.get_content(metadata_mode=MetadataMode.LLM), id=node.node_id)
    return node


class _Reader:
    """Turns the events of one answer into its parts."""

    def __init__(self) -> None:
        self._text = ""
        self._sources: list[Passage] = []

    def __call__(self, event: Event) -> _Part | None:
        if isinstance(event, Token) and event.text:
            self._text += event.text
            return self._text, event.text, {}
        if isinstance(event, Sources):
            self._sources = list(event.passages)
        if isinstance(event, Summary):
            return self._text, "", {"sources": self._sources, "summary": fields(event)}
        return None


def _message(text: str, new: str, metadata: dict[str, Any]) -> ChatResponse:
    message = ChatMessage(role="assistant", content=text)
    return ChatResponse(message=message, delta=new, additional_kwargs=metadata)


def _completion(text: str, new: str, metadata: dict[str, Any]) -> CompletionResponse:
    return CompletionResponse(text=text, delta=new, additional_kwargs=metadata)
