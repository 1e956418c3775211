"""LlamaIndex integration: a retriever over a corpus, an LLM, and a response synthesizer that reuses nodes' KV."""

from collections.abc import AsyncGenerator, Generator, Sequence
from dataclasses import replace
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
from llama_index.core.indices.prompt_helper import ChatPromptHelper, PromptHelper
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import LLM
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore, QueryBundle, TextNode
from pydantic import ConfigDict, PrivateAttr

from fusionkv.gateway.client import requests
from fusionkv.gateway.client.fields import QuestionFields, RetrievalFields, with_metadata
from fusionkv.gateway.client.results import Event, Model, Passage, Sources, Summary, Token, as_dict, usage
from fusionkv.protos.runtime.errors import InvalidArgument

# The text so far, the new text and, in the last part, what else LlamaIndex's response has.
_Part = tuple[str, str, dict[str, Any]]


class FusionKVRetriever(BaseRetriever):
    """Retrieves passages of a corpus, best first.

    A query's embedding is ignored: the gateway embeds its text. Raises the errors of
    `fusionkv.protos.runtime.errors`.

    Args:
        options: fields of `fusionkv.gateway.client.fields.RetrievalFields`, such as address, token, top_k and filter.

    Raises:
        ValueError: an unknown option, or one of another type.
    """

    def __init__(self, corpus: str, **options: Any) -> None:
        self._corpus = corpus
        self._search = RetrievalFields(**options)
        super().__init__()

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        with self._search.client() as client:
            return [_node(p) for p in client.retrieve(self._corpus, _query(query_bundle), **self._search.options())]

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        query, options = _query(query_bundle), self._search.options()
        async with self._search.async_client() as client:
            return [_node(p) for p in await client.retrieve(self._corpus, query, **options)]


class FusionKV(QuestionFields, LLM):
    """Answers over a corpus; without one, over the passages of a call, `llm.complete(question, passages=[...])`.

    A call with neither is answered from its messages alone, as chat engines and `predict` need it. In a query engine,
    use FusionKVSynthesizer, which sends the nodes as passages. Passages are texts, `Passage`s or nodes; the source of
    a node has its id and metadata. A call may override the options: `llm.complete(question, max_tokens=16)`. Unknown
    arguments are errors. `additional_kwargs` of an answer holds its sources and its summary. Raises the errors of
    `fusionkv.protos.runtime.errors`.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    _model: Model | None = PrivateAttr(default=None)

    @classmethod
    def class_name(cls) -> str:
        return "FusionKV"

    @property
    def metadata(self) -> LLMMetadata:
        """The gateway's model and its limits, which are asked for once."""
        if self._model is None:
            with self.client() as client:
                self._model = client.model()
        return LLMMetadata(
            context_window=self._model.max_tokens,
            num_output=self.max_tokens or self._model.max_new_tokens,
            is_chat_model=True,
            model_name=self._model.name,
        )

    def to_payload(self) -> dict[str, Any]:
        """What LlamaIndex tells its handlers about the LLM: neither the token nor texts of the prompt."""
        settings = self.model_dump(
            include={"address", "corpus", "recipe", "ratio", "top_k", "max_tokens", "temperature"}
        )
        return {**settings, "class_name": self.class_name()}

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

    def _request(
        self, arguments: dict[str, Any], question: str, messages: Sequence[ChatMessage]
    ) -> tuple[dict[str, Any], "_Reader"]:
        """The options of a call, and the reader of its answer."""
        turns = [_turn(number, message) for number, message in enumerate(messages)]
        options = self.call_options(arguments)
        passages = self.take_passages(options)
        sent = None if passages is None else [_passage(passage) for passage in passages]
        conversation = {"messages": turns} if turns else {"question": question}
        read = _Reader([_metadata(passage) for passage in passages or ()])
        return {**options, "passages": sent, **conversation}, read

    def _parts(
        self, arguments: dict[str, Any], question: str = "", messages: Sequence[ChatMessage] = ()
    ) -> Generator[_Part]:
        options, read = self._request(arguments, question, messages)
        with self.client() as client:
            for event in client.stream(self.corpus, **options):
                if (part := read(event)) is not None:
                    yield part

    async def _aparts(
        self, arguments: dict[str, Any], question: str = "", messages: Sequence[ChatMessage] = ()
    ) -> AsyncGenerator[_Part]:
        options, read = self._request(arguments, question, messages)
        async with self.async_client() as client:
            async for event in client.stream(self.corpus, **options):
                if (part := read(event)) is not None:
                    yield part


