"""Requests read from questions and messages, checked and put together, without any process."""

import time
from collections import UserDict
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any

import pytest
from transformers import AutoTokenizer

from fusionkv.fusion_worker.library.catalog import KNOWN
from fusionkv.fusion_worker.template import PromptTemplate
from fusionkv.gateway import plan
from fusionkv.gateway.client import requests
from fusionkv.gateway.client.results import Passage as Given
from fusionkv.gateway.plan import Conversation
from fusionkv.gateway.retrieval.base import Candidate, TextChunk, rank
from fusionkv.gateway.tokens import Vocabulary
from fusionkv.protos.contract.requests import RequestedRecipe
from fusionkv.protos.fusion.v1 import fusion_pb2
from fusionkv.protos.fusion.v1.fusion_pb2 import Sampling
from fusionkv.protos.gateway.v1 import gateway_pb2 as pb
from fusionkv.protos.runtime.errors import InvalidArgument
from tests.conftest import ROOT
from tests.fusion_worker.oracle import byte_tokenizer
from tests.fusion_worker.test_models import LLAMA_LIKE, QWEN_LIKE
from tests.gateway import test_tokens

NAN = float("nan")
ONE = pb.Passage(text="one")


def vocabulary() -> Vocabulary:
    made = test_tokens.vocabulary(question="{question}", system="s")
    made.model.max_tokens = 100
    return made


def asked(name: str) -> RequestedRecipe:
    return RequestedRecipe.of(name, vocabulary().model)


PLAIN, NEAR = asked("a3"), asked("a3+similarity_guided(3)")
WHY = pb.GenerateRequest(question="why", corpus="c")


def build(
    recipe: RequestedRecipe, passages: Any, tenant: str = "", request: pb.GenerateRequest = WHY
) -> fusion_pb2.GenerateRequest:
    return plan.build(request, Conversation.of(request), recipe, passages, vocabulary(), tenant)


def chunk(document: str, position: int, tokens: int = 10, variant: bytes = b"") -> TextChunk:
    return TextChunk(document, position, "text", tuple(range(tokens)), variant, 3 if variant else 0)


PASSAGES = [(chunk("b", 1), 0.9), (chunk("a", 2), 0.8), (chunk("b", 0, variant=b"v" * 32), 0.7)]


@pytest.mark.parametrize(
    ("order", "keys"),
    [
        (pb.ORDER_UNSPECIFIED, [("b", 1), ("a", 2), ("b", 0)]),
        (pb.ORDER_DOCUMENT, [("a", 2), ("b", 0), ("b", 1)]),
        (pb.ORDER_RANK, [("b", 1), ("a", 2), ("b", 0)]),
        (pb.ORDER_RANK_REVERSED, [("b", 0), ("a", 2), ("b", 1)]),
        (pb.ORDER_ENDS, [("b", 1), ("b", 0), ("a", 2)]),
    ],
)
def test_order(order: pb.Order, keys: list[tuple[str, int]]) -> None:
    assert [c.key for c, _ in plan.order(PASSAGES, order)] == keys


def test_an_order_of_a_later_version_is_no_rank() -> None:
    with pytest.raises(InvalidArgument, match="there is no order 99"):
        plan.order(PASSAGES, pb.RetrieveRequest(order=99).order)  # type: ignore[arg-type]


def test_what_looks_the_same_is_the_same() -> None:
    """In NFC, as documents are stored."""
    apart, one = "Cafe\u0301", "Café"
    own = (Conversation.of(pb.GenerateRequest(question=t, system=t)) for t in (apart, one))
    assert len({*own, Conversation((one,), one)}) == 1
    turns = [pb.Message(role=pb.ROLE_SYSTEM, text=apart), pb.Message(role=pb.ROLE_USER, text=apart)]
    assert Conversation.of(pb.GenerateRequest(messages=turns)) == Conversation((one,), one)
    given = plan.given([pb.Passage(title=t, text=t) for t in (apart, one)], vocabulary())
    assert given[0][0].ids == given[1][0].ids
    assert given[0][0].text == f"{one}\n{one}"


