.PHONY: help setup serving clients page serve test lint types check audit dashboard bench clean
.DEFAULT_GOAL := help

# In quotes wherever it stands: a clone may lie in a folder with a space in its name. What is here
# and in scripts/ runs with what macOS has: make 3.81 and a shell that knows POSIX alone.
BIN := $(CURDIR)/.venv/bin
WORKERS := 2
BENCHMARKS := engine_vs_mlx_lm http_vs_server prefix_reuse disk_prefix pace load_pause large_bodies embeddings fair_share structured observers memory

help:
	@echo 'make serve   install what serving needs into .venv, once, and serve the embedded model on 127.0.0.1:8000'
	@echo '             more options: make serve ARGS="--model mlx-community/Llama-3.2-3B-Instruct-4bit --port 9000"'
	@echo 'make setup   install that and what the tests need (PYTHON=/path/to/python3, MLX=metal|cuda13|cuda12|cpu to choose)'
	@echo 'make clients install the clients and the CUDA compiler that tests try (gigabytes; else skipped)'
	@echo 'make page    build frontend/ into the package, where it is committed (npm)'
	@echo 'make test    ruff check, ruff format --check, mypy, then all the tests'
	@echo 'make check   the tests alone; some of them: make check ARGS="-k stop_strings"; WORKERS=0: in one process'
	@echo 'make audit   bandit over the code, pip-audit over the pinned dependencies (asks PyPI)'
	@echo 'make dashboard  draw docs/grafana over a server in use (npm, Chromium, Prometheus; 700 MB)'
	@echo 'make bench   run the benchmarks (minutes); one of them: see benchmarks/README.md'
	@echo 'make clean   remove .venv and every cache'

setup:
	@scripts/setup.sh test

serving:
	@scripts/setup.sh serve

clients:
	@scripts/clients.sh

page:
	@scripts/page.sh
	cd frontend && npm run --silent build

serve: serving
	@exec "$(BIN)/mlx-manager" serve $(ARGS)

test: lint types check

lint: setup
	cd backend && "$(BIN)/ruff" check . ../benchmarks
	cd backend && "$(BIN)/ruff" format --check . ../benchmarks

types: setup
	cd backend && "$(BIN)/mypy" --num-workers=$(WORKERS)

check: setup
	cd backend && HF_HUB_OFFLINE=1 "$(BIN)/python" -m pytest --quiet --numprocesses=$(WORKERS) --dist=loadfile --no-loadscope-reorder $(ARGS)

audit: setup
	cd backend && "$(BIN)/bandit" --quiet --configfile pyproject.toml --recursive mlx_manager
	"$(BIN)/pip-audit" --requirement constraints.txt --disable-pip --no-deps

dashboard: setup
	@scripts/prometheus.sh
	@cd backend/tests/dashboard && npm install --silent --no-audit --no-fund
	@"$(BIN)/python" backend/tests/dashboard/look.py $(ARGS)

bench: setup
	@failed=; \
	for name in $(BENCHMARKS); do "$(BIN)/python" benchmarks/$$name.py $(ARGS) || failed="$$failed $$name"; done; \
	[ -z "$$failed" ] || { echo "make bench: without figures:$$failed" >&2; exit 1; }

clean:
	rm -rf .venv .venv-clients .uv build backend/tests/clients/*/node_modules backend/tests/dashboard/node_modules frontend/node_modules backend/.mypy_cache backend/.pytest_cache backend/.ruff_cache backend/.hypothesis .ruff_cache
	find backend benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
