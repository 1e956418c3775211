"""The length of a prompt and its answer, which share the model's limit."""

from fusionkv.protos.fusion.v1.fusion_pb2 import GenerateRequest
from fusionkv.protos.runtime.errors import InvalidArgument


class TooLong(InvalidArgument):
    """A prompt over the model's length; `tokens` is the number of tokens that were made to find out."""

    def __init__(self, message: str, tokens: int) -> None:
        super().__init__(message)
        self.tokens = tokens


def prompt_tokens(request: GenerateRequest) -> int:
    """Length of a request's prompt in tokens, without link tokens."""
    return len(request.system.ids) + sum(len(chunk.ids) for chunk in request.chunks) + len(request.question.ids)


def check_length(request: GenerateRequest, links: int, limit: int) -> None:
    """Checks that a prompt and its answer, which has at least one token, fit the model.

    links: link tokens after each chunk. limit: the model's, in tokens.
    Raises TooLong if they exceed the limit together.
    """
    prompt, chunks, answer = prompt_tokens(request), len(request.chunks), max(1, request.sampling.max_tokens)
    system, question, linked = len(request.system.ids), len(request.question.ids), links * chunks
    context = prompt - system - question + linked
    if (excess := prompt + linked + answer - limit) > 0:
        raise TooLong(
            f"the prompt has {prompt + linked} tokens ({system} system, {context} in {chunks} chunks, {question} "
            f"question) and {answer} more are requested, {excess} more than the model's maximum of {limit} in total: "
            f"{shorten(prompt + linked, answer, limit, context)}",
            prompt,
        )


def shorten(prompt: int, answer: int, limit: int, context: int) -> str:
    """What to do about a prompt and an answer that exceed the model's limit together; all are numbers of tokens.

    context: of the prompt's chunks.
    """
    ways = [f"ask for at most {limit - prompt} tokens (max_tokens)"] if prompt < limit else []
    # Leaving out all chunks would do.
    if prompt - context + answer <= limit:
        ways.append("use fewer passages (top_k) or shorter ones (chunk_tokens)")
    return " or ".join(ways) or "shorten the question or the system prompt"
