"""Prints docs/structure.md: its text up to the heading "Files", then one line a file from the module docstrings."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("protos", "kvcache_service", "fusion_worker", "kernels", "gateway", "models", "bench")
HEADING = "## Files\n"


def sentence(file: Path) -> str:
    """The first paragraph of a module's docstring, on one line."""
    docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
    return " ".join(docstring.partition("\n\n")[0].split())


def files_of(package: Path) -> list[Path]:
    """Python files that a person wrote and that hold more than a docstring."""
    return sorted(f for f in package.rglob("*.py") if f.name != "__init__.py" and "_pb2" not in f.name)


def page() -> str:
    before, _, _ = (ROOT / "docs/structure.md").read_text().partition(HEADING)
    parts = [before, HEADING]
    for name in PACKAGES:
        package = ROOT / name
        about = sentence(package / "__init__.py")
        parts.append(f"\n### {name}\n\n" + (f"{about}\n\n" if about else "") + "| file | what it is |\n|---|---|\n")
        parts += [f"| `{file.relative_to(package)}` | {sentence(file)} |\n" for file in files_of(package)]
    return "".join(parts)


if __name__ == "__main__":
    print(page(), end="")
