"""Jobs of an evaluation in processes of their own."""

import multiprocessing
from dataclasses import replace
from pathlib import Path

import pytest

from fusionkv.bench.quality import jobs
from fusionkv.bench.quality.data.tasks import reference
from fusionkv.bench.quality.report.cells import Subject
from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.fusion_worker.recipes import modifiers
from fusionkv.protos.runtime.errors import ResourceExhausted


@pytest.mark.slow
def test_when_a_job_fails_the_others_end(reference_model: Path) -> None:
    """And not only when they are done, which here would take minutes."""
    task = reference("twohop", jobs.BLOCK)
    recipes = [modifiers.find(name) for name in ("full_attention", "full_reuse", "prophetkv")]
    part = jobs.Part(next(task.blocks(jobs.BLOCK)), tuple(jobs.cells_of(task, recipes, (0.1, 0.2, 0.3))))
    subject, config = Subject("model", "fingerprint", "auto", 512), WorkerConfig(model=reference_model)
    long = jobs.Job(subject, replace(config, pool_bytes=256 << 20), (part,) * 100)
    failing = jobs.Job(subject, replace(config, pool_bytes=1 << 18), (part,))
    with pytest.raises(ResourceExhausted, match="raise pool_bytes"):
        list(jobs.run([long, failing], processes=2, threads=1))
    for child in multiprocessing.active_children():
        child.join(30)
    assert multiprocessing.active_children() == []
