"""The clients of docs/clients.md against a real gateway: Python, LangChain, Node, and what asks for reflection."""

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

from fusionkv.gateway.client.langchain import ChatFusionKV, FusionKVRetriever
from fusionkv.protos.runtime.errors import InvalidArgument, NotFound
from tests.commands import run_python

pytestmark = pytest.mark.system
ROOT = Path(__file__).parent.parent.parent
QUESTION = "Report Velkorda: code of Bervek?"
SHELL = "".join(re.findall(r"^```sh\n(.*?)^```", (ROOT / "docs/clients.md").read_text(), re.DOTALL | re.MULTILINE))
GRPCURL = [line for line in SHELL.splitlines() if line.startswith("grpcurl ")]


def run(*command: str | Path, **env: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **env}, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_python(notes: str) -> None:
    said = run_python("examples/python_async.py", "--gateway", notes, cwd=ROOT).stdout
    assert "Report Ballakmi: code of Bervek? 535\n" in said
    assert re.search(r"^from: ballakmi-01.txt, ballakmi-02.txt\n *Janberg$", said, re.MULTILINE)
    assert re.search(r"^\d+ of \d+ context tokens were exact hits in the cache", said, re.MULTILINE)


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
    said = run(node, "examples/node/ask.js", notes, "notes", QUESTION, NODE_PATH=str(packages))
    assert re.fullmatch(r"from: a\.md, b\.md\n\s*535\s*\nfirst token after [\d.]+ ms\n", said)
    command = [node, "examples/node/ask.js", notes, "none", QUESTION]
    failed = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "NODE_PATH": str(packages)}, cwd=ROOT
    )
    assert failed.returncode == 1
    assert failed.stderr.startswith("NOT_FOUND: ")


def test_grpcurl(notes: str) -> None:
    if shutil.which("grpcurl") is None:
        pytest.skip("grpcurl is not on PATH: go install github.com/fullstorydev/grpcurl/cmd/grpcurl@latest")
    said = [run(*shlex.split(line.replace("127.0.0.1:7072", notes))) for line in GRPCURL]
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
            call = kind(
                f"/{words[-1]}",
                request_serializer=type(request).SerializeToString,
                response_deserializer=GetMessageClass(method.output_type).FromString,
            )
            answer = call(request, timeout=60)
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

    chat = ChatFusionKV(corpus="notes", address=notes, options={"recipe": "full_attention", "max_tokens": 16})
    answer = chat.invoke(QUESTION)
    assert answer.text.strip() == "535"
    assert [s["document"] for s in answer.response_metadata["sources"]] == ["a.md", "b.md"]
    summary = answer.response_metadata["summary"]
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["input_tokens"] == summary["prompt_tokens"]
    assert summary["recipe"] == "full_attention"
    again = await chat.ainvoke(QUESTION, recipe="full_reuse")
    assert again.response_metadata["summary"]["recipe"] == "full_reuse"
    streamed = [chunk async for chunk in chat.astream(QUESTION)]
    assert len(streamed) > 2
    assert "".join(chunk.text for chunk in streamed) == answer.text
    assert [a.text.strip() for a in chat.batch([QUESTION, "Report Velkorda: age of Dorlin?"])] == ["535", "41"]
    assert len(chat.invoke(QUESTION, stop=["3"]).text.strip()) < 3


def test_langchain_turns_and_errors(notes: str) -> None:
    chat = ChatFusionKV(corpus="notes", address=notes, options={"max_tokens": 4, "top_k": 1})
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
    assert "secret" not in repr(ChatFusionKV(corpus="notes", token="secret"))
