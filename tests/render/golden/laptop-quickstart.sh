#!/bin/sh
# Attempt 1 of run run-1: what zerun does on each node over SSH to start the agent there.
# By hand, on the node:
#
#   sh /home/ann/runs/quickstart-1/attempts/1/script NODE
#
# NODE is one of
#   localhost: ranks 0-1
#
# An agent detaches, outlives this shell, and is adopted, not doubled, when it is started again.
set -eu
agent_python=python3
runtime=/home/ann/runs/.blobs/0123abcd.zip

node=${1:?which node is this}
case $node in
  localhost) request='{"run_dir": "/home/ann/runs/quickstart-1", "attempt": 1, "node": "localhost"' ;;
  *)
    printf '%s is no node of this attempt\n' "$node" >&2
    exit 2
    ;;
esac

printf '%s}\n' "$request" | "$agent_python" "$runtime" start
