"""A worker that can't serve says why in one line and exits with 1; one that can serves every reference model."""

from pathlib import Path

import pytest
import torch
import transformers

from fusionkv.fusion_worker import models
from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.fusion_worker.servicer import FusionServicer
from tests.commands import run_python
from tests.services import HERE
from tests.system.prompts import request

ROOT = Path(__file__).parents[2]
REFERENCE = sorted(p.parent for p in (ROOT / "models").glob("*/config.json"))


def start(*flags: str) -> tuple[int, list[str]]:
    """Exit status and lines on standard error of a worker that is expected to end by itself."""
    ended = run_python("-m", "fusionkv.fusion_worker", *HERE, "--device", "cpu", *flags, status=None)
    assert ended.stdout == ""
    return ended.returncode, ended.stderr.splitlines()


@pytest.mark.system
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--model", "/no/such/model"), "/no/such/model is no model: give the directory of a Hugging Face model"),
        (("--pool-bytes", "3"), "--pool-bytes: 3 is outside 1048576.."),
        (("--config", "/no/such/file"), "can't read the configuration /no/such/file"),
    ],
    ids=["model", "pool", "file"],
)
def test_settings_that_make_no_sense(flags: tuple[str, ...], message: str) -> None:
    status, lines = start(*flags)
    assert (status, len(lines)) == (1, 1)
    assert message in lines[0]


@pytest.mark.parametrize("directory", REFERENCE, ids=lambda p: p.name)
async def test_reference_models_answer_as_transformers_does(directory: Path) -> None:
    """Twenty greedy tokens of text, by full attention and with every token recomputed."""
    model = models.load(directory, "cpu", "float32")
    plain = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    template = model.template
    texts = ("The code of the harbour is 4711.", "The baker lives in the mill.", "Nobody knows the gardener.")

    def ids(text: str) -> list[int]:
        return list(model.tokenizer.encode(text, add_special_tokens=False).ids)

    system = [*([] if model.bos is None else [model.bos]), *ids(template.system)]
    chunks = [ids(template.chunk.replace("{text}", text)) for text in texts]
    question = ids(template.question.replace("{question}", "What is the code of the harbour?"))
    whole = torch.tensor([[*system, *sum(chunks, start=[]), *question]])  # noqa: RUF017 - three chunks
    out = plain.generate(whole, attention_mask=torch.ones_like(whole), max_new_tokens=20, do_sample=False)
    expected = out[0, whole.shape[1] :].tolist()
    servicer = FusionServicer(WorkerConfig(pool_bytes=64 << 20), model)
    try:
        for recipe in ("full_attention", "prophetkv"):
            prompt = request(system, chunks, question, 20, recipe=recipe, ratio=1.0)
            found = [r.token.id async for r in servicer.Generate(prompt, None) if r.HasField("token")]
            assert found == expected, recipe
    finally:
        await servicer.close()
