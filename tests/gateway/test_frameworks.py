"""What the LangChain and LlamaIndex classes accept, refuse, send and tell others."""

import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.globals import set_llm_cache
from langchain_core.messages import ChatMessage
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.llms import ChatMessage as LlamaMessage
from llama_index.core.llms import MessageRole
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from pydantic import ValidationError

from fusionkv import langchain, llama_index
from fusionkv.gateway.client import requests
from fusionkv.gateway.client.client import Client
from fusionkv.gateway.client.fields import QuestionFields
from fusionkv.gateway.client.requests import IngestOptions, Options
from fusionkv.gateway.client.results import Passage
from fusionkv.langchain import ChatFusionKV
from fusionkv.protos.answer.v1.answer_pb2 import Summary, Token
from fusionkv.protos.gateway.v1 import gateway_pb2 as pb
from fusionkv.protos.gateway.v1.gateway_pb2_grpc import GatewayServiceServicer
from fusionkv.protos.runtime import rpc
from fusionkv.protos.runtime.errors import InvalidArgument
from tests.services import listening

SERVICE = pb.DESCRIPTOR.services_by_name["GatewayService"]


# A value for each option, and where it is in a request.
def read_kwargs(request: pb.GenerateRequest) -> dict[str, Any]:
    return {name: json.loads(value) for name, value in request.chat_template_kwargs.items()}


OPTIONS: dict[str, tuple[Any, Callable[[pb.GenerateRequest], Any]]] = {
    "query": ("about", lambda r: r.query),
    "system": ("Be brief.", lambda r: r.system),
    "prompt_template": ("{passages}{question}", lambda r: r.prompt_template),
    "chat_template_kwargs": ({"enable_thinking": False}, read_kwargs),
    "recipe": ("full_reuse", lambda r: r.recipe),
    "ratio": (0.0, lambda r: r.ratio if r.HasField("ratio") else None),
    "top_k": (3, lambda r: r.top_k),
    "order": ("rank", lambda r: {pb.ORDER_RANK: "rank"}.get(r.order)),
    "filter": ({"team": "it"}, lambda r: dict(r.filter)),
    "max_tokens": (7, lambda r: r.sampling.max_tokens),
    "temperature": (0.5, lambda r: r.sampling.temperature),
    "top_p": (0.25, lambda r: r.sampling.top_p),
    "sample_top_k": (5, lambda r: r.sampling.top_k),
    "seed": (0, lambda r: r.sampling.seed if r.sampling.HasField("seed") else None),
    "stop": (["end"], lambda r: list(r.sampling.stop)),
}
SEARCH = {name: OPTIONS[name] for name in ("top_k", "order", "filter")}


class Recorder(GatewayServiceServicer):
    """Keeps the requests, and answers each with its corpus and number."""

    def __init__(self) -> None:
        self.requests: list[Any] = []

    async def Retrieve(self, request: pb.RetrieveRequest, context: Any) -> pb.RetrieveResponse:
        self.requests.append(request)
        return pb.RetrieveResponse()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        self.requests.append(request)
        passages = [pb.Passage(text=p.text, id=p.id, position=i) for i, p in enumerate(request.passages)]
        yield pb.GenerateResponse(sources=pb.Sources(passages=passages[::-1]))
        yield pb.GenerateResponse(token=Token(id=1, text=f"{request.corpus} {len(self.requests)}"))
        yield pb.GenerateResponse(summary=Summary(finish_reason="end", model="tiny"))

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:
        self.requests.append(request)
        return pb.GetModelResponse(name="tiny", max_tokens=2048, max_new_tokens=64)


@pytest.fixture
async def gateway(tmp_path: Any) -> AsyncIterator[tuple[str, Recorder]]:
    recorder = Recorder()
    async with listening(rpc.handlers(SERVICE, recorder), f"unix:{tmp_path}/g.sock") as address:
        yield address, recorder


Gateway = tuple[str, Recorder]


