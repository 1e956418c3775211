"""One layer's sparse prefill against FlexAttention, compiled for each shape, with and without creating its mask."""

from typing import Any

import torch

from fusionkv.bench.gpu import workload
from fusionkv.bench.gpu.report import Row
from fusionkv.bench.gpu.setup import Setup
from fusionkv.bench.gpu.workload import Problem, Shape
from fusionkv.bench.kernels.baselines import AGREEMENT, Dense, disagreement
from fusionkv.bench.kernels.prefill import cases

_COLUMNS = ("shape", "context", "r", "ms", "flex", "ratio", "flex with mask", "ratio")
_COMPILE_SECONDS = 15
# Every shape is compiled separately, so the most important ratios come first, in case the budget runs out.
_ORDER = (0.15, 1.0, 0.3, 0.05, 0.0)


def measure(setup: Setup) -> None:
    """Measures FlexAttention without and with creating its mask, for each measured row of prefill."""
    if setup.device.type != "cuda":
        setup.report.notice("FlexAttention: no CUDA device")
        return
    measured = {(r.context, r.r, r.shape): r for r in setup.report.rows if r.kind == "prefill"}
    flex, lines = Flex(), []
    for context, ratio, shape in sorted(cases(setup), key=lambda case: _ORDER.index(case[1])):
        row = measured.get((context, ratio, shape.name))
        what = f"FlexAttention {shape.name}, {context} tokens, r = {ratio}"
        if row is None or not setup.allows(what, _COMPILE_SECONDS):
            continue
        problem = workload.prefill(shape, context, setup.sizes.chunk, ratio, setup.device, setup.dtype)
        try:
            lines.append(_rows(setup, flex, problem, row, shape, what))
        except Exception as error:  # a baseline that can't be compiled is not a failure
            setup.report.notice(f"{what}: {type(error).__name__}: {error}".splitlines()[0])
    setup.report.table("Prefill of one layer against FlexAttention, ms", _COLUMNS, lines)


def _rows(setup: Setup, flex: "Flex", problem: Problem, ours: Row, shape: Shape, what: str) -> list[object]:
    dense = Dense(problem)
    mask = flex.mask(dense)
    error = disagreement(problem.attend(), flex.attend(dense, mask))
    if not error <= AGREEMENT[setup.dtype]:
        setup.report.fail(f"{what}: differs by {error:.2e} of the norm")
    alone = setup.clock.ms(lambda: flex.attend(dense, mask))
    whole = setup.clock.ms(lambda: flex.attend(dense, flex.mask(dense)))
    line: list[object] = [shape.name, ours.context, ours.r, ours.ms]
    for name, ms in (("flex", alone), ("flex+mask", whole)):
        row = Row("prefill", shape.name, ours.ms, ours.context, ours.r, 1, name, ms, None, ours.rate, ours.share)
        line += [ms, setup.report.add(row).ratio]
    return line


class Flex:
    """FlexAttention and the creation of its block mask, both compiled with static shapes, which is fastest."""

    def __init__(self) -> None:
        from torch._dynamo import config
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        # One entry per shape. Past the limit, torch would fall back to a version that stores all scores.
        config.recompile_limit = 256
        self._attend: Any = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        self._make: Any = torch.compile(create_block_mask, dynamic=False)

    def mask(self, dense: Dense) -> Any:
        """The causal block mask: a row sees keys up to its own position."""
        positions = dense.positions

        def seen(batch: Any, head: Any, row: Any, key: Any) -> Any:
            return key <= positions[row]

        return self._make(seen, None, None, len(positions), dense.keys, device=positions.device)

    def attend(self, dense: Dense, mask: Any) -> torch.Tensor:
        """The attention's output, [1, heads, rows, dim]."""
        out: torch.Tensor = self._attend(dense.q, dense.k, dense.v, block_mask=mask, enable_gqa=True)
        return out
