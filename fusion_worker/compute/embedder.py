"""Text vectors from the model itself, so that retrieval needs no second model."""

import asyncio
from collections.abc import Sequence

import torch

from fusionkv.fusion_worker.compute.engine import Engine
from fusionkv.fusion_worker.compute.forward_job import ForwardJob
from fusionkv.fusion_worker.load.loader import Loader
from fusionkv.fusion_worker.models import Model
from fusionkv.fusion_worker.prompt import stretch
from fusionkv.protos.runtime.errors import InvalidArgument

MAX_TEXTS = 256
# A text's first tokens say what it is about; a longer one costs a prefill of its length.
MAX_TOKENS = 512


class Embedder:
    """Mean of the last hidden states over a text's tokens, of unit length."""

    def __init__(self, model: Model, engine: Engine, loader: Loader) -> None:
        self._model = model
        self._engine = engine
        self._loader = loader

    async def embed(self, texts: Sequence[str]) -> list[torch.Tensor]:
        """float32 [hidden] for each text.

        Raises:
            InvalidArgument: no text, too many, or one without a token.
        """
        if not 0 < len(texts) <= MAX_TEXTS:
            raise InvalidArgument(f"{len(texts)} texts: send 1 to {MAX_TEXTS}")
        encodings = self._model.tokenizer.encode_batch(list(texts), add_special_tokens=False)
        tokens = [encoding.ids[:MAX_TOKENS] for encoding in encodings]
        if not all(tokens):
            raise InvalidArgument(f"text {[bool(t) for t in tokens].index(False)} has no token to embed")
        return list(await asyncio.gather(*map(self._embed, tokens)))

    async def _embed(self, ids: list[int]) -> torch.Tensor:
        device = self._model.device
        rows, positions = stretch(0, ids)
        async with self._loader.plain(len(ids)) as placement:
            result = await self._engine.run(
                ForwardJob(rows.to(device), positions.to(device), placement.fresh, mean=True)
            )
        assert result.mean is not None
        return torch.nn.functional.normalize(result.mean, dim=0)
