"""Says at the end how many inputs there were, where somebody asked for many."""

from typing import Any

import pytest

from tests.fuzz import effort


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where somebody asked for many, all of them may take long."""
    if effort.SECONDS:
        for item in items:
            item.add_marker("slow")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if effort.SECONDS:
        terminalreporter.section(f"inputs, seed {effort.SEED}")
        for name, count in sorted(effort.done.items()):
            terminalreporter.line(f"{count:9,} {name}")
        terminalreporter.line(f"{effort.done.total():9,} together")
