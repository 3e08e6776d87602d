"""OpenVINO GenAI for peers.py, run by the Python of its environment: a JSON line of prompts in, one of tokens out.

python benchmarks/openvino_worker.py MODEL.gguf --threads 2 --max-new-tokens 48 [--prompt-lookup GAMMA]
"""

from __future__ import annotations

import argparse
import json
import sys

import numpy as np

sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]  # it sends statistics of use from processes of its own
import openvino  # noqa: E402
import openvino_genai  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="GGUF file of 16 or 8 bits, or a directory in OpenVINO's format")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--max-new-tokens", type=int, required=True)
    parser.add_argument("--dtype", choices=("f32", "bf16"), default="f32", help="of products")
    parser.add_argument("--prompt-lookup", type=int, default=0, help="draft length")
    args = parser.parse_args()
    options = {"INFERENCE_PRECISION_HINT": args.dtype, "INFERENCE_NUM_THREADS": args.threads}
    if args.prompt_lookup:
        options["prompt_lookup"] = True
    pipeline = openvino_genai.LLMPipeline(args.model, "CPU", **options)
    config = openvino_genai.GenerationConfig(max_new_tokens=args.max_new_tokens, do_sample=False)
    config.eos_token_id = pipeline.get_generation_config().eos_token_id
    config.stop_token_ids = pipeline.get_generation_config().stop_token_ids
    if args.prompt_lookup:
        config.num_assistant_tokens, config.max_ngram_size = args.prompt_lookup, 3
    print(json.dumps(openvino_genai.__version__), flush=True)
    for line in sys.stdin:
        prompts = json.loads(line)
        width = max(map(len, prompts))
        ids = np.array([[0] * (width - len(prompt)) + prompt for prompt in prompts], dtype=np.int64)
        mask = np.array([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], dtype=np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(mask))
        print(json.dumps([list(tokens) for tokens in pipeline.generate(inputs, config).tokens]), flush=True)


if __name__ == "__main__":
    main()
