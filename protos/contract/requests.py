"""Checks of a worker's request: a worker makes them first, and the gateway before it sends anything to its caller."""

from collections.abc import Sequence
from dataclasses import dataclass

from fusionkv.protos.contract.capabilities import check_usable
from fusionkv.protos.contract.length import check_length
from fusionkv.protos.contract.limits import check_label, check_variants
from fusionkv.protos.contract.names import full_name
from fusionkv.protos.contract.recipes import Recipe, find_recipe
from fusionkv.protos.fusion.v1.fusion_pb2 import GenerateRequest, GetModelResponse, Sampling
from fusionkv.protos.runtime.errors import FailedPrecondition, InvalidArgument

_MAX_TEMPERATURE = 100
_MAX_STOPS, _MAX_STOP = 16, 256


@dataclass(frozen=True, slots=True)
class RequestedRecipe:
    """What the name of a recipe means on a worker. name: as requested, such as `default`. recipe: what it means."""

    name: str
    recipe: Recipe

    @classmethod
    def of(cls, name: str, model: GetModelResponse) -> "RequestedRecipe":
        """Raises InvalidArgument if there is no such recipe."""
        return cls(name, find_recipe(full_name(name, model.default_recipe)))

    def check(self, ratio: float | None, chunks: int, model: GetModelResponse) -> None:
        """Checks that a worker can follow it.

        ratio: as requested; None if the request leaves it to the recipe. chunks: number of chunks in the prompt.
        Raises InvalidArgument if it takes no such ratio, and FailedPrecondition if the model can't follow it.
        """
        self.recipe.ratio_for(ratio)
        check_usable(self.recipe, chunks, model)

    def check_portable(self) -> None:
        """Raises FailedPrecondition if other engines can't decode from the KV of a prompt."""
        if not self.recipe.portable:
            raise FailedPrecondition(f"only the fusion worker can decode an answer by {self.name}")


def check_request(request: GenerateRequest, model: GetModelResponse) -> RequestedRecipe:
    """Checks a request as far as it depends on nothing but itself and the model, and returns its recipe.

    Raises:
        TooLong: the prompt and its answer exceed the model's length.
        InvalidArgument: another field has a value out of range.
        FailedPrecondition: the request is for another model, or the model can't follow the recipe.
    """
    check_model(request.model_fingerprint, model)
    check_label(request.tenant, "tenant")
    check_label(request.corpus, "corpus")
    check_sampling(request.sampling)
    asked = RequestedRecipe.of(request.recipe, model)
    asked.check(request.ratio if request.HasField("ratio") else None, len(request.chunks), model)
    for number, chunk in enumerate(request.chunks):
        check_filled(chunk.ids, f"chunk {number}")
        check_variants(chunk.variants, f"chunk {number}")
    check_filled(request.question.ids, "the question")
    check_length(request, asked.recipe.links, model.max_tokens)
    return asked


def check_sampling(sampling: Sampling) -> None:
    """Raises InvalidArgument if temperature, top_p or a stop string is out of range; other values all have a meaning.

    The number of stop strings is checked before any of them.
    """
    temperature, top_p, stop = sampling.temperature, sampling.top_p, sampling.stop
    if not 0 <= temperature <= _MAX_TEMPERATURE:
        raise InvalidArgument(f"temperature is {temperature:.15g}: it must be from 0 (greedy) to {_MAX_TEMPERATURE}")
    if not 0 <= top_p <= 1:
        raise InvalidArgument(f"top_p is {top_p:.15g}: it must be from 0 to 1")
    if len(stop) > _MAX_STOPS or any(not 1 <= len(each) <= _MAX_STOP for each in stop):
        raise InvalidArgument(f"a request takes at most {_MAX_STOPS} stop strings of 1 to {_MAX_STOP} characters")


def signed_seed(seed: int) -> int:
    """A seed as torch and vLLM take it: any of 64 bits is accepted, but they take only signed ones."""
    return seed & 0x7FFF_FFFF_FFFF_FFFF


def check_filled(ids: Sequence[int], what: str) -> None:
    """Raises InvalidArgument if a part of a prompt has no tokens."""
    if not ids:
        raise InvalidArgument(f"{what} is empty")


def check_model(fingerprint: bytes, model: GetModelResponse) -> None:
    """Raises FailedPrecondition if a request is for another model."""
    if fingerprint not in (b"", model.fingerprint):
        raise FailedPrecondition(
            f"the request is for the model with fingerprint {fingerprint.hex()[:16]}; this worker runs {model.name}, "
            f"with fingerprint {model.fingerprint.hex()[:16]}"
        )
