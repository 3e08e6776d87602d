"""Layers for crossdraft: linear ones for few rows on CPUs, fused ones for CUDA, recurrent ones of hybrids."""

from crossdraft import hookimpl


@hookimpl
def crossdraft_register_preparations(register):
    register(
        "small-batch-linear",
        f"{__name__}.small_batch_linear:SmallBatchLayers",
        summary="faster products of few rows on a CPU",
    )
    register("fused-layers", f"{__name__}.fused_layers:FusedLayers", summary="decoder layers of few kernels on CUDA")
    register(
        "recurrent-layers",
        f"{__name__}.recurrent_cache:RecurrentLayers",
        summary="states of recurrent layers by node",
    )
    register("flex-attention", f"{__name__}.flex_attention:FlexAttention", summary="PyTorch's FlexAttention on CUDA")
    register("longrope", f"{__name__}.longrope:LongRope", summary="texts with the long frequencies of longrope")
