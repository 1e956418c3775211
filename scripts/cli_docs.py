"""The reference of the command line for the site, from what each command prints with --help."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

_COMMAND = re.compile(r"^    (\w+) ", re.MULTILINE)
# Two at a time: some load torch before they print.
_AT_ONCE = 2


def page() -> str:
    """The page in Markdown: a section for each command and each command below it."""
    commands = _COMMAND.findall(_help(""))
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = dict(zip(commands, pool.map(_help, commands), strict=True))
        below = [f"{name} {under}" for name, text in found.items() for under in _COMMAND.findall(text)]
        found |= zip(below, pool.map(_help, below), strict=True)
    head = (
        "# Command line\n\nAfter this page you can use every command with all its flags. The flags of a single "
        "service (`fusionkv serve worker`) are its [settings](../configuration.md)."
    )
    return "\n\n".join([head, *(f"## fusionkv {name}\n\n```text\n{found[name]}```" for name in sorted(found))]) + "\n"


def _help(command: str) -> str:
    flags = ("-P", "-m", "fusionkv.gateway.cli.main", *command.split(), "--help")
    env = {**os.environ, "COLUMNS": "88", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *flags], env=env, capture_output=True, text=True, check=True).stdout
