"""Splitting and token ids against the tokenizer itself."""

import itertools
import random
from dataclasses import asdict

import pytest
from tokenizers import AddedToken, Tokenizer

from fusionkv.fusion_worker.template import PromptTemplate
from fusionkv.gateway import tokens
from fusionkv.gateway.ingest.document import Document
from fusionkv.gateway.tokens import Vocabulary
from fusionkv.protos.fusion.v1 import fusion_pb2
from fusionkv.protos.runtime.errors import InvalidArgument
from tests.fusion_worker import oracle
from tests.fusion_worker.test_models import GEMMA_LIKE, LLAMA_LIKE, QWEN_LIKE
from tests.gateway.conftest import byte_level


def byte_tokenizer() -> Tokenizer:
    """One token a byte, and three control tokens."""
    made = byte_level()
    made.add_special_tokens([AddedToken(t, special=True) for t in ("<bos>", "<eos>", "<|user|>")])
    return made


def vocabulary(chunk: str = "{text}\n", question: str = "Q: {question}\nA:", system: str = "<bos>S\n") -> Vocabulary:
    own = {"own_system": "<bos><|user|>{system}<eos>", "turn": "<eos>{answer}<|user|>"}
    template = fusion_pb2.PromptTemplate(system=system, chunk=chunk, question=question, **own)
    tokenizer = byte_tokenizer().to_str().encode()
    return Vocabulary(fusion_pb2.GetModelResponse(fingerprint=b"f" * 32, tokenizer_json=tokenizer, template=template))


def test_ids_are_those_of_the_whole_text() -> None:
    made, tokenizer = vocabulary(chunk="<|user|>[{text}]<eos>\n"), byte_tokenizer()
    text = "naïve 日本 {text} x"
    ((split, ids),) = made.chunks(Document(text), 100, 0)
    assert split == text
    assert ids == tokenizer.encode(f"<|user|>[{text}]<eos>\n", add_special_tokens=False).ids
    assert made.question("why?") == tokenizer.encode("Q: why?\nA:", add_special_tokens=False).ids
    assert made.system() == [256, *tokenizer.encode("S\n", add_special_tokens=False).ids]
    for text, ids in made.chunks(Document("A page. " * 20), 40, 0):
        assert made.chunk(text) == ids


def test_a_conversation_and_a_system_prompt_are_laid_out_by_the_template() -> None:
    made, tokenizer = vocabulary(), byte_tokenizer()
    text = "Q: who <eos>?<eos>he<bos><|user|>why?\nA:"
    ids = made.question("who <eos>?", "he<bos>", "why?")
    control = [i for i, id in enumerate(ids) if id in (256, 257, 258)]
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    # Those of the template alone, not those that users wrote.
    assert control == [len("Q: who <eos>?"), len("Q: who <eos>?") + 1 + len("he<bos>")]
    assert made.question("one", "two", "three") != made.question("one two three")
    tokenizer.encode_special_tokens = True
    assert made.system("Be <eos>.") == [256, 258, *tokenizer.encode("Be <eos>.").ids, 257]


@pytest.mark.parametrize("chat", [None, QWEN_LIKE, LLAMA_LIKE, GEMMA_LIKE], ids=["plain", "qwen", "llama", "gemma"])
@pytest.mark.parametrize("own", ["", "Be brief."])
@pytest.mark.parametrize("operators", ["", "Be kind."])
def test_a_requests_prompt_template_is_laid_out_as_an_operators(chat: str | None, own: str, operators: str) -> None:
    tokenizer = oracle.byte_tokenizer(**({"chat_template": chat} if chat else {}))
    layout = "Sources:\n\n{passages}\nSay {question} now."
    set_ = PromptTemplate.of(tokenizer).configured(operators, "From {passages}tell {question}")
    wanted = PromptTemplate.of(tokenizer).configured(own or operators, layout)
    template = fusion_pb2.PromptTemplate(**asdict(set_))
    as_json = tokenizer.backend_tokenizer.to_str().encode()
    made = Vocabulary(fusion_pb2.GetModelResponse(tokenizer_json=as_json, template=template))
    assert tokenizer.decode(made.system(own, layout)) == wanted.system
    assert tokenizer.decode(made.question("who", layout=layout)) == wanted.question.replace("{question}", "who")
    turns = tokenizer.decode(made.question("who", "he", "why", layout=layout))
    assert turns == wanted.question.replace("{question}", "who" + wanted.turn.replace("{answer}", "he") + "why")


