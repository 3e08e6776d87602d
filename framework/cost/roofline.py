"""How long a forward pass takes on a machine one does not have: the roofline.

Each part of a pass moves bytes and multiplies; it takes as long as the slower of the two ("Roofline: an insightful
visual performance model for multicore architectures", Williams, Waterman and Patterson, 2009):

    seconds = max(bytes / bandwidth, FLOPs / FLOP rate)

The parts are added up, with a fixed time a layer for launching kernels and, over several devices, two all-reduces
a layer. Nothing is loaded: a model is its `Shape`, read from a transformers config.

What it leaves out: sampling, the verifier, the engine's scheduling, quantised arithmetic (fewer bytes a weight are
possible, the FLOP rate stays that of bfloat16), and every reason why a kernel may be worse than `Roofline` assumes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .. import plugins
from ..errors import ModelError, UsageError, first_line, printable, quoted
from ..models.configs import check_config
from ..models.quantization import refuse_quantized
from ..util.input_files import kind_of, path_of, read_json
from ..util.limits import CONFIG_BYTES
from .accelerators import Accelerator

#: Share of the stated memory bandwidth and FLOP rate that a pass is taken to reach.
EFFICIENCY = (0.8, 0.7)
#: Seconds of a layer that are neither: about ten kernels of a recorded graph, a microsecond each.
LAYER_OVERHEAD = 10e-6
#: Seconds of an all-reduce however little it sends.
ALL_REDUCE_LATENCY = 10e-6
#: Bytes of an activation, and of a key or value by default: bfloat16.
_BFLOAT16 = 2

#: Matrices of an MLP: gate, up and down, or up and down.
_GATED = ("cohere", "gemma", "gemma2", "gemma3_text", "glm4", "granite", "llama", "ministral", "mistral", "olmo")
_GATED += ("olmo2", "phi3", "qwen2", "qwen3", "smollm3", "gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe")
_PLAIN = ("gpt2", "gpt_neox", "opt", "starcoder2")


class Work(NamedTuple):
    """What one device does for a part of a pass."""

    bytes: float
    flops: float


@dataclass(frozen=True)
class Shape:
    """What a decoder-only model's cost depends on.

    Attributes:
        layers, hidden: their numbers; ``vocab``: rows of the output head, of a drafter with a vocabulary of its own
            (``draft_vocab_size``) that one; ``embedding``: width of its input.
        heads, kv_heads, head_dim: of the attention.
        intermediate, matrices: width of a dense MLP, and how many matrices it has (3 gated, 2 plain).
        experts, active, expert_intermediate, shared_intermediate: of a mixture-of-experts layer; ``moe_layers`` have
            one in place of the dense MLP.
        window, window_layers: ``window_layers`` layers look back at most ``window`` tokens.
        fusion: parameters of a layer by itself in front of the others, read once a pass.
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
        """The shape that a transformers config, or the mapping of a ``config.json``, describes.

        Raises ModelError for a family whose products are not known here: a guess would be a wrong number.
        """
        try:
            config = _transformers_config(config).get_text_config()
        except AttributeError as error:
            raise ModelError(f"the config cannot be read: {first_line(error)}") from None
        kind = config.model_type
        if kind not in (*_GATED, *_PLAIN):
            raise ModelError(
                f"the roofline does not know the shape of model_type {kind!r}; "
                f"it knows {', '.join(sorted((*_GATED, *_PLAIN)))}"
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
            raise ModelError(f"the config says that {shape.active} of {shape.experts} experts are active")
        if shape.heads % shape.kv_heads:
            raise ModelError(f"the config shares {shape.kv_heads} keys among {shape.heads} heads, which is no division")
        return shape

    @property
    def parameters(self) -> int:
        """Parameters that products multiply with, the output head included; the input embedding is looked up only."""
        per_layer = self._attention_parameters(self.kv_heads)
        dense = (self.layers - self.moe_layers) * self.matrices * self.hidden * self.intermediate
        routed = self.moe_layers * self.experts * self._expert_parameters
        return round(self.layers * per_layer + dense + routed + self.moe_layers * self._shared_parameters + self._outer)

    @property
    def _expert_parameters(self) -> int:
        return self.matrices * self.hidden * self.expert_intermediate

    @property
    def _shared_parameters(self) -> int:
        """The router, and the expert that every token visits with its gate."""
        gate = 1 if self.shared_intermediate else 0
        return self.hidden * (self.experts + gate + self.matrices * self.shared_intermediate)

    @property
    def _outer(self) -> int:
        """Products outside the layers: the output head, and projections around a narrower embedding."""
        embedding = self.embedding or self.hidden
        between = 2 * embedding * self.hidden if embedding != self.hidden else 0
        return self.vocab * embedding + between + self.fusion

    def _attention_parameters(self, kv_heads: float) -> float:
        return 2 * self.hidden * self.head_dim * (self.heads + kv_heads)

    def experts_read(self, tokens: float) -> float:
        """Expected number of different experts that ``tokens`` visit, if the router spreads them evenly."""
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
    ) -> dict[str, Work]:
        """Bytes and FLOPs of one pass on one of ``devices`` tensor-parallel devices, by part.

        Args:
            batch_size, width: ``width`` tokens in each of ``batch_size`` rows.
            context: tokens that each row already holds in the cache.
            weight_bytes, cache_bytes: bytes of a weight and of a key or value.

        Returns:
            ``projections``, ``attention``, ``mlp``, ``head``; all layers together.
        """
        n, d = batch_size * width, devices
        queries = self.heads * self.head_dim / d
        # A device holds at least one KV head: over more devices than KV heads they are stored more than once.
        kv_heads = max(self.kv_heads / d, 1)
        keys = 2 * kv_heads * self.head_dim

        projections = self._attention_parameters(self.kv_heads) / d
        held = 2 * self.hidden * self.head_dim * (self.heads / d + kv_heads)
        moved = 2 * self.hidden + 2 * queries + keys  # activations in and out, a token
        parts = {"projections": self._times(self.layers, held, projections * n, moved * n, weight_bytes)}

        near = min(context, self.window) if self.window else context
        seen = (self.layers - self.window_layers) * (context + width) + self.window_layers * (near + width)
        cache = batch_size * seen * keys * cache_bytes
        parts["attention"] = Work(cache + self.layers * n * 2 * queries * _BFLOAT16, 4 * n * seen * queries)

        dense = self.layers - self.moe_layers
        plain = self.matrices * self.hidden * self.intermediate / d
        bytes_, flops = self._times(dense, plain, plain * n, self._mlp_moved(self.intermediate, d) * n, weight_bytes)
        if self.moe_layers:
            read = (self.experts_read(n) * self._expert_parameters + self._shared_parameters) / d
            used = (self.active * self._expert_parameters + self._shared_parameters) / d
            moved = self.active * self._mlp_moved(self.expert_intermediate, d)
            if self.shared_intermediate:
                moved += self._mlp_moved(self.shared_intermediate, d)
            more = self._times(self.moe_layers, read, used * n, moved * n, weight_bytes)
            bytes_, flops = bytes_ + more.bytes, flops + more.flops
        parts["mlp"] = Work(bytes_, flops)

        outer = self._outer / d
        parts["head"] = self._times(1, outer, outer * n, (self.hidden + self.vocab / d) * n, weight_bytes)
        return parts

    def _mlp_moved(self, intermediate: int, devices: int) -> float:
        """Activations that an MLP's products read and write, a token."""
        return self.matrices * (self.hidden + intermediate / devices)

    @staticmethod
    def _times(layers: int, weights: float, products: float, moved: float, weight_bytes: float) -> Work:
        return Work(layers * (weights * weight_bytes + moved * _BFLOAT16), layers * 2 * products)


