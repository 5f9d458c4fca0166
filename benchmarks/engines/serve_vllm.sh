#!/bin/sh
# Serve the demo target by the vLLM that install.py put here, on loopback, with n-gram speculation.
# More arguments go to vLLM: ./serve_vllm.sh --port 8123.  VENV names another environment.
here=$(cd "$(dirname "$0")" && pwd)
export VLLM_CPU_KVCACHE_SPACE=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
exec "${VENV:-$here/.venv}/bin/python" -m vllm.entrypoints.openai.api_server \
  --model "$here/../../outrider/demo/target" --served-model-name demo --host 127.0.0.1 --port "${PORT:-8123}" \
  --dtype float32 --enforce-eager --max-num-seqs 16 --per-request-spec-decode-metrics detailed \
  --speculative-config '{"method":"ngram","num_speculative_tokens":5,"prompt_lookup_max":5,"prompt_lookup_min":2}' "$@"
