"""The documentation says what the code does, and holds the figures of its reports."""

import re
import runpy
from pathlib import Path

import pytest
from bs4 import BeautifulSoup

from fusionkv.fusion_worker.quality.verdict import PRIMED
from tests.commands import run_python


@pytest.mark.parametrize("name", ["configuration", "methods"])
def test_a_page_that_follows_from_the_code_is_current(root: Path, name: str) -> None:
    done = run_python(root / f"scripts/{name}_docs.py")
    assert (root / f"docs/{name}.md").read_text() == done.stdout, "run `make docs`"


def test_the_default_recipe_is_named(root: Path) -> None:
    assert f"otherwise `{PRIMED.recipe}` at {PRIMED.ratio:g}" in (root / "docs/recipes.md").read_text()


PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "models/README.md", "k8s/fusionkv/README.md")


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub and mkdocs name them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.replace("`", "")) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in plain}


def test_links_lead_to_files_and_headings(root: Path) -> None:
    """As they stand in the repository, the notes among them; those of the site are checked when it is built."""
    wrong = []
    for page in (*(root / name for name in PAGES), *(root / "docs").rglob("*.md")):
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", text):
            if "://" not in target:
                file = page.parent / target if target else page
                if not file.exists() or (anchor and anchor not in anchors(file)):
                    wrong.append(f"{page.relative_to(root)}: {target}#{anchor}")
    assert wrong == []


def test_users_read_no_more_than_this(root: Path) -> None:
    """The README and docs/*.md; not the reference that is generated, nor what is for contributors."""
    counted = runpy.run_path(str(root / "bench/figures.py"))["words"]()
    assert 10_000 < counted <= 15_000, "shorten a page, or move details to docs/journal"


def test_files_named_in_the_life_of_a_request_exist(root: Path) -> None:
    named = re.findall(r"`([a-z_]+/[a-z_/.]+)`", (root / "docs/structure.md").read_text())
    assert len(named) > 10
    assert [name for name in named if not (root / name).exists()] == []


@pytest.mark.slow
def test_a_picture_shows_the_figures_of_its_table(root: Path, tmp_path: Path) -> None:
    for name in ("scripts/plots.py", "docs/performance.md", "docs/journal/performance.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((root / name).read_text())
    drawn = tmp_path / "docs/img"
    drawn.mkdir()
    run_python(tmp_path / "scripts/plots.py")
    assert {file.stem for file in drawn.iterdir()} == {"first-token", "decoding", "moving"}
    for file in drawn.iterdir():
        assert file.read_text() == (root / "docs/img" / file.name).read_text(), "run `make plots`"


@pytest.fixture(scope="module")
def site(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """--strict: a link or an anchor that leads nowhere, and a page that is in no list, is an error."""
    folder = tmp_path_factory.mktemp("site")
    flags = ("--strict", "-f", "scripts/site.yml", "-d", folder)  # -q would hide warnings from --strict too
    run_python("-m", "mkdocs", "build", *flags, cwd=root, env={"NO_MKDOCS_2_WARNING": "1"})
    return folder


def pages(site: Path) -> dict[str, BeautifulSoup]:
    return {str(f.relative_to(site)): BeautifulSoup(f.read_text(), "html.parser") for f in site.rglob("*.html")}


@pytest.mark.slow
def test_every_file_that_a_page_needs_is_there(site: Path) -> None:
    found = pages(site)
    assert len(found) > 15
    for name, page in found.items():
        needed = [
            *page.select("link[rel=stylesheet]"),
            *page.select("script[src]"),
            *page.select("img[src], source[srcset]"),
        ]
        assert needed
        for element in needed:
            target = str(element.get("href") or element.get("src") or element["srcset"])
            assert "//" not in target, f"{name} needs {target} from elsewhere"
            # The page that answers for missing ones is shown at any depth, so it names files from the top.
            start = site if target.startswith("/") else (site / name).parent
            assert (start / target.partition("?")[0].lstrip("/")).exists(), f"{name} needs {target}"
        # For these the theme would fetch a library.
        assert not page.select(".mermaid, .arithmatex")


@pytest.mark.slow
def test_every_link_of_the_site_leads_to_a_file(site: Path) -> None:
    """mkdocs does not warn of links to pages that it excludes."""
    for name, page in pages(site).items():
        assert "(notes)" not in page.get_text(), f"{name} names notes that the site does not have"
        for element in page.select("a[href]"):
            target = str(element["href"]).partition("#")[0]
            if target and ":" not in target and name != "404.html":
                assert ((site / name).parent / target).exists(), f"{name} links to {target}"
