"""Decoder layers for crossdraft: compiled ones and threads for CPUs, fused ones for CUDA, recurrent ones of hybrids."""

from crossdraft import hookimpl


@hookimpl
def crossdraft_command_started():
    from .threads import choose_wait_policy

    choose_wait_policy()


@hookimpl
def crossdraft_decoding_steps(lm, steps):
    from .threads import compared_threads

    threads = compared_threads(lm)
    return threads.applied(steps) if threads is not None else None


@hookimpl
def crossdraft_register_preparations(register):
    register(
        "small-batch-linear",
        f"{__name__}.small_batch_linear:SmallBatchLayers",
        summary="faster products of few rows on a CPU",
    )
    register(
        "compiled-layers",
        f"{__name__}.compiled_layers:CompiledLayers",
        summary="decoder layers compiled for a CPU",
    )
    register("fused-layers", f"{__name__}.fused_layers:FusedLayers", summary="decoder layers of few kernels on CUDA")
    register(
        "recurrent-layers",
        f"{__name__}.recurrent_cache:RecurrentLayers",
        summary="states of recurrent layers by node",
    )
    register("longrope", f"{__name__}.longrope:LongRope", summary="texts with the long frequencies of longrope")
