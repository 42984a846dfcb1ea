#!/usr/bin/env bash
# The paper's 17 runs in miniature, their nightly subset, or runs with an LMCache server: trace, model, sweep, page. Run
# again, it goes on where it was stopped. usage: [PYTHON=…] miniature.sh miniature|nightly|server-mode|three-engines OUT
set -euo pipefail
cd "$(dirname "$0")/.."
plan=$1 out=$2
python=${PYTHON:-.venv/bin/python}
elm=("$python" -m efficient_lmcache.cli)
source=${EFFICIENT_LMCACHE_DATA:-../shared}/traces/swebench-verified-mini-swe-agent.jsonl.gz
case $plan in
miniature) tasks=79 trim=(--calls 12) shares_server= ;;
nightly) tasks=32 trim=(--calls 12) shares_server= ;;
server-mode) tasks=32 trim=(--calls 12) shares_server=yes synthesized=(--tasks 32 --calls-per-task 12) ;;
three-engines) tasks=24 trim=(--tasks 20 --calls 9) shares_server=yes synthesized=(--tasks 20 --calls-per-task 9) ;;
*) echo "error: the plan is '$plan'; it must be miniature, nightly, server-mode or three-engines" >&2 && exit 2 ;;
esac
if [ ! -f "$out/agents.trace" ] && [ ! -f "$source" ] && [ -z "$shares_server" ]; then
    echo "error: $source is absent; EFFICIENT_LMCACHE_DATA names the directory that holds traces/" >&2
    exit 2
fi
mkdir -p "$out"
if [ ! -f "$out/agents.trace" ] && [ -f "$source" ]; then
    "${elm[@]}" trace import "$source" --tokenizer tekken --tasks "$tasks" --vocab 16384 \
        --out "$out/whole.trace" --force
    # Two cores compute some 15,000 tokens a second: the first calls of every task, and short outputs, are what fits.
    "${elm[@]}" trace trim "$out/whole.trace" "${trim[@]}" --max-output 8 --out "$out/agents.trace"
    rm "$out/whole.trace"
elif [ ! -f "$out/agents.trace" ]; then
    echo "$source is absent: agents are synthesized" >&2
    "${elm[@]}" trace synthesize --out "$out/agents.trace" "${synthesized[@]}" --vocab 16384 \
        --max-output 8 --max-prompt 14000
fi
[ -f "$out/model/config.json" ] || "${elm[@]}" model create "$out/model"
status=0
"${elm[@]}" replay sweep "deploy/reproduce/$plan.yaml" --trace "$out/agents.trace" --model "$out/model" \
    --out "$out/sweep" --resume || status=$?
[ "$status" -gt 1 ] || "${elm[@]}" report "$out/sweep" --trace "$out/agents.trace" -o "$out/report.html" --force
if [ "$shares_server" ] && [ "$status" = 0 ]; then
    "$python" benchmarks/server_mode.py "$out"/sweep/runs/* --trace "$out/agents.trace"
fi
exit "$status"
