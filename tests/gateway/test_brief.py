"""Documents of every kind, shortened before they are stored; what is stored then is what is found."""

import json
from pathlib import Path
from typing import Any

import pytest

from fusionkv.gateway.cli import main as cli
from fusionkv.gateway.ingest import brief
from fusionkv.protos.runtime.errors import InvalidArgument

SENTENCES = [f"Report Velnora says that Name{i} of the grey house has the code {100 + i}." for i in range(8)]
TEXT = " ".join(SENTENCES)


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("a.txt", TEXT, "text/plain"),
        ("a.md", TEXT, "text/markdown"),
        ("a.html", f"<p>{TEXT}</p>", "text/markdown"),
        ("a.jsonl", f"{json.dumps(TEXT)}\n\n{json.dumps({'id': 'x', 'text': TEXT})}\n", "application/jsonl"),
    ],
)
def test_half_of_the_sentences_stay(name: str, content: str, kind: str) -> None:
    text, found = brief.document(name, content.encode(), "", 0.5)
    assert found == kind
    texts = [json.loads(line)["text"] for line in text.split("\n") if line] if kind.endswith("jsonl") else [text]
    assert len(texts) == (2 if kind.endswith("jsonl") else 1)
    if kind.endswith("jsonl"):
        assert [json.loads(line or "{}").get("id") for line in text.split("\n")] == [None, None, "x"]
    for part in texts:
        assert 3 <= sum(sentence in part for sentence in SENTENCES) <= 4
        assert len(part) <= len(TEXT) / 2


def test_what_is_no_document_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="the media type is unknown"):
        brief.document("a.exe", TEXT.encode(), "", 0.5)


@pytest.mark.system
def test_the_command_stores_the_shorter_text(stack: Any, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    flags = ["--gateway", stack.gateway.address, "--json"]
    assert cli.main(["ingest", "brief", str(tmp_path), "--compress", "0.5", *flags]) == 0
    assert cli.main(["ingest", "whole", str(tmp_path), *flags]) == 0
    short, long = (sum(p.tokens for p in stack.client.retrieve(c, "code?", top_k=50)) for c in ("brief", "whole"))
    assert 0 < short <= long / 2 + 2
