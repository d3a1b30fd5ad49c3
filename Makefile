# Everything happens in .venv, which the first target to run makes. Repeat as you like.
#   make demo | test [ARGS='-k machine'] | lint | sanitize | wheel | clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALLED := $(VENV)/installed.stamp
LINTERS := $(VENV)/linters.stamp
SOURCES := pyproject.toml CMakeLists.txt constraints.txt $(wildcard csrc/* csrc/*/*)

.PHONY: demo test lint sanitize wheel clean
.DELETE_ON_ERROR:

demo: $(INSTALLED)
	$(BIN)/featherweight compare smollm2-135m -p 256 -n 32 --budget 240s

test: $(INSTALLED)
	$(BIN)/python -m pytest $(ARGS)

lint: $(LINTERS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# All of the native library, called under AddressSanitizer and UBSan.
sanitize: $(INSTALLED)
	$(BIN)/cmake -S . -B build/sanitize -DFEATHERWEIGHT_SANITIZE=ON
	$(BIN)/cmake --build build/sanitize --parallel $$(getconf _NPROCESSORS_ONLN)
	build/sanitize/featherweight

# dist/featherweight-VERSION-py3-none-PLATFORM.whl; fails without a compiler.
wheel: $(INSTALLED)
	FEATHERWEIGHT_REQUIRE_NATIVE=1 $(PIP) wheel --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) build dist
	find . -name __pycache__ -prune -exec rm -rf {} +
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis

# A virtual environment without pip is one that was interrupted: made anew.
$(INSTALLED): $(SOURCES)
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(PIP) install -c constraints.txt -e '.[all,test]'
	touch $@

$(LINTERS): $(INSTALLED)
	$(PIP) install -c constraints.txt -e '.[dev]'
	touch $@
