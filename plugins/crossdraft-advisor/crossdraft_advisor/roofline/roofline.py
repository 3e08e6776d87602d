"""Roofline model of a forward pass, for machines that are not available.

Each part of a pass moves bytes and computes; the slower of the two determines its time ("Roofline: an insightful
visual performance model for multicore architectures", Williams, Waterman and Patterson, 2009):

    seconds = max(bytes / bandwidth, FLOPs / FLOP rate)

The times of the parts are added, plus a fixed time per layer for kernel launches and, on several devices, two
all-reduces per layer. Weights are not loaded: a model is described by its `Shape`, read from a transformers config.

Not modelled: sampling, the verifier, the scheduling of the engine, quantised arithmetic (fewer bytes per weight are
supported, but the FLOP rate is that of bfloat16), and kernels less efficient than `Roofline` assumes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from crossdraft.framework import plugins
from crossdraft.framework.cli.options.machine import MachineOptions
from crossdraft.framework.errors import ModelError, UsageError, first_line, printable, quoted
from crossdraft.framework.models.adapters import split_adapter
from crossdraft.framework.models.configs import check_config
from crossdraft.framework.models.quantization import refuse_quantized
from crossdraft.framework.util.input_files import kind_of, path_of, read_json
from crossdraft.framework.util.limits import CONFIG_BYTES

from .accelerators import Accelerator, accelerator

#: Assumed efficiency of a pass: shares of the stated memory bandwidth and FLOP rate.
EFFICIENCY = (0.8, 0.7)
#: Overhead of a layer in seconds: about ten kernels of a CUDA graph, a microsecond each.
LAYER_OVERHEAD = 10e-6
#: Latency of an all-reduce in seconds.
ALL_REDUCE_LATENCY = 10e-6
#: Bytes of an activation, and by default of a weight, key or value.
_BFLOAT16 = 2

#: Model types by their MLP: gate, up and down projections, or up and down.
_GATED = ("cohere", "gemma", "gemma2", "gemma3_text", "glm4", "granite", "llama", "ministral", "mistral", "olmo")
_GATED += ("olmo2", "phi3", "qwen2", "qwen3", "smollm3", "gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe")
_PLAIN = ("gpt2", "gpt_neox", "opt", "starcoder2")


class PassWork(NamedTuple):
    """Work of one device for a part of a pass."""

    bytes: float
    flops: float


@dataclass(frozen=True)
class Shape:
    """Dimensions of a decoder-only model that determine its cost.

    Attributes:
        layers, hidden: number of layers, hidden size.
        vocab: rows of the output head (``draft_vocab_size`` of a draft model with its own vocabulary).
        embedding: width of the embedding; 0: the hidden size.
        heads, kv_heads, head_dim: dimensions of the attention.
        intermediate, matrices: width of a dense MLP, and number of its matrices (3 if gated, else 2).
        experts, active, expert_intermediate, shared_intermediate: dimensions of a mixture-of-experts layer.
        moe_layers: number of mixture-of-experts layers.
        window, window_layers: sliding window, and number of layers that have it.
        fusion: parameters of an additional projection before the layers.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    matrices: int = 3
    embedding: int = 0
    experts: int = 0
    active: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    moe_layers: int = 0
    window: int = 0
    window_layers: int = 0
    fusion: int = 0

    @classmethod
    def from_config(cls, config: Any, name: str = "") -> Shape:
        """Create the shape from a transformers config or the mapping of a ``config.json``.

        Raises ModelError for unsupported model types.
        """
        try:
            config = _transformers_config(config).get_text_config()
        except AttributeError as error:
            raise ModelError(f"the config is not readable: {first_line(error)}") from None
        kind = config.model_type
        if kind not in (*_GATED, *_PLAIN):
            raise ModelError(
                f"the roofline does not support model_type {kind!r}; supported: {', '.join(sorted((*_GATED, *_PLAIN)))}"
            )

        def get(*keys: str, default: int = 0) -> int:
            values = (getattr(config, key, None) for key in keys)
            return next((value for value in values if value), default)

        hidden, heads, layers = config.hidden_size, config.num_attention_heads, config.num_hidden_layers
        types = getattr(config, "layer_types", None)
        window = get("sliding_window")
        experts = get("num_experts", "num_local_experts")
        dense, step = getattr(config, "mlp_only_layers", None) or [], get("decoder_sparse_step", default=1)
        shape = cls(
            name=name or kind,
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=get("num_key_value_heads", default=heads),
            head_dim=get("head_dim", default=hidden // heads),
            intermediate=get("ffn_dim", "n_inner", "intermediate_size", default=4 * hidden),
            vocab=get("draft_vocab_size", "vocab_size"),
            matrices=3 if kind in _GATED else 2,
            embedding=get("word_embed_proj_dim", default=hidden),
            experts=experts,
            active=get("num_experts_per_tok") if experts else 0,
            expert_intermediate=get("moe_intermediate_size", "intermediate_size") if experts else 0,
            shared_intermediate=get("shared_expert_intermediate_size") if experts else 0,
            moe_layers=sum((i + 1) % step == 0 and i not in dense for i in range(layers)) if experts else 0,
            window=window,
            window_layers=(types.count("sliding_attention") if types else layers) if window else 0,
        )
        if shape.active > shape.experts:
            raise ModelError(f"the config has more active experts than experts: {shape.active} of {shape.experts}")
        if shape.heads % shape.kv_heads:
            raise ModelError(
                f"the config has {shape.heads} heads, which {shape.kv_heads} key-value heads do not divide"
            )
        return shape

    @property
    def parameters(self) -> int:
        """Number of parameters in matrix products, the output head included; the input embedding is excluded."""
        per_layer = self._attention_parameters(self.kv_heads)
        dense = (self.layers - self.moe_layers) * self.matrices * self.hidden * self.intermediate
        routed = self.moe_layers * self.experts * self._expert_parameters
        return round(self.layers * per_layer + dense + routed + self.moe_layers * self._shared_parameters + self._outer)

    @property
    def _expert_parameters(self) -> int:
        return self.matrices * self.hidden * self.expert_intermediate

    @property
    def _shared_parameters(self) -> int:
        """Parameters of the router and of the shared expert with its gate."""
        gate = 1 if self.shared_intermediate else 0
        return self.hidden * (self.experts + gate + self.matrices * self.shared_intermediate)

    @property
    def _outer(self) -> int:
        """Parameters outside of the layers: the output head, and projections of a narrower embedding."""
        embedding = self.embedding or self.hidden
        between = 2 * embedding * self.hidden if embedding != self.hidden else 0
        return self.vocab * embedding + between + self.fusion

    def _attention_parameters(self, kv_heads: float) -> float:
        return 2 * self.hidden * self.head_dim * (self.heads + kv_heads)

    def experts_read(self, tokens: float) -> float:
        """Expected number of distinct experts used by ``tokens`` under uniform routing."""
        return self.experts * (1 - (1 - self.active / self.experts) ** tokens) if self.experts else 0.0

    def work(
        self,
        batch_size: float,
        width: float,
        context: float,
        *,
        devices: int = 1,
        weight_bytes: float = _BFLOAT16,
        cache_bytes: float = _BFLOAT16,
    ) -> dict[str, PassWork]:
        """Bytes and FLOPs of a pass by part, on one of ``devices`` tensor-parallel devices.

        Args:
            batch_size, width: ``width`` tokens in each of ``batch_size`` rows.
            context: tokens of each row in the cache.
            weight_bytes, cache_bytes: bytes of a weight and of a key or value.

        Returns:
            work of ``projections``, ``attention``, ``mlp`` and ``head``, summed over all layers.
        """
        n, d = batch_size * width, devices
        queries = self.heads * self.head_dim / d
        # Each device has at least one KV head: KV heads are replicated on more devices than KV heads.
        kv_heads = max(self.kv_heads / d, 1)
        keys = 2 * kv_heads * self.head_dim

        projections = self._attention_parameters(self.kv_heads) / d
        weights = 2 * self.hidden * self.head_dim * (self.heads / d + kv_heads)
        activations = 2 * self.hidden + 2 * queries + keys  # per token, input and output
        parts = {"projections": self._times(self.layers, weights, projections * n, activations * n, weight_bytes)}

        window = min(context, self.window) if self.window else context
        attended = (self.layers - self.window_layers) * (context + width) + self.window_layers * (window + width)
        cache = batch_size * attended * keys * cache_bytes
        parts["attention"] = PassWork(cache + self.layers * n * 2 * queries * _BFLOAT16, 4 * n * attended * queries)

        dense = self.layers - self.moe_layers
        plain = self.matrices * self.hidden * self.intermediate / d
        bytes_, flops = self._times(dense, plain, plain * n, self._mlp_moved(self.intermediate, d) * n, weight_bytes)
        if self.moe_layers:
            read_parameters = (self.experts_read(n) * self._expert_parameters + self._shared_parameters) / d
            active_parameters = (self.active * self._expert_parameters + self._shared_parameters) / d
            activations = self.active * self._mlp_moved(self.expert_intermediate, d)
            if self.shared_intermediate:
                activations += self._mlp_moved(self.shared_intermediate, d)
            experts = self._times(
                self.moe_layers, read_parameters, active_parameters * n, activations * n, weight_bytes
            )
            bytes_, flops = bytes_ + experts.bytes, flops + experts.flops
        parts["mlp"] = PassWork(bytes_, flops)

        outer_parameters = self._outer / d
        parts["head"] = self._times(
            1, outer_parameters, outer_parameters * n, (self.hidden + self.vocab / d) * n, weight_bytes
        )
        return parts

    def _mlp_moved(self, intermediate: int, devices: int) -> float:
        """Activations read and written by the products of an MLP, per token."""
        return self.matrices * (self.hidden + intermediate / devices)

    @staticmethod
    def _times(layers: int, weights: float, products: float, moved: float, weight_bytes: float) -> PassWork:
        return PassWork(layers * (weights * weight_bytes + moved * _BFLOAT16), layers * 2 * products)


@dataclass(frozen=True)
class Roofline:
    """Seconds of a pass of ``shape`` on ``devices`` tensor-parallel accelerators; implements `Curve`.

    Attributes:
        weight_bytes, cache_bytes: bytes of a weight and of a key or value.
        efficiency: shares of the stated bandwidth and FLOP rate that are reached.
        layer_overhead: additional seconds per layer.
        all_reduce: include two ring all-reduces per layer for tensor parallelism, at the stated rate of the link.
    """

    shape: Shape
    accelerator: Accelerator
    devices: int = 1
    weight_bytes: float = _BFLOAT16
    cache_bytes: float = _BFLOAT16
    efficiency: tuple[float, float] = EFFICIENCY
    layer_overhead: float = LAYER_OVERHEAD
    all_reduce: bool = field(default=True)

    def __post_init__(self) -> None:
        for name in ("devices", "weight_bytes", "cache_bytes"):
            if not 0 < getattr(self, name) < math.inf:
                raise UsageError(f"{name.replace('_', ' ')} must be a positive number, not {getattr(self, name)}")

    @property
    def memory(self) -> float:
        """Memory of a device in bytes."""
        return self.accelerator.memory

    @property
    def facts(self) -> dict[str, Any]:
        """Names for JSON output."""
        return {"target": self.shape.name, "accelerator": self.accelerator.name, "devices": self.devices}

    def description(self, context: float) -> str:
        """Model, machine and assumptions, for readers."""
        memory, compute = self.efficiency
        parameters = f"{self.shape.parameters / 1e9:.2f} G parameters in matrix products"
        shares = f"{100 * memory:.0f} % of the bandwidth and {100 * compute:.0f} % of the FLOP rate"
        return (
            f"{self.shape.name} ({parameters}) on {self.devices} x {self.accelerator.name}, context {context}\n"
            f"roofline at {shares} of: {self.accelerator.source}"
        )

    def seconds(self, batch_size: float, width: float, context: float) -> float:
        """Seconds of a pass over ``width`` tokens in each of ``batch_size`` rows with ``context`` tokens each.

        Raises:
            UsageError: the numbers of the model or the accelerator do not give a positive, finite time.
        """
        seconds = sum(self.parts(batch_size, width, context).values())
        if not 0 < seconds < math.inf:
            title = f"a pass of {self.shape.name} on {self.accelerator.name}"
            raise UsageError(
                f"{title} takes {seconds} seconds, which is not a positive time; check the numbers of both"
            )
        return seconds

    def parts(self, batch_size: float, width: float, context: float) -> dict[str, float]:
        """Seconds of a pass by part; ``other`` is kernel launches and communication."""
        work = self.shape.work(
            batch_size,
            width,
            context,
            devices=self.devices,
            weight_bytes=self.weight_bytes,
            cache_bytes=self.cache_bytes,
        )
        bandwidth = self.accelerator.bandwidth * self.efficiency[0]
        rate = self.accelerator.flops * self.efficiency[1]
        seconds = {part: max(w.bytes / bandwidth, w.flops / rate) for part, w in work.items()}
        other = self.shape.layers * self.layer_overhead
        if self.devices > 1 and self.all_reduce:
            sent = batch_size * width * self.shape.hidden * _BFLOAT16 * 2 * (self.devices - 1) / self.devices
            other += 2 * self.shape.layers * (ALL_REDUCE_LATENCY + sent / self.accelerator.link)
        return seconds | {"other": other}

    def memory_bytes(self, batch_size: float, context: float) -> float:
        """Bytes of weights and cache on one device; a tied embedding counts twice."""
        shape = self.shape
        embedding = shape.vocab * (shape.embedding or shape.hidden)
        weights = (shape.parameters + embedding) * self.weight_bytes / self.devices
        kv = max(shape.kv_heads / self.devices, 1) * shape.head_dim * 2 * self.cache_bytes
        window = min(context, shape.window) if shape.window else context
        return weights + batch_size * kv * (
            (shape.layers - shape.window_layers) * context + shape.window_layers * window
        )


def modelled(options: MachineOptions, model: str) -> Roofline:
    """The roofline of a model on the machine of ``--on``. Raises as `accelerator` and `read_shape` do."""
    assert options.on is not None
    device = accelerator(options.on)
    machine: dict[str, Any] = options.model_dump(include={"devices", "weight_bytes", "cache_bytes", "efficiency"})
    return Roofline(read_shape(model), device, **machine)


def read_shape(name: str) -> Shape:
    """Read the shape of a model: a ``config.json``, a model directory, or a registered name. Loads no weights.

    Raises UsageError if `name` is none of these, ModelError if the config is unreadable or unsupported.
    """
    path = path_of(name)
    if not kind_of(path):
        refuse_quantized(name, "set the bytes per weight with --weight-bytes")
        name, _ = split_adapter(name)  # a merged adapter leaves the shape as it is
        path = path_of(name)
    if name in plugins.entries("models") and not kind_of(path):
        from crossdraft.framework.models.resolve import resolve

        path = resolve(name).path
    directory = kind_of(path) == "directory"
    file = path / "config.json" if directory else path
    if kind_of(file) != "file":
        raise UsageError(
            f"{printable(name)} is not a config.json, a model directory or a registered model; give one of these"
        )
    config = check_config(read_json(file, CONFIG_BYTES, error=ModelError), str(file))
    try:
        return Shape.from_config(config, name=(path.name if directory else path.stem) or name)
    except ModelError as error:
        raise ModelError(f"{file}: {error}") from None
    except (AttributeError, TypeError, ValueError, ArithmeticError) as error:
        raise ModelError(f"{file} does not describe a supported decoder: {first_line(error)}") from None


def _transformers_config(config: Any) -> Any:
    """Convert a mapping to a transformers config with the defaults of its model type."""
    if not isinstance(config, Mapping):
        return config
    from transformers import AutoConfig

    options = dict(config)
    kind = options.pop("model_type", None)
    if kind is None:
        raise ModelError('the config has no model_type; add one, as in "model_type": "llama"')
    try:
        return AutoConfig.for_model(kind, **options)
    except Exception as error:  # errors of transformers and of its validation
        raise ModelError(
            f"transformers cannot read a config of model_type {quoted(kind)}: {first_line(error)}"
        ) from None
