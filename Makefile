# `make demo` and `make test` are the two to know; both set up what they need first.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON_ENV := .venv/bin
STAMPS := .venv/stamps
JOBS ?= $(shell nproc)
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)
# The first import of a package writes its bytecode (scripts/setup). Otherwise each process would compile vLLM again, which
# takes 20 seconds of a core.
unexport PYTHONDONTWRITEBYTECODE

NATIVE := $(shell find native -name '*.cc' -o -name '*.h')
NATIVE_SOURCES := $(filter %.cc,$(NATIVE))
# The thread sanitizer cannot place its shadow under some kernels' address randomisation.
NO_ASLR := $(shell setarch -R true 2>/dev/null && echo setarch -R)

.PHONY: help setup demo test check prepared native-asan native-tsan test-native test-simulation test-python test-libfabric test-verbs test-vllm-next test-sglang test-fleet test-browser test-observability board test-upstream test-examples test-compose test-helm bench-verbs campaign interleavings test-data-parallel test-weights test-early test-leaving test-topologies test-conversations test-faults soak test-all fuzz fuzz-router fuzz-scheduler fuzz-splice hostile lint analyze format bench bench-gpu wheels test-wheels reference docs clean distclean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMPS)/project ## Debian packages, .venv, vLLM for CPUs, and kv-connector itself (each only where missing)

# Order-only: `system` runs each time, and the targets that need it are not made again for that reason.
.PHONY: system
system:
	@scripts/setup system

$(STAMPS)/python: | system
	@scripts/setup python
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/vllm: $(STAMPS)/python
	@scripts/setup vllm
	@touch $@

# The install is editable: only changes of native code and of the build files need it again.
$(STAMPS)/project: $(STAMPS)/vllm pyproject.toml CMakeLists.txt $(NATIVE)
	@scripts/setup project
	@touch $@

demo: setup ## two engines, one prompt after another pushed from P into D, beside one engine alone
	@$(PYTHON_ENV)/kv-connector demo

# Three processes a core: many of these tests wait for a clock. Idle processes take over tests that others have not begun.
# The expensive properties try one example in eight (tests/support/samples.py). `make test` tries all examples.
check: ## lint, types, wording and the unit tests that need neither vLLM nor a compiler run: before each commit
	@test -e $(STAMPS)/project || $(MAKE) --no-print-directory setup
	@$(PYTHON_ENV)/ruff check . && $(PYTHON_ENV)/ruff format --check . && $(PYTHON_ENV)/python scripts/check_text.py
	@mkdir -p build; $(types) >build/types.log 2>&1 & types=$$! status=0; \
		KVC_WITHOUT=vllm,torch KVC_SAMPLE=8 $(PYTHON_ENV)/python -m pytest -n $$((3 * $(JOBS))) --dist worksteal tests/unit || status=1; \
		wait $$types || status=1; cat build/types.log; exit $$status
types = { $(PYTHON_ENV)/mypy && $(PYTHON_ENV)/mypy --config-file tests/mypy.ini; }

test: prepared test-native test-simulation test-python ## all tests: native under sanitizers, and Python, real engines included

# One job waits for the network and the disk while the other one compiles. The longer one starts first.
prepared:
	@$(MAKE) --no-print-directory -j2 SANITIZED='nice -n 19' setup native-tsan

# The simulator's time is virtual, so a slow machine does not change its results. No time limit ends these tests.
test-simulation: setup ## a sample of `make campaign`
	@$(PYTHON_ENV)/python -m pytest -o faulthandler_exit_on_timeout=false tests/simulation

# Tests with real engines run alone. The tests named here start no engine, so their time limit is shorter.
SIDE_BY_SIDE := tests/unit tests/conformance tests/fuzz
test-python: setup
	@$(PYTHON_ENV)/python -m pytest -n $(JOBS) -o faulthandler_timeout=240 $(SIDE_BY_SIDE)
	@$(PYTHON_ENV)/python -m pytest $(SIDE_BY_SIDE:%=--ignore=%) --ignore=tests/simulation