class FusionKVSynthesizer(BaseSynthesizer):
    """Answers a query over the nodes that a query engine has retrieved; each node is a passage whose KV is reused.

    Example: `RetrieverQueryEngine(index.as_retriever(), FusionKVSynthesizer(FusionKV()))`
    """

    def __init__(self, llm: FusionKV, *, streaming: bool = False) -> None:
        # The helpers split nodes into prompts, which the worker's template does here: without them, nothing is asked.
        super().__init__(
            llm=llm, streaming=streaming, prompt_helper=PromptHelper(), chat_prompt_helper=ChatPromptHelper()
        )

    def _get_prompts(self) -> dict[str, Any]:
        return {}

    def _update_prompts(self, prompts: dict[str, Any]) -> None:
        """Raises InvalidArgument for any prompt: the worker's template is the prompt."""
        if prompts:
            raise InvalidArgument(
                f"the prompt {min(prompts)!r} has no effect here: set `system` and `prompt_template` of the LLM"
            )

    def get_response(self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any) -> Any:
        arguments = {**response_kwargs, "passages": list(text_chunks)}
        if self._streaming:
            return (part.delta or "" for part in self._llm.stream_complete(query_str, **arguments))
        return self._llm.complete(query_str, **arguments).text

    async def aget_response(self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any) -> Any:
        arguments = {**response_kwargs, "passages": list(text_chunks)}
        if self._streaming:
            return (part.delta or "" async for part in await self._llm.astream_complete(query_str, **arguments))
        return (await self._llm.acomplete(query_str, **arguments)).text


def _node(passage: Passage) -> NodeWithScore:
    metadata = {"document": passage.document, "position": passage.position, **passage.metadata}
    hidden = [*metadata]
    if passage.title:
        hidden = [key for key in metadata if key != "title"]
        metadata["title"] = passage.title
    # With the title alone above the text, the chunk and its KV are the same wherever the text comes from.
    node = TextNode(
        id_=passage.name,
        text=passage.text,
        metadata=metadata,
        excluded_llm_metadata_keys=hidden,
        metadata_template="{value}",
        text_template="{metadata_str}\n{content}",
    )
    return NodeWithScore(node=node, score=passage.score)


def _turn(number: int, message: ChatMessage) -> requests.Message:
    """A message of a request. Raises InvalidArgument for one with an image, for example."""
    for block in message.blocks if message.role != MessageRole.ASSISTANT else ():
        if block.block_type != "text":
            raise InvalidArgument(f"message {number} has a part of type {block.block_type!r}: only text is supported")
    return {"role": message.role.value, "content": message.content or ""}


def _passage(passage: str | Passage | BaseNode | NodeWithScore) -> str | Passage:
    node = passage.node if isinstance(passage, NodeWithScore) else passage
    if isinstance(node, BaseNode):
        return Passage(text=node.get_content(metadata_mode=MetadataMode.LLM), id=node.node_id)
    return node


def _metadata(passage: str | Passage | BaseNode | NodeWithScore) -> dict[str, Any]:
    """The metadata of a node, which the gateway does not need to have."""
    node = passage.node if isinstance(passage, NodeWithScore) else passage
    return node.metadata if isinstance(node, BaseNode) else {}


def _query(bundle: QueryBundle) -> str:
    """The text to retrieve by. Raises InvalidArgument for a query that is more than its text."""
    if bundle.image_path or bundle.custom_embedding_strs:
        part = "an image" if bundle.image_path else "texts to embed (custom_embedding_strs)"
        raise InvalidArgument(f"the query has {part}: the gateway retrieves by the query's text")
    return bundle.query_str


class _Reader:
    """Turns the events of one answer into its parts.

    metadata: of each passage in the request.
    """

    def __init__(self, metadata: Sequence[dict[str, Any]]) -> None:
        self._metadata = metadata
        self._text = ""
        self._sources: list[Passage] = []

    def __call__(self, event: Event) -> _Part | None:
        if isinstance(event, Token) and event.text:
            self._text += event.text
            return self._text, event.text, {}
        if isinstance(event, Sources):
            completed = with_metadata(event.passages, self._metadata)
            self._sources = [replace(source, metadata=metadata) for source, metadata in completed]
        if isinstance(event, Summary):
            about = {"sources": self._sources, "summary": as_dict(event)}
            # Without it, LlamaIndex counts the tokens of the question alone, and by another tokenizer.
            return self._text, "", {"additional_kwargs": about, "raw": {"usage": usage(event)}}
        return None


def _message(text: str, new: str, more: dict[str, Any]) -> ChatResponse:
    return ChatResponse(message=ChatMessage(role="assistant", content=text), delta=new, **more)


def _completion(text: str, new: str, more: dict[str, Any]) -> CompletionResponse:
    return CompletionResponse(text=text, delta=new, **more)