@dataclass(frozen=True)
class Roofline:
    """Seconds of a pass of ``shape`` on ``devices`` tensor-parallel accelerators; a curve like `cost.CostCurve`.

    Attributes:
        weight_bytes, cache_bytes: bytes of a weight and of a key or value.
        efficiency: share of the stated bandwidth and FLOP rate that is reached.
        layer_overhead: seconds a layer beside that.
        all_reduce: count the two all-reduces a layer of tensor parallelism: a ring, at the link's stated rate.
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

    def seconds(self, batch_size: float, width: float, context: float) -> float:
        """One pass over ``width`` tokens in each of ``batch_size`` rows that hold ``context`` tokens each.

        Raises:
            UsageError: numbers of the model or the machine that lead to no time at all.
        """
        found = sum(self.parts(batch_size, width, context).values())
        if not 0 < found < math.inf:
            what = f"a pass of {self.shape.name} on {self.accelerator.name}"
            raise UsageError(f"{what} comes to {found} seconds, which is no time; check the numbers of both")
        return found

    def parts(self, batch_size: float, width: float, context: float) -> dict[str, float]:
        """The same by part, in seconds; ``other`` is launching kernels and waiting for other devices."""
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

    def held(self, batch_size: float, context: float) -> float:
        """Bytes that weights and cache take on one device; an embedding that is also the head counts twice."""
        shape = self.shape
        embedding = shape.vocab * (shape.embedding or shape.hidden)
        weights = (shape.parameters + embedding) * self.weight_bytes / self.devices
        kv = max(shape.kv_heads / self.devices, 1) * shape.head_dim * 2 * self.cache_bytes
        near = min(context, shape.window) if shape.window else context
        return weights + batch_size * kv * ((shape.layers - shape.window_layers) * context + shape.window_layers * near)


def read_shape(name: str) -> Shape:
    """The shape of the model in a ``config.json``, in the directory of one, or of a registered name; loads no weights.

    Raises UsageError for what is none of these, ModelError for a config that cannot be read or is not known.
    """
    path = path_of(name)
    if not kind_of(path):
        refuse_quantized(name, "say how many bytes a weight has with --weight-bytes")
    if name in plugins.entries("models") and not kind_of(path):
        from ..models.resolve import resolve

        path = resolve(name).path
    directory = kind_of(path) == "directory"
    file = path / "config.json" if directory else path
    if kind_of(file) != "file":
        raise UsageError(
            f"{printable(name)} is no config.json, no model directory and no registered model; give one of them"
        )
    config = check_config(read_json(file, CONFIG_BYTES, error=ModelError), str(file))
    try:
        return Shape.from_config(config, name=(path.name if directory else path.stem) or name)
    except ModelError as error:
        raise ModelError(f"{file}: {error}") from None
    except (AttributeError, TypeError, ValueError, ArithmeticError) as error:
        raise ModelError(f"{file} describes no decoder whose costs can be told: {first_line(error)}") from None


def _transformers_config(config: Any) -> Any:
    """A mapping with the defaults of its family filled in; a config object as it is."""
    if not isinstance(config, Mapping):
        return config
    from transformers import AutoConfig

    options = dict(config)
    kind = options.pop("model_type", None)
    if kind is None:
        raise ModelError('the config has no model_type to tell its family; add one, as in "model_type": "llama"')
    try:
        return AutoConfig.for_model(kind, **options)
    except Exception as error:  # of transformers and of its checks
        raise ModelError(
            f"transformers cannot read a config of model_type {quoted(kind)}: {first_line(error)}"
        ) from None
