# make demo   a video from a prompt with the model that ships here
# make test   lint, formatting, types, layering, tests
# Both create .venv on first use. PYTHON picks the interpreter (3.11 or 3.12), TORCH the build of torch.
PYTHON ?= python3
TORCH ?= torch==2.13.0
PROMPT ?= a butterfly moving right on a blue background
SEED ?= 7
BIN := .venv/bin

.PHONY: demo test clean

demo: .venv/.run
	$(BIN)/loopwright generate loopwright/tiny-wan --prompt "$(PROMPT)" --seed $(SEED) \
		--output-path demo/demo.mp4 --contact-sheet demo/demo.png

test: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

.venv/.run: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' \
		|| { echo "Loopwright needs Python 3.11 or 3.12; set PYTHON=/path/to/one"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

.venv/.dev: .venv/.run
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

clean:
	rm -rf .venv demo outputs build
