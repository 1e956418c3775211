# The commands of this project. `make` alone lists them; each sets up what it needs, once.
SHELL := /bin/bash
.DEFAULT_GOAL := help
# -P: the folder `kernels` would otherwise be taken for the package of that name.
PY := .venv/bin/python -P
PROTOS := $(wildcard protos/*/v1/*.proto)
ARGS ?=
# Services are started hundreds of times: modules are compiled once, also where containers turn that off.
unexport PYTHONDONTWRITEBYTECODE
# As many files at once as there are cores.
PYTEST := OMP_NUM_THREADS=1 .venv/bin/pytest -n auto --dist loadfile --no-loadscope-reorder

.PHONY: help
help: ## Lists these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  \033[1mmake %-15s\033[0m %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: setup
setup: .venv/.packages .venv/.stubs build/tools/.done ## Virtual environment, packages, stubs, tools

PACKAGES := pyproject.toml constraints.txt setup.py scripts/setup.sh

.venv/.packages: $(PACKAGES)
	@scripts/setup.sh tests
	@touch .venv/.services $@

# The demo needs no packages of the tests, which take twice as much room.
.venv/.services: $(PACKAGES)
	@scripts/setup.sh services
	@touch $@

.venv/.stubs: $(PROTOS) setup.py scripts/setup.sh | .venv/.services
	@scripts/setup.sh stubs
	@touch $@

build/tools/.done: scripts/setup.sh
	@mkdir -p build/tools
	@scripts/setup.sh tools
	@touch $@

.PHONY: venv
venv: .venv/.services .venv/.stubs ## The services and the command `fusionkv` in .venv, without what tests need

.PHONY: demo
demo: venv ## Fetches SmolLM2, starts the three services, asks questions with full attention and with the default
	@$(PY) examples/demo.py $(ARGS)

.PHONY: test
test: setup ## The tests to run after each change, a few minutes; ARGS="-k frames" picks some
	@$(PYTEST) $(ARGS)

.PHONY: test-all
test-all: setup ## All tests, and all examples of each: ARGS as for `make test`
	@$(PYTEST) -m "not weights" --hypothesis-profile all $(ARGS)

.PHONY: test-engines
test-engines: setup ## The adapters in SGLang and LMCache themselves, with faults; installs both first, in build/engines
	@test -e build/engines/.done || scripts/setup.sh engines
	@OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/build/engines .venv/bin/pytest tests/engines $(ARGS)

.PHONY: lint style mypy pyright
lint: style mypy pyright ## ruff, mypy, pyright, buf, hadolint

style: setup
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	.venv/bin/buf lint protos
	.venv/bin/buf format --diff --exit-code protos
	.venv/bin/hadolint Dockerfile

mypy: setup
	$(PY) -m mypy -p fusionkv

pyright: setup
	.venv/bin/pyright -p build/paths/fusionkv

.PHONY: format
format: setup ## Formats Python and protos
	$(PY) -m ruff check --fix
	$(PY) -m ruff format
	.venv/bin/buf format --write protos

.PHONY: proto
proto: .venv/.services ## Regenerates the gRPC stubs
	@scripts/setup.sh stubs
	@touch .venv/.stubs

.PHONY: proto-breaking
proto-breaking: setup ## Refuses changes that break clients of an earlier commit: BASE=v0.1.0
	@test -n "$(BASE)" || { echo "usage: make proto-breaking BASE=<tag or commit>"; exit 2; }
	.venv/bin/buf breaking protos --against '.git#ref=$(BASE),subdir=protos'

.PHONY: docs
docs: setup ## Regenerates the pages that follow from the code, and builds the site: build/site/
	@for page in configuration methods; do \
	  $(PY) scripts/$${page}_docs.py > build/$$page.md && mv build/$$page.md docs/$$page.md || exit 1; done
	@$(PY) scripts/chart_schema.py > build/schema.json && mv build/schema.json k8s/fusionkv/values.schema.json
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict -f scripts/site.yml 2>&1 | grep -v '^INFO'; exit $${PIPESTATUS[0]}

.PHONY: observe
observe: setup ## The services beside Phoenix and Prometheus, traffic, pictures in docs/img/; ARGS=--stay leaves them up
	@scripts/setup.sh observe
	@.venv/bin/python scripts/observe.py $(ARGS)

.PHONY: images
images: setup ## The CPU images, from Debian's packages and without a registry, then a question to them; needs root
	@scripts/images.sh $(ARGS)

.PHONY: bench
bench: setup ## Speed of the cache service and of the worker, storage that it saves; rows in build/bench/
	@$(PY) -m fusionkv.bench.cache.simulation --json build/bench/storage.json
	@$(PY) -m fusionkv.bench.cache.churn --json build/bench/churn.json
	@$(PY) -m fusionkv.bench.cache.scale --json build/bench/scale.json
	@$(PY) -m fusionkv.bench.cache.bench --json build/bench/kvcache.json
	@$(PY) -m fusionkv.bench.worker.bench --json build/bench/ttft.json
	@$(PY) -m fusionkv.bench.worker.decode --json build/bench/decode.json
	@$(PY) -m fusionkv.bench.worker.encode --json build/bench/encode.json
	@$(PY) -m fusionkv.bench.worker.throughput --requests 12 --chunks 4 --json build/bench/throughput.json

.PHONY: bench-gpu
bench-gpu: setup ## What this machine's GPU gives, in nine minutes: kernels, first tokens, decoding; rows in build/bench/gpu/
	@PYTHON=$(CURDIR)/.venv/bin/python bench/gpu/lease.sh

.PHONY: figures
figures: setup ## Lines of the product, bench and tests, words of the docs, and classes and functions that are large
	@$(PY) bench/figures.py

.PHONY: soak
soak: setup ## Mixed traffic over tiers that are too small, for MINUTES=30: answers right, nothing left behind
	@FUSIONKV_TEST_SOAK_MINUTES=$(or $(MINUTES),30) .venv/bin/pytest -q tests/fusion_worker/test_soak.py -k mixed -m '' $(ARGS)

.PHONY: chaos
chaos: setup ## Random faults over real processes, FAULTS=1000 SEED=1: answers right, nothing lost; build/chaos.json
	@$(PY) tests/chaos/run.py --faults $(or $(FAULTS),1000) --seed $(or $(SEED),1) $(ARGS)

.PHONY: fuzz
fuzz: setup ## Every decoder and RPC with inputs of any content, each for SECONDS_EACH=60; SEED=1
	@FUZZ_SECONDS=$(or $(SECONDS_EACH),60) FUZZ_SEED=$(or $(SEED),1) .venv/bin/pytest -q tests/fuzz -m '' --timeout 3600 $(ARGS)

.PHONY: eval
eval: setup ## Most recipes on the reference models' tasks, 500 samples a cell; report in build/eval/
	@.venv/bin/fusionkv eval --auxiliary models/clip/tuned-1 $(ARGS)

.PHONY: bench-peers
bench-peers: setup ## Speed of the cache service beside Redis, Mooncake Store and LMCache's server; build/bench/peers.json
	@test -x build/peers/bin/python || scripts/setup.sh peers
	@$(PY) -m fusionkv.bench.cache.peers --json build/bench/peers.json $(ARGS)

.PHONY: vllm
vllm: setup ## vLLM with the connector beside vLLM alone; ARGS="--data FILE"; build/bench/vllm.json
	@scripts/setup.sh vllm
	@$(PY) -m fusionkv.fusion_worker.library get smollm2
	@$(PY) -m fusionkv.bench.services.vllm --json build/bench/vllm.json $(ARGS)

.PHONY: recall
recall: setup ## What retrieval finds, by words, by embeddings and by both: ARGS="FILE..."; build/bench/recall.json
	@$(PY) -m fusionkv.bench.recall $(ARGS)

.PHONY: published
published: setup ## Takes what make bench, make bench-gpu, make vllm and fusionkv eval measured last into docs/benchmarks/, which README and docs quote
	@$(PY) -m fusionkv.bench.published $(ARGS)

.PHONY: plots
plots: setup ## Draws the plots of docs/performance.md and docs/quality.md, from build/bench/ or their tables
	@$(PY) scripts/plots.py

.PHONY: eval-smoke
eval-smoke: setup ## Answers of every reference model under full attention and full reuse, 20 a task
	@$(PY) -m fusionkv.models.evaluate --n 20 $(ARGS)

.PHONY: clean
clean: ## Removes what the commands above made, .venv too
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find protos -name '*_pb2*' -delete
