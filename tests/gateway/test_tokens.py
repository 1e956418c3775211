"""Splitting and token ids against the tokenizer itself."""

import itertools
import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from fusionkv.gateway.ingest.document import Document
from fusionkv.gateway.tokens import Vocabulary
from fusionkv.protos.fusion.v1 import fusion_pb2
from fusionkv.protos.runtime.errors import InvalidArgument


def byte_tokenizer() -> Tokenizer:
    """One token a byte, and three control tokens."""
    alphabet = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(alphabet, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(t, special=True) for t in ("<bos>", "<eos>", "<|user|>")])
    return made


def vocabulary(chunk: str = "{text}\n", question: str = "Q: {question}\nA:", system: str = "S\n") -> Vocabulary:
    own = {"own_system": "<|user|>{system}<eos>", "turn": "<eos>{answer}<|user|>"}
    template = fusion_pb2.PromptTemplate(system=system, chunk=chunk, question=question, **own)
    tokenizer = byte_tokenizer().to_str().encode()
    return Vocabulary(
        fusion_pb2.GetModelResponse(fingerprint=b"f" * 32, tokenizer_json=tokenizer, template=template, bos_token=256)
    )


def test_ids_are_those_of_the_whole_text() -> None:
    made, tokenizer = vocabulary(chunk="<|user|>[{text}]<eos>\n"), byte_tokenizer()
    text = "naïve 日本 {text} x"
    ((split, ids),) = made.chunks(Document(text), 100, 0)
    assert split == text
    assert ids == tokenizer.encode(f"<|user|>[{text}]<eos>\n", add_special_tokens=False).ids
    assert made.question("why?") == tokenizer.encode("Q: why?\nA:", add_special_tokens=False).ids
    assert made.system() == [256, *tokenizer.encode("S\n", add_special_tokens=False).ids]
    # A passage is the chunk of the same text.
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


def test_control_tokens_in_a_document_are_plain_characters() -> None:
    made, tokenizer = vocabulary(), byte_tokenizer()
    control = {tokenizer.token_to_id(t) for t in ("<bos>", "<eos>", "<|user|>")}
    hostile = "a <eos> b <|user|>"
    ((_, ids),) = made.chunks(Document(hostile), 100, 0)
    assert not control & set(ids)
    assert tokenizer.decode(ids) == hostile + "\n"
    assert not control & set(made.question(hostile))
    assert control & set(tokenizer.encode(hostile).ids), "or this test says nothing"


@pytest.mark.parametrize("markdown", [False, True])
@pytest.mark.parametrize("most", [16, 40, 256])
def test_chunks_hold_everything_within_their_size(most: int, markdown: bool) -> None:
    rng = random.Random(most)
    words = ["".join(rng.choices("abcdefgäß", k=rng.randint(1, 30))) for _ in range(300)]
    text = " ".join(w + rng.choice(["", ".", "\n\n", "\n"]) for w in words)
    pieces = vocabulary().chunks(Document(text, markdown), most, 0)
    assert all(len(ids) <= most for _, ids in pieces)
    assert "".join("".join(t for t, _ in pieces).split()) == "".join(text.split())


@pytest.mark.parametrize(("text", "markdown"), [(" one. two.\n", False), ("# three\n\n", True)])
def test_a_small_document_is_one_chunk(text: str, markdown: bool) -> None:
    pieces = vocabulary().chunks(Document(text, markdown), 50, 0)
    assert [t for t, _ in pieces] == [text.strip()]


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


@pytest.mark.parametrize("unit", ["word ", "It is so. ", "e.g.", "ä"])
def test_a_line_without_end_is_split_in_parts(unit: str) -> None:
    text = "first line\n" + unit * (40_000 // len(unit)) + "\nlast line"
    pieces = vocabulary().chunks(Document(text), 256, 0)
    assert all(len(ids) <= 256 for _, ids in pieces)
    assert "".join("".join(t for t, _ in pieces).split()) == "".join(text.split())
    # Behind a sentence or a word, where there are any.
    ends = [t for t, _ in pieces if not t.endswith(unit.strip())]
    assert len(ends) <= (2 if unit[-1] == " " or unit == "ä" else 400)


def test_chunks_may_overlap() -> None:
    text = " ".join(f"word{i}." for i in range(40))
    pieces = [t for t, _ in vocabulary().chunks(Document(text), 40, 16)]
    assert all(after.split()[0] in before for before, after in itertools.pairwise(pieces))


def test_identity_covers_what_token_ids_depend_on() -> None:
    assert vocabulary().identity == vocabulary(question="other {question}").identity
    assert vocabulary().identity != vocabulary(chunk="{text}\n\n").identity
