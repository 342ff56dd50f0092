# `make demo` and `make test` need nothing but Python 3.11 or newer, pip and make.

VENV ?= .venv
VENV_CUDA ?= .venv-cuda
TEST_WORKERS ?= 3
RUN := $(VENV)/bin

# Else each of the tests' thousands of processes would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

# Where tests with a mark are: to read all others, and the frameworks that they import, takes half a minute of each worker.
holding = -o "testpaths=$$(grep -rl --include='test_*.py' 'mark\.$(1)' tests | tr '\n' ' ')"

ifndef PYTHON
# The first of these that runs and is new enough; `make PYTHON=/path/to/python3.12 test` names another.
PYTHON := $(firstword $(foreach name,python3 python3.13 python3.12 python3.11,$(shell \
	$(name) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(name))))
endif

.PHONY: help demo test test-all test-avx2 test-cuda test-cuda-compiled notebooks lint bench bench-searches bench-slots bench-shared-study bench-priors bench-play-off bench-memory bench-first-contact bench-worth bench-told bench-heavy bench-anytime bench-compiled bench-peers test-peers clean
.DEFAULT_GOAL := test

help:  ## list the targets
	@sed -n 's/^\([a-z][a-z0-9-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r name text; do \
		printf '%-15s %s\n' "$$name" "$$text"; done

demo: $(VENV)/.installed  ## search on a shipped case study, then with one more layer; DEMO_ARGS is for the first, e.g. DEMO_ARGS="--budget 20s"
	$(RUN)/autotune search studies/gpt/model.py --budget 2m $(DEMO_ARGS)
	@echo; echo "The same model with one more layer: its search starts where the first ended."
	GPT_LAYERS=5 $(RUN)/autotune search studies/gpt/model.py --study gpt-5-layers --budget 20s

