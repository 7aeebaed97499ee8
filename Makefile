# `make serve` sets up everything and serves the default model; `make test` passes the tests; `make help` lists the rest.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

RUN := $(VENV)/bin/python
INPUTS := pyproject.toml setup.py packaging/constraints.txt packaging/make_venv.sh packaging/native_build.py \
	$(wildcard kernels/cpu/src/*)

# A file of tests stays in one process, and with it what its tests share.
# One process more than there are cores: many tests wait for a server or a screen.
SIDE_BY_SIDE := -n $(shell echo $$(( $$(nproc) + 1 ))) --maxprocesses 4 --dist loadfile

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv serve test test-clients check check-full sanitize docs picture clean

help: ## list what make can do
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s%s\n", $$1, $$2}' Makefile
	@echo '  ARGS="…" passes flags on; PYTHON=python3.12 chooses the interpreter; KVD_TORCH=… chooses the torch.'

venv: $(VENV)/.made ## build the environment: .venv/bin/kvd

serve: venv ## serve the model of kvd.yaml on 127.0.0.1:8000
	@exec $(VENV)/bin/kvd serve -c kvd.yaml $(ARGS)

test: $(VENV)/.made-test ## the quick tests; ARGS="tests/server -x" narrows them
	$(RUN) -m pytest $(SIDE_BY_SIDE) -m "not full and not gpu and not clients" $(ARGS)

test-clients: $(VENV)/.made-test build/clients/.made ## other people's clients against `kvd serve` with the default model
	$(RUN) -m pytest -m clients tests/clients $(ARGS)

# Exit code 5 of pytest says that no test was selected; here that is no failure.
check-full: $(VENV)/.made-test ## the long tests: soaks, whole matrices, fuzz
	@$(RUN) -m pytest $(SIDE_BY_SIDE) -m "full and not gpu and not clients" $(ARGS); code=$$?; \
	if [ $$code -eq 5 ]; then echo "no test is marked full"; exit 0; fi; exit $$code

check: $(VENV)/.made-dev build/typing/kvd_kernels ## format, lint, types
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy kvd build/typing/kvd_kernels

# The sanitizers' runtime must be in the process before Python; Python itself leaks by design.
sanitize: $(VENV)/.made-test ## run the kernel tests (or ARGS) on a build with AddressSanitizer and UBSan
	$(RUN) packaging/native_build.py build/native/sanitized.so --sanitize
	LD_PRELOAD="$$($${CXX:-c++} -print-file-name=libasan.so) $$($${CXX:-c++} -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 KVD_NATIVE_LIBRARY=build/native/sanitized.so \
	$(RUN) -m pytest -m "not full and not gpu and not clients" $(or $(ARGS),tests/kernels)

docs: venv ## write what is generated from the program: kvd.yaml and tables in docs/
	$(RUN) packaging/make_docs.py

picture: venv ## take docs/dashboard.svg from the real dashboard under real load
	$(RUN) packaging/make_picture.py

clean: ## remove the environment and everything that was built
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.made: $(INPUTS)
	@packaging/make_venv.sh $(PYTHON) $(VENV)
	@touch $@

$(VENV)/.made-test: $(VENV)/.made
	@packaging/make_venv.sh $(PYTHON) $(VENV) test
	@touch $@

$(VENV)/.made-dev: $(VENV)/.made
	@packaging/make_venv.sh $(PYTHON) $(VENV) dev
	@touch $@

build/clients/.made: packaging/make_clients.sh $(wildcard tests/clients/environments/*)
	@packaging/make_clients.sh $(PYTHON) build/clients
	@touch $@

# The folder kernels/ is imported as kvd_kernels; mypy needs to see it under that name.
build/typing/kvd_kernels:
	@mkdir -p build/typing
	@ln -sfn ../../kernels $@
