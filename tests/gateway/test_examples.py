"""The clients of docs/clients.md against a real gateway: Python, LangChain, LlamaIndex, Node and reflection."""

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import grpc
import pytest
from google.protobuf import json_format
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, TextBlock
from llama_index.core.chat_engine import CondenseQuestionChatEngine, ContextChatEngine, SimpleChatEngine
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import RetrieverQueryEngine

from fusionkv import llama_index
from fusionkv.gateway.client.client import Client
from fusionkv.langchain import ChatFusionKV, FusionKVRetriever
from fusionkv.protos.runtime.errors import InvalidArgument, NotFound
from tests.commands import run_python
from tests.conftest import ROOT

pytestmark = pytest.mark.system
QUESTION = "Report Velkorda: code of Bervek?"
SHELL = "".join(re.findall(r"^```sh\n(.*?)^```", (ROOT / "docs/clients.md").read_text(), re.DOTALL | re.MULTILINE))
GRPCURL = [line for line in SHELL.splitlines() if line.startswith("grpcurl ")]


def run(*command: str, status: int = 0, **env: str) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **env}, cwd=ROOT)
    assert done.returncode == status, done.stdout + done.stderr
    return done


def test_python(notes: str) -> None:
    said = run_python("examples/python_async.py", "--gateway", notes, cwd=ROOT).stdout
    assert "Report Ballakmi: code of Bervek? 535\n" in said
    assert re.search(r"^from: ballakmi-01.txt, ballakmi-02.txt\n *Janberg$", said, re.MULTILINE)
    assert re.search(r"^\d+ of \d+ context tokens were exact hits in the cache", said, re.MULTILINE)
    said = run_python("examples/python_client.py", "--gateway", notes, cwd=ROOT).stdout
    assert "from: ballakmi-02.txt, ballakmi-01.txt" in said  # best first
    assert "as expected: gateway: no corpus 'no-such-corpus'" in said
    assert "Deleted(documents=2, chunks=2)" in said


def test_node(notes: str) -> None:
    packages = ROOT / "build/tools/node_modules"
    node = shutil.which("node")
    if node is None or not (packages / "@grpc/grpc-js").exists():
        reason = "node or the packages of examples/node are missing: apt-get install npm, then scripts/setup.sh tools"
        if os.environ.get("FUSIONKV_REQUIRE_TOOLS"):
            pytest.fail(reason)
        pytest.skip(reason)
    wanted = json.loads((ROOT / "examples/node/package.json").read_text())["dependencies"]
    for name, version in wanted.items():
        assert json.loads((packages / name / "package.json").read_text())["version"] == version
    said = run(node, "examples/node/ask.js", notes, "notes", QUESTION, NODE_PATH=str(packages)).stdout
    assert re.fullmatch(r"from: a\.md, b\.md\n\s*535\s*\nfirst token after [\d.]+ ms\n", said)
    failed = run(node, "examples/node/ask.js", notes, "none", QUESTION, status=1, NODE_PATH=str(packages))
    assert failed.stderr.startswith("NOT_FOUND: ")


def test_grpcurl(notes: str) -> None:
    if shutil.which("grpcurl") is None:
        pytest.skip("grpcurl is not on PATH: go install github.com/fullstorydev/grpcurl/cmd/grpcurl@latest")
    said = [run(*shlex.split(line.replace("127.0.0.1:7072", notes))).stdout for line in GRPCURL]
    assert "gateway.v1.GatewayService" in said[0]
    assert "535" in said[-1]


def test_what_grpcurl_does(notes: str) -> None:
    """Names from reflection alone, messages from JSON; no stub of ours."""
    with grpc.insecure_channel(notes) as channel:
        found = ProtoReflectionDescriptorDatabase(channel)
        assert "gateway.v1.GatewayService" in found.get_services()
        pool = DescriptorPool(found)
        calls = [words for line in GRPCURL if "-d" in (words := shlex.split(line))]
        assert len(calls) == 2
        for words in calls:
            service, _, name = words[-1].rpartition("/")
            method = pool.FindServiceByName(service).FindMethodByName(name)
            request = json_format.Parse(words[words.index("-d") + 1], GetMessageClass(method.input_type)())
            kind = channel.unary_stream if method.server_streaming else channel.unary_unary
            forms = type(request).SerializeToString, GetMessageClass(method.output_type).FromString
            answer = kind(f"/{words[-1]}", *forms)(request, timeout=60)
            responses = [json_format.MessageToDict(r) for r in (answer if method.server_streaming else [answer])]
            if name == "Generate":
                assert "".join(r["token"].get("text", "") for r in responses if "token" in r).strip() == "535"
            else:
                assert responses[0]["passages"][0]["document"] == "a.md"


