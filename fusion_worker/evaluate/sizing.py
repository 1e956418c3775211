"""`fusionkv size`: the bytes of KV of a model and a corpus, what is worth storing, and the work that it saves."""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from fusionkv.fusion_worker.evaluate import command
from fusionkv.fusion_worker.quality.verdict import PRIMED
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
# What computing is compared at: a GPU of so many operations a second, and prices of about 2026 in a public cloud, in
# dollars for an hour of it and for a GB of disk a month.
RATE, GPU_HOUR, DISK_MONTH = 100e12, 2.0, 0.1


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
class Stored:
    """Bytes in one storage format.

    Attributes:
        corpus: with each chunk once.
        break_even: retrievals of a chunk a month from which on storing it costs less than computing it, at `RATE`,
            `GPU_HOUR` and `DISK_MONTH`; the default recipe computes a share of it all the same.
    """

    chunk: int
    prompt: int
    corpus: int
    break_even: int


@dataclass(frozen=True, slots=True)
class Size:
    """Sizes in bytes, except `chunks`, which is a number, and operations, which are floating-point operations.

    Attributes:
        token: KV of a token in the pool.
        prompt: the chunks of a prompt, in the pool.
        chunks: number of chunks of the corpus.
        stored: by storage format, as the settings of a worker name them.
        index: of the stored corpus.
        pool: the pool for all concurrent prompts, with no chunk in common.
        worker, cache: memory of the services, without the memory tier.
        prompt_operations, corpus_operations: to prefill the chunks of a prompt, and to encode the corpus once.
    """

    weights: int
    token: int
    prompt: int
    chunks: int
    stored: dict[str, Stored]
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
    add = parser.add_argument
    add("model", metavar="MODEL", help="model directory, *.gguf file, hub id, or a name of a model")
    add("--documents", type=positive, default=1000, metavar="N", help="(default: %(default)s)")
    add("--document-tokens", type=positive, default=1000, metavar="N", help="tokens in a document (%(default)s)")
    add("--chunk-tokens", type=positive, default=256, metavar="N", help="tokens in a chunk (%(default)s)")
    add("--chunks", type=positive, default=8, metavar="N", help="chunks in a prompt (%(default)s)")
    add("--prompts", type=positive, default=8, metavar="N", help="prompts at a time (%(default)s)")
    add("--dtype", default="auto", help="float32, bfloat16 or float16 (default: the checkpoint's)")
    add("--json", action="store_true", help="print JSON")
    return parser


def report(args: argparse.Namespace) -> None:
    """Prints the sizes. Raises FailedPrecondition when the model is unknown or not supported."""
    network = measure(args.model, args.dtype)
    load = Load(args.documents, args.document_tokens, args.chunk_tokens, args.chunks, args.prompts)
    size = of(network, load)
    if args.json:
        print(json.dumps({"model": args.model, "dtype": _name(network.shape), **asdict(size)}))
        return
    console = Console(highlight=False)
    console.print(_by_format(network.shape, size, load))
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    for row in _rows(network.shape, size, load):
        table.add_row(*row)
    console.print(table)


