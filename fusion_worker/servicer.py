"""The gRPC service fusion.v1: validates requests, has them answered, and fills in replies."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import asdict, replace
from typing import Any

import grpc

from fusionkv.fusion_worker.client import CHECKSUM
from fusionkv.fusion_worker.compute.engine import Engine, TPGroup
from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.fusion_worker.decode.sampling import SamplingParams
from fusionkv.fusion_worker.load.encoder import Encoder
from fusionkv.fusion_worker.load.loader import Loader
from fusionkv.fusion_worker.load.lookup import CacheFault
from fusionkv.fusion_worker.meters import Summary
from fusionkv.fusion_worker.models import Model
from fusionkv.fusion_worker.pool.kv_pool import KVPool, pool_size
from fusionkv.fusion_worker.prompt import Chunk, Prompt
from fusionkv.fusion_worker.quality.verdict import Verdict
from fusionkv.fusion_worker.request import Answerer, Request
from fusionkv.fusion_worker.select.auxiliary import Auxiliary
from fusionkv.fusion_worker.transfer.handover import HANDLE_BYTES
from fusionkv.kvcache_service.client import CacheClient
from fusionkv.protos.answer.v1 import answer_pb2
from fusionkv.protos.contract.capabilities import unusable
from fusionkv.protos.contract.limits import check_label
from fusionkv.protos.contract.names import DEFAULT
from fusionkv.protos.contract.recipes import MODIFIERS, RECIPES
from fusionkv.protos.contract.requests import check_filled, check_model, check_request
from fusionkv.protos.contract.template import template_values
from fusionkv.protos.fusion.v1 import fusion_pb2 as pb
from fusionkv.protos.runtime import frames, rpc
from fusionkv.protos.runtime.checksum import Checksum
from fusionkv.protos.runtime.errors import FailedPrecondition, InvalidArgument, ResourceExhausted, Unavailable

SERVICE = pb.DESCRIPTOR.services_by_name["FusionService"]
_MAX_REASON = 512  # characters
# Renderings of chat templates that run or wait, one after another.
_MAX_RENDERINGS = 16


def handler(servicer: "FusionServicer") -> grpc.GenericRpcHandler:
    """The service for `rpc.serve`; KV bytes bypass protobuf (frames.py)."""
    return rpc.handlers(SERVICE, servicer, serialisers={"FetchPrefill": frames.encode_frame})


class FusionServicer:
    """Serves one model with one pool and one engine. Create it inside the event loop that serves it."""

    def __init__(
        self,
        config: WorkerConfig,
        model: Model,
        auxiliary: Model | None = None,
        verdict: Verdict | None = None,
        tp: TPGroup | None = None,
    ) -> None:
        texts = config.system, config.prompt_template
        chat = replace(model.chat, system=texts[0], prompt=texts[1])
        model = replace(model, template=model.template.configured(*texts), chat=chat)
        self._config = config
        self._model = model
        self._verdict = verdict or Verdict(model.fingerprint.hex(), {})
        self.cache = CacheClient(config.cache, config.client_tls()) if config.cache else None
        self.pool = KVPool.of(model.kv, pool_size(config.pool_bytes, model), config.page_tokens, model.device)
        self.engine = Engine(model, self.pool, config, tp)
        self.loader = Loader(config, model, self.pool, self.engine, self.cache)
        self.auxiliary = Auxiliary(config, model, auxiliary, self.cache) if auxiliary is not None else None
        self.answerer = Answerer(config, model, self.pool, self.engine, self.loader, self.auxiliary)
        self._encoder = Encoder(self.loader)
        default = self._verdict.default
        self._described = model.described(auxiliary is not None)
        self._described.default_recipe = default.choice.recipe
        self._described.default_meaning = str(default)
        # Not a thread of those that all share: templates may wait for each other.
        self._renderer = ThreadPoolExecutor(1, "render")
        self._renderings = 0

    async def wait_idle(self) -> None:
        """Waits until all loads have ended, and all chunks are stored or dropped."""
        await self.loader.wait_idle()
        if self.auxiliary is not None:
            await self.auxiliary.wait_idle()

    async def close(self) -> None:
        """Ends background work, stores or drops waiting chunks, stops the engine and closes connections."""
        await self.answerer.shadow.close()
        await self.loader.close()
        self.engine.close()
        self._renderer.shutdown(wait=False, cancel_futures=True)
        if self.auxiliary is not None:
            await self.auxiliary.close()
        if self.cache is not None:
            await self.cache.close()

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:
        model = self._model
        template = model.template
        response = pb.GetModelResponse(
            family=model.family,
            tokenizer_json=model.tokenizer_json,
            template=pb.PromptTemplate(**asdict(template)),
            kv_bytes_per_token=model.token_bytes,
            recipes=[
                pb.Recipe(
                    name=r.name,
                    description=r.description,
                    default_ratio=r.ratio,
                    neighbours=r.neighbours,
                    takes_modifiers=not r.lossless,
                    unusable=unusable(r, 0, self._described),
                )
                for r in RECIPES.values()
            ],
            modifiers=[
                pb.Modifier(name=m.name, description=m.description, neighbours=m.neighbours)
                for m in MODIFIERS.values()
            ],
            device=str(model.device),
            dtype=str(model.kv.dtype).removeprefix("torch."),
            verdicts=self._verdicts(),
            template_variables=sorted(model.chat.variables),
            max_new_tokens=self._config.max_new_tokens,
        )
        response.MergeFrom(self._described)
        return response

    async def RenderTemplate(self, request: pb.RenderTemplateRequest, context: Any) -> pb.RenderTemplateResponse:
        check_model(request.model_fingerprint, self._described)
        values = template_values(request.chat_template_kwargs)
        if self._renderings >= _MAX_RENDERINGS:
            raise ResourceExhausted("too many chat templates are being rendered: try again later", retry_after=1.0)
        self._renderings += 1
        try:
            rendering = asyncio.get_running_loop().run_in_executor(self._renderer, self._model.chat.rendered, values)
            template = await rendering
        finally:
            self._renderings -= 1
        return pb.RenderTemplateResponse(template=pb.PromptTemplate(**asdict(template)))

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        checked, replaced = await self._checked(request)
        async with aclosing(self.answerer.answer(checked, rpc.deadline(context))) as events:
            async for event in events:
                if isinstance(event, answer_pb2.Token):
                    yield pb.GenerateResponse(token=event)
                else:
                    yield pb.GenerateResponse(**self._about(event, replaced))

    async def Prefill(self, request: pb.PrefillRequest, context: Any) -> AsyncIterator[pb.PrefillResponse]:
        checked, replaced = await self._checked(request.prompt, portable=True)
        async with aclosing(self.answerer.prefill(checked, rpc.deadline(context))) as events:
            async for event in events:
                if isinstance(event, pb.FirstToken):
                    yield pb.PrefillResponse(first=event)
                elif isinstance(event, pb.PrefilledKV):
                    yield pb.PrefillResponse(kv=event)
                else:
                    yield pb.PrefillResponse(**self._about(event, replaced))

    async def HoldPrefill(self, request: pb.HoldPrefillRequest, context: Any) -> pb.HoldPrefillResponse:
        self.answerer.handover.hold(_handle(request))
        return pb.HoldPrefillResponse()

    async def FetchPrefill(self, request: pb.FetchPrefillRequest, context: Any) -> AsyncIterator[memoryview]:
        data = await self.answerer.handover.read(_handle(request), request.rank, max(1, request.ranks))
        checksum = Checksum()
        for frame in frames.split(data):
            checksum.update(frame)
            yield frame
        context.set_trailing_metadata(((CHECKSUM, checksum.digest()),))

    async def ReleasePrefill(self, request: pb.ReleasePrefillRequest, context: Any) -> pb.ReleasePrefillResponse:
        if len(request.error) > _MAX_REASON:
            raise InvalidArgument(f"the error is longer than {_MAX_REASON} characters")
        self.answerer.handover.release(_handle(request), max(1, request.ranks), request.error)
        return pb.ReleasePrefillResponse()

    def _about(self, event: answer_pb2.Explanation | Summary, replaced: str) -> dict[str, Any]:
        if isinstance(event, Summary):
            return {"summary": event.message(replaced), "pool_tokens": self.pool.capacity}
        event.verdicts.extend(self._verdicts())
        return {"explanation": event}

    async def _checked(self, request: pb.GenerateRequest, portable: bool = False) -> tuple[Request, str]:
        """Validates a request. Also returns why another recipe than the requested one is used, or an empty text.

        portable: whether another engine decodes the answer.
        """
        asked = check_request(request, self._described)
        if portable:
            asked.check_portable()
            if self._model.kv.tensors == 1:
                raise FailedPrecondition(f"{self._model.name} stores latents, from which other engines can't decode")
        chunks = tuple(
            Chunk(self._tokens(chunk.ids, f"chunk {number}"), tuple(chunk.variants))
            for number, chunk in enumerate(request.chunks)
        )
        question = self._tokens(request.question.ids, "the question")
        system = Chunk(self._tokens(request.system.ids, "the system prompt"))
        prompt = Prompt(system, chunks, question, request.tenant, request.corpus)
        recipe = asked.recipe
        given = request.ratio if request.HasField("ratio") else None
        if given is None and request.recipe.partition("+")[0] == DEFAULT:
            given = self._verdict.default.choice.ratio
        ratio = recipe.ratio_for(given)
        if replaced := self._verdict.unsafe(recipe, ratio):
            recipe, ratio = RECIPES["prefix_cache"], 0.0
        tokens = prompt.tokens + recipe.links * len(chunks)
        params = self._sampling(request.sampling, self._model.max_tokens - tokens)
        return Request(prompt, recipe, ratio, params, request.explain), replaced

    async def Encode(self, request: pb.EncodeRequest, context: Any) -> pb.EncodeResponse:
        check_model(request.model_fingerprint, self._described)
        check_label(request.tenant, "tenant")
        check_label(request.corpus, "corpus")
        parts = [*request.before, request.chunk]
        for number, part in enumerate(parts):
            check_filled(part.ids, f"chunk {number}")
        chunks = tuple(Chunk(self._tokens(part.ids, f"chunk {number}")) for number, part in enumerate(parts))
        system = Chunk(self._tokens(request.system.ids, "the system prompt"))
        prompt = Prompt(system, chunks, (), request.tenant, request.corpus)
        if request.corpus and request.mode != pb.EncodeRequest.MODE_PRIMED:
            raise InvalidArgument("only MODE_PRIMED takes a corpus: omit it with other modes")
        # A primer is cut from the chunks before a primed one: they need not fit together.
        together = replace(prompt, chunks=chunks[-1:]) if request.mode == pb.EncodeRequest.MODE_PRIMED else prompt
        if together.tokens > self._model.max_tokens:
            raise InvalidArgument(f"{together.tokens} tokens exceed the model's limit of {self._model.max_tokens}")
        if request.mode == pb.EncodeRequest.MODE_EXACT:
            encoded = await self._encoder.exact(prompt)
        elif request.mode == pb.EncodeRequest.MODE_NEIGHBOURS:
            encoded = await self._encoder.after_neighbours(prompt)
        elif request.mode == pb.EncodeRequest.MODE_PRIMED:
            encoded = await self._encoder.primed(prompt)
        else:
            raise InvalidArgument("mode must be MODE_EXACT, MODE_NEIGHBOURS or MODE_PRIMED")
        return pb.EncodeResponse(
            key=encoded.key, variant=encoded.variant, existed=encoded.existed, tokens=len(chunks[-1])
        )

    async def ForgetCorpus(self, request: pb.ForgetCorpusRequest, context: Any) -> pb.ForgetCorpusResponse:
        check_label(request.tenant, "tenant")
        check_label(request.corpus, "corpus")
        if not request.corpus:
            raise InvalidArgument("name a corpus")
        try:
            await self.loader.primers.forget(request.tenant, request.corpus)
        except CacheFault as error:
            raise Unavailable(str(error)) from error
        return pb.ForgetCorpusResponse()

    def _verdicts(self) -> list[answer_pb2.Verdict]:
        judged = self._verdict.judged
        return [answer_pb2.Verdict(recipe=name, ratio=j.ratio, verdict=j.verdict, why=j.why) for name, j in judged]

    def _tokens(self, ids: Sequence[int], what: str) -> tuple[int, ...]:
        if ids and max(ids) >= self._model.vocabulary:
            raise InvalidArgument(
                f"{what} holds token id {max(ids)}, but the vocabulary has {self._model.vocabulary} tokens"
            )
        return tuple(ids)

    def _sampling(self, sampling: pb.Sampling, room: int) -> SamplingParams:
        """room: tokens that the model's limit leaves for the answer."""
        return SamplingParams(
            # A request that sets no limit is not refused for ours.
            max_tokens=sampling.max_tokens or max(1, min(room, self._config.max_new_tokens)),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=sampling.seed if sampling.HasField("seed") else None,
            stop=tuple(sampling.stop),
        )


def _handle(request: pb.HoldPrefillRequest | pb.FetchPrefillRequest | pb.ReleasePrefillRequest) -> bytes:
    if len(request.handle) != HANDLE_BYTES:
        raise InvalidArgument(f"a handle has {HANDLE_BYTES} bytes, not {len(request.handle)}")
    return request.handle
