"""A server with vLLM's /v1/completions that decodes by transformers, from KV as vLLM's connector would get it."""

import asyncio
import json
import mmap
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from transformers import AutoModelForCausalLM, DynamicCache

from fusionkv.fusion_worker.client import WorkerClient
from fusionkv.protos.runtime.checksum import checksum
from tests.http_server import serving


@dataclass
class Decoder:
    """Serves a model directory. bodies: what it was asked; loaded: of how many prompts it used the KV.

    status: what it answers in place of an answer; early: ends streams before their last token; refuses: why it
    computes prompts itself; left: streams that their caller left. pause: seconds before each token. cached: tokens
    that it says it had in a prefix cache.
    """

    model: Path
    bodies: list[dict[str, Any]] = field(default_factory=list)
    loaded: int = 0
    status: int = 200
    early: bool = False
    refuses: str = ""
    left: int = 0
    pause: float = 0.0
    cached: int | None = None
    url: str = ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Its URL."""
        self._network = AutoModelForCausalLM.from_pretrained(self.model, dtype="float32", use_safetensors=True).eval()
        async with serving(web.post("/v1/completions", self._complete)) as url:
            yield url

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.status != 200:
            return web.json_response({"error": {"message": "no"}}, status=self.status)
        cache, computed = DynamicCache(), 0
        if (params := body.get("kv_transfer_params")) is not None:
            computed = await self._load(params["fusionkv"], cache)
        response = web.StreamResponse()
        await response.prepare(request)
        ids, count = body["prompt"][computed:], body["max_tokens"]
        try:
            for number in range(count):
                with torch.inference_mode():
                    logits = self._network(torch.tensor([ids]), past_key_values=cache).logits
                ids = [int(logits[0, -1].argmax())]
                last = number == count - 1
                if last and self.early:
                    break
                choice = {"index": 0, "token_ids": ids, "finish_reason": "length" if last else None}
                await asyncio.sleep(self.pause)
                await response.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
        except (ConnectionResetError, asyncio.CancelledError):
            self.left += 1
            raise
        if self.cached is not None and body["stream_options"]["include_usage"]:
            usage = {"prompt_tokens": len(body["prompt"]), "prompt_tokens_details": {"cached_tokens": self.cached}}
            await response.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _load(self, params: dict[str, Any], cache: DynamicCache) -> int:
        worker, handle = WorkerClient(params["worker"]), bytes.fromhex(params["handle"])
        try:
            if self.refuses:
                await worker.release_prefill(handle, error=self.refuses)
                return 0
            file = os.open(params["path"], os.O_RDONLY)
            data = mmap.mmap(file, 0, flags=mmap.MAP_PRIVATE)
            os.close(file)
            assert checksum(data).hex() == params["checksum"]
            shape = (params["layers"], 2, params["tokens"], params["kv_heads"], params["head_dim"])
            kv = torch.frombuffer(data, dtype=getattr(torch, params["dtype"])).view(shape)
            for layer, (keys, values) in enumerate(kv):
                cache.update(keys.transpose(0, 1)[None], values.transpose(0, 1)[None], layer)
            await worker.release_prefill(handle)
        finally:
            await worker.close()
        self.loaded += 1
        return params["tokens"]
