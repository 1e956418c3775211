"""Prints the README of the chart: its text, then tables from the comments of values.yaml (`make docs`)."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
VALUES, README = ROOT / "k8s/fusionkv/values.yaml", ROOT / "k8s/fusionkv/README.md"
_KEY = re.compile(r"^( *)(\w+):(?: (.*))?$")
_PAGE = re.compile(r"docs/(\w+)\.md")


def page() -> str:
    """The README's text, and a section for each top-level key with a row for each value.

    A value without a comment is what the first of its name is, in a section before.
    """
    parts, comments, above = [README.read_text().partition("\n### ")[0]], list[str](), list[str]()
    told = dict[str, str]()
    for line in VALUES.read_text().splitlines():
        if match := _KEY.match(line):
            depth, name, value = len(match[1]) // 2, match[2], match[3]
            above = [*above[:depth], name]
            text = _PAGE.sub(r"[\1](../../docs/\1.md)", " ".join(comments))
            if depth == 0 and value is not None:
                parts += [f"### {name}", "", f"{text} The default is `{value}`."]
            elif depth == 0:
                parts += [f"### {name}", "", *([text, ""] if text else [])]
                parts += ["| value | default | what it is |", "|---|---|---|"]
            elif value is None and text:
                parts.append(f"| `{'.'.join(above)}` | | {text} |")
            if depth and value is not None:
                text = text or told[name]
                parts.append(f"| `{'.'.join(above)}` | `{value}` | {text} |")
                told.setdefault(name, text)
            comments = []
        elif line.strip().startswith("#"):
            comments.append(line.strip(" #"))
        else:
            parts += [""] if above else []
            comments = []
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    print(page(), end="")
