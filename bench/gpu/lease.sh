#!/usr/bin/env bash
# What a GPU gives, in under nine minutes: checks, first tokens, decoding, kernels and ceilings, encoding.
#
# Needs a CUDA device, torch with Triton, and for the worker's parts what it is installed with. Each part has a time
# limit of its own, the most decisive comes first, and what has ended well is not run again: OUT keeps it.
#
#     OUT=build/bench/gpu COMMIT=... PYTHON=python3 bench/gpu/lease.sh
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${OUT:-build/bench/gpu} python=${PYTHON:-python3}
commit=${COMMIT:-$(git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)}
mkdir -p "$out" build/paths
ln -sfn ../.. build/paths/fusionkv
# A profiler that ends breaks the next one where there are CUDA graphs (torch/profiler/profiler.py).
export PYTHONPATH=$PWD/build/paths FUSIONKV_TEST_SLOWER=100 DISABLE_CUPTI_LAZY_REINIT=1 TEARDOWN_CUPTI=0

if ! "$python" -P -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "no CUDA device: nothing to measure" >&2
  exit 2
fi

failed=()
part() { # name, seconds, command: runs it unless it has ended well before
  local name=$1 seconds=$2
  shift 2
  if [ -e "$out/$name.done" ]; then
    return
  fi
  echo "[$SECONDS s] $name"
  if timeout "$seconds" "$python" -P "$@" 2>&1 | tee "$out/$name.log"; then
    touch "$out/$name.done"
  else
    failed+=("$name")
  fi
}

# In several processes: Triton compiles some 70 kernels for them, in 1 to 4 s each.
part checks 90 -m pytest -q -n 8 -p no:cacheprovider tests/kernels/test_causal_attention.py \
  tests/fusion_worker/test_step_graphs.py "tests/kernels/test_attention.py::test_every_path"
part ttft 140 -m fusionkv.bench.worker.bench --model shape-7b --contexts 4096,16384,27648 --repeats 1 \
  --json "$out/ttft.json"
part decode 70 -m fusionkv.bench.worker.decode --model shape-7b --tokens 16384 --repeats 5 --json "$out/decode.json"
part tuning 50 -m fusionkv.bench.gpu.tuning --head-dims 128
part kernels 120 -m fusionkv.bench.gpu.gpu --budget-seconds 100 --commit "$commit" --out "$out/gpu.csv"
part encode 60 -m fusionkv.bench.worker.encode --model shape-7b --json "$out/encode.json"
"$python" -P -m fusionkv.bench.gpu.summary "$out" --commit "$commit" --csv "$out/gpu.csv" || failed+=(summary)
for name in "${failed[@]}"; do
  echo "FAILED $name: see $out/$name.log"
done
exit $((${#failed[@]} > 0))
