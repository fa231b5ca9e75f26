PYTHON ?= python3
BIN := .venv/bin
UV := $(shell command -v uv)
INSTALLED := .venv/.installed
# Of tests that begin real proxies, all others are the same with the native library and without it.
STREAMING := tests/live/test_serve.py tests/live/test_hand_over.py
CARGO := $(firstword $(shell command -v cargo) $(wildcard $(HOME)/.cargo/bin/cargo))
CRATE := proxy/pump
NATIVE := .venv/.native
DOCS := build/docs-venv
# xds-protos brings older files of the same names: whichever is installed last counts.
LAST := opentelemetry-proto
# One more than there are cores, as tests with real sockets and processes wait.
JOBS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
# A file stays in one process, where its fixtures are.
PYTEST = $(BIN)/pytest -n $(JOBS) --maxprocesses 8 --dist loadfile
export CARGO_TARGET_DIR := $(CURDIR)/build/native
# Else each process that a test starts compiles all modules again, and pytest all tests.
test test-all test-without-native: export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := check
.PHONY: check install native check-native lint types test test-all test-without-native test-vllm test-vllm-all test-deploy kube demo qos simulate bench docs constraints fmt clean help

check: lint types test ## lint, types and tests (the default)

install: $(INSTALLED) ## make .venv with the package (editable) and its tools

$(INSTALLED): pyproject.toml constraints.txt
	@echo "installing into .venv (about a minute)"
ifdef UV
	@uv venv -q --allow-existing --python $(PYTHON) .venv
	@uv pip install -q --python $(BIN)/python -c constraints.txt -e '.[dev]'
	@uv pip install -q --python $(BIN)/python -c constraints.txt --no-deps --reinstall $(LAST)
else
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt --no-deps --force-reinstall $(LAST)
endif
	@touch $@

native: $(NATIVE) ## the native pump of streams into .venv, where cargo is (half a minute)

$(NATIVE): $(INSTALLED) $(wildcard $(CRATE)/src/*.rs $(CRATE)/Cargo.* $(CRATE)/setup.py)
ifdef CARGO
ifdef UV
	@uv pip install -q --python $(BIN)/python --no-build-isolation --no-deps --reinstall ./$(CRATE)
else
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-build-isolation --no-deps --force-reinstall ./$(CRATE)
endif
	@rm -rf $(CRATE)/build $(CRATE)/*.egg-info
	@touch $@
else
	@echo "no cargo here (see https://rustup.rs): streams stay in Python"
endif

check-native: ## the crate: rustfmt, clippy and its tests, where cargo is
ifdef CARGO
	@cd $(CRATE) && { ! $(CARGO) fmt --version >/dev/null 2>&1 || $(CARGO) fmt --check; }
	@cd $(CRATE) && { ! $(CARGO) clippy --version >/dev/null 2>&1 || $(CARGO) clippy -q --locked --all-targets -- -D warnings; }
	@cd $(CRATE) && $(CARGO) test -q --locked
else
	@echo "no cargo here: the crate is not checked"
endif

lint: $(INSTALLED) ## ruff, read-only
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .

types: $(INSTALLED) ## mypy --strict
	@$(BIN)/mypy -p balanceroute
	@$(BIN)/mypy tests
	@$(BIN)/mypy scripts

test: $(NATIVE) ## the tests, in JOBS processes; real processes use the native library, where cargo is
	@$(PYTEST)

test-all: $(NATIVE) ## all cases: every policy, and both event loops (about twice as long)
	@$(PYTEST) -m "not slow"

test-without-native: $(INSTALLED) ## those that stream through real processes again, in Python alone
	@TEST_NATIVE=off $(PYTEST) $(STREAMING)

test-vllm: $(INSTALLED) ## the proxy before real vLLM engines on the CPU (20 minutes; 6 GB once)
	@$(BIN)/python scripts/checks engines
	@BALANCEROUTE_VLLM_PYTHON=build/vllm-venv/bin/python $(BIN)/pytest -m slow tests/topologies

test-vllm-all: $(INSTALLED) ## each connector's engines are asked all, those of vLLM 0.33 too (twice as long)
	@$(BIN)/python scripts/checks engines --all
	@$(BIN)/python scripts/checks engines --all --vllm 0.33.0 --connector nixl

test-deploy: $(INSTALLED) ## the Helm chart and kustomizations against Kubernetes' schemas (needs go and kubectl; 3 minutes once)
	@GOBIN=$(CURDIR)/build/bin go install helm.sh/helm/v3/cmd/helm@v3.19.0
	@$(BIN)/python -m pip install -q --disable-pip-version-check kubernetes-validate
	@PATH=$(CURDIR)/build/bin:$$PATH $(BIN)/pytest -m "not slow" tests/topologies/test_deploy.py tests/topologies/test_rendered_manifests.py tests/topologies/test_api_server.py

kube: ## builds the API server of Kubernetes that test-deploy uses if it is there (needs go; 15 minutes and 3 GB once)
	@scripts/build_kube.sh build/kube

demo: $(INSTALLED) ## BR-H against JSQ, live before emulated engines and simulated: table, pictures in build/demo
	@$(BIN)/python scripts/reproduce demo

qos: $(INSTALLED) ## two tenants live before emulated engines, by phases: shares, refusals (3 minutes)
	@$(BIN)/python scripts/reproduce qos

simulate: $(INSTALLED) ## five policies on a public trace in virtual time: table, pictures in build/simulate
	@$(BIN)/balanceroute simulate --trace traces/public/mooncake_conversation.jsonl.gz \
		--ranks 8 --batch 16 --backlog 64 --segments 6 --plots build/simulate

bench: $(INSTALLED) ## one dispatch decision, large bodies, and the proxy beside vllm-router (10 minutes)
	@$(BIN)/python scripts/bench dispatch
	@$(BIN)/python scripts/bench bodies
	@$(BIN)/python scripts/bench proxy

docs: $(DOCS)/.installed ## the pages as a site in build/docs; a link that leads nowhere is an error
	@$(DOCS)/bin/sphinx-build -q -E -W --keep-going -c docs . build/docs
	@cp build/docs/README.html build/docs/index.html
	@echo "build/docs/index.html"

# Apart, as what it needs would change what mypy sees in .venv.
$(DOCS)/.installed: pyproject.toml constraints.txt
ifdef UV
	@uv venv -q --allow-existing --python $(PYTHON) $(DOCS)
	@uv pip install -q --python $(DOCS)/bin/python -c constraints.txt -e '.[docs]'
else
	@$(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[docs]'
endif
	@touch $@

constraints: ## the newest versions of what tests and pages need into constraints.txt (needs uv)
	@uv pip compile -q --upgrade --universal --python-version 3.11 --extra dev --extra docs --no-header --no-annotate \
		--no-emit-package setuptools pyproject.toml -o build/constraints.txt
	@{ head -1 constraints.txt; cat build/constraints.txt; } > build/constraints.new
	@mv build/constraints.new constraints.txt

fmt: $(INSTALLED) ## format in place
	@$(BIN)/ruff check --fix --quiet .
	@$(BIN)/ruff format --quiet .

clean: ## remove what is built
	@rm -rf .venv build dist .src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-12s %s\n", $$1, $$2 }' Makefile