def test_every_option_of_the_client_is_a_field() -> None:
    """`explain` adds an event that neither framework has a place for."""
    fields = QuestionFields.model_fields.keys()
    assert {*Options.__annotations__} - fields == {"passages", "messages", "explain"}
    assert fields >= OPTIONS.keys()
    assert {*OPTIONS} == {*Options.__annotations__} - {"passages", "messages", "explain"}


@pytest.mark.parametrize("name", OPTIONS)
async def test_options_of_a_model_are_fields_and_arguments_of_a_call(name: str, gateway: Gateway) -> None:
    address, recorder = gateway
    value, read = OPTIONS[name]
    for made in ({name: value}, {}):
        called = {} if made else {name: value}
        await ChatFusionKV(corpus="c", address=address, **made).ainvoke("?", **called)
        _ = [part async for part in ChatFusionKV(corpus="c", address=address, **made).astream("?", **called)]
        llm = llama_index.FusionKV(corpus="c", address=address, **made)
        await llm.acomplete("?", **called)
        _ = [part async for part in await llm.astream_complete("?", **called)]
    assert [read(request) for request in recorder.requests] == [value] * 8
    other = {"top_k": 4, "k": 4}.get(name)
    if other:  # a call takes precedence, under either name
        await ChatFusionKV(corpus="c", address=address, k=value).ainvoke("?", k=other)
        assert recorder.requests[-1].top_k == other


@pytest.mark.parametrize("name", [*SEARCH, "k"])
async def test_options_of_a_retriever_are_fields_and_arguments_of_a_call(name: str, gateway: Gateway) -> None:
    address, recorder = gateway
    value, read = SEARCH["top_k" if name == "k" else name]
    await langchain.FusionKVRetriever(corpus="c", address=address, **{name: value}).ainvoke("?")
    await langchain.FusionKVRetriever(corpus="c", address=address).ainvoke("?", **{name: value})
    await llama_index.FusionKVRetriever("c", address=address, **{name: value}).aretrieve("?")
    assert [read(request) for request in recorder.requests] == [value] * 3


UNKNOWN: list[dict[str, Any]] = [
    {"filters": {"team": "it"}},
    {"similarity_top_k": 2},
    {"explain": True},
    {"top_k": 2, "k": 2},
]


@pytest.mark.parametrize("given", UNKNOWN, ids=" ".join)
async def test_unknown_arguments_are_errors(given: dict[str, Any]) -> None:
    """At construction and in every kind of call; nothing is sent."""
    for made in (ChatFusionKV, langchain.FusionKVRetriever, llama_index.FusionKV, llama_index.FusionKVRetriever):
        with pytest.raises(ValidationError, match=next(reversed(given))):
            made(**{"corpus": "c", "address": "unix:/nowhere", **given})
    chat, llm = ChatFusionKV(corpus="c", address="unix:/nowhere"), llama_index.FusionKV(corpus="c")
    retriever = langchain.FusionKVRetriever(corpus="c", address="unix:/nowhere")
    calls: list[Callable[[], Any]] = [
        lambda: chat.invoke("?", **given),
        lambda: next(chat.stream("?", **given)),
        lambda: retriever.invoke("?", **given),
        lambda: llm.complete("?", **given),
        lambda: llm.chat([], **given),
        lambda: next(llm.stream_complete("?", **given)),
    ]
    for call in calls:
        with pytest.raises(InvalidArgument, match=r"unknown argument|same option"):
            call()
    for awaited in (chat.ainvoke("?", **given), retriever.ainvoke("?", **given), llm.acomplete("?", **given)):
        with pytest.raises(InvalidArgument, match=r"unknown argument|same option"):
            await awaited


@pytest.mark.parametrize("given", [{"filter": "team=it"}, {"filter": {"year": 2020}}, {"top_k": "many"}], ids=str)
async def test_values_of_another_type_are_errors(given: dict[str, Any], gateway: Gateway) -> None:
    address, recorder = gateway
    for made in (ChatFusionKV, langchain.FusionKVRetriever, llama_index.FusionKV, llama_index.FusionKVRetriever):
        with pytest.raises(ValidationError):
            made(corpus="c", address=address, **given)
    for one in (ChatFusionKV(corpus="c", address=address), langchain.FusionKVRetriever(corpus="c", address=address)):
        with pytest.raises(InvalidArgument, match="must be a"):
            await one.ainvoke("?", **given)
    assert not recorder.requests


