"""Counts the lines and the largest units of the code, and the words for users: `make figures`."""

import argparse
import ast
import json
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT: tuple[str, ...] = runpy.run_path(str(ROOT / "setup.py"))["PRODUCT"]
REFERENCE = ("configuration", "methods", "structure", "kernels")


def files(*folders: str) -> Iterator[Path]:
    """Python files, without generated ones."""
    return (file for folder in folders for file in (ROOT / folder).rglob("*.py") if "_pb2" not in file.name)


def lines(*folders: str) -> int:
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files(*folders))


def large_classes(most: int) -> int:
    """Classes of the product with more than `most` methods, nested functions not counted."""
    trees = (ast.walk(ast.parse(file.read_bytes())) for file in files(*PRODUCT))
    classes = (node for tree in trees for node in tree if isinstance(node, ast.ClassDef))
    methods = ast.FunctionDef | ast.AsyncFunctionDef
    return sum(sum(isinstance(node, methods) for node in each.body) > most for each in classes)


def found(rule: str, setting: str) -> int:
    """What ruff finds in the product by a rule, whether or not a comment allows it."""
    command = ("ruff", "check", "--ignore-noqa", "--exit-zero", "--output-format=json")
    argv = [sys.executable, "-m", *command, f"--select={rule}", f"--config=lint.{setting}", *PRODUCT]
    return len(json.loads(subprocess.run(argv, cwd=ROOT, check=True, capture_output=True).stdout))


def words() -> int:
    """Words of the README and the pages for users, without the generated reference and pages for contributors.

    What has no letter and no digit, such as the rule of a table, is no word.
    """
    pages = [ROOT / "README.md", *(page for page in (ROOT / "docs").glob("*.md") if page.stem not in REFERENCE)]
    return sum(any(map(str.isalnum, word)) for page in pages for word in page.read_text(encoding="utf-8").split())


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    figures = {
        "product lines": lines(*PRODUCT),
        "bench lines": lines("bench"),
        "test lines": lines("tests"),
        "words for users": words(),
        "classes of more than 12 methods": large_classes(12),
        "functions of complexity over 10": found("C901", "mccabe.max-complexity=10"),
        "functions of more than 6 parameters": found("PLR0913", "pylint.max-args=6"),
    }
    for name, figure in figures.items():
        print(f"{name:36} {figure:7,}")


if __name__ == "__main__":
    main()