# name, sanitizers, compiler (where it is not the one of a release), further targets
define native_build
	@$(if $(3),CXX=$(3) )cmake -S . -B build/$(1) -G Ninja -DKVC_BUILD_TESTS=ON -DKVC_SANITIZE=$(2) -DCMAKE_COMPILE_WARNING_AS_ERROR=ON --log-level=WARNING
	@$(SANITIZED) cmake --build build/$(1) --parallel $(JOBS) --target kvc_tests $(4)
endef

# The Python tests run the release build: a third build here would cost five minutes and find nothing more.
# clang takes half of gcc's time for these two builds. A second compiler's warnings are checked as well.
# These measure, and no test runs them. They are built here so that they stay buildable.
BENCHES := kvc_hot_loops kvc_verbs_bench
.PHONY: sanitizers
sanitizers: | system
	@scripts/setup sanitizers
native-asan: | sanitizers
	$(call native_build,clang-asan,address$(comma)undefined,clang++,$(BENCHES))
native-tsan: | native-asan
	$(call native_build,clang-tsan,thread,clang++)

test-native: native-asan native-tsan ## native unit tests under address+undefined, and under thread sanitizer
	@echo '== native tests under address and undefined, then under thread sanitizer: two processes with half of them each, printed one after the other'
	@half() { export GTEST_TOTAL_SHARDS=2 GTEST_SHARD_INDEX=$$1; \
			build/clang-asan/kvc_tests --gtest_brief=1 && $(NO_ASLR) build/clang-tsan/kvc_tests --gtest_brief=1; }; \
		half 1 >build/native-half.log 2>&1 & other=$$! status=0; \
		half 0 || status=1; \
		wait $$other || status=1; cat build/native-half.log; exit $$status
comma := ,

test-verbs: setup ## the verbs lane in a VM with software RDMA NICs (as root; the first run compiles the VM's kernel)
	$(call native_build,native,)
	@integration/soft_roce/vm --timeout 3600 -- integration/soft_roce/tests build/native/kvc_tests $(CURDIR)/$(PYTHON_ENV)/python

bench-verbs: | system ## the verbs lane beside perftest, in the same VM
	$(call native_build,native,)
	@cmake --build build/native --parallel $(JOBS) --target kvc_verbs_bench
	@command -v ib_write_bw >/dev/null || apt-get install -y -qq --no-install-recommends perftest
	@integration/soft_roce/vm --timeout 900 -- integration/soft_roce/bench build/native/kvc_verbs_bench

# The contract over each provider of two libfabrics: Debian's, and the newer one of MPICH's wheel. Providers that are
# not usable in one of them are left out with the reason (shm in 1.17; "tcp" is "net" there). shm leads to other
# processes only, which is where tests/conformance has its peers.
LIBFABRIC_LANES := libfabric:tcp,libfabric:sockets,shuffle:libfabric:tcp
test-libfabric: setup ## the contract over libfabric's tcp, net, shm and sockets, in Debian's libfabric and in 2.5.1
	$(call native_build,native,)
	@scripts/setup libfabric
	@for library in '' $(CURDIR)/.venv/lib/mpich/libfabric.so.1; do \
		echo "== libfabric: $${library:-where the dynamic linker finds it}"; \
		export KV_CONNECTOR_LIBFABRIC=$$library; \
		KVC_TEST_PROVIDERS="$(LIBFABRIC_LANES)" KVC_TEST_REGISTERED_GIB=16 \
			build/native/kvc_tests --gtest_brief=1 --gtest_filter='Lanes/*:*Libfabric*'; \
		KVC_TEST_PROVIDERS="$(LIBFABRIC_LANES),libfabric:shm,shuffle:libfabric:shm" \
			$(PYTHON_ENV)/python -m pytest -rs tests/conformance; \
	done

$(STAMPS)/next: $(STAMPS)/project
	@scripts/setup next
	@touch $@

