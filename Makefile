# Everything here needs only Python >= 3.11 with venv, and make. Each target first makes the environment it needs
# in .venv, and makes it again whenever pyproject.toml has changed. Another Python: make test PYTHON=python3.13

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# The stamps say what was installed, and when: the package alone, with JupyterLab, with its tools, with what builds its
# site, or with CUDA's compiler.
CORE   := $(VENV)/.stamp-core
LAB    := $(VENV)/.stamp-lab
DEV    := $(VENV)/.stamp-dev
DOCS   := $(VENV)/.stamp-docs
NVRTC  := $(VENV)/.stamp-nvrtc
# PyTorch, DeepSpeed and others beside which zerosim is run have an environment of their own.
PEERS  := .venv-peers/.stamp

# The number of BLAS threads changes the last bits of a matmul, and more threads than cores only cost time.
ONE_THREAD := OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
# A process for each core. On two cores: 2:22 of wall time, 4:16 of the processors'. WORKERS=0 runs all in one.
WORKERS ?= auto
PYTEST  := $(BIN)/python -m pytest -n $(WORKERS)

# Python keeps what it has compiled, also where containers forbid it: else every process of a test compiles it again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
FIRST  := notebooks/01_the_worked_example.ipynb

.PHONY: help demo notebook test test-all peers peers-table lint types figures pictures notebooks docs slides browser bench gpu-check clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(CORE)  ## run the worked example: 4 weights, 2 ranks, ZeRO's stages 0 to 3
	@$(BIN)/zerosim replay
	@echo; echo "Next, in this shell:   . $(BIN)/activate   (with uv: write 'uv run zerosim' for zerosim)"
	@echo "and then               zerosim compare --model gpt-nano,  zerosim --help,  make notebook"

notebook: $(LAB)  ## open JupyterLab on the first notebook (NOTEBOOK=notebooks/04_rings.ipynb opens that one)
	$(BIN)/jupyter lab --config=notebooks/lab_config.py $(OPTIONS) $(or $(NOTEBOOK),$(FIRST))

test: $(DEV)  ## run the tests (two to three minutes of two cores)
	$(ONE_THREAD) $(PYTEST)

test-all: $(DEV) $(NVRTC)  ## run all tests, the slow ones too, with many more examples
	$(ONE_THREAD) HYPOTHESIS_PROFILE=long $(PYTEST) -m ""

peers: $(PEERS)  ## run PyTorch, DeepSpeed, transformers and JAX beside zerosim, on this CPU (docs/peers.md)
	$(ONE_THREAD) .venv-peers/bin/python -m pytest -m peer --peers

peers-table: $(PEERS)  ## run them, and write what they come to anew
	$(ONE_THREAD) .venv-peers/bin/python -m tests.peers.record

lint: $(DEV)  ## run the linter
	$(BIN)/ruff check .

types: $(DEV)  ## run the type checker
	$(BIN)/mypy

figures: $(CORE)  ## draw the figures anew, into figures/, and the museum's, into docs/assets/
	$(BIN)/zerosim figures
	$(BIN)/zerosim figures --dark
	$(BIN)/zerosim figures --format gif
	$(BIN)/zerosim figures --format gif --dark
	$(BIN)/python docs/museum_page.py

pictures: $(DEV)  ## take the pictures of the page that moves anew, into docs/assets/, with a Chromium
	PYTHONPATH=. $(ONE_THREAD) $(BIN)/python docs/explore_pictures.py

notebooks: $(DEV)  ## execute the notebooks anew, each beside its text
	$(ONE_THREAD) $(BIN)/python notebooks/execute.py

# What the page is made of; it is recorded anew when the package has changed.
EXPLORED := build/explore.html
$(EXPLORED): $(CORE) $(shell find zerosim -name '*.py' -o -path '*/display/explore/*')
	@mkdir -p $(@D)
	$(ONE_THREAD) $(BIN)/zerosim explore --out $@

docs: $(DOCS) $(EXPLORED)  ## build the documentation into build/docs/site; fails on a link that leads nowhere
	PYTHONPATH=docs $(BIN)/python -m zerosim_site build/docs
	cp $(EXPLORED) build/docs/pages/assets/explore.html
	PYTHONPATH=docs NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --config-file build/docs/mkdocs.yml
	PYTHONPATH=docs $(BIN)/python -m zerosim_site.check build/docs/site
	@echo "open build/docs/site/index.html"

slides: $(LAB)  ## slides of docs/lectures.md into build/slides, for a browser; reveal.js comes from where nbconvert says
	$(BIN)/python docs/slides.py build/slides

browser: docs  ## add JupyterLite to that site: zerosim in the page, for a web server; Pyodide comes from its own host
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[browser]'
	PYTHONPATH=docs $(BIN)/python -m zerosim_site.browser build/docs/site

bench: $(DEV)  ## measure speeds, each beside its floor or a peer (ROWS="ring gpt")
	$(BIN)/zerosim bench $(ROWS)

# With the Python that has CuPy, as it is: nothing is installed. PARTS=speed,nccl runs these alone.
gpu-check:  ## on a machine with NVIDIA GPUs: all that only it can show, into gpu_check/ (PYTHON= that has CuPy)
	$(PYTHON) -m zerosim gpu-check $(if $(PARTS),--only $(PARTS))

clean:  ## remove everything that make made, the environment too
	rm -rf $(VENV) .venv-peers build dist mutants .pytest_cache .hypothesis .mypy_cache .ruff_cache .benchmarks
	find . -name .git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

$(CORE): pyproject.toml
	@command -v $(PYTHON) > /dev/null || \
	    { echo "zerosim needs Python 3.11 or newer; there is no $(PYTHON) here." \
	           "Install one, or name it: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "zerosim needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
	           "Name a newer one: make PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@# Python compiles what is imported when it first is; to compile all of it here takes two seconds of a newcomer.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --editable .
	@touch $@

$(LAB): $(CORE)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[notebook]'
	@touch $@

$(DEV): $(CORE)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

$(NVRTC): $(DEV)
	@if $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[nvrtc]'; then touch $@; \
	    else echo "CUDA's compiler could not be installed; see the tests that are skipped" >&2; fi

$(PEERS): pyproject.toml
	@test -x .venv-peers/bin/pip || $(PYTHON) -m venv .venv-peers
	DS_BUILD_OPS=0 .venv-peers/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[peers]'
	@touch $@

$(DOCS): $(CORE)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	@touch $@