def test_the_request_holds_all_parts() -> None:
    sampling = Sampling(max_tokens=5, temperature=0.5, top_p=0.9, top_k=3, seed=0, stop=["x"])
    made = build(NEAR, PASSAGES, "t", pb.GenerateRequest(question="why", ratio=0.0, sampling=sampling))
    known, same = vocabulary(), fusion_pb2.Sampling.FromString(sampling.SerializeToString())
    assert made == fusion_pb2.GenerateRequest(
        recipe=NEAR.name, ratio=0.0, system={"ids": known.system()}, question={"ids": known.question("why")},
        chunks=[fusion_pb2.Chunk(ids=range(10), variants=each) for each in ([], [], [b"v" * 32])],
        sampling=same, model_fingerprint=b"f" * 32, tenant="t", corpus=made.corpus,
    )  # fmt: skip


def test_a_request_without_passages_holds_one_text() -> None:
    made, known = build(PLAIN, [], request=pb.GenerateRequest(question="why", no_passages=True)), vocabulary()
    assert (made.system.ids, made.question.ids) == known.alone("", ["why"], known.plain_layout)


@pytest.mark.parametrize(
    ("name", "neighbours"),
    [("a3", 3), ("a3+similarity_guided(2)", 3), ("fusionrag+isolated", 3), ("a3", 0), ("fusionrag", 0)],
)
def test_what_was_encoded_with_other_neighbours_is_not_sent(name: str, neighbours: int) -> None:
    """Nor to a recipe that uses none, nor with an unknown number of them (0), as corpora of earlier gateways have."""
    encoded = [(replace(chunk, variant=b"v" * 32, neighbours=neighbours), score) for chunk, score in PASSAGES]
    made = build(asked(name), encoded)
    assert [list(c.variants) for c in made.chunks] == [[], [], []]
    assert not made.HasField("ratio")
    assert not made.sampling.HasField("seed")


@pytest.mark.parametrize(
    ("name", "encoded", "expected"),
    [
        ("a3", (0, 0, 0), "a3"),
        ("a3", (3, 5, 5), "a3+similarity_guided(5)"),
        ("a3+window", (0, 0, 3), "a3+window+similarity_guided(3)"),
        # These say themselves how chunks are encoded, or take no modifiers.
        ("fusionrag", (5, 5, 5), "fusionrag"),
        ("a3+similarity_guided(2)", (5, 5, 5), "a3+similarity_guided(2)"),
        ("a3+versions(5)", (5, 5, 5), "a3+versions(5)"),
        ("full_attention", (5, 5, 5), "full_attention"),
    ],
)
def test_the_default_reuses_chunks_as_most_were_encoded(name: str, encoded: tuple[int, ...], expected: str) -> None:
    passages = [
        (replace(chunk, variant=b"v" * 32 if count else b"", neighbours=count), score)
        for (chunk, score), count in zip(PASSAGES, encoded, strict=True)
    ]
    found = plan.as_encoded(asked(name), passages, vocabulary())
    assert found.name == expected
    made = build(found, passages)
    assert [bool(c.variants) for c in made.chunks] == [count == found.recipe.neighbours > 0 for count in encoded]


def test_prompt_and_answer_must_fit_the_model() -> None:
    def built(answer: int) -> None:
        build(PLAIN, PASSAGES, request=pb.GenerateRequest(question="why", sampling=Sampling(max_tokens=answer)))

    built(0)
    built(66)
    with pytest.raises(InvalidArgument, match=r"34 tokens \(1 system, 30 in 3 chunks, 3 question\).*67 more.*100"):
        built(67)


