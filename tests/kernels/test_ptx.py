"""The Triton kernels compile for sm_80 and sm_90 without a GPU, and every default tile fits their shared memory."""

import subprocess
import tempfile
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from fusionkv.kernels.gpu import (  # noqa: E402
    checksum_triton,
    quantised_triton,
    rotary_triton,
    sparse_attention_triton,
    tile_shapes,
)

pytestmark = pytest.mark.compile
# Bytes a program can have. sm_80 itself has 163 KiB, but sm_86 and sm_89, for which the same code is made, 99.
SHARED = {80: 99 << 10, 90: 227 << 10}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}


def compiled(
    kernel: Any, capability: int, kinds: dict[str, str], warps: int = 4, stages: int = 3, **constants: Any
) -> Any:
    """A kernel's binary. kinds: of pointers; others are to int32, as numbers are."""
    names = kernel.arg_names

    def kind(name: str) -> str:
        other = "*i32" if name.endswith("_ptr") else "fp32" if name == "scale" else "i32"
        return "constexpr" if name in constants else kinds.get(name, other)

    source = ASTSource(
        kernel,
        {name: kind(name) for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n.endswith(("_ptr", "_stride"))},
    )
    options = {"num_warps": warps, "num_stages": stages}
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert f".target sm_{capability}" in built.asm["ptx"]
    assert built.metadata.shared <= SHARED[capability]
    return built


def pointers(dtype: torch.dtype, *floats: str) -> dict[str, str]:
    """Of the kernels of attention, by the dtype of the model. floats: others that are to float32."""
    model = ("q", "k", "v", "q_out", "k_out", "v_out", "out", "sinks", "cos", "sin")
    kinds = {f"{name}_ptr": f"*{DTYPES[dtype]}" for name in model} | {"rows_ptr": "*i64"}
    return kinds | {f"{name}_ptr": "*fp32" for name in ("lse", "turns", "partial", "partial_lse", *floats)}


def test_no_step_compiles_a_kernel_again() -> None:
    """Triton compiles a number of 1, and a multiple of 16, in: only those of a model may be."""
    of_a_model = {"q_heads", "k_heads", "heads", "tensors", "scale", "blocks"}  # blocks: of a checksum's pieces
    attention = sparse_attention_triton
    kernels = (attention._gather, attention._attend, attention._merge, attention._columns)
    for kernel in (*kernels, quantised_triton._restore, rotary_triton._rotate, checksum_triton._accumulate):
        compiled_in = {each.name for each in kernel.params if not (each.is_constexpr or each.do_not_specialize)}
        assert {name for name in compiled_in if not name.endswith(("_ptr", "_stride"))} <= of_a_model, kernel


@pytest.mark.parametrize("capability", SHARED)
def test_checksum(capability: int) -> None:
    kinds = dict.fromkeys(("numbers_ptr", "keys_ptr", "turn_ptr", "start_ptr", "out_ptr"), "*i64")
    built = compiled(checksum_triton._accumulate, capability, kinds, warps=1)
    # Products of halves, not of whole numbers: the second takes four instructions for one.
    assert "mul.wide.u32" in built.asm["ptx"] or "mul.lo.s64" in built.asm["ptx"]


@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize("head_dim", [64, 80, 256])
def test_restore(capability: int, head_dim: int) -> None:
    kinds = {"numbers_ptr": "*u8", "keys_ptr": "*bf16", "values_ptr": "*bf16", "out_ptr": "*bf16"}
    sizes = {"HEAD_DIM": head_dim, "DIM": triton.next_power_of_2(head_dim), "GROUP": 32, "WIDTH": 16, "BLOCK": 32}
    compiled(quantised_triton._restore, capability, kinds, **sizes)


@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize(("head_dim", "dtype"), [(128, BF16), (96, FP16), (256, FP32)], ids=str)
def test_rotate(capability: int, head_dim: int, dtype: torch.dtype) -> None:
    sizes = {"HEAD_DIM": head_dim, "DIM": triton.next_power_of_2(head_dim), "ROTARY_DIM": head_dim, "HEADS": 8}
    if head_dim == 256:  # Triton compiles a number of 1 in
        sizes["k_heads"] = 1
    kernel = rotary_triton._rotate
    built = compiled(kernel, capability, pointers(dtype), **sizes, INTERLEAVED=head_dim == 96)
    assert capability == 80 or not spilled(built)


def spilled(built: Any) -> int:
    """Bytes of a thread's stack, to which it writes what its registers do not hold."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        used = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(used.partition("STACK:")[2].split()[0])


def shape(head_dim: int, groups: int, rows: int, keys: int) -> dict[str, Any]:
    return {
        "SLOT_STRIDE": 4 * head_dim,
        "KV_HEAD_STRIDE": head_dim,
        "HEAD_DIM": head_dim,
        "DIM": triton.next_power_of_2(head_dim),
        "ROTARY_DIM": head_dim,
        "INTERLEAVED": False,
        "GROUPS": groups,
        "TILE": max(1, rows // groups),
        "ROWS": rows,
        "BLOCK_KEYS": keys,
        "WINDOW": 0,
        "WIDEN": False,
    }


@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize(
    ("head_dim", "dtype", "groups"),
    # Every default tile at the largest head size that has it, and a head size that is padded.
    [(64, BF16, 7), (64, FP32, 7), (96, FP16, 1), (128, BF16, 7), (128, FP32, 4), (256, BF16, 4), (256, FP32, 4)],
    ids=str,
)
def test_prefill_and_decode(capability: int, head_dim: int, dtype: torch.dtype, groups: int) -> None:
    tile = tile_shapes.default(head_dim, dtype)
    for rows, warps in ((tile.rows, tile.warps), (16, 4)):
        few = rows == 16
        constants = shape(head_dim, groups, rows, tile.keys)
        constants |= {"PARTIAL": few, "SINKS": head_dim == 64, "ORDERED": not few}
        kinds = pointers(dtype, *["out"] * few)
        built = compiled(sparse_attention_triton._attend, capability, kinds, warps, tile.stages, **constants)
        # On sm_90 a tile of 64 rows or more is what the warpgroup product takes: without it half the rate is lost.
        if capability == 90 and rows >= 64 and dtype != torch.float32:
            assert "wgmma.mma_async" in built.asm["ptx"]
            assert head_dim > 128 or not spilled(built), "registers"


@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize(("head_dim", "dtype"), [(128, BF16), (256, BF16), (256, FP32)], ids=str)
def test_gather_and_scores(capability: int, head_dim: int, dtype: torch.dtype) -> None:
    gathers, scores = tile_shapes.Tile(64, 64, 4, 3), tile_shapes.scored(torch.device("cuda"), dtype)
    kernels = {sparse_attention_triton._gather: gathers, sparse_attention_triton._columns: scores}
    for kernel, tile in kernels.items():
        constants = shape(head_dim, 7, tile.rows, tile.keys)
        own = {name: value for name, value in constants.items() if name in kernel.arg_names}
        kinds = pointers(dtype, *["out"] * (kernel is sparse_attention_triton._columns))
        assert spilled(compiled(kernel, capability, kinds, tile.warps, tile.stages, **own)) < 1024


@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize("parts", [16, 512])
def test_merge(capability: int, parts: int) -> None:
    """512 parts: one row of a model with one KV head on 132 multiprocessors."""
    channels = min(256, sparse_attention_triton._MERGED // parts)
    constants = {"PARTS_CEIL": parts, "SINKS": True, "HEAD_DIM": 256, "CHANNELS": channels}
    assert spilled(compiled(sparse_attention_triton._merge, capability, pointers(BF16), **constants)) < 256
