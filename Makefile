PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

DISTRIBUTIONS := $(patsubst %/pyproject.toml,%,$(wildcard */pyproject.toml */*/pyproject.toml))

# One thread for each test worker; a test with more threads must not spin on the other worker's core.
# Hundreds of processes import the distributions, so their bytecode is kept, even where
# PYTHONDONTWRITEBYTECODE is set.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest
# What the machine at hand may lack: an accelerator, emulators, other versions of torch, vLLM.
AVAILABLE := not gpu and not foreign and not versions and not vllm
SEED := $(or $(SEED),$(shell $(PYTHON) -c 'import random; print(random.randrange(2**32))'))

.DEFAULT_GOAL := help
.PHONY: FORCE help install demo test test-quick test-process test-all test-speed test-repeat test-checkpoints test-load mutants test-vllm test-foreign test-torch test-transformers test-hub test-libraries clients test-spirv test-gpu gpu-bundle gpu-evidence gpu-rehearsal lint format docs triton-targets adapt-coverage bench wheels cycles clean

help: ## Show this list.
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' Makefile | expand -t 12

install: $(INSTALLED) ## Install every distribution and the tools into .venv, if anything changed.

demo: $(INSTALLED) ## Run the example of the README.
	$(BIN)/python examples/demo.py

# The linters run alone: beside the tests they would take the processor that a test waits for. Both
# tiers are one run, because collecting the tests takes half a minute, and three workers, because
# tests of the process tier often wait for a process or a deadline.
test: $(INSTALLED) ## Run what every change must pass: the linters, then the quick and the process tests.
	@$(MAKE) --no-print-directory lint
	$(PYTEST) -n 3 --dist loadgroup -m "not slow and $(AVAILABLE)"

test-quick: $(INSTALLED) ## Run the tests that start no process and open no socket.
	$(PYTEST) -n 2 --dist loadgroup -m "not process and not slow and $(AVAILABLE)"

# Collecting the modules without such tests would take half a minute.
PROCESS_MODULES = $(shell grep -rlwE 'process|conformance|check_lightness' --include='test_*.py' $(wildcard $(DISTRIBUTIONS:%=%/tests)) tests)
test-process: $(INSTALLED) ## Run the tests that start processes or servers.
	$(PYTEST) -n 3 --dist loadgroup -m "process and not slow and $(AVAILABLE)" $(PROCESS_MODULES)

# The seed of hypothesis is new for each run; `make test-all SEED=N` repeats one.
test-all: $(INSTALLED) ## Run all tests that this machine can run, with a random seed. Hours.
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group wheels --group fuzz
	@$(MAKE) --no-print-directory lint
	@echo "hypothesis seed: $(SEED)"
	$(PYTEST) -n 2 --dist loadgroup --hypothesis-profile=random --hypothesis-seed=$(SEED) -m "not process and $(AVAILABLE)"
	$(PYTEST) --hypothesis-profile=random --hypothesis-seed=$(SEED) -m "process and $(AVAILABLE)"
	$(if $(RELEASE),@$(MAKE) --no-print-directory test-speed)

# RELEASE is the Python of an environment with the last release of interposer-cpu.
test-speed: $(INSTALLED) ## Fail if this checkout decodes slower than a release: make test-speed RELEASE=PYTHON. Three minutes.
	@test -n "$(RELEASE)" || { echo "Name a Python in whose environment a release is installed: make test-speed RELEASE=PYTHON"; exit 2; }
	$(BIN)/python benchmarks/random_model.py llama-100m .speed_cache/llama-100m
	OMP_NUM_THREADS=2 $(BIN)/python benchmarks/revisions.py $(RELEASE) .speed_cache/llama-100m --quantization none int8 w4a8 --at-least 0.93

RUNS ?= 10
test-repeat: $(INSTALLED) ## Run the quick and the process tests RUNS times, to find tests that fail now and then.
	@for run in $$(seq $(RUNS)); do \
		echo "run $$run of $(RUNS)"; \
		$(PYTEST) -n 3 --dist loadgroup -m "not slow and $(AVAILABLE)" || exit 1; \
	done

test-checkpoints: $(INSTALLED) ## Compare spellings of checkpoints with transformers and PEFT: 2,000 of config.json and of tokenizer files, 500 of each other file. An hour.
	OMP_NUM_THREADS=1 $(BIN)/python models/engine/tests/variants/compare.py 0 2000 --keep .variants_cache/loaded
	OMP_NUM_THREADS=1 $(BIN)/python models/engine/tests/variants/compare.py 0 500 --adapt --keep .variants_cache/adapted
	OMP_NUM_THREADS=1 $(BIN)/python models/engine/tests/variants/compare_adapters.py 0 500 --keep .variants_cache/adapters
	OMP_NUM_THREADS=1 $(BIN)/python models/engine/tests/variants/tokenizer_files.py 0 2000
	OMP_NUM_THREADS=1 $(BIN)/python models/engine/tests/variants/generation_files.py 0 1000 --keep .variants_cache/generation
	OMP_NUM_THREADS=1 $(BIN)/python models/engine/tests/variants/quantized_files.py 0 1000 --keep .variants_cache/quantized

test-load: $(INSTALLED) ## Send costly requests to a server, and measure how other clients are delayed. Three minutes.
	$(BIN)/python serve/tests/load.py

# It changes the sources while it runs and puts them back: have no work in this checkout meanwhile.
MUTANTS := $(BIN)/python tests/mutants/mutants.py
mutants: $(INSTALLED) ## Measure how many random faults the landing tests find, see tests/mutants. Hours.
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group mutants
	rm -rf .mutants_cache && mkdir .mutants_cache
	$(MUTANTS) draw .mutants_cache/mutants.json
	$(MUTANTS) record .mutants_cache/mutants.json .mutants_cache --checkout . -m "not slow and $(AVAILABLE)"
	$(MUTANTS) judge .mutants_cache/mutants.json .mutants_cache .mutants_cache/results.json --checkout . -m "not slow and $(AVAILABLE)"

# Other architectures want packages of the system, which the tests name where they miss them.
test-foreign: $(INSTALLED) ## Build llama.cpp and compare with it; run kernels of ARM and s390x in emulators. An hour.
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group wheels
	$(BIN)/python -m pip install --quiet "llama-cpp-python==0.3.36"
	$(BIN)/python -m pytest -m foreign -s

test-torch: $(INSTALLED) ## Install every version of torch that is declared, 3 GB, one by one, and run what was built once. Five minutes each.
	$(BIN)/python -m pytest tests/test_torch_versions.py -s

test-transformers: $(INSTALLED) ## Install each tested version of transformers, 11 MB, aside, and run the tests of adapted models. Two minutes each.
	$(BIN)/python -m pytest tests/test_transformers_versions.py -s

test-hub: $(INSTALLED) ## Install a transformers that takes the installed kernels, 11 MB, aside, and run a model with both.
	$(BIN)/python -m pytest tests/test_hub_kernels.py -m versions -s

test-vllm: $(INSTALLED) ## Install vLLM for CPUs into .vllm-env, 4 GB, and run models on it with and without interposer.
	$(BIN)/python benchmarks/vllm_environment.py .vllm-env
	.vllm-env/bin/python -m pytest -p no:cacheprovider -m vllm plugins/vllm/tests -s

# Clients of the server have environments of their own, because they need other versions
# of libraries.
CLIENTS := .clients_cache
clients: $(CLIENTS)/openai-3/.installed $(CLIENTS)/openai-2/.installed $(if $(shell command -v npm),$(CLIENTS)/node/.installed) ## Install clients of the server for its tests, from PyPI and npm, into .clients_cache. 2.3 GB.

$(CLIENTS)/openai-%/.installed: serve/tests/clients/requirements-openai-%.txt
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet --upgrade pip
	$(@D)/bin/python -m pip install --quiet --requirement $<
	touch $@

$(CLIENTS)/node/.installed: serve/tests/clients/package.json
	mkdir -p $(@D) && cp $< $(@D)
	cd $(@D) && npm install --no-audit --no-fund --loglevel=error
	touch $@

test-libraries: $(INSTALLED) clients ## Install libraries, 1 GB, that run adapted models or evaluate models, and run their tests and those of clients of the server.
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group libraries
	$(BIN)/python -m pytest models/adapt/tests/test_adapt_libraries.py models/adapt/tests/test_adapt_pipelines.py models/engine/tests/test_evaluation_libraries.py serve/tests/test_client_libraries.py

test-spirv: $(INSTALLED) ## Compile the portable kernels to SPIR-V with a triton for XPU, 180 MB, which is installed aside. Ten minutes.
	$(BIN)/python -m pytest platforms/xpu/tests/test_spirv.py -s

test-gpu: $(INSTALLED) ## Run the suite on an accelerator, which the platform's plugin has to be there for.
	$(BIN)/python -m pytest -m gpu

# What travels to a machine with an accelerator that has no network, see benchmarks/README.md.
gpu-bundle: $(INSTALLED) ## Build wheels for a machine with an accelerator and no network, into .gpu_bundle/.
	$(BIN)/python benchmarks/gpu_bundle.py .gpu_bundle

# There is nothing but a Python with torch, so neither .venv nor pip from a network has a part.
gpu-evidence: ## There: install the bundle and take evidence in stages, into .gpu_evidence/.
	$(PYTHON) benchmarks/gpu_evidence.py --bundle .gpu_bundle --out .gpu_evidence --archive .gpu_evidence.tar.gz

gpu-rehearsal: $(INSTALLED) ## Rehearse both without an accelerator, in another Python without a network. 3 GB, half an hour.
	$(BIN)/python -m pytest -m versions tests/test_gpu_rehearsal.py -s

lint: $(INSTALLED) ## Check style, types and who imports whom.
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --num-workers 2
	$(BIN)/lint-imports --no-logo

format: $(INSTALLED) ## Format the code and mend what ruff can mend.
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# Strict: a broken link, a page outside the navigation or a public name without a docstring fails.
docs: $(INSTALLED) ## Build the site of the documentation into .site/.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# Kept outside of git; the next `make docs` shows it.
triton-targets: $(INSTALLED) ## Compile the Triton kernels for every GPU and write the page about it. An hour.
	mkdir -p .docs_cache
	$(BIN)/python -m interposer_ops._triton.aot --write .docs_cache/triton-targets.md

adapt-coverage: $(INSTALLED) ## Adapt a tiny model of every architecture of transformers and write the table of it.
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/adapt_coverage.py --table benchmarks/results/adapt_coverage.txt

# No development environment is needed: the wheels are for users. Compilers of the system are named
# where one is missing; see docs/install.md.
ARCHITECTURES ?= $(shell uname -m)
wheels: | $(BIN)/pip ## Build the wheels of all distributions into dist/, native ones for ARCHITECTURES (this machine's). Five minutes.
	$(BIN)/python -m pip install --quiet --constraint constraints.txt pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group build --group wheels
	$(BIN)/python platforms/wheels.py dist --architectures $(ARCHITECTURES)

cycles: $(INSTALLED) ## Renew the tables of cycles of native kernels by models of processors. Ten minutes.
	$(BIN)/python benchmarks/kernel_cycles.py --write

bench: $(INSTALLED) ## Run every benchmark.
	$(BIN)/python benchmarks/dispatch.py
	$(BIN)/python benchmarks/decode.py examples/models/stdlib-lm
	$(BIN)/python benchmarks/discovery.py --check
	$(BIN)/python benchmarks/serve.py compare examples/models/stdlib-lm

clean: ## Remove caches and built files; .venv stays.
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .kernel_cycles_cache .wheels_cache dist
	rm -rf $(addsuffix /dist,$(DISTRIBUTIONS)) $(addsuffix /build,$(DISTRIBUTIONS))
	find $(DISTRIBUTIONS) benchmarks examples tests -name __pycache__ -prune -exec rm -rf {} +

# The check runs on any Python 3, so that an old one gets a sentence instead of a traceback.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "%s is Python %d.%d; 3.11 or newer is needed. Try: make PYTHON=python3.11" % ((sys.executable,) + sys.version_info[:2]))'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) lacks the module venv or ensurepip. On Debian: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Sources of native kernels, which an editable installation builds once.
NATIVE := $(wildcard platforms/*/native/* platforms/*/native/*/* plugins/*/native/*)

# An editable installation of native distributions lists their modules when it is made, so a file
# that is added, moved or removed asks for another.
MODULES := find $(sort $(dir $(wildcard platforms/*/native plugins/*/native))) -path '*/src/*.py' | sort
$(VENV)/.modules: FORCE | $(BIN)/pip
	@$(MODULES) | cmp -s - $@ || $(MODULES) > $@
FORCE:

# One call for all, so that pip resolves them together. The pip that venv brings may be too old to
# know --group. Build systems are installed once, instead of once for each distribution. pip would
# compile all modules with one processor, those too that few programs import; compileall ends with 1
# as some files of packages are meant for another Python.
$(INSTALLED): pyproject.toml constraints.txt $(addsuffix /pyproject.toml,$(DISTRIBUTIONS)) $(NATIVE) $(VENV)/.modules | $(BIN)/pip
	@echo "Installing into $(VENV), five minutes on two cores; the whole output goes to $(VENV)/install.log"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group build
	@{ $(BIN)/python -m pip install --verbose --no-compile --constraint constraints.txt --no-build-isolation --group dev $(addprefix --editable ./,$(DISTRIBUTIONS)) 2>&1 || echo "pip failed"; } \
		| tee $(VENV)/install.log | awk "$$PROGRESS" || { tail -n 40 $(VENV)/install.log >&2; exit 1; }
	@echo "Compiling bytecode"
	@$(BIN)/python -m compileall -qq -j 0 -x '/tests/|transformers/models/' $(VENV)/lib/python3.* || true
	@touch $@

# Shows which packages pip collects, and every tenth source of the native kernels.
define PROGRESS
/^Collecting / { if (++packages % 20 == 0) print "  " packages " packages collected" }
/^ *\[[0-9]+\/[0-9]+\] Building/ { if (++sources % 10 == 1) print "  compiling kernels " $$1; fflush() }
/^Installing collected packages/ { print "  installing packages" }
/^pip failed$$/ { failed = 1 }
END { exit failed }
endef
export PROGRESS
