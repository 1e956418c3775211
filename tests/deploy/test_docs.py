"""The documentation says what the code does."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.parametrize("page", ["configuration", "structure", "recipes"])
def test_a_page_that_follows_from_the_code_is_current(root: Path, page: str) -> None:
    script = root / f"scripts/{page}_docs.py"
    done = subprocess.run([sys.executable, "-P", script], capture_output=True, text=True, check=True)
    assert (root / f"docs/{page}.md").read_text() == done.stdout, "run `make docs`"


PAGES = (
    "README.md",
    *(
        f"docs/{name}.md"
        for name in (
            "structure",
            "configuration",
            "recipes",
            "selection",
            "quality",
            "security",
            "cache",
            "openai",
            "observability",
        )
    ),
)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(root: Path, page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", (root / page).read_text()):
        if not target.startswith(("http:", "https:")):
            assert ((root / page).parent / target).exists(), f"{page} links to {target}"


def test_files_named_in_the_life_of_a_request_exist(root: Path) -> None:
    text, _, _ = (root / "docs/structure.md").read_text().partition("## Files")
    named = re.findall(r"`([a-z_]+/[a-z_/.]+)`", text)
    assert len(named) > 10
    assert [name for name in named if not (root / name).exists()] == []


def test_every_command_named_in_the_readme_exists(root: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:`|    )make ([a-z-]+)", (root / "README.md").read_text()))
    assert {"demo", "test"} <= named <= targets


@pytest.mark.system
def test_the_first_example_runs(root: Path, launch: Any, reference_model: Path, tmp_path: Path) -> None:
    example = re.search(r"```python\n(.*?)```", (root / "README.md").read_text(), re.DOTALL)
    assert example
    worker = launch("fusionkv.fusion_worker", "--listen", "127.0.0.1:0", "--model", str(reference_model))
    flags = ("--workers", worker.address, "--data-dir", str(tmp_path))
    gateway = launch("fusionkv.gateway", "--listen", "127.0.0.1:0", *flags)
    code = example[1].replace("127.0.0.1:7072", gateway.address)
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r".+ \d\.\d+ \d+\n", done.stdout)
