"""The documentation says what the code does."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

WRITTEN = {
    "configuration": "docs/configuration.md",
    "structure": "docs/structure.md",
    "recipes": "docs/recipes.md",
    "chart": "k8s/fusionkv/README.md",
}


# Recipes come with the engine, which loads torch.
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n == "recipes" else n for n in WRITTEN])
def test_a_page_that_follows_from_the_code_is_current(root: Path, name: str) -> None:
    script = root / f"scripts/{name}_docs.py"
    done = subprocess.run([sys.executable, "-P", script], capture_output=True, text=True, check=True)
    assert (root / WRITTEN[name]).read_text() == done.stdout, "run `make docs`"


PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "k8s/fusionkv/README.md")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(root: Path, page: str) -> None:
    """As they stand in the repository; those within docs/ are checked when the site is built."""
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", (root / page).read_text()):
        if not target.startswith(("http:", "https:")):
            assert ((root / page).parent / target).exists(), f"{page} links to {target}"


def test_files_named_in_the_life_of_a_request_exist(root: Path) -> None:
    text, _, _ = (root / "docs/structure.md").read_text().partition("## Files")
    named = re.findall(r"`([a-z_]+/[a-z_/.]+)`", text)
    assert len(named) > 10
    assert [name for name in named if not (root / name).exists()] == []
