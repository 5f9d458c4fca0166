#!/usr/bin/env python3
"""llama.cpp's server from a wheel, with the options of llama-server that `verify-export` gives: nothing to compile.

    pip install xllamacpp==2026.10.11549
    outrider verify-export FOLDER --engine llamacpp --server benchmarks/engines/llama_wheel.py

The wheel has llama.cpp of build 11549 for CPUs, with DFlash 2.  Caches are float32, without flash attention.
"""

from __future__ import annotations

import argparse
import signal
import sys

import xllamacpp

NAMES = (
    "-m", "-md", "--spec-type", "-ctk", "-ctv", "-ctkd", "-ctvd", "-fa", "--device", "-devd", "--host", "--log-colors"
)  # fmt: skip
NUMBERS = ("--spec-draft-n-max", "-c", "-np", "-t", "-tb", "--port")


def main() -> None:
    if "--version" in sys.argv:
        print(f"version: {xllamacpp.__version__.rpartition('.')[2]} (xllamacpp {xllamacpp.__version__})")
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in NAMES:
        parser.add_argument(name)
    for name in NUMBERS:
        parser.add_argument(name, type=int)
    parser.add_argument("--spec-draft-p-min", type=float, default=0.0)
    for name in ("--no-warmup", "--metrics"):
        parser.add_argument(name, action="store_true")
    server = xllamacpp.Server(settings(parser.parse_args()))  # it serves as long as it is there
    print("listening at", server.listening_address, flush=True)
    signal.sigwait([signal.SIGTERM, signal.SIGINT])


def settings(options: argparse.Namespace) -> xllamacpp.CommonParams:
    own, float32 = xllamacpp.CommonParams(), xllamacpp.ggml_type.GGML_TYPE_F32
    own.model.path, own.hostnames, own.port = options.m, [options.host], options.port
    own.n_ctx, own.n_parallel, own.endpoint_metrics, own.warmup = options.c, options.np, True, False
    own.n_gpu_layers, own.fit_params = 0, False
    own.cache_type_k = own.cache_type_v = float32
    own.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    own.cpuparams.n_threads = own.cpuparams_batch.n_threads = options.t
    if options.md is not None:
        name = options.spec_type.upper().replace("-", "_")
        own.speculative.types = [getattr(xllamacpp.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_{name}")]
        draft = own.speculative.draft
        draft.mparams.path, draft.n_max, draft.p_min = options.md, options.spec_draft_n_max, options.spec_draft_p_min
        draft.n_gpu_layers, draft.cache_type_k, draft.cache_type_v = 0, float32, float32
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = options.t
    return own


if __name__ == "__main__":
    main()
