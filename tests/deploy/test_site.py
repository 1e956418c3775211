"""The site of the documentation: built without a warning, all links lead somewhere, nothing comes from elsewhere."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from bs4 import BeautifulSoup

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """--strict: a link or an anchor that leads nowhere, and a page that is in no list, is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-P", "-m", "mkdocs", "build", "--strict", "-q", "-f", "scripts/site.yml"]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run([*command, "-d", str(folder)], cwd=root, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return folder


def pages(site: Path) -> dict[str, BeautifulSoup]:
    return {str(f.relative_to(site)): BeautifulSoup(f.read_text(), "html.parser") for f in site.rglob("*.html")}


def test_every_file_that_a_page_needs_is_there(site: Path) -> None:
    found = pages(site)
    assert len(found) > 15
    for name, page in found.items():
        needed = [*page.select("link[rel=stylesheet]"), *page.select("script[src]"), *page.select("img[src]")]
        assert needed
        for element in needed:
            target = str(element.get("href") or element.get("src"))
            assert "//" not in target, f"{name} needs {target} from elsewhere"
            # The page that answers for missing ones is shown at any depth, so it names files from the top.
            start = site if target.startswith("/") else (site / name).parent
            assert (start / target.partition("?")[0].lstrip("/")).exists(), f"{name} needs {target}"
        # For these the theme would fetch a library.
        assert not page.select(".mermaid, .arithmatex")


def test_interfaces_are_whole(site: Path, root: Path) -> None:
    found = pages(site)
    for proto in root.glob("protos/*/v1/*.proto"):
        page = found[f"reference/{proto.parent.parent.name}.v1/index.html"]
        headings = {str(h.get("id")) for h in page.select("h2, h3")}
        words = [line.split() for line in proto.read_text().splitlines()]
        named = {w[1].split("(")[0].lower() for w in words if w[:1] in (["service"], ["rpc"], ["message"], ["enum"])}
        assert named
        assert named <= headings
    python = found["reference/python/index.html"]
    names = {str(h.get("id")) for h in python.select("h2, h3, h4")}
    assert {
        "fusionkv.gateway.client.client.AsyncClient.stream",
        "fusionkv.protos.runtime.errors.ServiceError",
    } <= names
    (asked,) = (h for h in python.select("h3") if h.get("id") == "fusionkv.gateway.client.requests.Options")
    assert "share of context tokens to recompute" in str(asked.parent)
