"""Names of crossdraft-advisor, registered through the hooks that third parties use."""

from typing import Any

from crossdraft import Register, hookimpl

_PACKAGE = "crossdraft_advisor"
_ENGINES = f"{_PACKAGE}.engines.builtin"
_COMMANDS = {
    "Prove": {
        "certify-samples": (
            "certify_samples:CertifySamples",
            "test an engine's draws against the target's distribution, or plan how many show a bias",
        ),
        "certify-model": (
            "certify_model:CertifyModel",
            "test the first token of a real model against the target's distribution",
        ),
        "verify-engine": (
            "verify_engine.command:VerifyEngine",
            "check an engine's steps and text against replay",
        ),
        "compare-texts": (
            "compare_texts:CompareTexts",
            "check if greedy texts differ by more than rounding",
        ),
    },
    "Decide": {
        "replay": (
            "replay.command:Replay",
            "compute the block efficiency of pairs on recorded responses",
        ),
        "diagnose": ("diagnose.command:Diagnose", "find the cause of a low acceptance rate among common mistakes"),
        "advise": (
            "advise.command:Advise",
            "recommend a drafter, verifier and draft length per batch size, and write settings",
        ),
        "gate": ("gate:Gate", "fail a build if the acceptance length dropped since a baseline"),
        "simulate": ("simulate.command:Simulate", "simulate draft lengths under traffic: latency and goodput"),
    },
}
_FORMATS = {
    "vllm": ("vllm:VllmFormat", "log, counters, and a configuration with synthetic acceptance"),
    "sglang": ("sglang:SglangFormat", "log, counters and gauge"),
    "llama.cpp": ("llama_cpp:LlamaCppFormat", "log, counters, timings of responses, output of its examples"),
    "speeds": ("speed_table:SpeedTable", "CSV of batch_size,gamma,tokens_per_s,acceptance_length"),
    "rapid-mlx": ("rapid_mlx:RapidMlxCounters", "counters of its server"),
    "response-statistics": (
        "responses:ResponseStatistics",
        "statistics of each response: vLLM, TensorRT-LLM, AIPerf's profile_export.jsonl",
    ),
    "sglang-responses": ("responses:SglangResponses", "meta_info of each response, and the log of requests"),
    "tensorrt-llm-responses": ("responses:TensorRtLlmResponses", "tokens per iteration of each response"),
    "tensorrt-llm-counters": ("responses:TensorRtLlmCounters", "counters of its server, by position"),
    "tensorrt-llm-iterations": ("responses:IterationStats", "statistics of each iteration"),
    "vllm-bench": ("benchmarks:VllmBench", "vllm bench serve: table and JSON"),
    "aiperf": ("benchmarks:AiPerf", "profile_export_aiperf.json"),
    "trtllm-bench": ("benchmarks:TrtllmBench", "trtllm-bench: report and JSON"),
    "sglang-bench": ("benchmarks:SglangBench", "sglang.bench_serving: table and JSONL; /server_info"),
    "speculators": ("benchmarks:Speculators", "acceptance_analysis.txt"),
    "spec-bench": ("benchmarks:SpecBench", "answers of Spec-Bench and EAGLE"),
    "golden-al": ("golden_al:GoldenAlCurves", "golden acceptance-length curves of InferenceX, in YAML"),
    "speculation-profile": (
        "speculation_profile:SpeculationProfileRates",
        "speculation_profile.json, the acceptance stored with a draft checkpoint",
    ),
}
_RESPONSES = {
    "sglang-generate": ("SglangGenerate", "responses of SGLang's /generate"),
    "sglang-extension": ("SglangExtension", "completions of SGLang with token ids in sglext"),
    "llama.cpp-completion": ("LlamaCppCompletion", "responses of llama.cpp's /completion"),
    "lm-eval": ("LmEvalSamples", "samples that lm-eval logs"),
    "openai-responses": ("OpenAiResponses", "responses of OpenAI's Responses API"),
    "anthropic-messages": ("AnthropicMessages", "responses of Anthropic's Messages API"),
    "vllm-outputs": ("VllmOutputs", "outputs of vLLM's offline API"),
    "text-generation": ("TextGeneration", "responses of Text Generation Inference"),
    "ollama": ("Ollama", "responses of Ollama's /api/chat and /api/generate"),
    "prompt-completion": ("PromptCompletion", "prompts and completions of data sets"),
    "conversations": ("Conversations", "conversations of data sets: ShareGPT, LMSYS-Chat, messages for fine-tuning"),
}