# vLLM's ordinary wheel finds no device here, so the target device is set to the CPU. The wheel has no CPU kernels, and
# these tests need none.
test-vllm-next: $(STAMPS)/next ## the tests of the adapter against the newest supported vLLM, which has no CPU wheel
	@VLLM_TARGET_DEVICE=cpu .venv-next/bin/python -m pytest tests/unit/vllm_adapter tests/unit/weights

# A separate environment: SGLang and vLLM need different versions of the same packages.
.venv-sglang/ready: scripts/sglang-packages.txt pyproject.toml CMakeLists.txt $(NATIVE) | system
	@scripts/setup sglang
	@touch $@

test-sglang: .venv-sglang/ready ## the other adapter, with SGLang itself: real servers, P and D behind its router
	@.venv-sglang/bin/python -m pytest tests/with_sglang

# The stamp lies in the environment, so that it is removed with the environment.
.venv-fleet/ready: | $(STAMPS)/project
	@scripts/setup fleet
	@touch $@

test-fleet: setup .venv-fleet/ready ## other projects' routers and Ray Serve LLM before real engines: docs/compatibility.md
	@KVC_FLEET=1 .venv-fleet/bin/python -m pytest tests/fleet

test-browser: setup ## the router's status page in a real browser (installs Debian's chromium)
	@scripts/setup browser
	@$(PYTHON_ENV)/python -m pytest tests/browser

test-observability: setup ## Grafana board and alert rules, with a real Prometheus over a router, P and D
	@scripts/setup prometheus
	@KVC_PROMETHEUS=$(CURDIR)/build/prometheus/usr/bin $(PYTHON_ENV)/python -m pytest tests/observability

board: setup ## writes integration/observability/board.json anew
	@scripts/setup prometheus
	@$(PYTHON_ENV)/python integration/observability/board.py >integration/observability/board.json

test-examples: setup ## each example's command, and the recipe for two hosts, as a reader would run them; SGLang's where .venv-sglang is
	@KVC_EXAMPLES=1 $(PYTHON_ENV)/python -m pytest --durations=0 --durations-min=1 tests/examples

test-compose: setup ## examples/compose: images, containers, an engine killed; agents in containers; BASE= names a base image of this machine
	@KVC_COMPOSE=1 $(PYTHON_ENV)/python -m pytest -rs -o faulthandler_timeout=3600 tests/examples/test_compose.py tests/unit/agent/test_agent_namespaces.py

$(STAMPS)/helm: $(STAMPS)/project
	@scripts/setup helm
	@touch $@

test-helm: $(STAMPS)/helm ## the Helm chart by Helm's own engine, against the schemas of Kubernetes' releases
	@$(PYTHON_ENV)/python -m pytest tests/helm

VLLM ?= $(error name a source tree of the vLLM that setup installs: make test-upstream VLLM=path)
test-upstream: setup ## vLLM's own tests of connectors, over ours: VLLM=path of a source tree
	@$(PYTHON_ENV)/python scripts/upstream_tests.py "$(VLLM)"

bench-gpu: ## on a machine with two GPUs: the nvlink lane, and vLLM P/D beside one engine (PYTHON: one that has vLLM)
	@integration/benchmarks/run-gpu

SEEDS ?= 200000
campaign: setup ## the protocol under every fault, in virtual time: SEEDS=200000, or SEED=N for one that failed
	@$(PYTHON_ENV)/python -m tests.simulation $(if $(SEED),--seed $(SEED),--seeds $(SEEDS))

interleavings: setup ## MoE dispatch and combine: all interleavings of more ranks, rounds and deaths than `make test` explores
	@$(PYTHON_ENV)/python -m tests.simulation.moe

INPUTS ?= 10000000
fuzz: setup ## mutated inputs for every decoder, then raw connections to a live agent; INPUTS=10000000
	@PYTHONPATH=tests/support $(PYTHON_ENV)/python -m tests.fuzz.campaign --inputs $(INPUTS)

