"""Text of documents, models and errors as a terminal may show it: nothing in it moves a cursor or sets a colour."""

import json
import os
import sys
from pathlib import Path

from fusionkv.gateway.ingest.text import acts


def _escaped(char: str) -> str:
    return char.encode("unicode_escape", "surrogatepass").decode()


def line(text: object) -> str:
    """The text on one line, with escapes such as `\\x1b` for control characters."""
    return "".join(_escaped(char) if acts(char) else char for char in str(text))


def lines(text: str) -> str:
    """The same for text that may have several lines, such as an answer, and tabs."""
    return "".join(_escaped(char) if acts(char) and char not in "\n\t" else char for char in text)


def as_json(value: object) -> str:
    """One line of JSON, in which control characters are escaped too."""
    text = json.dumps(value, ensure_ascii=False)
    return "".join(f"\\u{ord(char):04x}" if acts(char) else char for char in text)


def name(path: str | Path) -> str:
    """A path as text; bytes that are no UTF-8 become escapes such as `\\xff`."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def tell(message: object) -> None:
    """Prints a line for the user on standard error."""
    print(f"fusionkv: {line(message)}", file=sys.stderr, flush=True)
