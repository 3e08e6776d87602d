"""llama.cpp's server out of the wheel ``xllamacpp``, with those of its options that benchmarks and tests here use."""

from __future__ import annotations

import argparse
import time

import xllamacpp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--model-draft", default="")
    parser.add_argument("--spec-type", default="none")
    parser.add_argument("--spec-draft-n-max", type=int, default=3)
    parser.add_argument("--spec-draft-p-min", type=float, default=0.0)
    parser.add_argument("--spec-ngram-simple-size-n", type=int, default=12)
    parser.add_argument("--spec-ngram-simple-size-m", type=int, default=48)
    parser.add_argument("-lv", dest="verbosity", type=int, default=3)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--ctx-size", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--parallel", type=int, default=1)
    args, _ = parser.parse_known_args()
    params = xllamacpp.CommonParams()
    params.model.path, params.hostnames, params.port = args.model, [args.host], args.port
    params.n_ctx, params.n_parallel, params.warmup, params.n_gpu_layers = args.ctx_size, args.parallel, False, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = args.threads
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.endpoint_metrics, params.verbosity = True, args.verbosity
    kind, ngram = args.spec_type.upper().replace("-", "_"), params.speculative.ngram_simple
    params.speculative.types = [getattr(xllamacpp.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_{kind}")]
    ngram.size_n, ngram.size_m = args.spec_ngram_simple_size_n, args.spec_ngram_simple_size_m
    if args.model_draft:
        draft = params.speculative.draft
        draft.mparams.path, draft.n_max, draft.p_min = args.model_draft, args.spec_draft_n_max, args.spec_draft_p_min
        draft.n_gpu_layers = 0
        draft.cache_type_k = draft.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main()
