"""What the chart makes of values."""

from pathlib import Path
from typing import Any

import pytest

from tests.deploy.rendering import VERSIONS, Objects, Render, template, validate


@pytest.fixture
def render(helm: str, tmp_path: Path) -> Render:
    """Renders values, and validates what comes of them."""

    def run(values: dict[str, Any] | None = None, version: str = VERSIONS[-1]) -> Objects:
        documents = template(helm, tmp_path, values or {}, version)
        validate(documents, version)
        return Objects(documents)

    return run
