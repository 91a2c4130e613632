# Two commands on a fresh machine: `make image` builds the headline image, `make test` tries
# the whole product once. Needed beforehand: Python 3.11 or later, git, make, and apt as root
# or with sudo.

# Without bytecode every start of Python compiles what it imports; the tests start it
# thousands of times.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
BIN := .venv/bin
# smdistributed is checked and tested with the Python that has torch.
TORCH := ../.cache/peers/smdistributed/bin/python
# One process more than there are cores, because some tests wait (tests/conftest.py), and at
# most four, because each imports all tests first. What tests share is made once: those of a
# file stay together.
PARALLEL := --numprocesses auto --maxprocesses 4 --dist loadfile
# Suites are run by tools/evidence.py, which writes a record of it; it counts the tests in
# this file.
TESTS := -m pytest --junitxml=$$JUNIT
PYTEST := $(BIN)/python $(TESTS)
# Seconds after which a test ends its process (pyproject.toml). The first test that wants an
# image builds it. What is run by hand compiles for hours.
LIMIT := -o faulthandler_timeout=7200
LIMIT_BY_HAND := -o faulthandler_timeout=43200
# Two tests with an image at once, and those of a file one after another.
TWO_AT_ONCE := --numprocesses 2 --dist loadfile
RELEASE_TEST := tests/push/test_release_engine.py

.PHONY: image test test-quick test-all gpu coverage check fix proof arm64 targets release wheels docs site golden lock-tools benchmark reading setup engine engines peers torch clean

image: setup engine  ## set everything up, then build and test the PyTorch image for CUDA 12.1
	$(BIN)/python build.py --framework pytorch --cuda cu121

test: setup engines torch  ## set up, then try everything once: a real image, jobs on one and two hosts, extend, push; 10 to 17 minutes
	@tools/evidence.py run "make test" \
		'what needs no engine: $(PYTEST) $(PARALLEL)' \
		'the core of smdistributed, on two and four ranks: cd smdistributed && $(TORCH) $(TESTS) -m core --numprocesses 2' \
		'the cpu image is built and tested, and jobs run in it: $(PYTEST) -m core $(LIMIT) $(TWO_AT_ONCE) tests/image tests/push'

test-quick: setup  ## the tests that need no engine; 7 to 11 minutes
	$(BIN)/python -m pytest $(PARALLEL)

# Before a change of an engine, a recipe, the supervisor or a transport is called done.
# The test of a release comes last and alone: it builds the cpu image from today's archive
# under the tag that the other engine tests use.
test-all: setup engines peers  ## every test, but for `proof`, `arm64` and SMP_FULL_MATRIX=1; two hours
	@tools/evidence.py run "make test-all" \
		'what needs no engine: $(PYTEST) $(PARALLEL)' \
		'smdistributed: cd smdistributed && $(TORCH) $(TESTS) --numprocesses 2' \
		'real images, real jobs: $(PYTEST) -m engine $(LIMIT) --numprocesses 3 --ignore $(RELEASE_TEST)' \
		'a release, killed and begun again: $(PYTEST) -m engine $(LIMIT) $(RELEASE_TEST)'

gpu:  ## everything that one NVIDIA GPU can show, with a Python that has CUDA PyTorch; writes a record
	$(PYTHON) tests/gpu/run.py --report report.json; status=$$?; $(PYTHON) tools/evidence.py gpu report.json; exit $$status

coverage: setup torch  ## what AWS's pages describe: the quick tests of its rows; ALL=1 runs the others, too
	$(BIN)/python tools/coverage_table.py $(if $(ALL),--all)

check: setup torch  ## lint, format, types, import contracts, generated and golden files; says what to run for a refusal
	@tools/check

fix: setup  ## write everything that `make check` compares: lint, format, documentation, golden files
	$(BIN)/ruff check --fix --exit-zero .
	$(BIN)/ruff format .
	$(MAKE) docs
	$(MAKE) golden

proof: setup engines  ## by hand: every source component of the vendors' recipes, compiled in one build; SOURCES=a mirror
	@TRAINWORKS_PROOF=$(SOURCES) tools/evidence.py run "make proof" \
		'source components of vendors: $(PYTEST) -m engine $(LIMIT_BY_HAND) tests/image/test_source_page.py'

arm64: setup engines  ## by hand: build, test and train images for arm64, emulated on another machine; hours
	tools/set-up-emulation
	@QEMU_CPU=neoverse-v1 TRAINWORKS_ARM64=1 tools/evidence.py run "make arm64" \
		'images for arm64: $(PYTEST) -m engine $(LIMIT_BY_HAND) tests/image/test_arm64.py'

targets: setup engine  ## build, test and record every package target from the last commit, images removed; ONLY=GLOB, SOURCES=a mirror; hours, and goes on where it was
	$(BIN)/python tools/targets $(if $(ONLY),--only "$(ONLY)") $(if $(SOURCES),--mirror "$(SOURCES)")

release: setup engines  ## build, test, scan, prove and push every target; REPOSITORY=HOST/NAME, SOURCES=a mirror; hours, and goes on where it was
	@tools/evidence.py run "make release" \
		'every target: $(BIN)/python tools/release --repository "$(REPOSITORY)" $(if $(SOURCES),--mirror "$(SOURCES)")'; \
		status=$$?; $(BIN)/python tools/generate.py; exit $$status

wheels: setup  ## build the wheels of the three packages into dist/, with checksums; TAG=vX.Y.Z for a release
	$(BIN)/python tools/wheels.py $(if $(TAG),--tag "$(TAG)")

docs: setup  ## write the generated parts of the documentation, and the schemas
	$(BIN)/python tools/generate.py
	$(BIN)/python tools/write_buildspec.py

site: setup  ## write the documentation as a site, build/site/docs/index.html
	$(BIN)/sphinx-build -W -b html -c docs . build/site

golden: setup  ## write the golden files anew; review the difference
	TRAINWORKS_UPDATE_GOLDEN=1 $(BIN)/python -m pytest --quiet -k golden

lock-tools: setup  ## write tools/*.lock anew: the newest versions of what `make setup` installs, with their hashes
	tools/lock-tools

benchmark: setup engines peers  ## measure builds beside a plain Dockerfile, print ratios
	$(BIN)/python benchmarks/builds.py

setup: .venv/complete  ## the virtual environment with everything that the builder and its tests need

.venv/complete: pyproject.toml launcher/pyproject.toml testing/pyproject.toml tools/requirements.lock tools/uv.lock tools/set-up-python tools/install-packages
	PYTHON=$(PYTHON) tools/set-up-python .venv tools/requirements.lock . ./launcher ./testing
	@touch $@

engine:  ## a container engine, installed and started where none answers
	@tools/set-up-engine

engines:  ## Docker and buildah, as the tests want them
	@tools/set-up-engine all

peers: setup  ## the programs that the launcher is tested and measured with: Open MPI, torchrun, sagemaker-training, SDKs
	@tools/set-up-peers

torch: setup  ## the environment that checks and tests smdistributed: PyTorch, transformers, Open MPI
	@tools/set-up-peers smdistributed

reading:  ## print how each package reads, beside its peers: tokens a line, conditionals, comments, pronouns; no gate
	@$(PYTHON) tools/reading.py

clean:  ## remove what `make` made in this folder; images stay in their engine
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	cd smdistributed && rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
