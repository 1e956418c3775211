"""LlamaIndex over a real gateway: retriever, LLM, synthesizer, and its own retriever over a folder."""

import re
from pathlib import Path

import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.query_engine import RetrieverQueryEngine

from fusionkv.gateway.client import llama_index
from fusionkv.protos.runtime.errors import NotFound
from tests.commands import run_python

pytestmark = [pytest.mark.system, pytest.mark.slow]
QUESTION = "Report Velkorda: code of Bervek?"


async def test_llama_index(notes: str) -> None:
    retriever = llama_index.FusionKVRetriever("notes", address=notes, top_k=1)
    (node,) = retriever.retrieve("code of Bervek?")
    assert node.text == (await retriever.aretrieve("code of Bervek?"))[0].text
    assert node.metadata["document"] == "a.md"
    assert "535" in node.text

    llm = llama_index.FusionKV(corpus="notes", address=notes, options={"recipe": "full_attention", "max_tokens": 16})
    answer = llm.complete(QUESTION)
    assert answer.text.strip() == "535"
    assert answer.additional_kwargs["summary"]["recipe"] == "full_attention"
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
    assert "secret" not in repr(llama_index.FusionKV(token="secret"))


@pytest.mark.parametrize("streaming", [False, True])
async def test_llama_index_retrieves_and_the_nodes_are_passages(notes: str, streaming: bool) -> None:
    """The second question, over the same nodes, finds their KV."""
    corpus = llama_index.FusionKVRetriever("notes", address=notes)
    llm = llama_index.FusionKV(address=notes, options={"recipe": "prophetkv", "max_tokens": 16})
    engine = RetrieverQueryEngine(corpus, llama_index.FusionKVSynthesizer(llm, streaming=streaming))
    said = engine.query(QUESTION)
    assert len(said.source_nodes) == 2
    assert str(said).strip() == "535"
    awaited = await engine.aquery("Report Velkorda: age of Dorlin?")
    text = "".join([part async for part in awaited.response_gen]) if streaming else str(awaited)
    assert text.strip() == "41"
    summary = llm.complete(QUESTION, passages=[node.text for node in said.source_nodes[::-1]])
    assert summary.additional_kwargs["summary"]["chunks_missed"] == 0


def test_a_folder_that_llama_index_retrieves_from(notes: str, root: Path, tmp_path: Path) -> None:
    """What is asked a second time, in another order, is all in the cache."""
    for name, about in (("a", "The code of Tarvin is 212."), ("b", "The age of Tarvin is 35."), ("c", "A lake.")):
        (tmp_path / f"{name}.txt").write_text(f"Report Ashkorda. {about}")
    script = ("examples/llama_index_folder.py", str(tmp_path), "Report Ashkorda: code of Tarvin?")
    said = run_python(*script, "--gateway", notes, cwd=root)
    first, second = [line for line in said.stdout.splitlines() if " passages, " in line]
    assert re.match(r"  \d passages, [1-9] not in the cache; ", first)
    assert re.match(r"  \d passages, 0 not in the cache; ", second)
