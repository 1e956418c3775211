"""What the chart makes of values."""

from pathlib import Path
from typing import Any

import pytest

from tests.deploy.rendering import VERSIONS, Render, named, template, validate


@pytest.fixture
def render(helm: str, tmp_path: Path) -> Render:
    """Valid objects by kind, then by what follows the release in their names."""

    def run(values: dict[str, Any], version: str = VERSIONS[-1]) -> dict[str, dict[str, Any]]:
        documents = template(helm, tmp_path, values, version)
        validate(documents, version)
        return named(documents)

    return run
