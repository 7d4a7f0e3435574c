# Two commands for a newcomer, `make demo` and `make test`; everything else is plain pip and pytest.
#
# They use LIGER_PYTHON when it is set, else the active virtual environment, else .venv here, which they create.

ifneq ($(LIGER_PYTHON),)
PYTHON := $(LIGER_PYTHON)
else ifneq ($(VIRTUAL_ENV),)
PYTHON := $(VIRTUAL_ENV)/bin/python
else ifneq ($(CONDA_PREFIX),)
PYTHON := $(CONDA_PREFIX)/bin/python
else
PYTHON := .venv/bin/python
endif

# gpu-test installs no requirement and makes no environment: it wants the interpreter that has the CUDA torch.
GPU_PYTHON := $(or $(LIGER_PYTHON),$(if $(VIRTUAL_ENV),$(VIRTUAL_ENV)/bin/python),python3)

CXX_SOURCES = $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
# The op tests: those with Triton kernels of the same name, and properties of every op.
OP_TESTS = $(wildcard $(foreach op,$(notdir $(wildcard triton_kernels/*.py)),tests/ops/test_$(op) tests/ops/*/test_$(op))) \
  $(foreach property,layouts frozen row_ops,tests/properties/test_$(property).py)
# One file with many minutes of slow tests, which --dist loadfile leaves to one process.
MODEL_TESTS = tests/transformers/test_transformers_models.py
# Tests run side by side, one thread each.
JOBS ?= $(shell nproc)
PYTEST = OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n $(JOBS) --dist worksteal
BENCH_ARGS ?=
MODELS_ARGS ?=
DEMO_ARGS ?=
PYTEST_ARGS ?=
SANITIZE_TOOLS ?=
FUZZ_CASES ?= 100000
RELEASE_ARGS ?=

.PHONY: release-check demo test test-slow fuzz gpu-test gpu-test-archs sanitize distributed-test bench models lint docs clean install-demo install-test

demo: install-demo
	$(PYTHON) -m liger_cli demo $(DEMO_ARGS)

# What needs no GPU and is not marked slow: lint, the tests with the torch backend, a quarter of the op tests with
# Triton's interpreter.
test: install-test lint
	$(PYTEST) -m "not slow" $(PYTEST_ARGS)
	TRITON_INTERPRET=1 $(PYTEST) -m "not slow" $(PYTEST_ARGS) $(OP_TESTS)

# The slow ones: several processes, building and installing, the benchmarks, the rest of the interpreter. After test.
test-slow:
	$(PYTEST) -m slow $(PYTEST_ARGS) $(MODEL_TESTS)
	$(PYTEST) --dist loadfile -m slow $(PYTEST_ARGS) --ignore $(MODEL_TESTS)
	TRITON_INTERPRET=1 $(PYTEST) -m slow $(PYTEST_ARGS) $(OP_TESTS)

# Random options, layouts, dtypes and sizes against float64; FUZZ_CASES in all, others at every call. After test.
fuzz:
	LIGER_FUZZ_CASES=$(FUZZ_CASES) $(PYTEST) tests/fuzz --timeout 86400 $(PYTEST_ARGS)

# Everything on a GPU, with kernels built for the GPU at hand. Needs no network. With pytest-xdist in parallel: then it
# takes three minutes on an H200, most of them in Python.
gpu-test:
	$(GPU_PYTHON) -c "import torch; torch.cuda.init()"
	env -u TORCH_CUDA_ARCH_LIST LIGER_BUILD_CUDA=1 $(GPU_PYTHON) -m pip install --no-build-isolation --no-deps .
	$(GPU_PYTHON) -m liger_cli info
	OMP_NUM_THREADS=1 $(GPU_PYTHON) -m pytest -m "not packaging and not distributed" $(if $(shell $(GPU_PYTHON) -c "import xdist" 2>&1),,-n 12) $(PYTEST_ARGS)

# The same kernels built for 8.0 alone, which a later GPU runs through PTX: a selection of tests.
gpu-test-archs:
	scripts/gpu_test_archs.sh $(GPU_PYTHON) 80 $(if $(shell $(GPU_PYTHON) -c "import xdist" 2>&1),,-n 12) $(PYTEST_ARGS)

# compute-sanitizer over every compiled op in small sizes, with the liger that is installed: after gpu-test.
sanitize:
	$(GPU_PYTHON) scripts/sanitize.py $(SANITIZE_TOOLS)

# Two ranks, or LIGER_TEST_RANKS=4 or 8: with nccl where there are as many GPUs, else with gloo on the CPU. Tests of
# DeepSpeed run where it is installed.
distributed-test:
	$(GPU_PYTHON) -m pytest tests/distributed $(PYTEST_ARGS)

# Every op beside the peers that are installed, with the liger that is installed: after gpu-test, or after demo.
bench:
	$(if $(wildcard $(PYTHON)),$(PYTHON),$(GPU_PYTHON)) benchmarks/run.py $(BENCH_ARGS)

# What liger.patch replaces in every model of transformers, and whether it is equal; all of them take an hour.
models:
	PYTHONPATH=scripts $(PYTHON) -m model_scan $(MODELS_ARGS)

lint:
	$(PYTHON) -m ruff check
	$(PYTHON) -m ruff format --check
	$(PYTHON) -m mypy
	"$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("scripts"))')/clang-format" --dry-run -Werror $(CXX_SOURCES)

# The documentation site in build/site, strictly: a broken link or a page outside the navigation is an error. It has an
# environment of its own, and needs neither torch nor a build.
docs: build/docs/installed
	build/docs/bin/python scripts/docs_site/stage.py build/site-sources
	NO_MKDOCS_2_WARNING=1 build/docs/bin/python -m mkdocs build --strict

# The sdist and the two wheels of a release in dist/, and every check of them that needs no GPU. Hours: all architectures
# are compiled twice. docs/development/releasing.md has the rest of a release.
release-check: install-test
	$(PYTHON) -m pip install --quiet --group release
	$(PYTHON) scripts/release_check.py $(RELEASE_ARGS)

build/docs/installed: pyproject.toml
	python3 -m venv build/docs
	build/docs/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	build/docs/bin/python -m pip install --quiet --group docs
	touch $@

install-demo:
	scripts/install.sh $(PYTHON) ".[demo]"

install-test:
	scripts/install.sh $(PYTHON) . --group test

clean:
	rm -rf build dist demo-output .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
