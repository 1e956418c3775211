"""mkdocs hooks of site.yml: add pages from outside docs/, and API references generated from the code."""

import os
import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File as SiteFile
from mkdocs.structure.files import Files

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "scripts"))  # mkdocs loads this file by its path

import cli_docs  # noqa: E402
import proto_docs  # noqa: E402

# Pages from outside docs/, by their path on the site.
ELSEWHERE = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "security-policy.md": "SECURITY.md",
    "reference-models.md": "models/README.md",
    "chart.md": "k8s/fusionkv/README.md",
}
# Modules of the public Python API, whose docstrings become the reference.
MODULES = (
    "fusionkv.gateway.client.client",
    "fusionkv.gateway.client.requests",
    "fusionkv.gateway.client.results",
    "fusionkv.protos.runtime.errors",
    "fusionkv.protos.runtime.tls",
    "fusionkv.kvcache_service.client",
    "fusionkv.kvcache_service.keys",
    "fusionkv.fusion_worker.client",
)
_LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)]*)?\)")
# On a phone a screenshot is too small to read: it links to its file.
_SCREENSHOT = re.compile(r"!\[[^\]]*\]\(([^)\s]+\.png)\)")
# One that has a dark variant, as HTML.
_PICTURE = re.compile(r"<picture>.*?</picture>\n", re.DOTALL)
_CODE = re.compile("<code>[^<]*</code>")
_FLAG = re.compile(r"--[a-z][a-z-]*")
_CELL = re.compile("<td>(.*?)</td>", re.DOTALL)
_TAG = re.compile("<[^>]*>")
# Characters from which a cell stays readably wide on a phone; its table scrolls.
_LONG = 60
# Notes for contributors are no part of the site: there, a link to them is its text alone, or nothing in brackets.
_NOTES = re.compile(r"\s\(\[[^\]]+\]\({0}\)\)|\[([^\]]+)\]\({0}\)".format(r"[^)\s]*\bjournal\b[^)\s]*"))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds generated pages and pages from outside docs/, and every file that a page links to."""
    made = {name: _read(ROOT / file) for name, file in ELSEWHERE.items()}
    made["index.md"] = _home(made["index.md"])
    made |= {file.src_uri: _read(ROOT / "docs" / file.src_uri) for file in files.documentation_pages()}
    for name, page in made.items():
        _replace(files, SiteFile.generated(config, name, content=_SCREENSHOT.sub(r"[\g<0>](\1)", page)))
    for file in sorted({ROOT / target for page in made.values() for target in _sources(page)}):
        _replace(files, SiteFile.generated(config, f"source/{file.relative_to(ROOT)}", abs_src_path=str(file)))
    for package, page in proto_docs.pages().items():
        files.append(SiteFile.generated(config, f"reference/{package}.md", content=page))
    python = "# Python\n\n" + "\n".join(f"::: {module}\n" for module in MODULES)
    files.append(SiteFile.generated(config, "reference/python.md", content=python))
    files.append(SiteFile.generated(config, "reference/cli.md", content=cli_docs.page()))
    return files


def on_page_content(html: str, **_: object) -> str:
    """Marks for site.css the flags in inline code, which stay in one piece, and the cells of long text."""
    html = _CODE.sub(lambda code: _FLAG.sub(r'<span class="flag">\g<0></span>', code[0]), html)
    return _CELL.sub(_marked, html)


def _marked(cell: re.Match[str]) -> str:
    return cell[0] if len(_TAG.sub("", cell[1])) < _LONG else f'<td class="long">{cell[1]}</td>'


def _home(page: str) -> str:
    """The home page: what the README says to users, its picture beside the first paragraphs, and no sidebars.

    Raises:
        ValueError: the README lacks a picture before its first section.
    """
    page, _, _ = page.partition("\n## Documentation\n")
    first, heading, rest = page.partition("\n## ")
    picture = _PICTURE.search(first)
    if picture is None:
        raise ValueError("README.md has no picture before its first section")
    text = first.replace(picture[0], "")
    linked = '<a href="img/answer.png">' + picture[0].replace('"docs/', '"') + "</a>"
    hero = f'<div class="hero" markdown>\n<div markdown>\n\n{text}\n</div>\n\n{linked}\n</div>\n'
    return f"---\nhide: [navigation, toc]\n---\n\n{hero}{heading}{rest}"


def _replace(files: Files, file: SiteFile) -> None:
    if (old := files.get_file_from_path(file.src_uri)) is not None:
        files.remove(old)
    files.append(file)


def _sources(page: str) -> list[str]:
    return [match[2].removeprefix("source/") for match in _LINK.finditer(page) if match[2].startswith("source/")]


def _read(file: Path) -> str:
    """Reads a page, and rewrites its links for the site."""
    places = {path: name for name, path in ELSEWHERE.items()}

    def moved(match: re.Match[str]) -> str:
        target = match[2]
        if "://" in target:
            return match[0]
        path = os.path.relpath(file.parent / target, ROOT)
        path = places.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}")
        return f"{match[1]}{path}{match[3] or ''})"

    return _LINK.sub(moved, _NOTES.sub(r"\1", file.read_text()))
