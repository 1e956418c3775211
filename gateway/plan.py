"""Turns a question, or a conversation that ends with it, and its passages into one request for a worker."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fusionkv.gateway.ingest.text import is_blank, normal
from fusionkv.gateway.retrieval.base import TextChunk
from fusionkv.gateway.tokens import Vocabulary
from fusionkv.protos.contract.length import TooLong
from fusionkv.protos.contract.recipes import MODIFIERS
from fusionkv.protos.contract.requests import RequestedRecipe, check_request, check_sampling
from fusionkv.protos.contract.template import template_error, template_values
from fusionkv.protos.fusion.v1 import fusion_pb2
from fusionkv.protos.gateway.v1 import gateway_pb2 as pb
from fusionkv.protos.runtime.errors import InvalidArgument

# A chunk, and the passage that the reply shows for it.
Passage = tuple[TextChunk, pb.Passage]
# Characters of given passages with their titles: of one, and of all. The second is a context of 128 Ki tokens.
_MAX_PASSAGE, _MAX_PASSAGES = 1 << 15, 1 << 19
# Characters of a passage's document, id and metadata, which are not part of the prompt.
MAX_NOTES = 4096
# Characters of a whole conversation. Longer context belongs in passages.
MAX_QUESTION = 1 << 16
MAX_MESSAGES = 1024
# Key-value pairs of a filter.
_MAX_PAIRS = 16


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation that ends with the user's question.

    Attributes:
        turns: texts of the user and the assistant, alternating; the first and the last are the user's.
        system: the system prompt; empty uses the worker's.
    """

    turns: tuple[str, ...]
    system: str = ""

    @property
    def question(self) -> str:
        return self.turns[-1]

    @classmethod
    def of(cls, request: pb.GenerateRequest) -> "Conversation":
        """Reads the conversation of a request.

        Raises InvalidArgument if the request does not have exactly one of question and messages, or they are empty,
        too long or in the wrong order.
        """
        if not request.messages:
            check_question(request.question)
            _check_length(request.system, "system prompt")
            return cls((normal(request.question),), normal(request.system))
        if request.question:
            raise InvalidArgument("a request takes either a question or messages, not both")
        if len(request.messages) > MAX_MESSAGES:
            raise InvalidArgument(f"{len(request.messages)} messages are given; the maximum is {MAX_MESSAGES}")
        _check_length("".join(message.text for message in request.messages) + request.system, "conversation")
        systems = [m.text for m in request.messages if m.role == pb.ROLE_SYSTEM]
        if systems and request.system:
            raise InvalidArgument("the system prompt is given both as a field and as a message")
        return cls(tuple(map(normal, _turns(request))), normal("\n\n".join(systems) or request.system))


def check_question(question: str, what: str = "question") -> None:
    """Raises InvalidArgument if a question has no text, or far more text than any model accepts."""
    _check_length(question, what)
    if is_blank(question):
        raise InvalidArgument(f"the {what} is empty")


def _check_length(text: str, what: str) -> None:
    if len(text) > MAX_QUESTION:
        raise InvalidArgument(f"the {what} has {len(text)} characters; the maximum is {MAX_QUESTION}")


def _turns(request: pb.GenerateRequest) -> tuple[str, ...]:
    """Texts of the user and the assistant in turn; consecutive messages of one role become one turn."""
    turns: list[str] = []
    last = pb.ROLE_UNSPECIFIED
    for number, message in enumerate(request.messages):
        if message.role == pb.ROLE_SYSTEM:
            continue
        if message.role not in (pb.ROLE_USER, pb.ROLE_ASSISTANT):
            raise InvalidArgument(f"message {number} has none of the roles system, user and assistant")
        if not turns and message.role != pb.ROLE_USER:
            raise InvalidArgument(f"message {number} has the role assistant; the first turn must be the user's")
        if message.role == last:
            turns[-1] += f"\n\n{message.text}"
        else:
            turns.append(message.text)
        last = message.role
    if last != pb.ROLE_USER:
        raise InvalidArgument("the last message must have the role user: it is the question")
    check_question(turns[-1], "last message")
    return tuple(turns)


