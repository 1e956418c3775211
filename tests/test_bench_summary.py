"""The page that `make bench` prints last."""

import json
from pathlib import Path

from fusionkv.bench import summary
from fusionkv.fusion_worker.quality.defaults import PRIMED


def test_figures_stand_beside_floors_and_peers(tmp_path: Path) -> None:
    ttft = [
        {"name": "epic", "context": 2245, "baseline_s": 3.2, "value_s": 0.7, "ratio": 4.6, "ideal": 6.3},
        {"name": PRIMED.recipe, "context": 2245, "baseline_s": 3.2, "value_s": 0.8, "ratio": 4.0, "ideal": 8.0},
    ]
    decode = [
        {"requests": 8, "chunks": chunks, "recomputed": 0.15, "step_ms": 80, "one_piece_ms": 60, "keys_read": 2.2}
        for chunks in (1, 8)
    ]
    load = [
        {"name": name, "requests_per_s": rate, "ttft_p99_s": late, "bound_s": 10.0}
        for name, rate, late in (
            *(("full_attention", 0.1, 5.0), ("full_attention", 0.2, 10.0)),
            (PRIMED.recipe, 0.9, 5.0),
        )
    ]
    start = [{"figure": "gateway: memory", "unit": "MB", "value": 190.0, "floor": 0.0, "goal": 300.0}]
    for name, rows in {"ttft": ttft, "decode": decode, "throughput": load, "start": start}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))
    assert summary.figures(tmp_path) == [
        ("first token, 2,245 tokens", "0.80 s", "full attention 3.20 s, 4.0x; by operations 8.0x", "50%", "85%"),
        (
            "decoding, 8 at once, 8 chunks, 15% recomputed",
            "80 ms a token",
            "one piece 60 ms; 2.2x the keys",
            "75%",
            "97%",
        ),
        (f"questions a second, {PRIMED.recipe}", ">= 0.90", "full attention 0.20, at the same p99", "4.5x", "4x"),
        ("gateway: memory", "190 MB", "", "", "300 MB"),
    ]