@pytest.mark.parametrize(
    "talk",
    [
        [("user", "Who?")],
        [("system", "Be brief."), ("user", "Who?")],
        [("user", "Who?"), ("assistant", "He."), ("user", "Why?")],
    ],
    ids=len,
)
@pytest.mark.parametrize("chat", [QWEN_LIKE, LLAMA_LIKE])
def test_without_passages_a_prompt_is_that_of_the_chat_template(chat: str, talk: list[tuple[str, str]]) -> None:
    """Also if the operator has a user message for prompts with passages."""
    tokenizer = byte_tokenizer(chat_template=chat)
    template = PromptTemplate.of(tokenizer).configured("", "Use these:\n{passages}Then say: {question}")
    as_json = tokenizer.backend_tokenizer.to_str().encode()
    model = fusion_pb2.GetModelResponse(
        tokenizer_json=as_json, template=fusion_pb2.PromptTemplate(**asdict(template)), max_tokens=1000
    )
    messages = [{"role": role, "content": text} for role, text in talk]
    request = requests.generate(passages=[], messages=messages)
    made = plan.build(request, Conversation.of(request), PLAIN, [], Vocabulary(model), "")
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert [*made.system.ids, *made.question.ids] == ids
    assert not made.chunks


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"prompt_template": "{question}"}, r"must contain \{passages\} and, behind it, \{question\}, each once"),
        ({"prompt_template": "{passages}{question}" + "x" * 65_536}, "the prompt template has 65556 characters"),
        ({"sampling": Sampling(temperature=NAN)}, "temperature is nan"),
        ({"corpus": ""}, "neither a corpus nor passages are given"),
        ({"passages": [ONE]}, "a corpus and passages are given: a request needs exactly one of them"),
        ({"no_passages": True}, "a corpus and no_passages are given"),
        ({"corpus": "", "passages": [ONE], "no_passages": True}, "passages and no_passages are given"),
        ({"corpus": "", "no_passages": True, "query": "q"}, "query, top_k and filter apply to a corpus only"),
        ({"query": " "}, "query is empty"),
        ({"corpus": "", "passages": [ONE], "query": "q"}, "query, top_k and filter apply to a corpus only"),
        ({"corpus": "", "passages": [ONE], "top_k": 1}, "query, top_k and filter apply to a corpus only"),
        ({"corpus": "", "passages": [ONE] * 3}, "3 passages are given; the maximum is 2"),
        ({"corpus": "", "passages": [ONE, pb.Passage(text=" \n\u00ad", title="t")]}, "passage 1 is empty"),
        ({"corpus": "", "passages": [pb.Passage(text="x" * 32768, title="t")]}, "passage 0 has 32769 characters"),
        ({"corpus": "", "passages": [pb.Passage(text="x", metadata={"k": "v" * 4096})]}, "metadata of passage 0"),
    ],
)
def test_wrong_values_are_named(wrong: dict[str, object], error: str) -> None:
    plan.check(pb.GenerateRequest(corpus="c", ratio=1.0), 2)
    with pytest.raises(InvalidArgument, match=error):
        plan.check(pb.GenerateRequest(**{"corpus": "c", **wrong}), 2)  # type: ignore[arg-type]


def test_words_decide_where_a_chunk_has_much_of_the_question() -> None:
    """At equal differences of the cosine: a score of 40 is names and numbers in common, one of 4 is common words."""
    for words, first in ((40.0, "named"), (4.0, "near")):
        named, near = Candidate(chunk("named", 0), words, 0.3), Candidate(chunk("near", 0), 0.0, 0.6)
        assert rank([near, named], 0.5, 1)[0][0].key == (first, 0)
    # Without common words meaning decides.
    found = rank([Candidate(chunk("d", i), 0.0, i / 10) for i in range(5)], 0.3, 2)
    assert [(c.position, round(score, 3)) for c, score in found] == [(4, 0.12), (3, 0.09)]


def test_what_is_said_of_a_corpus_names_its_tenant_and_gives_nothing_away() -> None:
    labels = [build(PLAIN, PASSAGES, tenant).corpus for tenant in ("", "salt-1", "salt-2")]
    assert labels[0] == "c"
    assert len(set(labels)) == 3
    assert not any("salt" in label for label in labels)


def read(*said: tuple[str, str], **options: Any) -> Conversation:
    messages = [{"role": role, "content": text} for role, text in said]
    return Conversation.of(requests.generate("c", messages=messages, **options))