def measure(model: str, dtype: str = "auto") -> Network:
    """Reads what counts of a model from its configuration; weights are not read.

    Raises FailedPrecondition if the model or the dtype is unknown, or the model is not supported.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from fusionkv.fusion_worker.models import KVShape, dtype_of

    config = _configuration(model)
    kind = dtype_of(dtype, config)
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


def of(network: Network, load: Load) -> Size:
    """Computes the sizes of a workload."""
    from fusionkv.kernels.quantised import KINDS, sizes

    shape = network.shape
    token = shape.token_bytes
    heads = shape.layers * shape.kv_heads
    stored = {"plain": token} | {
        name: heads * sizes(kind, shape.head_dim).token(shape.tensors) for name, kind in KINDS.items()
    }
    prompt = load.prompt_chunks * load.chunk_tokens
    tokens = load.documents * load.document_tokens
    chunks = load.documents * -(-load.document_tokens // load.chunk_tokens)
    weights = network.parameters * shape.dtype.itemsize
    pool = load.prompts * prompt * token
    # Dollars for computing a token once, and for each of its bytes a month.
    computed = (1 - PRIMED.ratio) * network.operations / RATE * GPU_HOUR / 3600
    month = DISK_MONTH / 1e9
    return Size(
        weights=weights,
        token=token,
        prompt=prompt * token,
        chunks=chunks,
        stored={
            name: Stored(
                round(load.chunk_tokens * each),
                round(prompt * each),
                round(tokens * each),
                math.ceil(each * month / computed),
            )
            for name, each in stored.items()
        },
        index=chunks * ENTRY_BYTES,
        pool=pool,
        worker=weights + pool + WORKER_BYTES,
        cache=CACHE_BYTES + chunks * ENTRY_BYTES,
        prompt_operations=prompt * network.operations,
        corpus_operations=tokens * network.operations,
    )


def _by_format(shape: "KVShape", size: Size, load: Load) -> Table:
    """What depends on the storage format; int8 and fp8 take the same room."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("stored as", style="bold")
    for title in (_name(shape), "int8, fp8", "int4"):
        table.add_column(title, justify="right")
    formats = [size.stored[name] for name in ("plain", "int8", "int4")]

    def add(what: str, value: Callable[[Stored], str]) -> None:
        table.add_row(what, *map(value, formats))

    add(f"a chunk of {load.chunk_tokens} tokens", lambda f: decimal(f.chunk))
    add(f"a prompt of {load.prompt_chunks} chunks", lambda f: decimal(f.prompt))
    for gigabits in LINKS:
        loaded = (f"{8 * f.prompt / (1e6 * gigabits):,.0f} ms" for f in formats)
        table.add_row(f"  loaded at {gigabits} Gbit/s", *loaded)
    add(f"a corpus of {load.documents:,} documents", lambda f: decimal(f.corpus))
    add("  encoded ahead, alone and primed", lambda f: decimal(2 * f.corpus))
    add(f"  if questions retrieve {HOT:.0%} of it", lambda f: decimal(round(HOT * f.corpus)))
    add("retrievals a month that pay for a chunk", lambda f: f"{f.break_even:,}")
    return table


def _rows(shape: "KVShape", size: Size, load: Load) -> list[tuple[str, str]]:
    heads = f"2 x {shape.kv_heads} KV heads" if shape.tensors == 2 else "1 latent with its rotary key"
    parts = f"{shape.layers} layers x {heads} x {shape.head_dim}, {_name(shape)}"
    at = f"at {RATE / 1e12:.0f} TFLOP/s"
    encoded = timedelta(seconds=round(size.corpus_operations / RATE))
    return [
        ("", ""),
        ("worth storing", "what questions retrieve; only `encode` stores more"),
        ("retrievals that pay", f"${DISK_MONTH:.2f} a GB of disk a month, ${GPU_HOUR:.2f} an hour of a GPU;"),
        ("", "a chunk that is retrieved less often saves time alone"),
        ("computing a prompt", f"{1e3 * size.prompt_operations / RATE:,.0f} ms {at}, in place of loading it"),
        ("encoding the corpus", f"{encoded} {at}, each chunk once: {size.corpus_operations:.1e} FLOP"),
        ("KV of a token", f"{decimal(size.token)}: {parts}"),
        ("cache service", f"{decimal(size.cache)} for {size.chunks:,} chunks, and its memory tier"),
        ("worker", f"{decimal(size.worker)}: {decimal(size.weights)} of weights, {decimal(size.pool)} of pool"),
        ("", f"for {load.prompts} prompts at a time that share no chunk"),
    ]


def _name(shape: "KVShape") -> str:
    return str(shape.dtype).removeprefix("torch.")
