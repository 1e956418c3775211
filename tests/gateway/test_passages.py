"""Passages and messages of a caller's own, through real services: they meet the KV that corpora left."""

from dataclasses import replace
from typing import Any

import pytest

from fusionkv.gateway.client.client import Client
from fusionkv.gateway.client.results import Answer, Explanation, Passage, Summary
from fusionkv.protos.runtime.errors import InvalidArgument
from tests.waiting import wait_until

pytestmark = pytest.mark.system
WHO = "Whose code is 103?"


def said(**by_role: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in by_role.items()]


def hits(answer: Answer) -> int:
    return sum(hit.chunks for hit in answer.summary.hits if hit.kind == "exact")


def test_retrieved_passages_given_back_are_answered_as_their_corpus_is(client: Client) -> None:
    asked: dict[str, Any] = {"question": WHO, "recipe": "full_reuse", "max_tokens": 8}
    over = client.ask("base", **asked)
    given = client.ask(passages=over.sources, order="rank", **asked)
    assert (given.text, given.sources) == (over.text, over.sources)
    s = given.summary
    assert (s.prompt_tokens, s.chunks_retrieved) == (over.summary.prompt_tokens, 6)
    assert s.chunks_missed == s.tokens_encoded == 0


def test_documents_order_given_passages_as_they_order_a_corpus(client: Client) -> None:
    over = client.ask("base", WHO, order="document", max_tokens=1)
    given = client.ask(question=WHO, passages=over.sources[::-1], order="document", max_tokens=1)
    assert given.sources == over.sources
    own = ["first", Passage(document="a.txt", position=1, text="third"), Passage(document="a.txt", text="second")]
    sources = client.ask(question=WHO, passages=own, order="document", max_tokens=1).sources
    assert [source.text for source in sources] == ["first", "second", "third"]


def test_the_same_text_is_the_same_chunk_wherever_it_comes_from(client: Client) -> None:
    client.ask("base", WHO, recipe="full_reuse", max_tokens=1)
    same = ["Report Velnora.\nThe code of Name1 is 101.", " \nReport Velnora.\nThe code of Name2 is 102.\n"]
    titled = Passage(title="Report Velnora.", text="The code of Name3 is 103.")
    answer = client.ask(question="Other words?", passages=[*same, titled], recipe="full_reuse", max_tokens=1)
    assert answer.summary.chunks_missed == 0
    assert sum(hit.chunks for hit in answer.summary.hits) == 3


def test_sources_say_what_is_cited(client: Client) -> None:
    given = [
        Passage(text="The lake is blue.", id="a-1", title="Lakes", metadata={"url": "https://lakes", "page": "3"}),
        Passage(text="The hill is green."),
        Passage(document="hills.txt", position=7, text="The hill is high.", score=0.5),
    ]
    sources = client.ask(question="Which colour?", passages=given, order="rank", max_tokens=1).sources
    assert all(source.tokens > len(source.text) for source in sources), "a byte is a token of this model"
    assert [replace(s, tokens=0) for s in sources] == [given[0], replace(given[1], position=1), given[2]]
    assert [s.name for s in sources] == ["Lakes", "passage 2", "hills.txt#7"]


def laid_out(client: Client, **asked: Any) -> tuple[str, str]:
    """What stands before the passages and behind them, as the worker says."""
    events = client.stream(passages=["A page."], explain=True, max_tokens=1, **asked)
    (found,) = [event for event in events if isinstance(event, Explanation)]
    assert ["".join(chunk.texts) for chunk in found.chunks] == ["A page.\n"]
    return "".join(found.system.texts), "".join(found.question.texts)


def test_an_explanation_marks_what_was_recomputed(client: Client) -> None:
    """As many tokens as the summary says, of the highest scores; lossless chunks have none.

    A byte is a token of this model, and the text of several tokens is whole.
    """
    given = [f"The lake {number} is blue (湖は青い), and the hill is green." for number in range(4)]
    asked: Any = {"recipe": "prophetkv", "ratio": 0.3, "order": "rank", "explain": True, "max_tokens": 1}
    events = list(client.stream(question="Which lake?", passages=given, **asked))
    (found,), summary = [event for event in events if isinstance(event, Explanation)], events[-1]
    assert isinstance(summary, Summary)
    assert ["".join(chunk.texts) for chunk in found.chunks] == [f"{text}\n" for text in given]
    assert sum(len(chunk.recomputed) for chunk in found.chunks) == summary.tokens_recomputed > 0
    assert not any(chunk.recomputed for chunk in found.chunks if chunk.lossless)
    stale = [chunk for chunk in found.chunks if not chunk.lossless]
    scored = [(s, i in chunk.recomputed) for chunk in stale for i, s in enumerate(chunk.scores)]
    assert len(scored) == sum(len(chunk.texts) for chunk in stale)
    # Ranks are rounded to two digits.
    assert min(s for s, on in scored if on) >= max(s for s, on in scored if not on) - 0.01


