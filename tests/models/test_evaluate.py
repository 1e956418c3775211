"""The evaluation's forward pass is the model's own, and its full reuse is page by page encoding."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from fusionkv.models import evaluate


@pytest.fixture(scope="module")
def model(reference_model: Path) -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM.from_pretrained(reference_model, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts(reference_model: Path) -> evaluate.Prompts:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(reference_model)
    return evaluate.lay_out(evaluate.held_out("chain2", 3), tokenizer)


@torch.inference_mode()
def test_full_attention_is_the_models_own(model: Qwen2ForCausalLM, prompts: evaluate.Prompts) -> None:
    place = torch.arange(prompts.ids.shape[1]).expand_as(prompts.ids)
    ours, states = evaluate.forward(model, prompts.ids, place, prompts.visible)
    real = prompts.chunk != -2
    theirs = model(input_ids=prompts.ids, attention_mask=real.long()).logits
    torch.testing.assert_close(ours[real], theirs[real], atol=1e-4, rtol=1e-4)
    again, _ = evaluate.forward(model, prompts.ids, place, prompts.visible, prompts.chunk <= 0, states)
    torch.testing.assert_close(again[real], ours[real], atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_a_page_is_encoded_behind_the_system_text_alone(model: Qwen2ForCausalLM, prompts: evaluate.Prompts) -> None:
    _, states = evaluate.forward(model, prompts.ids, prompts.alone, prompts.visible_alone)
    row, page = 1, 5
    kept = (prompts.chunk[row] == 0) | (prompts.chunk[row] == page)
    ids = prompts.ids[row : row + 1, kept]
    count = ids.shape[1]
    causal = torch.ones(1, count, count, dtype=torch.bool).tril()
    _, alone = evaluate.forward(model, ids, torch.arange(count)[None], causal)
    for together, apart in zip(states, alone, strict=True):
        for one, other in zip(together, apart, strict=True):
            torch.testing.assert_close(one[row][:, kept], other[0], atol=1e-4, rtol=1e-4)