@hookimpl
def crossdraft_register_engines(register: Register) -> None:
    register("vllm", f"{_ENGINES}.vllm:Vllm", summary="--speculative-config")
    register(
        "vllm-cpu", f"{_ENGINES}.vllm:VllmCpu", summary="--speculative-config for CPUs, without block verification"
    )
    register(
        "vllm-synthetic",
        f"{_ENGINES}.vllm:VllmSynthetic",
        summary="--speculative-config with synthetic acceptance, to time a schedule",
    )
    register("sglang", f"{_ENGINES}.sglang:Sglang", summary="--speculative-*")
    register(
        "sglang-synthetic",
        f"{_ENGINES}.sglang:SglangSynthetic",
        summary="--speculative-* with a simulated acceptance length, to time a draft length",
    )
    register("tensorrt-llm", f"{_ENGINES}.tensorrt_llm:TensorRtLlm", summary="speculative_config in YAML")
    register(
        "tensorrt-llm-synthetic",
        f"{_ENGINES}.tensorrt_llm:TensorRtLlmSynthetic",
        summary="speculative_config with a forced acceptance length, to time a draft length",
    )
    register(
        "golden-al",
        f"{_ENGINES}.golden_al:GoldenAl",
        summary="golden acceptance-length curves of InferenceX, in YAML",
    )
    register(
        "aiconfigurator",
        f"{_ENGINES}.simulators:Aiconfigurator",
        summary="--nextn and the mean of accepted tokens",
    )
    register(
        "dynamo-mocker",
        f"{_ENGINES}.simulators:DynamoMocker",
        summary="conditional acceptance rates of Dynamo's mocker",
    )
    register(
        "atom-synthetic",
        f"{_ENGINES}.simulators:AtomSynthetic",
        summary="--method with a forced acceptance length, to time a draft length",
    )
    register("llama.cpp", f"{_ENGINES}.llama_cpp:LlamaCpp", summary="--spec-*")
    register("transformers", f"{_ENGINES}.transformers:Transformers", summary="arguments of generate")
    register(
        "speculation-profile",
        f"{_ENGINES}.speculation_profile:SpeculationProfile",
        summary="speculation_profile.json, the acceptance stored with a draft checkpoint",
    )


@hookimpl
def crossdraft_register_acceptance_formats(register: Register) -> None:
    for name, (reference, summary) in _FORMATS.items():
        register(name, f"{_ENGINES}.{reference}", summary=summary)


@hookimpl
def crossdraft_register_response_formats(register: Register) -> None:
    for name, (reference, summary) in _RESPONSES.items():
        register(name, f"{_PACKAGE}.replay.response_formats:{reference}", summary=summary)


@hookimpl
def crossdraft_register_sections(register: Register) -> None:
    register(
        "engine-settings",
        f"{_PACKAGE}.advise.engine_settings:engine_settings",
        summary="settings with which engines draft as the pairs did",
    )


@hookimpl
def crossdraft_register_servers(register: Register) -> None:
    register("openai", f"{_ENGINES}.openai:OpenAiServer", summary="a server that runs, with /v1/completions")


@hookimpl
def crossdraft_register_cell_runners(register: Register) -> None:
    register("engine", f"{_PACKAGE}.engines.engine_cell:EngineCell", summary="cells of an engine's server")


@hookimpl
def crossdraft_register_machines(register: Register) -> None:
    register("roofline", f"{_PACKAGE}.roofline.roofline:modelled", summary="passes on accelerators, by the roofline")


@hookimpl
def crossdraft_summary_written(summary: Any) -> None:
    """Write the cost tables of the engines of a run into its directory."""
    if any(result.config.engine is not None for result in summary.results):
        from crossdraft.framework.runs.run_directory import RunDirectory

        from .engines.served_cost import cost_tables

        for name, table in cost_tables(summary.results).items():
            RunDirectory(summary.directory).write_text(name, table)


@hookimpl
def crossdraft_register_commands(register: Register) -> None:
    for heading, commands in _COMMANDS.items():
        for name, (reference, summary) in commands.items():
            register(name, f"{_PACKAGE}.commands.{reference}", summary, heading)
