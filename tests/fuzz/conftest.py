"""Says at the end how many inputs there were, where somebody asked for many; and who may call a gateway."""

from pathlib import Path
from typing import Any

import pytest

from fusionkv.gateway.auth.access import Bearer
from fusionkv.gateway.auth.verifiers import StaticTokens
from tests.fuzz import effort
from tests.gateway.test_jwt import Signer, key_file, tokens
from tests.services import token_entry


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if effort.SECONDS:
        for item in items:
            item.add_marker("slow")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if effort.SECONDS:
        terminalreporter.section(f"inputs, seed {effort.SEED}")
        for name, count in sorted(effort.done.items()):
            terminalreporter.line(f"{count:9,} {name}")
        terminalreporter.line(f"{effort.done.total():9,} together")


@pytest.fixture
def signer() -> Signer:
    return Signer("k")


@pytest.fixture
def bearer(signer: Signer, tmp_path: Path) -> Bearer:
    """Both kinds of verifier: of a file with one token, and of what `signer` signs."""
    (tmp_path / "tokens").write_text(token_entry("nobody has it", "app"))
    return Bearer([StaticTokens(tmp_path / "tokens"), tokens(key_file(tmp_path, signer))])