SCENARIOS ?= 10000
fuzz-scheduler: setup ## the contents of every block under vLLM's scheduler, P and D in one process; SCENARIOS=10000, FIRST=seed
	@PYTHONPATH=tests/support $(PYTHON_ENV)/python -m tests.fuzz.scheduler --seeds $(SCENARIOS) $(if $(FIRST),--first $(FIRST))

WORLDS ?= 10000
fuzz-router: setup ## the router's limits under clients and engines of all sorts, in virtual time; WORLDS=10000, FIRST=seed
	@PYTHONPATH=tests/support $(PYTHON_ENV)/python -m tests.fuzz.router --seeds $(WORLDS) $(if $(FIRST),--first $(FIRST))

ANSWERS ?= 1000000
fuzz-splice: setup ## the first token of P before the stream of D; ANSWERS=1000000, FIRST=seed
	@PYTHONPATH=tests/support $(PYTHON_ENV)/python -m tests.fuzz.splice --seeds $(ANSWERS) $(if $(FIRST),--first $(FIRST))

FRAMES ?= 10000000
hostile: setup ## strangers and peers out of their senses against a live engine, over tcp, host and nvlink; FRAMES=10000000
	@PYTHONPATH=tests/support $(PYTHON_ENV)/python -m tests.fuzz.hostile --frames $(FRAMES)

# Real engines are killed, stopped and cut off. MINUTES sets the duration, so this is no part of `make test`. The rolling
# replacement alone takes MINUTES. So a test here may hang for an hour before pytest ends it, and elsewhere for 10 minutes.
MINUTES ?= 10
test-faults: setup ## kill -9, SIGSTOP, restarts, partitions, rolling replacement under load; MINUTES=10
	@KVC_FAULT_MINUTES=$(MINUTES) $(PYTHON_ENV)/python -m pytest -o faulthandler_timeout=3600 tests/faults

CONVERSATIONS ?= 200
test-conversations: setup ## conversations of up to 12 turns over two P and two D, with faults: one engine's answers; CONVERSATIONS=200
	@KVC_CONVERSATIONS=$(CONVERSATIONS) $(PYTHON_ENV)/python -m pytest -s -o faulthandler_timeout=3600 tests/conversations

# MINUTES has another default here, and is taken as given otherwise.
RATE ?= 2
soak: setup ## a prefill engine, two decode engines and the router under load and faults: what grows; MINUTES=30 RATE=2
	@PYTHONPATH=tests/support $(PYTHON_ENV)/python -m tests.soak --minutes $(if $(filter file,$(origin MINUTES)),30,$(MINUTES)) --rate $(RATE)

test-early: setup ## 2,000 random requests per model with and without the first token from P: the same answers
	@KVC_EARLY_REQUESTS=1000 $(PYTHON_ENV)/python -m pytest -o faulthandler_timeout=3600 tests/with_vllm/test_early_tokens.py
	@KVC_EARLY_REQUESTS=200 $(PYTHON_ENV)/python -m pytest -o faulthandler_timeout=3600 tests/with_vllm/test_first_tokens.py  # interpreted

test-leaving: setup ## 1,000 requests for each model and dispatch, of which one client in ten leaves: nothing counts as failed
	@KVC_LEAVING_REQUESTS=1000 $(PYTHON_ENV)/python -m pytest -o faulthandler_timeout=3600 tests/with_vllm/test_aborts.py -k leave_are_no_failures

test-weights: setup ## weights for real engines, dense and experts: FSDP2 of 2 and 4, HSDP, a trainer killed at 20 points in each mode
	@KVC_WEIGHT_FAULTS=20 $(PYTHON_ENV)/python -m pytest --durations=0 --durations-min=1 tests/with_vllm/test_weights.py tests/with_vllm/test_weights_experts.py

