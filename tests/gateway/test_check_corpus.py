"""Questions about a corpus, for `fusionkv check`: what they are made of, and what is done with them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fusionkv.gateway.cli import check_corpus
from fusionkv.gateway.cli import main as cli
from fusionkv.gateway.cli.connect import UsageError
from fusionkv.gateway.cli.launch import launched
from fusionkv.gateway.client.results import Item, Passage

TEXTS = [
    f"Of the {name} it is told that nobody ever counted them. They live in the {place} beyond the second hill." * 2
    for name, place in (("herons", "reeds"), ("otters", "river"), ("toads", "cellar"))
]


class Corpus:
    """A gateway's client, as far as it is asked here."""

    def __init__(self, texts: list[str]) -> None:
        self.asked: list[tuple[str, str]] = []
        self.passages = tuple(Passage("d", i, text, 1.0, 40) for i, text in enumerate(texts))

    async def list(self, corpus: str) -> list[Item]:
        return [Item("d", 1, len(self.passages), 100, 1000)] * bool(self.passages)

    async def retrieve(self, corpus: str, question: str, order: str = "rank") -> tuple[Passage, ...]:
        self.asked.append((question, order))
        return self.passages


async def test_questions_join_two_sentences() -> None:
    corpus = Corpus(TEXTS)
    found = await check_corpus.questions(corpus, "c", 5, 10.0)  # type: ignore[arg-type]
    assert found == await check_corpus.questions(Corpus(TEXTS), "c", 5, 10.0)  # type: ignore[arg-type]
    assert len({record["question"] for record in found}) == len(found) == 5
    for record in found:
        assert [context["text"] for context in record["ctxs"]] == TEXTS
        begun = record["question"].split('"')[1::2]
        assert len(begun) == 2
        assert all(len(words.split()) == 6 and any(words in text for text in TEXTS) for words in begun)
        assert all(words in record["answers"][0] for words in begun)
    # Passages in the order in which the gateway puts them into a prompt.
    assert [order for _, order in corpus.asked] == ["rank", "document"] * (len(corpus.asked) // 2)
    assert all(question == "d" or any(question in text for text in TEXTS) for question, _ in corpus.asked)


@pytest.mark.parametrize("texts", [[], TEXTS[:1]])
async def test_a_corpus_without_two_passages(texts: list[str]) -> None:
    with pytest.raises(UsageError, match="no two passages of corpus 'c' are retrieved together"):
        await check_corpus.questions(Corpus(texts), "c", 5, 10.0)  # type: ignore[arg-type]


async def test_text_without_sentences() -> None:
    (record, *_) = await check_corpus.questions(Corpus(["7 8 9", "\u4e2d" * 900]), "c", 1, 10.0)  # type: ignore[arg-type]
    assert len(record["question"]) < 600


def test_the_check_is_given_the_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    async def fetch(args: Any) -> list[dict[str, Any]]:
        assert (args.corpus, args.n, args.gateway, args.token) == ("papers", 7, "unix:/g", "t")
        return [{"question": "q", "answers": ["a"], "ctxs": [{"text": "t"}]}]

    def run(argv: list[str]) -> "subprocess.CompletedProcess[str]":
        ran.append(argv)
        file = Path(argv[-1])
        assert json.loads(file.read_text())[0]["question"] == "q"
        assert file.parent.stat().st_mode & 0o077 == 0
        return subprocess.CompletedProcess(argv, 3)

    monkeypatch.setattr(check_corpus, "_fetch", fetch)
    monkeypatch.setattr(subprocess, "run", run)
    flags = ["--corpus", "papers", "--n", "7", "--gateway", "unix:/g", "--token", "t", "--json"]
    monkeypatch.setattr(sys, "argv", ["check", "smollm2", *flags])
    assert check_corpus.main() == 3
    ((*_, module, model, as_json, _, n, _, file),) = ran
    assert (module, model, as_json, n) == ("fusionkv.bench.quality.check", "smollm2", "--json", "7")
    assert not Path(file).exists()
    assert not Path(file).parent.exists()


def test_data_and_corpus_exclude_each_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["check", "m", "--corpus", "c", "--data", "f"])
    with pytest.raises(SystemExit):
        check_corpus.main()
    assert "--data and --corpus can't be combined" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "module"),
    [
        (["check", "m", "--corpus", "c"], "fusionkv.gateway.cli.check_corpus"),
        (["check", "m", "--corpus=c"], "fusionkv.gateway.cli.check_corpus"),
        (["check", "m"], "fusionkv.bench.quality.check"),
    ],
)
def test_which_process_checks(given: list[str], module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Started(Exception):
        pass

    def execv(program: str, argv: list[str]) -> None:
        assert argv == launched("check", module, given[1:])
        raise Started

    monkeypatch.setattr("os.execv", execv)
    with pytest.raises(Started):
        cli.main(given)