async def test_langchain(notes: str) -> None:
    retriever = FusionKVRetriever(corpus="notes", address=notes, top_k=1)
    (document,) = retriever.invoke("code of Bervek?")
    assert document == (await retriever.ainvoke("code of Bervek?"))[0]
    assert document.metadata["document"] == "a.md"
    assert "535" in document.page_content

    chat = ChatFusionKV(corpus="notes", address=notes, recipe="full_attention", max_tokens=16)
    answer = chat.invoke(QUESTION)
    assert answer.text.strip() == "535"
    assert [s["document"] for s in answer.response_metadata["sources"]] == ["a.md", "b.md"]
    summary, usage = answer.response_metadata["summary"], answer.usage_metadata
    assert (usage["input_tokens"], summary["recipe"]) == (summary["prompt_tokens"], "full_attention")
    again = await chat.ainvoke(QUESTION, recipe="full_reuse")
    assert again.response_metadata["summary"]["recipe"] == "full_reuse"
    streamed = [chunk async for chunk in chat.astream(QUESTION)]
    assert len(streamed) > 2
    assert "".join(chunk.text for chunk in streamed) == answer.text
    assert [a.text.strip() for a in chat.batch([QUESTION, "Report Velkorda: age of Dorlin?"])] == ["535", "41"]
    assert len(chat.invoke(QUESTION, stop=["3"]).text.strip()) < 3


def test_langchain_turns_and_errors(notes: str) -> None:
    chat = ChatFusionKV(corpus="notes", address=notes, max_tokens=4, top_k=1)
    turns = [SystemMessage("Be brief."), HumanMessage("Hill?"), AIMessage("Green."), HumanMessage("age of Dorlin?")]
    answer = chat.invoke(turns)
    # Chunks are searched for by the last message alone, while the prompt holds all of them.
    assert [s["document"] for s in answer.response_metadata["sources"]] == ["b.md"]
    alone = chat.invoke("age of Dorlin?").response_metadata["summary"]["prompt_tokens"]
    assert answer.response_metadata["summary"]["prompt_tokens"] > alone
    with pytest.raises(InvalidArgument, match="the last message must have the role user"):
        chat.invoke(turns[:3])
    with pytest.raises(NotFound, match="no corpus"):
        ChatFusionKV(corpus="none", address=notes).invoke(QUESTION)


@pytest.fixture(scope="module")
def titled(notes: str) -> str:
    """The corpus of a document with a title, whose KV is in the cache."""
    line = {"id": "lake", "title": "Report Velkorda", "text": "The code of Bervek is 535.", "metadata": {"year": "1"}}
    with Client(notes) as client:
        client.ingest("titled", "lines.jsonl", json.dumps(line))
        client.ask("titled", QUESTION, max_tokens=1)
    return "titled"


def test_documents_of_langchain_are_passages_with_their_titles(notes: str, titled: str) -> None:
    documents = FusionKVRetriever(corpus=titled, address=notes).invoke(QUESTION)
    assert [document.metadata["title"] for document in documents] == ["Report Velkorda"]
    found = [document.model_copy(update={"id": "a-1"}) for document in documents]
    answer = ChatFusionKV(address=notes, max_tokens=1).invoke(QUESTION, passages=found)
    assert [source["id"] for source in answer.response_metadata["sources"]] == ["a-1"]
    assert answer.response_metadata["summary"]["chunks_missed"] == 0, "it is the corpus's chunk"


def test_messages_with_images_are_refused() -> None:
    parts = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": "https://a/b.png"}}]
    with pytest.raises(InvalidArgument, match="message 1 has a part of type 'image_url': only text is supported"):
        ChatFusionKV(corpus="c").invoke([SystemMessage("Be brief."), HumanMessage(parts)])
    blocks = [TextBlock(text="What is it?"), ImageBlock(url="https://a/b.png")]
    with pytest.raises(InvalidArgument, match="message 0 has a part of type 'image': only text is supported"):
        llama_index.FusionKV(corpus="c").chat([ChatMessage(blocks=blocks)])


def test_nodes_of_llama_index_are_passages_with_their_titles(notes: str, titled: str) -> None:
    nodes = llama_index.FusionKVRetriever(titled, address=notes).retrieve(QUESTION)
    llm = llama_index.FusionKV(address=notes, max_tokens=1)
    for passages in (nodes, [node.node for node in nodes]):
        answer = llm.complete(QUESTION, passages=passages).additional_kwargs
        assert [source.id for source in answer["sources"]] == [node.node_id for node in nodes]
        assert answer["summary"]["chunks_missed"] == 0, "it is the corpus's chunk"
    engine = RetrieverQueryEngine(
        llama_index.FusionKVRetriever(titled, address=notes), llama_index.FusionKVSynthesizer(llm)
    )
    assert [node.metadata["title"] for node in engine.query(QUESTION).source_nodes] == ["Report Velkorda"]


