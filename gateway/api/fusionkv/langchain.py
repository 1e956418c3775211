"""LangChain integration: a retriever and a chat model over a corpus."""

import hashlib
import json
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
from langchain_core.messages import AIMessageChunk, BaseMessage, ChatMessage
from langchain_core.messages.ai import UsageMetadata
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.retrievers import BaseRetriever
from pydantic import ConfigDict

from fusionkv.gateway.client import requests
from fusionkv.gateway.client.fields import QuestionFields, RetrievalFields, with_metadata
from fusionkv.gateway.client.results import Event, Passage, Sources, Summary, Token, as_dict, cached_tokens
from fusionkv.protos.runtime.errors import InvalidArgument

_ROLES = {"human": "user", "ai": "assistant"}
# Options that are text of the prompt or of documents: tracers get them with a run's settings, which no switch hides.
_TEXTS = ("passages", "system", "prompt_template", "query", "filter")


class FusionKVRetriever(RetrievalFields, BaseRetriever):
    """Retrieves passages of a corpus, best first; a call may override the options: `invoke(question, k=2)`.

    A document's metadata is that of its passage; keys that it lacks are added: `document`, `position`, `score` and
    `title`. Unknown arguments are errors. Raises the errors of `fusionkv.protos.runtime.errors`.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    corpus: str

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        with self.client() as client:
            return [_document(p) for p in client.retrieve(self.corpus, query, **self._call(kwargs))]

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        async with self.async_client() as client:
            return [_document(p) for p in await client.retrieve(self.corpus, query, **self._call(kwargs))]

    def _call(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The options of a call; `verbose` is LangChain's own."""
        return self.call_options({name: value for name, value in arguments.items() if name != "verbose"})


class ChatFusionKV(QuestionFields, BaseChatModel):
    """A chat model that answers over a corpus; the gateway retrieves passages and reuses their KV.

    Without a corpus, it answers over the passages of a call, `chat.invoke(messages, passages=[...])`, and without
    them from the messages alone. Passages are texts, `Passage`s or documents, whose metadata `title` is the passage's
    title. Retrieval uses the last message. A call may override the options: `chat.invoke(messages, max_tokens=16)`.
    Unknown arguments are errors.

    `response_metadata` of an answer holds its sources, with the documents' metadata, and its summary. Raises the
    errors of `fusionkv.protos.runtime.errors`.

    Attributes:
        streaming: whether LangChain may stream an answer.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    streaming: bool = True

    @property
    def _llm_type(self) -> str:
        return "fusionkv"

    @property
    def model_name(self) -> str:
        """The model's name in traces. An answer's `response_metadata` has the name of the gateway's model."""
        return "fusionkv"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {"address": self.address, "caller": self.caller(), **self.options(), "corpus": self.corpus}

    def _get_invocation_params(self, stop: list[str] | None = None, **kwargs: Any) -> dict[str, Any]:
        params = super()._get_invocation_params(stop, **kwargs)
        return {name: value for name, value in params.items() if name not in _TEXTS}

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        """The key of LangChain's cache for an answer beside the messages: all else that determines it."""
        options, metadata = self._request((), stop, kwargs)
        options.pop("timeout", None)
        request = requests.generate(self.corpus, "", **options)
        sent = hashlib.sha256(request.SerializeToString(deterministic=True))
        sent.update(json.dumps(metadata, sort_keys=True, default=repr).encode())
        return json.dumps([self._llm_type, self.address, self.caller(), self.output_version, sent.hexdigest()])

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        options, metadata = self._request(messages, stop, kwargs)
        with self.client() as client:
            for event in client.stream(self.corpus, **options):
                if (chunk := _chunk(event, metadata)) is not None:
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
        options, metadata = self._request(messages, stop, kwargs)
        async with self.async_client() as client:
            async for event in client.stream(self.corpus, **options):
                if (chunk := _chunk(event, metadata)) is not None:
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

    def _request(
        self, messages: Sequence[BaseMessage], stop: list[str] | None, arguments: dict[str, Any]
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The options of a call, with its messages and passages, and the metadata of each passage, kept here."""
        turns = [_turn(number, message) for number, message in enumerate(messages)]
        options = self._call(arguments, stop)
        passages = self.take_passages(options)
        sent = None if passages is None else [_passage(passage) for passage in passages]
        metadata = [passage.metadata if isinstance(passage, Document) else {} for passage in passages or ()]
        return {**options, "passages": sent, "messages": turns}, metadata

    def _call(self, arguments: dict[str, Any], stop: list[str] | None = None) -> dict[str, Any]:
        """The options of a call; `stream` is LangChain's own."""
        options = {name: value for name, value in arguments.items() if name != "stream"}
        return self.call_options({**options, "stop": stop} if stop else options)


def _turn(number: int, message: BaseMessage) -> requests.Message:
    """A message of a request. Raises InvalidArgument for one with an image, for example."""
    parts = message.content if isinstance(message.content, list) and message.type != "ai" else []
    for part in parts:
        if isinstance(part, dict) and part.get("type") != "text":
            raise InvalidArgument(f"message {number} has a part of type {part.get('type')!r}: only text is supported")
    role = message.role if isinstance(message, ChatMessage) else _ROLES.get(message.type, message.type)
    return {"role": role, "content": message.text}


def _document(passage: Passage) -> Document:
    origin = {"document": passage.document, "position": passage.position, "score": passage.score}
    # The title stands above the text in the prompt: with it, the text is the same chunk in every request.
    title = {"title": passage.title} if passage.title else {}
    return Document(passage.text, id=passage.name, metadata={**origin, **passage.metadata, **title})


def _passage(passage: str | Passage | Document) -> str | Passage:
    if not isinstance(passage, Document):
        return passage
    return Passage(text=passage.page_content, title=str(passage.metadata.get("title") or ""), id=passage.id or "")


def _chunk(event: Event, metadata: Sequence[dict[str, Any]]) -> ChatGenerationChunk | None:
    """LangChain's chunk for an event; None if the event adds no text or metadata."""
    if isinstance(event, Token):
        return ChatGenerationChunk(message=AIMessageChunk(content=event.text)) if event.text else None
    if isinstance(event, Sources):
        sources = [{**asdict(p), "metadata": merged} for p, merged in with_metadata(event.passages, metadata)]
        return ChatGenerationChunk(message=AIMessageChunk(content="", response_metadata={"sources": sources}))
    if isinstance(event, Summary):
        usage = UsageMetadata(
            input_tokens=event.prompt_tokens,
            output_tokens=event.tokens_generated,
            total_tokens=event.prompt_tokens + event.tokens_generated,
            input_token_details={"cache_read": cached_tokens(event)},
        )
        about = {"summary": as_dict(event), "finish_reason": event.finish_reason, "model_name": event.model}
        message = AIMessageChunk(content="", response_metadata=about, usage_metadata=usage, chunk_position="last")
        return ChatGenerationChunk(message=message)
    return None