def test_an_empty_list_of_passages_is_plain_generation(client: Client) -> None:
    """No instruction and no worker's user message: the conversation alone, labelled, as there is no chat template."""
    talk = said(user="Who?", assistant="He.") + said(user="Why?")
    for asked, expected in (
        ({"question": "Who?"}, ("<bos>", "Question: Who?\nAnswer:")),
        (
            {"messages": talk, "system": "Be brief."},
            ("<bos>Be brief.\n", "Question: Who?\nAnswer: He.\nQuestion: Why?\nAnswer:"),
        ),
        ({"question": "def f(", "prompt_template": "{passages}{question}"}, ("<bos>", "def f(")),
    ):
        events = list(client.stream(passages=[], explain=True, max_tokens=2, **asked))  # type: ignore[arg-type]
        (found,) = [event for event in events if isinstance(event, Explanation)]
        assert ("".join(found.system.texts), "".join(found.question.texts)) == expected
        summary = events[-1]
        assert isinstance(summary, Summary)
        assert (summary.context_tokens, summary.chunks_retrieved, summary.tokens_generated) == (0, 0, 2)
        assert not summary.degraded
    recipes = {
        client.ask(question="Who?", passages=[], max_tokens=4, recipe=name).text
        for name in ("", "full_attention", "full_reuse")
    }
    assert len(recipes) == 1
    for asked in ({}, {"passages": None}):
        with pytest.raises(InvalidArgument, match="neither a corpus nor passages are given: for an answer without"):
            client.ask(question="Who?", **asked)
    with pytest.raises(InvalidArgument, match="a corpus and no_passages are given"):
        client.ask("base", "Who?", passages=[])


def test_messages_keep_their_roles(client: Client) -> None:
    """As text, since this model has no chat template."""
    messages = said(system="Be brief.", user="Who?", assistant="He.") + said(user="Why?")
    conversation = "Question: Who?\nAnswer: He.\nQuestion: Why?\nAnswer:"
    assert laid_out(client, messages=messages) == ("<bos>Be brief.\n", conversation)
    assert laid_out(client, messages=messages[1:], system="Be kind.") == ("<bos>Be kind.\n", conversation)
    worker = ("<bos>Answer the question using the passages.\n", "Question: Why?\nAnswer:")
    assert laid_out(client, messages=messages[3:]) == laid_out(client, question="Why?") == worker
    own = {"prompt_template": "Read: {passages}Say {question} now.", "system": "Be kind."}
    assert laid_out(client, question="Why?", **own) == ("<bos>Be kind.\nRead: ", "Say Why? now.")


def test_kv_depends_on_the_system_prompt_and_on_no_conversation(client: Client) -> None:
    asked: dict[str, Any] = {"passages": ["A story of three rivers."], "recipe": "full_reuse", "max_tokens": 1}
    assert client.ask(question="How many?", **asked).summary.chunks_missed == 1
    wait_until(lambda: hits(client.ask(question="How many?", **asked)) == 1)
    talk = [{"role": role, "content": "How many?"} for role in ("user", "assistant", "user")]
    assert hits(client.ask(messages=talk, **asked)) == 1
    own = {"question": "How many?", "system": "Count."}
    assert client.ask(**own, **asked).summary.chunks_missed == 1
    wait_until(lambda: hits(client.ask(**own, **asked)) == 1)


def test_a_conversation_over_a_corpus_is_searched_by_its_last_message(client: Client) -> None:
    messages = said(user="Name5, Name5, Name5?", assistant="Name5 is 105.") + said(user="And the code of Name2?")
    for query, document in (("", "page-2.txt"), ("Name4", "page-4.txt")):
        answer = client.ask("base", messages=messages, query=query, top_k=1, max_tokens=1)
        assert [s.document for s in answer.sources] == [document]
