"""FusionKV's KV connector for vLLM: loads prompts prefilled by fusion workers, and shares prefixes of vLLM."""
