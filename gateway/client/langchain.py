"""LangChain integration: a retriever and a chat model over a corpus."""

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from langchain_core.callbacks import (
    AsyncCallbackManagerForLLMRun,
    AsyncCallbackManagerForRetrieverRun,
    CallbackManagerForLLMRun,
    CallbackManagerForRetrieverRun,
)
from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel
from langchain_core.language_models.chat_models import agenerate_from_stream, generate_from_stream
from langchain_core.messages import AIMessageChunk, BaseMessage
from langchain_core.messages.ai import UsageMetadata
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.retrievers import BaseRetriever
from pydantic import BaseModel, ConfigDict, Field

from fusionkv.gateway.client.client import DEFAULT_ADDRESS, AsyncClient, Client
from fusionkv.gateway.client.results import Event, Passage, Sources, Summary, Token, cached_tokens, fields
from fusionkv.protos.runtime.errors import InvalidArgument
from fusionkv.protos.runtime.tls import ClientTLS

_ROLES = {"human": "user", "ai": "assistant"}


class _Gateway(BaseModel):
    """How to reach a gateway. Each call opens its own connection, so there is nothing to close."""

    model_config = ConfigDict(arbitrary_types_allowed=True)
    address: str = DEFAULT_ADDRESS
    token: str | None = Field(default=None, repr=False)
    tls: ClientTLS | None = None
    timeout: float = 300.0

    def _client(self) -> Client:
        return Client(self.address, timeout=self.timeout, token=self.token, tls=self.tls)

    def _async_client(self) -> AsyncClient:
        return AsyncClient(self.address, timeout=self.timeout, token=self.token, tls=self.tls)


class FusionKVRetriever(_Gateway, BaseRetriever):
    """Retrieves passages of a corpus, best first.

    Raises the errors of `fusionkv.protos.runtime.errors`.

    Attributes:
        top_k: number of passages; 0 uses the gateway's setting.
    """

    corpus: str
    top_k: int = 0

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        with self._client() as client:
            return [_document(p) for p in client.retrieve(self.corpus, query, top_k=self.top_k)]

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun
    ) -> list[Document]:
        async with self._async_client() as client:
            return [_document(p) for p in await client.retrieve(self.corpus, query, top_k=self.top_k)]


class ChatFusionKV(_Gateway, BaseChatModel):
    """A chat model that answers over a corpus; the gateway retrieves passages and reuses their KV.

    Without a corpus, each call takes its passages: `chat.invoke(messages, passages=[...])`, which are texts,
    `Passage`s or documents, whose metadata `title` is the passage's title. Retrieval uses the last message.
    `response_metadata` of an answer holds its sources and its summary. Raises the errors of
    `fusionkv.protos.runtime.errors`.

    Attributes:
        options: options of `fusionkv.gateway.client.requests.generate`, such as recipe, ratio, top_k and max_tokens.
    """

    corpus: str = ""
    options: dict[str, Any] = Field(default_factory=dict)

    @property
    def _llm_type(self) -> str:
        return "fusionkv"

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        options = self._call_options(messages, stop, kwargs)
        with self._client() as client:
            for event in client.stream(self.corpus, **options):
                if (chunk := _chunk(event)) is not None:
                    if run_manager is not None and chunk.text:
                        run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        options = self._call_options(messages, stop, kwargs)
        async with self._async_client() as client:
            async for event in client.stream(self.corpus, **options):
                if (chunk := _chunk(event)) is not None:
                    if run_manager is not None and chunk.text:
                        await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return generate_from_stream(self._stream(messages, stop, run_manager, **kwargs))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return await agenerate_from_stream(self._astream(messages, stop, run_manager, **kwargs))

    def _call_options(
        self, messages: Sequence[BaseMessage], stop: list[str] | None, given: dict[str, Any]
    ) -> dict[str, Any]:
        """The options of a call, with its messages."""
        turns = [_turn(number, message) for number, message in enumerate(messages)]
        options = {**self.options, **given}
        passages = [_passage(passage) for passage in options.pop("passages", ())]
        return {**options, "passages": passages, "messages": turns, **({"stop": stop} if stop else {})}


def _turn(number: int, message: BaseMessage) -> dict[str, str]:
    """A message of a request. Raises InvalidArgument for one with an image, for example."""
    parts = message.content if isinstance(message.content, list) and message.type != "ai" else []
    for part in parts:
        if isinstance(part, dict) and part.get("type") != "text":
            raise InvalidArgument(f"message {number} has a part of type {part.get('type')!r}: only text is supported")
    return {"role": _ROLES.get(message.type, message.type), "content": message.text}


def _document(passage: Passage) -> Document:
    known = {"document": passage.document, "position": passage.position, "score": passage.score}
    title = {"title": passage.title} if passage.title else {}
    return Document(passage.text, metadata={**passage.metadata, **known, **title})


def _passage(given: str | Passage | Document) -> str | Passage:
    if not isinstance(given, Document):
        return given
    return Passage(text=given.page_content, title=str(given.metadata.get("title") or ""), id=given.id or "")


def _chunk(event: Event) -> ChatGenerationChunk | None:
    """LangChain's chunk for an event; None if the event adds no text or metadata."""
    if isinstance(event, Token):
        return ChatGenerationChunk(message=AIMessageChunk(content=event.text)) if event.text else None
    if isinstance(event, Sources):
        sources = [asdict(passage) for passage in event.passages]
        return ChatGenerationChunk(message=AIMessageChunk(content="", response_metadata={"sources": sources}))
    if isinstance(event, Summary):
        usage = UsageMetadata(
            input_tokens=event.prompt_tokens,
            output_tokens=event.tokens_generated,
            total_tokens=event.prompt_tokens + event.tokens_generated,
            input_token_details={"cache_read": cached_tokens(event)},
        )
        metadata = {"summary": fields(event), "finish_reason": event.finish_reason}
        message = AIMessageChunk(content="", response_metadata=metadata, usage_metadata=usage, chunk_position="last")
        return ChatGenerationChunk(message=message)
    return None