def test_chat_engines_and_predict_of_llama_index_need_no_other_llm(notes: str) -> None:
    """They write, grade and condense questions by the same LLM; passages go to it only with an answer."""
    llm = llama_index.FusionKV(address=notes, max_tokens=8)
    retriever = llama_index.FusionKVRetriever("notes", address=notes)
    with Client(notes) as client:
        said = client.ask(question="Report Velkorda: write a query", passages=[], max_tokens=8).text
    assert llm.predict(PromptTemplate("Report {name}: write a query"), name="Velkorda").strip() == said.strip()
    engine = RetrieverQueryEngine(retriever, llama_index.FusionKVSynthesizer(llm))
    # The first question is asked as it is, the second as the LLM writes it.
    condensed = CondenseQuestionChatEngine.from_defaults(engine, llm=llm)
    assert str(condensed.chat(QUESTION)).strip() == "535"
    assert str(condensed.chat("Report Velkorda: age of Dorlin?"))
    for chat in (SimpleChatEngine.from_defaults(llm=llm), ContextChatEngine.from_defaults(retriever, llm=llm)):
        first, second = chat.chat("Hello?"), chat.chat("And now?")
        assert str(first)
        assert str(second)
        assert len(chat.chat_history) == 4


@pytest.mark.slow
async def test_llama_index(notes: str) -> None:
    retriever = llama_index.FusionKVRetriever("notes", address=notes, top_k=1)
    (node,) = retriever.retrieve("code of Bervek?")
    assert node.text == (await retriever.aretrieve("code of Bervek?"))[0].text
    assert node.metadata["document"] == "a.md"
    assert "535" in node.text

    llm = llama_index.FusionKV(corpus="notes", address=notes, recipe="full_attention", max_tokens=16)
    answer = llm.complete(QUESTION)
    assert (answer.text.strip(), answer.additional_kwargs["summary"]["recipe"]) == ("535", "full_attention")
    assert [s.document for s in answer.additional_kwargs["sources"]] == ["a.md", "b.md"]
    assert (await llm.acomplete(QUESTION, recipe="full_reuse")).additional_kwargs["summary"]["recipe"] == "full_reuse"
    turns = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content=QUESTION)]
    said = llm.chat(turns).message.content
    assert said == (await llm.achat(turns)).message.content
    assert "".join(part.delta for part in llm.stream_chat(turns)) == said
    *_, last = [part async for part in await llm.astream_chat(turns)]
    assert last.message.content == said
    assert [s.document for s in last.additional_kwargs["sources"]] == ["a.md", "b.md"]
    assert "".join(part.delta for part in llm.stream_complete(QUESTION)) == answer.text
    assert [part.text async for part in await llm.astream_complete(QUESTION)][-1] == answer.text
    with pytest.raises(NotFound, match="no corpus"):
        llama_index.FusionKV(corpus="none", address=notes).complete(QUESTION)


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [False, True])
async def test_llama_index_retrieves_and_the_nodes_are_passages(notes: str, streaming: bool) -> None:
    corpus = llama_index.FusionKVRetriever("notes", address=notes)
    llm = llama_index.FusionKV(address=notes, recipe="prophetkv", max_tokens=16)
    engine = RetrieverQueryEngine(corpus, llama_index.FusionKVSynthesizer(llm, streaming=streaming))
    said = engine.query(QUESTION)
    assert len(said.source_nodes) == 2
    assert str(said).strip() == "535"
    awaited = await engine.aquery("Report Velkorda: age of Dorlin?")
    text = "".join([part async for part in awaited.response_gen]) if streaming else str(awaited)
    assert text.strip() == "41"
    summary = llm.complete(QUESTION, passages=[node.text for node in said.source_nodes[::-1]])
    assert summary.additional_kwargs["summary"]["chunks_missed"] == 0


@pytest.mark.slow
def test_a_folder_that_llama_index_retrieves_from(notes: str, tmp_path: Path) -> None:
    """What is asked a second time, in another order, is all in the cache."""
    for name, about in (("a", "The code of Tarvin is 212."), ("b", "The age of Tarvin is 35."), ("c", "A lake.")):
        (tmp_path / f"{name}.txt").write_text(f"Report Ashkorda. {about}")
    script = ("examples/llama_index_folder.py", str(tmp_path), "Report Ashkorda: code of Tarvin?")
    said = run_python(*script, "--gateway", notes, cwd=ROOT)
    first, second = [line for line in said.stdout.splitlines() if " passages, " in line]
    assert re.match(r"  \d passages, [1-9] not in the cache; ", first)
    assert re.match(r"  \d passages, 0 not in the cache; ", second)