def as_encoded(requested: RequestedRecipe, passages: Sequence[Passage], vocabulary: Vocabulary) -> RequestedRecipe:
    """Adapts a recipe to the way in which most of the passages were encoded ahead of time, if any were.

    The recipe's selector stays the same. A recipe that sets the number of neighbours itself, or takes no modifiers,
    is returned unchanged.
    """
    modifiers = (MODIFIERS[term.partition("(")[0]] for term in requested.name.split("+")[1:])
    explicit = requested.recipe.neighbours or any(modifier.neighbours is not None for modifier in modifiers)
    counts = Counter(chunk.neighbours for chunk, _ in passages if chunk.variant and chunk.neighbours)
    if explicit or requested.recipe.lossless or not counts:
        return requested
    ((count, _),) = counts.most_common(1)
    return RequestedRecipe.of(f"{requested.name}+similarity_guided({count})", vocabulary.model)


def check(request: pb.GenerateRequest, max_passages: int) -> None:
    """Raises InvalidArgument if a request is invalid; does not check its conversation."""
    _check_context(request)
    if not request.corpus and (request.query or request.top_k or request.filter):
        raise InvalidArgument("query, top_k and filter apply to a corpus only: nothing else is searched")
    if len(request.passages) > max_passages:
        raise InvalidArgument(f"{len(request.passages)} passages are given; the maximum is {max_passages}")
    _check_passages(request.passages)
    if request.query:
        check_question(request.query, "query")
    _check_length(request.prompt_template, "prompt template")
    if error := template_error(request.prompt_template):
        raise InvalidArgument(error)
    template_values(request.chat_template_kwargs)
    check_sampling(request.sampling)


def _check_context(request: pb.GenerateRequest) -> None:
    """Raises InvalidArgument unless exactly one field says which passages the prompt has."""
    given = {"a corpus": request.corpus, "passages": request.passages, "no_passages": request.no_passages}
    found = [name for name, value in given.items() if value]
    if len(found) > 1:
        raise InvalidArgument(f"{' and '.join(found)} are given: a request needs exactly one of them")
    if not found:
        raise InvalidArgument(
            "neither a corpus nor passages are given: for an answer without passages, send an empty list of them "
            "(in gRPC, set no_passages)"
        )


def _check_passages(passages: Sequence[pb.Passage]) -> None:
    for number, passage in enumerate(passages):
        if is_blank(passage.text):
            raise InvalidArgument(f"passage {number} is empty")
        if (length := len(passage.text) + len(passage.title)) > _MAX_PASSAGE:
            raise InvalidArgument(
                f"passage {number} has {length} characters; the maximum is {_MAX_PASSAGE}: split it"
            )
        many = len(passage.metadata) > MAX_NOTES  # so many that their lengths need not be added up
        if many or len(passage.document) + len(passage.id) + _length(passage.metadata) > MAX_NOTES:
            raise InvalidArgument(
                f"document, id and metadata of passage {number} have more than {MAX_NOTES} characters in total"
            )
    if (length := sum(len(p.text) + len(p.title) for p in passages)) > _MAX_PASSAGES:
        raise InvalidArgument(f"the passages have {length} characters; the maximum is {_MAX_PASSAGES}")


def check_filter(where: Mapping[str, str]) -> None:
    """Raises InvalidArgument if a filter is too long."""
    if len(where) > _MAX_PAIRS or _length(where) > MAX_NOTES:
        raise InvalidArgument(f"a filter takes at most {_MAX_PAIRS} pairs and {MAX_NOTES} characters")


def _length(pairs: Mapping[str, str]) -> int:
    return sum(map(len, (*pairs.keys(), *pairs.values())))