def test_roles_become_turns() -> None:
    assert Conversation.of(pb.GenerateRequest(question="Who?", system="Brief.")) == Conversation(("Who?",), "Brief.")
    talk = ("user", "Who?"), ("assistant", "He."), ("system", "Be kind."), ("user", "Why?")
    asked = read(("system", "Be brief."), *talk)
    assert asked == Conversation(("Who?", "He.", "Why?"), "Be brief.\n\nBe kind.")
    assert asked.question == "Why?"
    assert read(("user", "Why?"), system="Be brief.") == Conversation(("Why?",), "Be brief.")
    # Messages of one role that follow each other are one turn.
    asked = read(("user", "Hello."), *talk[:2], ("assistant", "Or she."), ("user", "Why?"))
    assert asked.turns == ("Hello.\n\nWho?", "He.\n\nOr she.", "Why?")
    with pytest.raises(InvalidArgument, match="message 0 has the unknown role 'tool'; known: system"):
        read(("tool", "x"))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"top_k": "3"}, "top_k must be an integer"),
        ({"sample_top_k": -1}, r"top_k \(sample_top_k\): Value out of range"),
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"stop": [1]}, "stop must be a list of strings"),
        ({"filter": {"year": 2020}}, "filter must be a mapping of strings to strings"),
        ({"max_tokens": -1}, "max_tokens: "),
        ({"question": "\ud800"}, "question: "),
        ({"passages": "The lake is blue."}, "passages must be a list, not str"),
        ({"passages": ["a", {"text": "b"}]}, "passage 1 must be a string or a Passage, not dict"),
        ({"passages": [Given(text="a", id=7)]}, "id of passage 0 must be a string"),  # type: ignore[arg-type]
        ({"messages": "Who?"}, "messages must be a list, not str"),
        ({"messages": [{"role": "user", "content": 7}]}, "content of message 0 must be a string"),
    ],
    ids=str,
)
def test_a_value_that_cannot_be_sent_is_named(options: dict[str, Any], error: str) -> None:
    with pytest.raises(InvalidArgument, match=error):
        requests.generate("c", **options)


def test_metadata_may_be_any_mapping() -> None:
    for mapping in (dict, MappingProxyType, UserDict):
        given = Given(text="a", metadata=mapping({"page": "3"}))
        assert requests.generate(passages=[given]).passages[0].metadata == {"page": "3"}


def test_one_stop_string_is_not_its_letters() -> None:
    assert requests.generate("c", "q", stop="end").sampling.stop == ["end"]


def said(*roles: int, text: str = "x", **more: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(messages=[pb.Message(role=role, text=text) for role in roles], **more)


SYSTEM, USER, ASSISTANT = pb.ROLE_SYSTEM, pb.ROLE_USER, pb.ROLE_ASSISTANT


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (said(), "the question is empty"),
        (said(question=" \n\u200b"), "the question is empty"),
        (said(0, question="q"), "either a question or messages, not both"),
        (said(0), "message 0 has none of the roles"),
        (said(9), "message 0 has none of the roles"),
        (said(SYSTEM), "last message must have the role user"),
        (said(USER, ASSISTANT), "last message must have the role user"),
        (said(USER, text=""), "last message is empty"),
        (said(ASSISTANT, USER), "the first turn must be the user's"),
        (said(SYSTEM, USER, system="s"), "system prompt is given both as a field and as a message"),
        (said(USER, ASSISTANT, USER, text="x" * 30_000), "conversation has 90000 characters; the maximum is 65536"),
        (said(*[0] * 1025), "1025 messages are given; the maximum is 1024"),
        (said(question="q", system="x" * 65_537), "the system prompt has 65537 characters"),
    ],
)
def test_what_cannot_be_followed_is_named(request_: pb.GenerateRequest, error: str) -> None:
    with pytest.raises(InvalidArgument, match=error):
        Conversation.of(request_)


@pytest.mark.weights
def test_eight_passages_cost_at_most_5_ms_in_the_gateway() -> None:
    directory = KNOWN["smollm2"].directory
    if not directory.is_dir():
        pytest.skip("smollm2 was not fetched: fusionkv model get smollm2")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    template = fusion_pb2.PromptTemplate(**asdict(PromptTemplate.of(tokenizer)))
    as_json = tokenizer.backend_tokenizer.to_str().encode()
    model = fusion_pb2.GetModelResponse(tokenizer_json=as_json, template=template, max_tokens=8192)
    known, files = Vocabulary(model), sorted((ROOT / "examples/world/halmere").glob("*.md"))
    texts = [pb.Passage(text=file.read_text()) for file in files[:8]]
    asked = pb.GenerateRequest(question="Which river does the Halden Bridge cross?", passages=texts)

    def seconds() -> float:
        began = time.perf_counter()
        made = plan.build(asked, Conversation.of(asked), PLAIN, plan.given(texts, known), known, "")
        assert sum(len(chunk.ids) for chunk in made.chunks) > 2000
        return time.perf_counter() - began

    assert min(seconds() for _ in range(5)) < 0.005
