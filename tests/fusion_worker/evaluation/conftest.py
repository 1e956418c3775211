"""The first of the models that come with the project, loaded."""

from pathlib import Path

import pytest

from fusionkv.fusion_worker import models


@pytest.fixture(scope="module")
def model(reference_model: Path) -> models.Model:
    return models.load(reference_model)
