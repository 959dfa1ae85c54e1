# Everything runs in .venv, which each target makes or refreshes only when pyproject.toml changed.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: install demo serve check leaderboard rederive prove test test-slow test-gpu docs wheel bench format clean

install: .venv/.ready

.venv/.ready: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv (the first time takes a few minutes: torch is large)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

demo: install
	$(BIN)/patchcleanser demo

serve: install
	$(BIN)/patchcleanser serve

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m patchcleanser.reports.leaderboard --check

# Every claim against its rows, and the page of the claims.
leaderboard: install
	$(BIN)/python -m patchcleanser.reports.leaderboard

# Some rows of a run computed again from model and images, in a copy: an audit in the run itself would be another one.
RUN ?= results/reproduce/rows/tiny-cifar10-5-source-6x6-200-cpu-exact
rederive: install
	@rm -rf build/rederive && mkdir -p build && cp -r '$(RUN)' build/rederive
	$(BIN)/patchcleanser audit build/rederive --sample 2 --attack 2 --iterations 10 --locations 1 --device cpu

# The proofs in Coq, all of them anew; it installs nothing.
prove:
	@command -v coqc > /dev/null || { echo "make prove needs coqc: install coq, e.g. apt-get install coq"; exit 1; }
	@rm -rf build/proofs && mkdir -p build/proofs && cp proofs/*.v proofs/Makefile build/proofs
	@$(MAKE) --no-print-directory -j 2 -C build/proofs prove

test: install
	$(BIN)/pytest -n 2 -m "not slow and not gpu" --doctest-modules

test-slow: install
	$(BIN)/pytest -m slow

test-gpu: install
	$(BIN)/pytest -m gpu

docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --site-dir site

# Wheel and sdist, and the demo from the wheel in an environment that has nothing else.
wheel: install
	rm -rf dist build
	$(BIN)/python -m build --outdir dist .
	$(PYTHON) -m venv build/bare
	build/bare/bin/pip install --quiet --disable-pip-version-check dist/*.whl
	cd build && bare/bin/patchcleanser demo --limit 20 --device cpu

bench: install
	$(BIN)/python benchmarks/speed.py
	$(BIN)/python benchmarks/speed.py --suite growth

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .mypy_cache .ruff_cache .hypothesis dist build site