def test_prompts_and_queries_without_effect_are_errors() -> None:
    synthesizer = llama_index.FusionKVSynthesizer(llama_index.FusionKV())
    with pytest.raises(InvalidArgument, match="'text_qa_template' has no effect here"):
        synthesizer.update_prompts({"text_qa_template": Any})  # type: ignore[dict-item]
    for bundle in (QueryBundle("?", custom_embedding_strs=["!"]), QueryBundle("?", image_path="a.png")):
        with pytest.raises(InvalidArgument, match="the gateway retrieves by the query's text"):
            llama_index.FusionKVRetriever("c").retrieve(bundle)


async def test_a_chat_message_has_the_role_that_it_names(gateway: Gateway) -> None:
    address, recorder = gateway
    await ChatFusionKV(address=address).ainvoke(
        [ChatMessage(role="system", content="s"), ChatMessage("?", role="user")]
    )
    assert [message.role for message in recorder.requests[0].messages] == [pb.ROLE_SYSTEM, pb.ROLE_USER]
    with pytest.raises(InvalidArgument, match="unknown role 'critic'"):
        await ChatFusionKV(address=address).ainvoke([ChatMessage("?", role="critic")])


async def test_a_developer_is_the_system_as_over_http(gateway: Gateway) -> None:
    address, recorder = gateway
    await ChatFusionKV(address=address).ainvoke([ChatMessage("s", role="developer"), ("human", "?")])
    turns = [LlamaMessage(role=MessageRole.DEVELOPER, content="s"), LlamaMessage(role="user", content="?")]
    await llama_index.FusionKV(address=address).achat(turns)
    for request in recorder.requests:
        assert [message.role for message in request.messages] == [pb.ROLE_SYSTEM, pb.ROLE_USER]


async def test_without_a_corpus_and_passages_nothing_but_the_messages_is_sent(gateway: Gateway) -> None:
    address, recorder = gateway
    for given in ({}, {"passages": []}, {"passages": None}):
        await ChatFusionKV(address=address).ainvoke("?", **given)
        await llama_index.FusionKV(address=address).acomplete("?", **given)
    assert [request.no_passages for request in recorder.requests] == [True] * 6
    await ChatFusionKV(address=address, corpus="c").ainvoke("?")
    await llama_index.FusionKV(address=address).acomplete("?", passages=["a"])
    assert not any(request.no_passages for request in recorder.requests[6:])


@pytest.fixture
def cached() -> Iterator[None]:
    set_llm_cache(InMemoryCache())
    yield
    set_llm_cache(None)


async def test_the_cache_of_langchain_tells_corpora_callers_and_options_apart(cached: None, gateway: Gateway) -> None:
    """One cache for all; each of these differs from the first in one thing that may change the answer."""
    address, recorder = gateway
    same: dict[str, Any] = {"corpus": "c", "address": address}
    made: list[dict[str, Any]] = [{}, {"corpus": "d"}, {"token": "a"}, {"token": "b"}]
    made += [{name: value} for name, (value, _) in OPTIONS.items()]
    answers = [(await ChatFusionKV(**{**same, **each}).ainvoke("?")).text for each in made]
    assert len({*answers}) == len(made) == len(recorder.requests)
    # What a call has beside its messages counts too: an option as if it were a field, passages by all they are.
    chat = ChatFusionKV(**same)
    for (name, (value, _)), known in zip(OPTIONS.items(), answers[4:], strict=True):
        assert (await chat.ainvoke("?", **{name: value})).text == known
    passages = [["a"], ["b"], ["a", "b"], [Document("a", metadata={"page": 1})]]
    passages += [[Document("a", id="1")], [Passage(text="a", title="T")]]
    before = len(recorder.requests)
    asked = [(await ChatFusionKV(address=address).ainvoke("?", passages=each)).text for each in passages]
    assert len({*asked}) == len(passages) == len(recorder.requests) - before
    assert [(await ChatFusionKV(**{**same, **each}).ainvoke("?")).text for each in made] == answers
    assert len(recorder.requests) == before + len(passages), "all of these come from the cache"