test: $(VENV)/.installed-dev  ## run the tests; PYTEST_ARGS passes options on, e.g. PYTEST_ARGS="-k checkpoint"; on a GPU TEST_WORKERS=0
	OMP_NUM_THREADS=1 $(RUN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile $(PYTEST_ARGS)

test-all: $(VENV)/.installed-dev  ## all tests, also those that take minutes
	$(MAKE) test PYTEST_ARGS='-m "" --timeout 900'

# ONEDNN_MAX_CPU_ISA=AVX2 makes a processor with bf16 arithmetic behave like one that emulates it.
test-avx2: $(VENV)/.installed-dev  ## the tests that depend on the arithmetic once more, with less of it
	@if $(RUN)/python -c 'import sys, torch; sys.exit(not torch.ops.mkldnn._is_mkldnn_bf16_supported())'; then \
		ONEDNN_MAX_CPU_ISA=AVX2 OMP_NUM_THREADS=1 $(RUN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile -m arithmetic $(call holding,arithmetic) $(PYTEST_ARGS); \
	else echo "this processor emulates bf16: make test has run these tests so"; fi

test-cuda: $(VENV_CUDA)/.installed  ## the tests of GPUs, with torch's CUDA build over GPUs that the tests play; needs gcc and no GPU
	OMP_NUM_THREADS=1 $(VENV_CUDA)/bin/python -m tests.driver $(VENV_CUDA)/bin/python -m pytest -n $(TEST_WORKERS) --dist loadgroup \
		-m "gpu and not slow" $(call holding,gpu) $(PYTEST_ARGS)

test-cuda-compiled: $(VENV_CUDA)/triton  ## the tests of GPUs that compile, with triton, over GPUs that the tests play; minutes
	PYTHONPATH=$(abspath $<) OMP_NUM_THREADS=1 $(VENV_CUDA)/bin/python -m tests.driver $(VENV_CUDA)/bin/python -m pytest \
		-m gpu -k compile tests/gpu $(PYTEST_ARGS)

test-peers: $(VENV)/.installed-peers  ## what is exported, run by the peers themselves, DeepSpeed included
	OMP_NUM_THREADS=1 $(RUN)/python -m pytest --timeout 900 -m "" tests/export/test_peers.py $(PYTEST_ARGS)

notebooks: $(VENV)/.installed-dev  ## run the notebooks, and keep what they show
	OMP_NUM_THREADS=1 $(RUN)/python -m tests.notebooks

lint: $(VENV)/.installed-dev  ## ruff, mypy and the rule of imports
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy
	$(RUN)/lint-imports

bench: $(VENV)/.installed-dev  ## what a search itself costs
	$(RUN)/python tests/benchmarks/bench.py

bench-searches: $(VENV)/.installed-dev  ## search strategies over the recorded tables
	OMP_NUM_THREADS=1 $(RUN)/python -m tests.benchmarks.searches $(BENCH_ARGS)

bench-slots: $(VENV)/.installed-dev  ## searches with 1, 2, 4 and 8 slots over recorded tables and closed forms
	OMP_NUM_THREADS=1 $(RUN)/python -m tests.benchmarks.slots $(BENCH_ARGS)

bench-priors: $(VENV)/.installed-dev  ## what earlier studies are worth to a search, over recorded tables
	OMP_NUM_THREADS=1 $(RUN)/python -m tests.benchmarks.priors $(BENCH_ARGS)

bench-shared-study: $(VENV)/.installed-dev  ## what a study costs that several searches share, and what faults do to it; needs PostgreSQL
	OMP_NUM_THREADS=1 $(RUN)/python -m tests.benchmarks.shared_study $(BENCH_ARGS)

bench-ray: $(VENV)/.installed-dev  ## what Ray costs a probe, and with --faults what faults cost
	OMP_NUM_THREADS=1 $(RUN)/python -m tests.benchmarks.ray $(BENCH_ARGS)

bench-play-off: $(VENV)/.installed-dev  ## power and coverage of the play-off, over closed forms
	OMP_NUM_THREADS=1 $(RUN)/python -m tests.benchmarks.play_off $(BENCH_ARGS)

bench-memory: $(VENV)/.installed-dev  ## predicted memory against what was measured
	OMP_NUM_THREADS=1 $(RUN)/python -m tests.benchmarks.memory $(BENCH_ARGS)

bench-first-contact: $(VENV)/.installed-dev  ## searches on tasks and processors that did not shape the package
	OMP_NUM_THREADS=1 $(RUN)/python -m tests.benchmarks.first_contact $(BENCH_ARGS)

bench-worth: $(VENV)/.installed-dev  ## what each technique is worth on the studies, alone
	OMP_NUM_THREADS=1 $(RUN)/python -m tests.benchmarks.worth $(BENCH_ARGS)

bench-told: $(VENV)/.installed-dev  ## whether the gain that a search tells is the gain that is then seen; three quarters of an hour
	OMP_NUM_THREADS=1 $(RUN)/python -m tests.benchmarks.told $(BENCH_ARGS)

bench-heavy: $(VENV)/.installed-dev  ## whether searches of 45 s decide about models whose steps take seconds; a quarter of an hour
	OMP_NUM_THREADS=1 $(RUN)/python -m tests.benchmarks.heavy $(BENCH_ARGS)

bench-anytime: $(VENV)/.installed-bench  ## when the answer so far is nearly the final one, over recorded tables, and with --live beside other tuners
	OMP_NUM_THREADS=1 $(RUN)/python -m tests.benchmarks.anytime $(BENCH_ARGS)

bench-compiled: $(VENV)/.installed-dev  ## what compiling adds to the answers for the studies, and when that is won back
	OMP_NUM_THREADS=1 $(RUN)/python -m tests.benchmarks.compiled $(BENCH_ARGS)

bench-peers: $(VENV)/.installed-bench  ## other tuners on the same models; BENCH_ARGS passes options on, e.g. BENCH_ARGS=--quick
	OMP_NUM_THREADS=1 $(RUN)/python -m tests.benchmarks.peers $(BENCH_ARGS)

clean:  ## remove the virtual environment
	rm -rf $(VENV) $(VENV_CUDA)

# torch is installed first, and pinned: nothing that follows can then bring another build of it.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(if $(PYTHON),,$(error no Python 3.11 or newer was found; name one with `make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)`))
	$(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --quiet --constraint constraints.txt torch
	$(RUN)/python -m pip install --quiet --constraint constraints.txt --editable '.[studies]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(RUN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test,dev]'
	@touch $@

# torch's CUDA build without NVIDIA's libraries, for which the tests have stand-ins, before everything that $(VENV) has. `===` passes
# over a build for CPUs of the same version.
$(VENV_CUDA)/.installed: $(VENV)/.installed-dev constraints.txt
	$(RUN)/python -m venv --without-pip --clear $(VENV_CUDA)
	$(RUN)/python -m pip --python $(VENV_CUDA)/bin/python install --quiet --no-deps \
		"torch===$$(sed -n 's/^torch==//p' constraints.txt)"
	$(RUN)/python -c "import sysconfig; print(f'import site; site.addsitedir({sysconfig.get_path(\"purelib\")!r})')" \
		>"$$($(VENV_CUDA)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth"
	@touch $@

# The triton that this torch asks for, apart from the rest: where it is found, every search over a GPU compiles.
$(VENV_CUDA)/triton: $(VENV_CUDA)/.installed
	$(RUN)/python -m pip install --quiet --no-deps --target $@ "$$(sed -n 's/^Requires-Dist: \(triton==[0-9.]*\).*/\1/p' \
		$(VENV_CUDA)/lib/python*/site-packages/torch-*.dist-info/METADATA)"

# DeepSpeed is built here, against the torch that is there, and without kernels of its own.
$(VENV)/.installed-peers: $(VENV)/.installed-dev
	$(RUN)/python -m pip install --quiet --constraint constraints.txt setuptools wheel ninja
	DS_BUILD_OPS=0 $(RUN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation deepspeed
	@touch $@

$(VENV)/.installed-bench: $(VENV)/.installed
	$(RUN)/python -m pip install --quiet --constraint constraints.txt --editable '.[bench]'
	@touch $@
