"""A question and its passages to one request for a worker."""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from fusionkv.gateway.conversation import Conversation, check_question
from fusionkv.gateway.retrieval.base import Chunk
from fusionkv.gateway.tokens import Vocabulary
from fusionkv.protos.fusion.v1 import fusion_pb2
from fusionkv.protos.gateway.v1 import gateway_pb2 as pb
from fusionkv.protos.runtime.errors import InvalidArgument

# With what the caller is told of it.
Passage = tuple[Chunk, pb.Passage]
# Characters of given passages with their titles: of one, and of all. The second is the context of 128 Ki tokens.
_MOST_PASSAGE, _MOST_PASSAGES = 1 << 15, 1 << 19
# Characters of what is told of a passage without being in the prompt.
_MOST_NOTES = 4096
# Of a filter.
_MOST_PAIRS = 16
MOST_RECIPE = 256
# As the worker takes them, but told before anything is retrieved.
_MOST_STOPS, _MOST_STOP = 16, 256
# A modifier and its first number; the worker reads the rest.
_TERM = re.compile(r"(\w{1,32})(?:\(([0-9]{0,6})[0-9, ]{0,32}\))?")


def recipe(name: str, vocabulary: Vocabulary) -> fusion_pb2.Recipe:
    """The worker's recipe of that name, with what `recipe+modifier(number)` changes about its neighbours.

    Raises:
        InvalidArgument: the worker has none of that name, or no such modifier.
    """
    if len(name) > MOST_RECIPE:
        raise InvalidArgument(f"the recipe's name has {len(name)} characters; at most {MOST_RECIPE} are taken")
    base, *terms = name.split("+")
    known = {found.name: found for found in vocabulary.model.recipes}
    if base not in known:
        raise InvalidArgument(f"unknown recipe {base[:40]!r}; known: {', '.join(known)}")
    modifiers = {found.name: found for found in vocabulary.model.modifiers}
    made = fusion_pb2.Recipe()
    made.CopyFrom(known[base])
    made.name = name
    for term in terms:
        match = _TERM.fullmatch(term)
        modifier, number = match.groups() if match else ("", "")
        if modifier not in modifiers:
            named = ", ".join(modifiers) or "none"
            raise InvalidArgument(f"unknown modifier {term[:40]!r} of a recipe; known: {named}")
        if modifiers[modifier].HasField("neighbours"):
            default = modifiers[modifier].neighbours
            # One that decides for none may count something else, as `versions(3)` does.
            made.neighbours = int(number) if number and default else default
    return made


def as_encoded(found: fusion_pb2.Recipe, passages: Sequence[Passage], vocabulary: Vocabulary) -> fusion_pb2.Recipe:
    """The same choice of tokens over chunks as most of the passages were encoded ahead of time, if any were.

    A recipe that itself says how chunks are encoded, or takes no modifiers, stays as it is.
    """
    modifiers = {modifier.name: modifier for modifier in vocabulary.model.modifiers}
    says = (modifiers[term.partition("(")[0]].HasField("neighbours") for term in found.name.split("+")[1:])
    counts = Counter(chunk.neighbours for chunk, _ in passages if chunk.variant and chunk.neighbours)
    guided = next((modifier.name for modifier in modifiers.values() if modifier.neighbours), "")
    if not (counts and guided and found.takes_modifiers) or found.neighbours or any(says):
        return found
    ((count, _),) = counts.most_common(1)
    return recipe(f"{found.name}+{guided}({count})", vocabulary)


def check(request: pb.GenerateRequest, most_passages: int) -> None:
    """Raises InvalidArgument for whatever is wrong with a request by itself, beside its conversation."""
    if bool(request.corpus) == bool(request.passages):
        given = "both a corpus and passages are" if request.corpus else "neither a corpus nor passages are"
        raise InvalidArgument(f"{given} given: a request has one of them")
    if request.passages and (request.query or request.top_k or request.filter):
        raise InvalidArgument("query, top_k and filter are for a corpus: of given passages, all are taken")
    if len(request.passages) > most_passages:
        raise InvalidArgument(f"{len(request.passages)} passages are given; at most {most_passages} are taken")
    _check_passages(request.passages)
    if request.query:
        check_question(request.query, "query")
    if request.HasField("ratio") and not 0 <= request.ratio <= 1:
        raise InvalidArgument(f"ratio is {request.ratio:g}: it must be in 0..1")
    sampling = request.sampling
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise InvalidArgument(f"temperature is {sampling.temperature:g}: it must be 0 (greedy) or more")
    if not 0 <= sampling.top_p <= 1:
        raise InvalidArgument(f"top_p is {sampling.top_p:g}: it must be in 0..1")
    if any(not stop for stop in sampling.stop):
        raise InvalidArgument("a stop string is empty")
    if len(sampling.stop) > _MOST_STOPS or any(len(stop) > _MOST_STOP for stop in sampling.stop):
        raise InvalidArgument(f"at most {_MOST_STOPS} stop strings of {_MOST_STOP} characters are taken")


