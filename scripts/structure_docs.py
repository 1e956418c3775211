"""Prints docs/structure.md: its text up to the heading "Files", then a line for each file from its docstring."""

import ast
import runpy
from pathlib import Path

ROOT = Path(__file__).parent.parent
_SETUP = runpy.run_path(str(ROOT / "setup.py"))
PACKAGES = (*_SETUP["PRODUCT"], *_SETUP["CLONE"])
HEADING = "## Files\n"


def sentence(file: Path) -> str:
    """The first paragraph of a module's docstring, on one line."""
    docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
    return " ".join(docstring.partition("\n\n")[0].split())


def files_of(package: Path) -> list[Path]:
    """Python files, without generated ones and `__init__.py`."""
    return sorted(f for f in package.rglob("*.py") if f.name != "__init__.py" and "_pb2" not in f.name)


def table(folder: Path) -> str:
    """A table with a line for each file of a folder, followed by the same for its folders."""
    files = [file for file in files_of(folder) if file.parent == folder]
    rows = "".join(f"| `{file.name}` | {sentence(file)} |\n" for file in files)
    found = [f"| file | what it is |\n|---|---|\n{rows}"] if rows else []
    for inner in sorted({folder / file.relative_to(folder).parts[0] for file in files_of(folder)} - {*files}):
        about = inner / "__init__.py"
        heading = f"**{inner.relative_to(ROOT)}/** {sentence(about)}\n\n" if about.exists() else ""
        found.append(f"{heading}{table(inner)}")
    return "\n".join(found)


def page() -> str:
    before, _, _ = (ROOT / "docs/structure.md").read_text().partition(HEADING)
    parts = [before, HEADING]
    for name in PACKAGES:
        about = sentence(ROOT / name / "__init__.py")
        parts.append(f"\n### {name}\n\n" + (f"{about}\n\n" if about else "") + table(ROOT / name))
    return "".join(parts)


if __name__ == "__main__":
    print(page(), end="")
