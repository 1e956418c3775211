"""What the README has a newcomer do after `make demo`, done: its commands, in its order, as they stand there."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.commands import fusionkv

pytestmark = [pytest.mark.system, pytest.mark.slow]


def test_the_commands_of_the_readme_answer_as_it_says(root: Path, launch: Any, tmp_path: Path) -> None:
    text = (root / "README.md").read_text().partition("## Try it")[2].partition("```python")[0]
    lines = [shlex.split(line) for line in re.findall(r"^    (fusionkv .*)$", text, re.MULTILINE)]
    serve, *others = [words[1:] for words in lines]
    assert [words[0] for words in others] == ["ingest", "ask", "ask"]
    # As they stand, apart from ports and folders, which tests do not share.
    own = ("--listen", "127.0.0.1:0", "--data-dir", str(tmp_path / "data"), "--json")
    threads = {"FUSIONKV_WORKER_THREADS": "1"}
    service = launch("fusionkv.gateway.cli.main", *serve, *own, services=0, env=threads)
    service.wait_for_line('"event": "ready"', timeout=120)
    told = [json.loads(line) for line in service.log.splitlines() if line.startswith("{")]
    (address,) = [event["addresses"][0] for event in told if event.get("service") == "gateway"]
    page = tmp_path / "answer.html"
    for words in others:
        argv = [str(page) if word == page.name else word for word in words]
        done = fusionkv(*argv, "--gateway", address, cwd=root)
        if words[0] == "ask":
            (answer,) = re.findall(r"It is (\w+)", text)
            assert answer in done.stdout
    assert "full_attention" in page.read_text()
