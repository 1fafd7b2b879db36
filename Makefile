# make demo        train a small GPT twice, PyTorch's layers against memkern's, on this machine's hardware
# make test        all tests
# make lint        ruff and mypy
# make bench       microbenchmarks against PyTorch (on a GPU: make gpu-check runs them too)
# make gpu-check   on a CUDA machine: build, GPU tests, compute-sanitizer, benchmarks; no venv, no network
# make test-other-torch   the libraries built here, under another PyTorch (2.13.0, CPU)
#
# The first four set up .venv by themselves, once. Variables: PYTHON, TORCH, MEMKERN_BUILD.
SHELL := bash
PYTHON ?= python3
TORCH ?= torch==2.14.1
OTHER_TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check
OP_TESTS = $(shell $(PYTHON) tests/op_tests.py)
SOURCES := setup.py $(wildcard csrc/*.h csrc/*/*)

# The CUDA compiler from PyPI, for machines without the toolkit. The four parts must be of one version.
NVCC := nvidia-cuda-nvcc==13.0.* nvidia-nvvm==13.0.* nvidia-cuda-crt==13.0.* nvidia-cuda-cccl==13.0.*

.PHONY: demo test lint bench gpu-check test-other-torch clean

demo: $(VENV)/.built
	$(BIN)/memkern demo

# A process a core; the emulator and Triton's interpreter have no use for more.
test: $(VENV)/.built
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal

lint: $(VENV)/.built
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(VENV)/.built
	$(BIN)/python -m benchmarks

$(VENV)/.installed: Makefile
	@$(PYTHON) -c 'import sys; sys.version_info < (3, 10) and sys.exit("memkern needs Python 3.10 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) "$(TORCH)" "setuptools>=77" ninja numpy
	@command -v nvcc >/dev/null || test -x "$${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" \
	  || $(BIN)/python $(PIP_INSTALL) $(NVCC) \
	  || echo "memkern: no CUDA compiler, neither a toolkit here nor the PyPI packages: building without CUDA"
	@touch $@

# setup.py says what it builds and what it leaves out; pip, which would hide that, then finds it done.
$(VENV)/.built: $(VENV)/.installed pyproject.toml $(SOURCES)
	$(BIN)/python setup.py --quiet build_ext --inplace
	$(BIN)/python $(PIP_INSTALL) --no-build-isolation --editable ".[test,lint]"
	@touch $@

# The same files under another PyTorch, which has no compiler and no editable install to lean on.
$(VENV)-other/.installed: Makefile
	$(PYTHON) -m venv $(VENV)-other
	$(VENV)-other/bin/python $(PIP_INSTALL) "$(OTHER_TORCH)" rich matplotlib pytest hypothesis expecttest mpmath numpy
	@touch $@

test-other-torch: $(VENV)/.built $(VENV)-other/.installed
	$(VENV)-other/bin/python -c 'import memkern; memkern.backends.require("cpu")'
	$(VENV)-other/bin/python -m pytest --backends cpu,reference $(sort $(OP_TESTS) $(wildcard tests/test_norm*.py))

# Uses the Python, PyTorch and CUDA toolkit already there. Every step runs, whatever became of the one
# before; logs and figures go to RESULTS.
RESULTS ?= benchmarks/results/gpu-check
SANITIZED := -k "layout or alignment or limits or (test_optim and (finite or advance or no_elements))" --backends cuda
gpu-check:
	mkdir -p $(RESULTS)
	MEMKERN_BUILD=cuda $(PYTHON) setup.py --quiet build_ext --inplace 2>&1 | tee $(RESULTS)/build.txt
	set -o pipefail; failed=; \
	$(PYTHON) -m memkern info 2>&1 | tee $(RESULTS)/info.txt || failed+=" info"; \
	$(PYTHON) -m pytest --backends cuda,triton 2>&1 | tee $(RESULTS)/tests.txt || failed+=" tests"; \
	for tool in memcheck racecheck initcheck synccheck; do \
	  PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $$tool --error-exitcode 1 \
	    $(PYTHON) -m pytest -q $(SANITIZED) $(OP_TESTS) 2>&1 | tee $(RESULTS)/$$tool.txt || failed+=" $$tool"; \
	done; \
	$(PYTHON) -m benchmarks --device cuda --out $(RESULTS) 2>&1 | tee $(RESULTS)/benchmarks.txt || failed+=" benchmarks"; \
	$(PYTHON) -m memkern demo --out $(RESULTS)/demo.png 2>&1 | tee $(RESULTS)/demo.txt || failed+=" demo"; \
	if [ -n "$$failed" ]; then echo "gpu-check failed:$$failed"; exit 1; else echo "gpu-check passed"; fi

clean:
	rm -rf $(VENV) $(VENV)-other build dist *.egg-info memkern/*.so
