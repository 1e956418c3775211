"""What of a chat only vLLM can follow; docs/openai.md lists it."""

from typing import Any

# Fields that are passed on unless their values have no effect.
FIELDS = {
    *("n", "logprobs", "top_logprobs", "presence_penalty", "frequency_penalty", "logit_bias", "response_format"),
    *("tools", "tool_choice", "parallel_tool_calls", "reasoning_effort"),
    # Of vLLM.
    *("structured_outputs", "min_p", "min_tokens", "repetition_penalty", "stop_token_ids", "ignore_eos"),
    *("include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens"),
}
# Field of `fusionkv` that names a model or a LoRA adapter that vLLM serves.
MODEL = "vllm_model"


def is_about_tools(message: Any) -> bool:
    """Whether a message calls tools, or is the result of one."""
    return isinstance(message, dict) and (message.get("role") == "tool" or bool(message.get("tool_calls")))
