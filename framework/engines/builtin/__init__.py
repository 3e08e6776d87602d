"""Built-in engines and servers, one file each; see `crossdraft.framework.engines`."""

from ...contracts.hookspecs import Register, hookimpl


@hookimpl
def crossdraft_register_engines(register: Register) -> None:
    register("vllm", f"{__name__}.vllm:Vllm", summary="log, counters and responses; --speculative-config")
    register(
        "vllm-cpu", f"{__name__}.vllm:VllmCpu", summary="--speculative-config for CPUs, without block verification"
    )
    register(
        "vllm-synthetic",
        f"{__name__}.vllm:VllmSynthetic",
        summary="--speculative-config with synthetic acceptance, to time a schedule",
    )
    register("sglang", f"{__name__}.sglang:Sglang", summary="log, gauge and responses; --speculative-*")
    register(
        "sglang-synthetic",
        f"{__name__}.sglang:SglangSynthetic",
        summary="--speculative-* with a simulated acceptance length, to time a draft length",
    )
    register("tensorrt-llm", f"{__name__}.tensorrt_llm:TensorRtLlm", summary="speculative_config in YAML")
    register(
        "tensorrt-llm-synthetic",
        f"{__name__}.tensorrt_llm:TensorRtLlmSynthetic",
        summary="speculative_config with a forced acceptance length, to time a draft length",
    )
    register(
        "golden-al",
        f"{__name__}.golden_al:GoldenAl",
        summary="golden acceptance-length curves of InferenceX, in YAML",
    )
    register(
        "aiconfigurator",
        f"{__name__}.simulators:Aiconfigurator",
        summary="--nextn and the mean of accepted tokens",
    )
    register(
        "dynamo-mocker",
        f"{__name__}.simulators:DynamoMocker",
        summary="conditional acceptance rates of Dynamo's mocker",
    )
    register(
        "atom-synthetic",
        f"{__name__}.simulators:AtomSynthetic",
        summary="--method with a forced acceptance length, to time a draft length",
    )
    register("llama.cpp", f"{__name__}.llama_cpp:LlamaCpp", summary="log and counters; --spec-*")
    register("transformers", f"{__name__}.transformers:Transformers", summary="arguments of generate")
    register(
        "speculation-profile",
        f"{__name__}.speculation_profile:SpeculationProfile",
        summary="speculation_profile.json, the acceptance stored with a draft checkpoint",
    )


@hookimpl
def crossdraft_register_sections(register: Register) -> None:
    register(
        "engine-settings",
        "crossdraft.framework.advise.engine_settings:engine_settings",
        summary="settings with which engines draft as the pairs did",
    )


@hookimpl
def crossdraft_register_samples(register: Register) -> None:
    register(
        "engine",
        "crossdraft.framework.engines.gate_samples:samples_of",
        summary="logs, metrics, responses, replay JSON",
    )


@hookimpl
def crossdraft_register_servers(register: Register) -> None:
    register("openai", f"{__name__}.openai:OpenAiServer", summary="a server that runs, with /v1/completions")