def test_what_identifies_a_model_has_no_token_and_no_passage() -> None:
    chat = ChatFusionKV(corpus="c", token="secret-token", filter={"team": "it"})
    told = [repr(chat), str(chat._identifying_params), chat._get_llm_string(passages=["secret passage"])]
    told += [str(chat.asdict()), str(chat.model_dump()), json.dumps(chat.to_json(), default=str)]
    llm = llama_index.FusionKV(corpus="c", token="secret-token")
    told += [repr(llm), llm.to_json(), str(llm.to_payload())]
    assert not [each for each in told if "secret" in each]
    assert chat._identifying_params["corpus"] == "c"
    assert chat.caller() != ChatFusionKV(corpus="c", token="other").caller()


class Told(BaseCallbackHandler):
    """What a tracer is told when a run begins, apart from the messages."""

    def __init__(self) -> None:
        self.begun = ""

    def on_chat_model_start(self, serialized: Any, messages: Any, **kwargs: Any) -> None:
        self.begun += repr((serialized, kwargs))


async def test_tracers_do_not_get_passages_among_the_settings_of_a_run(gateway: Gateway) -> None:
    """LangSmith's LANGSMITH_HIDE_INPUTS and LANGSMITH_HIDE_OUTPUTS hide messages and answers, but no settings."""
    told, texts = Told(), {"system": "secret rule", "filter": {"team": "secret team"}, "query": "secret query"}
    chat = ChatFusionKV(address=gateway[0], token="secret-token", **texts)
    given: dict[str, Any] = {"passages": [Document("secret passage")], "max_tokens": 7}
    await chat.ainvoke("?", {"callbacks": [told]}, **given)
    _ = [part async for part in chat.astream("?", {"callbacks": [told]}, **given)]
    assert told.begun.count("'max_tokens': 7") >= 2
    assert "secret" not in told.begun


async def test_metadata_of_documents_and_nodes_comes_back_with_their_sources(gateway: Gateway) -> None:
    address, recorder = gateway
    own = [{"source": "a.pdf", "page": 3, "more": {"deep": [1]}}, {}, {"blob": "x" * 100_000}]
    documents = [Document(f"text {i}", metadata=each) for i, each in enumerate(own)]
    answer = await ChatFusionKV(address=address).ainvoke("?", passages=documents)
    assert [source["metadata"] for source in answer.response_metadata["sources"]] == own[::-1]
    nodes = [TextNode(text=f"text {i}", metadata=each) for i, each in enumerate(own)]
    for given in (nodes, [NodeWithScore(node=node) for node in nodes]):
        said = await llama_index.FusionKV(address=address).acomplete("?", passages=given)
        assert [source.metadata for source in said.additional_kwargs["sources"]] == own[::-1]
    assert not any(passage.metadata for request in recorder.requests for passage in request.passages)


def test_metadata_of_a_corpus_is_that_of_its_documents_and_nodes(notes: str) -> None:
    """Also under a name that the retriever would use itself."""
    own = {"source": "a.pdf", "page": "3", "score": "high", "document": "contract", "position": "left"}
    with Client(notes) as client:
        client.ingest("owned", "d.txt", "The lake is blue.", metadata=own)
    (document,) = langchain.FusionKVRetriever(corpus="owned", address=notes).invoke("lake")
    assert (document.metadata, document.id) == (own, "d.txt#0")
    (node,) = llama_index.FusionKVRetriever("owned", address=notes).retrieve("lake")
    # As stable as LangChain's: evaluations and citations compare ids.
    assert (node.metadata, node.node_id) == (own, "d.txt#0")
    sent = ChatFusionKV(address=notes, max_tokens=1).invoke("lake", passages=[document])
    assert sent.response_metadata["sources"][0]["metadata"] == own


