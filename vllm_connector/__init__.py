"""FusionKV in vLLM: prompts that fusion workers prefilled, and prefixes that vLLM instances share."""