def _check_passages(passages: Sequence[pb.Passage]) -> None:
    for number, passage in enumerate(passages):
        if not passage.text.strip():
            raise InvalidArgument(f"passage {number} is empty")
        if (length := len(passage.text) + len(passage.title)) > _MOST_PASSAGE:
            raise InvalidArgument(
                f"passage {number} has {length} characters; at most {_MOST_PASSAGE} are taken: split it"
            )
        notes = (passage.document, passage.id, *passage.metadata.keys(), *passage.metadata.values())
        if sum(map(len, notes)) > _MOST_NOTES:
            raise InvalidArgument(
                f"document, id and metadata of passage {number} have over {_MOST_NOTES} characters together"
            )
    if (length := sum(len(p.text) + len(p.title) for p in passages)) > _MOST_PASSAGES:
        raise InvalidArgument(f"the passages have {length} characters; at most {_MOST_PASSAGES} are taken")


def check_filter(where: Mapping[str, str]) -> None:
    """Raises InvalidArgument for a filter that is far too long."""
    if len(where) > _MOST_PAIRS or sum(map(len, (*where.keys(), *where.values()))) > _MOST_NOTES:
        raise InvalidArgument(f"a filter has at most {_MOST_PAIRS} pairs and {_MOST_NOTES} characters")


def given(passages: Sequence[pb.Passage], vocabulary: Vocabulary) -> list[Passage]:
    """A request's own passages: each is one chunk, the one that a corpus would have of the same text."""
    found = []
    for number, passage in enumerate(passages):
        text = "\n".join(filter(None, (passage.title.strip(), passage.text.strip())))
        chunk = Chunk("", number, text, tuple(vocabulary.chunk(text)))
        told = pb.Passage()
        told.CopyFrom(passage)
        told.tokens = len(chunk.ids)
        if not told.document:
            told.position = number
        found.append((chunk, told))
    return found


def retrieved(chunk: Chunk, score: float) -> Passage:
    """A chunk of a corpus."""
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
    """Passages, best first, in the order of the prompt.

    The default is by document and position: one set of chunks then always makes one path, which the cache service
    knows by its exact prefix. Of given passages it is the caller's order.
    """
    if order == pb.ORDER_RANK:
        return list(passages)
    if order == pb.ORDER_RANK_REVERSED:
        return list(reversed(passages))
    return sorted(passages, key=lambda passage: passage[0].key)


def build(
    request: pb.GenerateRequest,
    conversation: Conversation,
    recipe: fusion_pb2.Recipe,
    passages: Sequence[Passage],
    vocabulary: Vocabulary,
    tenant: str,
) -> fusion_pb2.GenerateRequest:
    """The worker's request for these passages, in this order, for the KV of `tenant`.

    Raises:
        InvalidArgument: the prompt and its answer are longer than the model takes.
    """
    system, question = vocabulary.system(conversation.system), vocabulary.question(*conversation.turns)
    context = sum(len(chunk.ids) for chunk, _ in passages)
    prompt = len(system) + context + len(question)
    # An answer has one token at least.
    answer, most = max(1, request.sampling.max_tokens), vocabulary.model.max_tokens
    if prompt + answer > most:
        raise InvalidArgument(
            f"the prompt has {prompt} tokens ({len(system)} system, {context} in {len(passages)} chunks, "
            f"{len(question)} question) and asks for {answer} more; the model takes {most} together: "
            "ask for fewer chunks (top_k), give fewer passages, or ask for fewer max_tokens"
        )
    sampling = request.sampling
    made = fusion_pb2.GenerateRequest(
        recipe=recipe.name,
        system=fusion_pb2.Tokens(ids=system),
        chunks=[
            # What was encoded with neighbours is for recipes that want as many; others would reuse worse KV.
            fusion_pb2.Chunk(
                ids=chunk.ids,
                variants=[chunk.variant] if chunk.variant and chunk.neighbours == recipe.neighbours > 0 else [],
            )
            for chunk, _ in passages
        ],
        question=fusion_pb2.Tokens(ids=question),
        sampling=fusion_pb2.Sampling(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=sampling.seed if sampling.HasField("seed") else None,
            stop=sampling.stop,
        ),
        model_fingerprint=vocabulary.model.fingerprint,
        tenant=tenant,
        corpus=_label(tenant, request.corpus),
        explain=request.explain,
    )
    if request.HasField("ratio"):
        made.ratio = request.ratio
    return made


def tokens(request: fusion_pb2.GenerateRequest) -> int:
    """Length of a request's prompt."""
    return len(request.system.ids) + sum(len(chunk.ids) for chunk in request.chunks) + len(request.question.ids)


def tenant_label(tenant: str) -> str:
    """What telemetry calls a tenant, where what opens its KV must not be."""
    return hashlib.sha256(tenant.encode()).hexdigest()[:16] if tenant else ""


def _label(tenant: str, corpus: str) -> str:
    """What a worker calls a corpus whose quality it watches: two tenants' corpora of one name are two."""
    return f"{tenant_label(tenant)}/{corpus}" if tenant else corpus
