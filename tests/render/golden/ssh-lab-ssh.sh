#!/bin/sh
# Attempt 1 of run run-1: what zerun does on each node over SSH to start the agent there.
# By hand, on the nodes, the first one first:
#
#   sh /home/ann/runs/ssh-1/attempts/1/script NODE [ANNOUNCEMENT]
#
# NODE is one of
#   node01: ranks 0-1
#   node02: ranks 2-3
#   node03: ranks 4-5
#   node04: ranks 6-7
#
# The first node answers with an announcement, where ranks and agents meet; the others need it. Where the run
# folder is shared they find it there by themselves, elsewhere it is the second argument: a JSON object.
# An agent detaches, outlives this shell, and is adopted, not doubled, when it is started again.
set -eu
agent_python=python3
runtime=/home/ann/runs/.blobs/0123abcd.zip
rendezvous=/home/ann/runs/ssh-1/attempts/1/rendezvous.json

node=${1:?which node is this}
case $node in
  node01) request='{"run_dir": "/home/ann/runs/ssh-1", "attempt": 1, "node": "node01"' ;;
  node02) request='{"run_dir": "/home/ann/runs/ssh-1", "attempt": 1, "node": "node02"' ;;
  node03) request='{"run_dir": "/home/ann/runs/ssh-1", "attempt": 1, "node": "node03"' ;;
  node04) request='{"run_dir": "/home/ann/runs/ssh-1", "attempt": 1, "node": "node04"' ;;
  *)
    printf '%s is no node of this attempt\n' "$node" >&2
    exit 2
    ;;
esac

if [ "$node" != node01 ]; then
  announcement=${2:-$(cat "$rendezvous")}
  request="$request, \"rendezvous\": $announcement"
fi
printf '%s}\n' "$request" | "$agent_python" "$runtime" start
