"""Says at the end how many inputs there were, where somebody asked for many."""

from typing import Any

from tests.fuzz import effort


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if effort.SECONDS:
        terminalreporter.section(f"inputs, seed {effort.SEED}")
        for name, count in sorted(effort.done.items()):
            terminalreporter.line(f"{count:9,} {name}")
        terminalreporter.line(f"{effort.done.total():9,} together")