test-data-parallel: setup ## engines of two data-parallel ranks each, dense and MoE, behind one API server and a router; 100 deaths of a rank
	@KVC_DATA_PARALLEL=1 $(PYTHON_ENV)/python -m pytest tests/with_vllm/test_data_parallel.py tests/with_vllm/test_data_parallel_weights.py
	@KVC_TEST_MOE_DEATHS=100 $(PYTHON_ENV)/python -m pytest tests/unit/moe/test_moe_processes.py -k wherever

CASE ?=
test-topologies: setup ## every kind of model and topology, real engines: docs/compatibility.md; CASE=mla
	@KVC_TOPOLOGIES=1 $(PYTHON_ENV)/python -m pytest -rs --durations=0 --durations-min=2 $(if $(CASE),-k "$(CASE)") tests/topologies

SUITES ?=
test-all: setup ## every suite above that this machine can run, and .ci/run; continues where it was broken off; SUITES="verbs fleet"
	@$(PYTHON_ENV)/python scripts/test_all.py $(SUITES)

TIDY = $(PYTHON_ENV)/clang-tidy -p build/native --quiet
TIDIED := $(filter native/base/% native/engine/% native/lane/% native/moe/% native/providers/%,$(NATIVE_SOURCES))
lint: setup ## ruff, wording, mypy (--strict over the package), clang-format, clang-tidy
	@echo '== ruff'; $(PYTHON_ENV)/ruff check . && $(PYTHON_ENV)/ruff format --check .
	@echo '== wording'; $(PYTHON_ENV)/python scripts/check_text.py
	@echo '== mypy'; $(types)
	@echo '== clang-format'; $(PYTHON_ENV)/clang-format --dry-run --Werror $(NATIVE)
	@cmake -S . -B build/native -G Ninja -DKVC_BUILD_TESTS=ON -DKVC_SANITIZE= --log-level=WARNING
	@echo '== clang-tidy'; printf '%s\n' $(TIDIED) | xargs -P $(JOBS) -n 1 $(TIDY)

# Left out: Padding, as fields stand in the order in which they are explained; BlockInCriticalSection, which takes a
# read of a non-blocking eventfd for one that blocks.
ANALYZER := -*,clang-analyzer-*,-clang-analyzer-optin.performance.Padding,-clang-analyzer-unix.BlockInCriticalSection
analyze: setup ## clang's static analyzer over the engine, which takes five times as long as clang-tidy's other checks
	@cmake -S . -B build/native -G Ninja -DKVC_BUILD_TESTS=ON -DKVC_SANITIZE= --log-level=WARNING
	@printf '%s\n' $(TIDIED) | xargs -P $(JOBS) -n 1 $(TIDY) --checks='$(ANALYZER)'

format: setup ## rewrites the sources as ruff and clang-format want them
	@$(PYTHON_ENV)/ruff check --fix . ; $(PYTHON_ENV)/ruff format .
	@$(PYTHON_ENV)/clang-format -i $(NATIVE)

$(STAMPS)/rivals: $(STAMPS)/project
	@scripts/setup rivals
	@touch $@

bench: $(STAMPS)/rivals ## the transfer benchmarks of docs/performance.md, other projects beside ours
	@$(PYTHON_ENV)/kv-connector bench

wheels: | system ## a release's wheels (every Python, x86-64 and aarch64) and sdist, in dist/, examined
	@scripts/wheels

test-wheels: ## each wheel of dist/, used in a clean environment of its Python (as root: also of Pythons that are not here)
	@scripts/wheels test

reference: setup ## makes the tables in README.md and docs anew that the code decides on
	@$(PYTHON_ENV)/python scripts/reference.py

.venv-docs/ready: scripts/docs-packages.txt | system
	@scripts/setup docs
	@touch $@

docs: .venv-docs/ready ## the documentation as a site, in build/docs/site, its links and anchors checked
	@scripts/docs

clean: ## removes build outputs and caches, keeps .venv
	@rm -rf build .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find . -path ./.venv -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf

distclean: clean ## removes .venv too
	@rm -rf .venv .venv-next .venv-fleet .venv-sglang .venv-docs
