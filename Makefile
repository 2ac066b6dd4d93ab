# Everything a newcomer needs: `make run` trains, `make test` proves. Both set themselves up.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup run test test-all lint docs accuracy zero

help:  ## what can be made
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' Makefile | expand -t 12

setup:  ## .venv with everything installed; does nothing when up to date
	@scripts/setup.sh

run: setup  ## the main job: a byte-level GPT, ZeRO stage 2 on 2 ranks, about a minute
	@.venv/bin/zerun submit jobs/quickstart.yaml --cluster laptop --follow

test: setup  ## lint, types and tests; as root also installs and meets a real Slurm and sshd
	@scripts/test.sh

test-all: setup  ## the same with the full products
	@scripts/test.sh --all

lint: setup  ## ruff and mypy alone
	@scripts/lint.sh

docs: setup  ## writes docs/cli.md, descriptions.md, messages.md, paper.md and zero.md's table of keys anew; accuracy.md is apart
	@.venv/bin/python scripts/gen_cli_docs.py
	@.venv/bin/python scripts/gen_description_docs.py
	@.venv/bin/python scripts/gen_messages_docs.py
	@.venv/bin/python scripts/gen_paper_docs.py
	@.venv/bin/python scripts/gen_zero_docs.py --config

# Not part of docs: it trains with real ranks at every setting of the page, which takes minutes. What the
# page says is held by tests/simulate/test_simulate_exact.py meanwhile, a part of it in `make test`.
accuracy: setup  ## writes docs/accuracy.md anew from real ranks, in minutes
	@.venv/bin/python scripts/gen_accuracy_docs.py

zero: setup  ## writes the tables and the picture of docs/zero.md anew from real ranks
	@.venv/bin/python scripts/gen_zero_docs.py
	@.venv/bin/python scripts/gen_zero_step.py