def test_llamaindex_counts_the_tokens_of_passages_too(notes: str) -> None:
    """And those of the answer by the model's tokenizer, however it is asked for."""
    user = LlamaMessage(role="user", content="Which colour?")
    calls: list[Callable[[llama_index.FusionKV, Any], list[Any]]] = [
        lambda llm, given: [llm.complete("Which colour?", passages=given)],
        lambda llm, given: [llm.chat([user], passages=given)],
        lambda llm, given: list(llm.stream_complete("Which colour?", passages=given)),
        lambda llm, given: list(llm.stream_chat([user], passages=given)),
    ]
    for call in calls:
        counter = TokenCountingHandler(tokenizer=str.split)
        llm = llama_index.FusionKV(address=notes, max_tokens=3, callback_manager=CallbackManager([counter]))
        summary = call(llm, ["The lake is blue. " * 9])[-1].additional_kwargs["summary"]
        assert counter.prompt_llm_token_count == summary["prompt_tokens"] > 36
        assert counter.completion_llm_token_count == summary["tokens_generated"]


def test_the_metadata_of_the_llm_is_the_gateways(notes: str) -> None:
    with Client(notes) as client:
        model = client.model()
        summary = client.ask("notes", "?", max_tokens=1).summary
    assert model.max_tokens > 256 == model.max_new_tokens
    about = llama_index.FusionKV(address=notes).metadata
    assert (about.context_window, about.num_output, about.model_name) == (model.max_tokens, 256, model.name)
    assert llama_index.FusionKV(address=notes, max_tokens=9).metadata.num_output == 9
    assert summary.model == model.name


async def test_a_call_without_retries_fails_at_once(tmp_path: Any) -> None:
    class Failing(GatewayServiceServicer):
        calls = 0

        async def Retrieve(self, request: pb.RetrieveRequest, context: Any) -> pb.RetrieveResponse:
            Failing.calls += 1
            await context.abort(rpc.grpc.StatusCode.UNAVAILABLE, "no worker")

    async with listening(rpc.handlers(SERVICE, Failing()), f"unix:{tmp_path}/g.sock") as address:
        for retries, calls in ((0, 1), (1, 2)):
            Failing.calls = 0
            with pytest.raises(Exception, match="no worker"):
                await langchain.FusionKVRetriever(corpus="c", address=address, max_retries=retries).ainvoke("?")
            assert Failing.calls == calls


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda c: c.ask("c", "?", recipes="x"), "unknown option 'recipes'"),
        (lambda c: c.ask("c", "?", passages=(text for text in "ab")), "passages must be a list, not generator"),
        (lambda c: c.ask("c", messages=[{"role": "user", "content": "?", "name": "x"}]), "the unknown key 'name'"),
        (lambda c: c.ask("c", messages=[{"role": ["user"], "content": "?"}]), r"unknown role \['user'\]; known"),
        (lambda c: c.ask("c", "?", order=["rank"]), r"unknown order \['rank'\]; known: document"),
        (lambda c: c.ask("c", "?", temperature=True), "temperature must be a number"),
        (lambda c: c.ask("c", "?", timeout=0), "timeout must be a positive number of seconds, not 0"),
        (lambda c: c.ask("c", "?", filter=[]), "filter must be a mapping"),
        (lambda c: c.retrieve("c", "?", filter={"a": 1}), "filter must be a mapping"),
        (lambda c: c.ingest("c", "a.txt", "x", sources="x"), "unknown option 'sources'"),
    ],
)
def test_options_of_the_client_that_are_none_are_errors(call: Callable[[Client], Any], error: str) -> None:
    with Client("unix:/nowhere") as client, pytest.raises(InvalidArgument, match=error):
        call(client)


def test_none_means_that_an_option_is_left_out() -> None:
    asked: Any = dict.fromkeys(Options.__annotations__)
    stored: Any = dict.fromkeys(IngestOptions.__annotations__)
    assert requests.generate("c", "?", **asked) == requests.generate("c", "?")
    assert requests.ingest("c", "a.txt", "x", **stored) == requests.ingest("c", "a.txt", "x")


def test_timeouts_and_retries_of_a_client() -> None:
    for wrong in ({"timeout": 0}, {"timeout": float("nan")}, {"retries": 5}, {"retries": -1}):
        with pytest.raises(ValueError, match="must be"):
            Client("unix:/nowhere", **wrong)  # type: ignore[arg-type]
