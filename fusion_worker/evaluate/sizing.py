"""`fusionkv size`: the bytes of KV of a model and a corpus, what is worth storing, and the work that it saves."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from fusionkv.fusion_worker.config import STORES
from fusionkv.fusion_worker.evaluate import command
from fusionkv.protos.runtime.errors import FailedPrecondition, first_line
from fusionkv.protos.runtime.settings import positive

if TYPE_CHECKING:
    from fusionkv.fusion_worker.models import KVShape

# Memory besides that counted here: bytes for each cache entry, and for each service. Checked by
# tests/system/test_footprint.py.
ENTRY_BYTES = 300
CACHE_BYTES, WORKER_BYTES = 150_000_000, 500_000_000
LINKS = (10, 25, 100)
# The share of a corpus that is shown as what questions retrieve.
HOT = 0.1
# Operations a second that the work of encoding a corpus is shown for.
RATE = 100e12


@dataclass(frozen=True, slots=True)
class Network:
    """What counts of a model.

    Attributes:
        parameters: number of all its parameters.
        operations: floating-point operations of a token in its layers, without attention: two for each parameter, of
            experts for those alone that a token is sent to.
    """

    shape: "KVShape"
    parameters: int
    operations: int


@dataclass(frozen=True, slots=True)
class Load:
    """A workload: documents of so many tokens, split into chunks, and so many concurrent prompts of chunks."""

    documents: int
    document_tokens: int
    chunk_tokens: int
    prompt_chunks: int
    prompts: int


@dataclass(frozen=True, slots=True)
class Size:
    """Sizes in bytes, except `chunks`, which is a number, and operations, which are floating-point operations.

    Attributes:
        token: KV of a token in the pool.
        chunk: a stored chunk.
        prompt, stored_prompt: the chunks of a prompt, in the pool and as stored.
        chunks: number of chunks of the corpus.
        disk, index: the corpus on disk, each chunk once, and its index.
        quantised: the corpus on disk, by quantised storage format.
        pool: the pool for all concurrent prompts, with no chunk in common.
        worker, cache: memory of the services, without the memory tier.
        prompt_operations, corpus_operations: to prefill the chunks of a prompt, and to encode the corpus once.
    """

    weights: int
    token: int
    chunk: int
    prompt: int
    stored_prompt: int
    chunks: int
    disk: int
    quantised: dict[str, int]
    index: int
    pool: int
    worker: int
    cache: int
    prompt_operations: int
    corpus_operations: int


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    return command.run("fusionkv size", lambda: report(args))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fusionkv size", description=__doc__)
    parser.add_argument("model", metavar="MODEL", help="model directory, *.gguf file, hub id, or a name of a model")
    parser.add_argument("--documents", type=positive, default=1000, metavar="N", help="(default: %(default)s)")
    parser.add_argument(
        "--document-tokens", type=positive, default=1000, metavar="N", help="tokens in a document (%(default)s)"
    )
    parser.add_argument(
        "--chunk-tokens", type=positive, default=256, metavar="N", help="tokens in a chunk (%(default)s)"
    )
    parser.add_argument("--chunks", type=positive, default=8, metavar="N", help="chunks in a prompt (%(default)s)")
    parser.add_argument("--prompts", type=positive, default=8, metavar="N", help="prompts at a time (%(default)s)")
    parser.add_argument("--dtype", default="auto", help="float32, bfloat16 or float16 (default: the checkpoint's)")
    parser.add_argument(
        "--store",
        default="plain",
        choices=STORES,
        help="storage format of KV; quantised, it saves room, and a CPU loads it no faster (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def report(args: argparse.Namespace) -> None:
    """Prints the sizes. Raises FailedPrecondition when the model is unknown or not supported."""
    network = measure(args.model, args.dtype)
    load = Load(args.documents, args.document_tokens, args.chunk_tokens, args.chunks, args.prompts)
    size = of(network, load, args.store)
    if args.json:
        print(json.dumps({"model": args.model, "dtype": _name(network.shape), "store": args.store, **asdict(size)}))
        return
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    for row in _rows(network.shape, size, load, args.store):
        table.add_row(*row)
    Console(highlight=False).print(table)


def measure(model: str, dtype: str = "auto") -> Network:
    """Reads what counts of a model from its configuration; weights are not read.

    Raises:
        FailedPrecondition: the model or the dtype is unknown, or the model is not supported.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from fusionkv.fusion_worker.models import DTYPES, KVShape

    config = _configuration(model)
    kind = DTYPES.get(dtype) if dtype != "auto" else getattr(config, "dtype", None) or torch.float32
    if kind is None:
        raise FailedPrecondition(f"unknown dtype {dtype!r}: use auto, {', '.join(DTYPES)}")
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    sizes = {name: parameter.numel() for name, parameter in network.named_parameters()}
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 1
    share = getattr(config, "num_experts_per_tok", 1) / experts if experts > 1 else 1.0
    used = sum(n * (share if ".experts." in name else 1.0) for name, n in sizes.items() if ".layers." in name)
    return Network(KVShape.of(config, kind), sum(sizes.values()), round(2 * used))


