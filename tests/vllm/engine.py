"""Answers a prompt with vLLM's engine in one process: run by vLLM's Python, for test_tier.py.

Takes a model's directory, a KV transfer configuration and a list of prompts with their `cache_salt`, in JSON. Prints
the token ids of each answer, and how many tokens vLLM had from its connector.
"""

import json
import os
import sys

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}

from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]
from vllm.config import KVTransferConfig  # pyright: ignore[reportMissingImports]


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # vLLM logs there
    model, connector, prompts = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    llm = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        disable_log_stats=False,
        kv_transfer_config=KVTransferConfig(kv_role="kv_both", **connector),
    )
    said = []
    for ids, salt in prompts:
        prompt = {"prompt_token_ids": ids, "cache_salt": salt}
        (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
        hits = [m.value for m in llm.get_metrics() if m.name == "vllm:external_prefix_cache_hits"]
        said.append({"ids": list(output.outputs[0].token_ids), "loaded": sum(hits)})
    print(json.dumps(said), file=answers, flush=True)


if __name__ == "__main__":
    main()