def given(passages: Sequence[pb.Passage], vocabulary: Vocabulary) -> list[Passage]:
    """The chunks of the passages in a request, one a passage, with the token ids that a corpus would store.

    Raises TooLong if they are longer than any prompt of the model. No more of them than necessary are tokenised.
    """
    chunks, tokens, limit = [], 0, vocabulary.model.max_tokens
    for number, passage in enumerate(passages):
        text = "\n".join(filter(None, (normal(part).strip() for part in (passage.title, passage.text))))
        shown = pb.Passage()
        shown.CopyFrom(passage)
        if not shown.document:
            shown.position = number
        chunk = TextChunk(shown.document, shown.position, text, tuple(vocabulary.chunk(text)))
        tokens += len(chunk.ids)
        if tokens > limit:
            raise TooLong(
                f"the first {number + 1} of {len(passages)} passages have {tokens} tokens; the model's maximum is "
                f"{limit}: request fewer or shorter passages",
                tokens,
            )
        shown.tokens = len(chunk.ids)
        chunks.append((chunk, shown))
    return chunks


def retrieved(chunk: TextChunk, score: float) -> Passage:
    """A chunk of a corpus, with its passage."""
    return chunk, pb.Passage(
        document=chunk.document,
        position=chunk.position,
        text=chunk.text.removeprefix(f"{chunk.title}\n") if chunk.title else chunk.text,
        title=chunk.title,
        metadata=dict(chunk.metadata),
        score=score,
        tokens=len(chunk.ids),
    )


def order(passages: Sequence[Passage], order: pb.Order) -> list[Passage]:
    """Sorts passages, best first, into their order in the prompt.

    By document and position, a set of chunks makes the same path for every question, and so a prefix hit in the cache
    service. `ORDER_ENDS` keeps the worst passages away from the question (docs/quality.md).

    Raises InvalidArgument for a number that is no order, which protobuf lets through.
    """
    if order not in pb.Order.values():
        raise InvalidArgument(f"there is no order {order}")
    if order == pb.ORDER_DOCUMENT:
        return sorted(passages, key=lambda passage: passage[0].key)
    if order == pb.ORDER_RANK_REVERSED:
        return list(reversed(passages))
    return [*passages[:1], *passages[:0:-1]] if order == pb.ORDER_ENDS else list(passages)


def build(
    request: pb.GenerateRequest,
    conversation: Conversation,
    requested: RequestedRecipe,
    passages: Sequence[Passage],
    vocabulary: Vocabulary,
    tenant: str,
) -> fusion_pb2.GenerateRequest:
    """The worker's request for these passages, in this order; `tenant` is the salt of the tenant whose KV is used.

    Raises:
        TooLong: the prompt and its answer exceed the model's length.
        InvalidArgument, FailedPrecondition: as `check_request`.
    """
    layout = normal(request.prompt_template) or (vocabulary.plain_layout if request.no_passages else "")
    if passages:
        system = vocabulary.system(conversation.system, layout)
        question = vocabulary.question(*conversation.turns, layout=layout)
    else:
        system, question = vocabulary.alone(conversation.system, conversation.turns, layout)
    worker_request = fusion_pb2.GenerateRequest(
        recipe=requested.name,
        system=fusion_pb2.Tokens(ids=system),
        chunks=[
            # KV encoded with neighbours is only for recipes with the same number; others would reuse worse KV.
            fusion_pb2.Chunk(
                ids=chunk.ids,
                variants=[chunk.variant]
                if chunk.variant and chunk.neighbours == requested.recipe.neighbours > 0
                else [],
            )
            for chunk, _ in passages
        ],
        question=fusion_pb2.Tokens(ids=question),
        sampling=request.sampling,
        model_fingerprint=vocabulary.model.fingerprint,
        tenant=tenant,
        corpus=corpus_name(tenant, request.corpus),
        explain=request.explain,
    )
    if request.HasField("ratio"):
        worker_request.ratio = request.ratio
    try:
        check_request(worker_request, vocabulary.model)
    except TooLong as error:
        if request.corpus:  # whose chunks were tokenised when it was ingested
            error.tokens -= sum(len(chunk.ids) for chunk, _ in passages)
        raise
    return worker_request


def corpus_name(tenant: str, corpus: str) -> str:
    """The name by which workers monitor a corpus's quality and keep its primer; it differs between tenants."""
    return f"{tenant_label(tenant)}/{corpus}" if tenant else corpus


def tenant_label(tenant: str) -> str:
    """A tenant's label in telemetry, which must not contain the salt that gives access to its KV."""
    return hashlib.sha256(tenant.encode()).hexdigest()[:16] if tenant else ""
