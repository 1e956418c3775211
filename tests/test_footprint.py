"""What a process takes before anybody asks it for something: seconds and memory."""

import os
import subprocess
import sys

import pytest


def test_the_help_is_there_at_once() -> None:
    """CPU seconds, of which other load makes no more: the best of three."""
    argv = [sys.executable, "-P", "-m", "fusionkv.gateway.cli.main", "--help"]
    seconds = []
    for _ in range(3):
        before = os.times()
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
        after = os.times()
        seconds.append(after.children_user + after.children_system - before.children_user - before.children_system)
    assert min(seconds) <= 0.3


@pytest.mark.system
def test_a_worker_and_an_embedder_load_no_compiler() -> None:
    """torch's, which a model is loaded without; whoever wants it afterwards has it, and the model is the same."""
    code = """
import sys
from fusionkv.fusion_worker.library import lean
with lean.uncompiled():
    import fusionkv.fusion_worker.servicer
    import transformers.models.auto.modeling_auto
    from transformers import Qwen2Config, Qwen2ForCausalLM
    import torch
    made = Qwen2ForCausalLM(Qwen2Config(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                        num_attention_heads=1, num_key_value_heads=1))
for heavy in ("sympy", "triton", "torch.distributed.tensor", "torch._dynamo"):
    assert heavy not in sys.modules, heavy
assert torch.distributed.is_available()
with lean.uncompiled():
    assert torch._dynamo.eval_frame.__name__ == "torch._dynamo.eval_frame"
assert torch._dynamo.config.__name__ == "torch._dynamo.config"
"""
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