def _configuration(model: str) -> Any:
    from fusionkv.fusion_worker.library.resolve import is_hub_id, resolve
    from fusionkv.fusion_worker.models import configuration

    if not is_hub_id(model):
        return configuration(resolve(model))
    from huggingface_hub import hf_hub_download

    try:
        file = Path(hf_hub_download(model, "config.json"))
    except Exception as error:  # huggingface_hub passes on errors of the network, the hub and the disk
        raise FailedPrecondition(f"can't read the configuration of {model}: {first_line(error)}") from error
    return configuration(file.parent)


def of(network: Network, load: Load, store: str = "plain") -> Size:
    """Computes the sizes of a workload."""
    from fusionkv.kernels.quantised import KINDS, sizes

    shape = network.shape
    token = shape.token_bytes
    heads = shape.layers * shape.kv_heads
    quantised = {name: heads * sizes(kind, shape.head_dim).token(shape.tensors) for name, kind in KINDS.items()}
    stored = token if store == "plain" else quantised[store]
    prompt = load.prompt_chunks * load.chunk_tokens
    tokens = load.documents * load.document_tokens
    chunks = load.documents * -(-load.document_tokens // load.chunk_tokens)
    weights = network.parameters * shape.dtype.itemsize
    pool = load.prompts * prompt * token
    return Size(
        weights=weights,
        token=token,
        chunk=round(load.chunk_tokens * stored),
        prompt=prompt * token,
        stored_prompt=round(prompt * stored),
        chunks=chunks,
        disk=round(tokens * stored),
        quantised={name: round(tokens * each) for name, each in quantised.items()},
        index=chunks * ENTRY_BYTES,
        pool=pool,
        worker=weights + pool + WORKER_BYTES,
        cache=CACHE_BYTES + chunks * ENTRY_BYTES,
        prompt_operations=prompt * network.operations,
        corpus_operations=tokens * network.operations,
    )


def _rows(shape: "KVShape", size: Size, load: Load, store: str) -> list[tuple[str, str]]:
    over = ", ".join(f"{size.stored_prompt * 8 / (gigabits * 1e6):,.0f} ms at {gigabits}" for gigabits in LINKS)
    # Operations in the time of the transfer: a worker that is slower takes longer to prefill.
    per_byte = size.prompt_operations / (8 * size.stored_prompt)
    rates = ", ".join(f"{per_byte * gigabits / 1e3:,.3g}" for gigabits in LINKS)
    links, took = ", ".join(map(str, LINKS)), timedelta(seconds=round(size.corpus_operations / RATE))
    hot = round(HOT * size.disk)
    int8, int4 = (decimal(round(HOT * size.quantised[name])) for name in ("int8", "int4"))
    heads = f"2 x {shape.kv_heads} KV heads" if shape.tensors == 2 else "1 latent with its rotary key"
    parts = f"{shape.layers} layers x {heads} x {shape.head_dim}, {_name(shape)}"
    return [
        ("KV of a token", f"{decimal(size.token)}  ({parts})"),
        (f"stored chunk of {load.chunk_tokens} tokens", f"{decimal(size.chunk)}  ({store})"),
        (f"prompt of {load.prompt_chunks} chunks", f"{decimal(size.prompt)} in the pool of a worker"),
        ("the same over a network", f"{decimal(size.stored_prompt)}: {over} Gbit/s"),
        (f"corpus of {load.documents:,} documents", f"{decimal(size.disk)} on disk, {size.chunks:,} chunks"),
        ("encoded ahead", f"{decimal(2 * size.disk)}: the default recipe stores each chunk alone and after a primer"),
        ("worth storing", "what questions retrieve, which is all that is stored unless it is encoded ahead"),
        ("a tenth of the corpus", f"{decimal(hot)} on disk, {int8} as int8 or fp8, {int4} as int4"),
        ("instead of loading", f"a worker prefills a prompt as fast with {rates} TFLOP/s, at {links} Gbit/s"),
        (
            "encoding the corpus",
            f"{size.corpus_operations:.1e} operations: {took} at {RATE / 1e12:.0f} TFLOP/s",
        ),
        ("cache service", f"{decimal(size.cache)} of memory, and its memory tier"),
        ("worker", f"{decimal(size.worker)}: {decimal(size.weights)} of weights, {decimal(size.pool)} of pool"),
        ("", f"for {load.prompts} prompts at a time that share no chunk"),
    ]


def _name(shape: "KVShape") -> str:
    return str(shape.dtype).removeprefix("torch.")
