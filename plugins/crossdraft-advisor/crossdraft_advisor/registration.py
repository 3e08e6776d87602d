"""Names of crossdraft-advisor, registered through the hooks that third parties use."""

from collections.abc import Iterable
from typing import Any

from crossdraft import Register, hookimpl

_PACKAGE = "crossdraft_advisor"
_ENGINES = f"{_PACKAGE}.engines.builtin."
#: Name, module and class, and summary of each, in lines; of commands by the heading of their help.
_COMMANDS = {
    "Prove": """
certify-samples | certify_samples:CertifySamples | test an engine's draws against the target's distribution, or plan how many show a bias
certify-model | certify_model:CertifyModel | test the first token of a real model against the target's distribution
verify-engine | verify_engine:VerifyEngine | check an engine's steps and text against replay
compare-texts | compare_texts:CompareTexts | check if greedy texts differ by more than rounding
""",  # noqa: E501
    "Decide": """
replay | replay.command:Replay | compute the block efficiency of pairs on recorded responses
diagnose | diagnose:Diagnose | find the cause of a low acceptance rate among common mistakes
advise | advise:Advise | recommend a drafter, verifier and draft length per batch size, and write settings
gate | gate:Gate | fail a build if the acceptance length dropped since a baseline
simulate | simulate:Simulate | simulate draft lengths under traffic: latency and goodput
""",
}
_SETTINGS = """
vllm | vllm:Vllm | --speculative-config
vllm-cpu | vllm:VllmCpu | --speculative-config for CPUs, without block verification
vllm-synthetic | vllm:VllmSynthetic | --speculative-config with synthetic acceptance, to time a schedule
sglang | sglang:Sglang | --speculative-*
sglang-synthetic | sglang:SglangSynthetic | --speculative-* with a simulated acceptance length, to time a draft length
tensorrt-llm | settings_only:TensorRtLlm | speculative_config in YAML
tensorrt-llm-synthetic | settings_only:TensorRtLlmSynthetic | speculative_config with a forced acceptance length, to time a draft length
golden-al | curves:GoldenAl | golden acceptance-length curves of InferenceX, in YAML
aiconfigurator | settings_only:Aiconfigurator | --nextn and the mean of accepted tokens
dynamo-mocker | settings_only:DynamoMocker | conditional acceptance rates of Dynamo's mocker
atom-synthetic | settings_only:AtomSynthetic | --method with a forced acceptance length, to time a draft length
llama.cpp | llama_cpp:LlamaCpp | --spec-*
transformers | settings_only:Transformers | arguments of generate
speculation-profile | curves:SpeculationProfile | speculation_profile.json, the acceptance stored with a draft checkpoint
"""  # noqa: E501
_FORMATS = """
vllm | vllm:VllmFormat | log, counters, and a configuration with synthetic acceptance
sglang | sglang:SglangFormat | log, counters and gauge
llama.cpp | llama_cpp:LlamaCppFormat | log, counters, timings of responses, output of its examples
speeds | benchmarks:SpeedTable | CSV of batch_size,gamma,tokens_per_s,acceptance_length
rapid-mlx | responses:RapidMlxCounters | counters of its server
response-statistics | responses:ResponseStatistics | statistics of each response: vLLM, TensorRT-LLM, AIPerf's profile_export.jsonl
sglang-responses | responses:SglangResponses | meta_info of each response, and the log of requests
tensorrt-llm-responses | responses:TensorRtLlmResponses | tokens per iteration of each response
tensorrt-llm-counters | responses:TensorRtLlmCounters | counters of its server, by position
tensorrt-llm-iterations | responses:IterationStats | statistics of each iteration
vllm-bench | benchmarks:VllmBench | vllm bench serve: table and JSON
aiperf | benchmarks:AiPerf | profile_export_aiperf.json
trtllm-bench | benchmarks:TrtllmBench | trtllm-bench: report and JSON
sglang-bench | benchmarks:SglangBench | sglang.bench_serving: table and JSONL; /server_info
speculators | benchmarks:Speculators | acceptance_analysis.txt
spec-bench | benchmarks:SpecBench | answers of Spec-Bench and EAGLE
golden-al | curves:GoldenAlCurves | golden acceptance-length curves of InferenceX, in YAML
speculation-profile | curves:SpeculationProfileRates | speculation_profile.json, the acceptance stored with a draft checkpoint
"""  # noqa: E501
_RESPONSES = """
sglang-generate | SglangGenerate | responses of SGLang's /generate
sglang-extension | SglangExtension | completions of SGLang with token ids in sglext
llama.cpp-completion | LlamaCppCompletion | responses of llama.cpp's /completion
lm-eval | LmEvalSamples | samples that lm-eval logs
openai-responses | OpenAiResponses | responses of OpenAI's Responses API
anthropic-messages | AnthropicMessages | responses of Anthropic's Messages API
vllm-outputs | VllmOutputs | outputs of vLLM's offline API
text-generation | TextGeneration | responses of Text Generation Inference
ollama | Ollama | responses of Ollama's /api/chat and /api/generate
prompt-completion | PromptCompletion | prompts and completions of data sets
conversations | Conversations | conversations of data sets: ShareGPT, LMSYS-Chat, messages for fine-tuning
"""


def _hook(prefix: str, *tables: str, headings: Iterable[str] = ("",)) -> Any:
    """A hook that registers the names of tables, each with its class behind ``prefix``, its summary and a heading."""

    def register_all(register: Register) -> None:
        for table, heading in zip(tables, headings, strict=True):
            for line in table.strip().splitlines():
                name, reference, summary = line.split(" | ")
                register(name, prefix + reference, summary, heading)

    return hookimpl(register_all)


crossdraft_register_commands = _hook(f"{_PACKAGE}.commands.", *_COMMANDS.values(), headings=_COMMANDS)
crossdraft_register_engines = _hook(_ENGINES, _SETTINGS)
crossdraft_register_servers = _hook(_ENGINES, "openai | openai:OpenAiServer | a server that runs, with /v1/completions")


@hookimpl
def crossdraft_register_formats(register: Register) -> None:
    """Register formats of acceptance and of responses."""
    _hook(_ENGINES, _FORMATS)(register)
    _hook(f"{_PACKAGE}.replay.response_formats:", _RESPONSES)(register)


@hookimpl
def crossdraft_summary_written(summary: Any) -> None:
    """Write the cost tables of the engines of a run into its directory."""
    if any(result.config.engine is not None for result in summary.results):
        from crossdraft.runs import RunDirectory

        from .cost.tables import cost_tables

        for name, table in cost_tables(summary.results).items():
            RunDirectory(summary.directory).write_text(name, table)