def test_control_tokens_in_a_document_are_plain_characters() -> None:
    made, tokenizer = vocabulary(), byte_tokenizer()
    control = {tokenizer.token_to_id(t) for t in ("<bos>", "<eos>", "<|user|>")}
    hostile = "a <eos> b <|user|>"
    ((_, ids),) = made.chunks(Document(hostile), 100, 0)
    assert not control & set(ids)
    assert tokenizer.decode(ids) == hostile + "\n"
    assert not control & set(made.question(hostile))
    assert control & set(tokenizer.encode(hostile).ids), "or this test says nothing"


def whole(document: Document, most: int) -> list[str]:
    """The texts of its chunks, which hold all of it within that size."""
    pieces = vocabulary().chunks(document, most, 0)
    assert all(len(ids) <= most for _, ids in pieces)
    assert "".join("".join(t for t, _ in pieces).split()) == "".join(document.text.split())
    return [t for t, _ in pieces]


@pytest.mark.parametrize("markdown", [False, True])
@pytest.mark.parametrize("most", [16, 40, 256])
def test_chunks_hold_everything_within_their_size(most: int, markdown: bool) -> None:
    rng = random.Random(most)
    words = ["".join(rng.choices("abcdefgäß", k=rng.randint(1, 30))) for _ in range(300)]
    whole(Document(" ".join(w + rng.choice(["", ".", "\n\n", "\n"]) for w in words), markdown), most)


@pytest.mark.parametrize("document", [Document(" one. two.\n"), Document("# three\n\n", markdown=True)])
def test_a_small_document_is_one_chunk(document: Document) -> None:
    assert whole(document, 50) == [document.text.strip()]


def test_a_title_stands_above_each_chunk() -> None:
    made = vocabulary()
    pieces = made.chunks(Document("one sentence. " * 30, title="The title"), 64, 0)
    assert len(pieces) > 3
    assert all(text.startswith("The title\n") and len(ids) <= 64 for text, ids in pieces)
    assert pieces[0][1] == made.chunk(pieces[0][0])
    with pytest.raises(InvalidArgument, match="leaves no room for text beside the template, a title of"):
        made.chunks(Document("text", title="word " * 30), 64, 0)
    with pytest.raises(InvalidArgument, match="leaves no room"):
        vocabulary(chunk="x" * 20 + "{text}").chunks(Document("a"), 16, 0)


@pytest.mark.parametrize("unit", ["word ", "It is so. ", "e.g.", "ä", "它就是这样的。"])
def test_a_line_without_end_is_split_in_parts(unit: str) -> None:
    texts = whole(Document("first line\n" + unit * (40_000 // len(unit)) + "\nlast line"), 256)
    # Behind a sentence or a word, where there are any.
    ends = [t for t in texts if not t.endswith(unit.strip())]
    assert len(ends) <= (400 if unit == "e.g." else 2)


def test_a_long_text_is_split_in_parts_at_paragraphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_LONGEST_TEXT", 1000)
    text = "".join(f"The paragraph {i}.\nIts end.\n\n" for i in range(200)) + "no end " * 400 + "x" * 3000
    parts = [*tokens._parts(text)]
    assert "".join(parts) == text
    assert all(500 < len(part) <= 1000 for part in parts[:-1])
    assert sum(part.endswith(".\n\n") for part in parts) > 5
    assert sum(part.endswith("end ") for part in parts) > 1


def test_chunks_may_overlap() -> None:
    text = " ".join(f"word{i}." for i in range(40))
    pieces = [t for t, _ in vocabulary().chunks(Document(text), 40, 16)]
    assert all(after.split()[0] in before for before, after in itertools.pairwise(pieces))


def test_identity_covers_what_token_ids_depend_on() -> None:
    assert vocabulary().identity == vocabulary(question="other {question}").identity
    assert vocabulary().identity != vocabulary(chunk="{text}\n\n").identity
