#!/usr/bin/env bash
# The paper's 17 runs in miniature, or their nightly subset: trace, model, sweep, page. Run again, it goes on where it
# was stopped. usage: miniature.sh miniature|nightly OUT
set -euo pipefail
cd "$(dirname "$0")/.."
plan=$1 out=$2
elm=(.venv/bin/python -m efficient_lmcache.cli)
source=${EFFICIENT_LMCACHE_DATA:-../shared}/traces/swebench-verified-mini-swe-agent.jsonl.gz
case $plan in
miniature) tasks=79 ;;
nightly) tasks=32 ;;
*) echo "error: the plan is '$plan'; it must be miniature or nightly" >&2 && exit 2 ;;
esac
if [ ! -f "$source" ]; then
    echo "error: $source is absent; EFFICIENT_LMCACHE_DATA names the directory that holds traces/" >&2
    exit 2
fi
mkdir -p "$out"
if [ ! -f "$out/agents.trace" ]; then
    "${elm[@]}" trace import "$source" --tokenizer tekken --tasks "$tasks" --vocab 16384 \
        --out "$out/whole.trace" --force
    # Two cores compute some 15,000 tokens a second: the first calls of every task, and short outputs, are what fits.
    "${elm[@]}" trace trim "$out/whole.trace" --calls 12 --max-output 8 --out "$out/agents.trace"
    rm "$out/whole.trace"
fi
[ -f "$out/model/config.json" ] || "${elm[@]}" model create "$out/model"
status=0
"${elm[@]}" replay sweep "deploy/reproduce/$plan.yaml" --trace "$out/agents.trace" --model "$out/model" \
    --out "$out/sweep" --resume || status=$?
[ "$status" -gt 1 ] || "${elm[@]}" report "$out/sweep" --trace "$out/agents.trace" -o "$out/report.html" --force
exit "$status"
