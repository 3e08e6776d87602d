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
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from crossdraft import ModelError, UsageError, first_line, printable, quoted
from crossdraft.commands import kind_of, path_of
from crossdraft.framework import plugins
from crossdraft.models import read_config, refuse_quantized, split_adapter

from .accelerators import Accelerator

#: Assumed efficiency of a pass: shares of the stated memory bandwidth and FLOP rate.
EFFICIENCY = (0.8, 0.7)
#: Overhead of a layer in seconds: about ten kernels of a CUDA graph, a microsecond each.
LAYER_OVERHEAD = 10e-6
#: Latency of an all-reduce in seconds.
ALL_REDUCE_LATENCY = 10e-6
#: Bytes of an activation, and by default of a weight, key or value.
_BFLOAT16 = 2

#: Keys of the number of experts that a token uses; the first that a config has is read.
_ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts", "moe_k")
#: Recurrent states of a layer: products of config keys, or of the hidden size and a key.
_STATES = (
    ("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    ("mamba_num_heads", "mamba_head_dim", "ssm_state_size"),
    ("mamba_n_heads", "mamba_d_head", "mamba_d_state"),
    ("n_mamba_heads", "mamba_headdim", "mamba_d_state"),
    ("hidden_size", "mamba_expand", "mamba_d_state"),
    ("num_heads", "head_dim", "state_size"),
    ("intermediate_size", "state_size"),
    ("hidden_size", "conv_L_cache"),
    ("num_attention_heads", "head_dim", "head_dim"),
)
#: Layers that keep a state, and layers that attend.
_RECURRENT = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention", "hybrid", "hybrid_sliding"}
#: Bytes of an element of a recurrent state, which engines keep in float32.
_STATE_BYTES = 4


class PassWork(NamedTuple):
    """Work of one device for a part of a pass."""

    bytes: float
    flops: float


class Products(NamedTuple):
    """Matrix products of a part: elements of the weights, and of the activations that a token reads and writes."""

    weights: float = 0
    moved: float = 0

    def __mul__(self, times: Any) -> Products:
        return Products(self.weights * times, self.moved * times)

    def __add__(self, other: Any) -> Products:
        return Products(self.weights + other.weights, self.moved + other.moved)


_NONE = Products()


class Cache(NamedTuple):
    """Keys and values of ``layers`` layers that are alike."""

    layers: int
    values: float  # cached elements of a token in a layer
    queries: float  # elements of a token's queries that meet a cached token, twice (scores, weighted sum)
    heads: int  # key-value heads, over which devices share the cache; 1 for a compressed cache (MLA)
    window: int = 0  # tokens that a layer attends to; 0: all

    def tokens(self, context: float) -> float:
        return min(context, self.window) if self.window else context


@dataclass(frozen=True)
class Shape:
    """Work of a decoder: what a pass multiplies, reads from its cache, and looks up.

    Attributes:
        layers, hidden, vocab: number of layers, hidden size, rows of the output head.
        projections, mlp, head: products that every pass computes, over all layers: attention and other mixers; dense
            MLPs, routers and shared experts; what stands outside of the layers.
        expert, experts, active, moe_layers: products of one expert in one layer, experts of a layer, those that a
            token uses, and layers that have them.
        caches, states: keys and values; elements of the recurrent states of a row.
        embedding: elements of tables in which a pass looks up rows.
        stored: ``quant_method`` of the config, which does not change the shape; empty if it has none.
    """

    name: str
    layers: int
    hidden: int
    vocab: int
    projections: Products
    mlp: Products
    head: Products
    caches: tuple[Cache, ...]
    expert: Products = _NONE
    experts: int = 0
    active: int = 0
    moe_layers: int = 0
    states: float = 0
    embedding: float = 0
    stored: str = ""

    @classmethod
    def from_config(cls, config: Any, name: str = "") -> Shape:
        """Create the shape from a transformers config or the mapping of a ``config.json``.

        The weights are those of transformers' class, laid out without memory (PyTorch's device ``meta``).

        Raises ModelError for types without a causal language model in transformers and for unknown dimensions.
        """
        import torch
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

        whole = _transformers_config(config)
        try:
            config = whole.get_text_config()
            of_text = type(config) in AutoModelForCausalLM._model_mapping
            with torch.device("meta"):
                classes = AutoModelForCausalLM if of_text else AutoModelForImageTextToText
                model = classes.from_config(config if of_text else whole)
        except Exception as error:  # errors of transformers' classes
            raise ModelError(
                f"transformers cannot lay out model_type {whole.model_type!r}: {first_line(error)}"
            ) from None
        looked_up = {id(m.weight): m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)}
        head = model.get_output_embeddings()
        if head is None:
            raise ModelError(f"model_type {config.model_type!r} has no output head")
        parts = {"projections": _NONE, "mlp": _NONE, "head": _product(*head.weight.shape)}
        expert, experts, moe_layers = _NONE, 0, set()
        for path, weight in model.named_parameters():
            layer, shape = _LAYER.search(path), weight.shape
            known = weight is head.weight or id(weight) in looked_up or _OF_IMAGES.search(path)
            if len(shape) < 2 or path.endswith("bias") or known:
                continue
            if layer and (routed := _EXPERT.search(path)):
                count = 1 if routed[1] else shape[0]
                experts = max(experts, int(routed[1]) + 1 if routed[1] else count)
                expert += _product(*shape[-2:]) * count
                moe_layers.add(layer[0])
            else:
                part = "head" if layer is None else "mlp" if _MLP.search(path) else "projections"
                parts[part] += Products(weight.numel(), sum(shape[:2]))
        caches, states = _memory(config)
        shape = cls(
            name=name or config.model_type,
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            vocab=head.weight.shape[0],
            caches=caches,
            expert=expert * (1 / (experts * len(moe_layers))) if experts else expert,
            experts=experts,
            active=_first(config, _ACTIVE) if experts else 0,
            moe_layers=len(moe_layers),
            states=states,
            embedding=sum(weight.numel() for weight in looked_up.values()),
            stored=str((getattr(whole, "quantization_config", None) or {}).get("quant_method", "")),
            **parts,
        )
        if shape.active > shape.experts:
            raise ModelError(f"the config has more active experts than experts: {shape.active} of {shape.experts}")
        return shape.of_vocabulary(getattr(config, "draft_vocab_size", None) or shape.vocab)

    def of_vocabulary(self, rows: int) -> Shape:
        """The same shape with an output head of ``rows`` rows."""
        fewer = Products((rows - self.vocab) * self.hidden, rows - self.vocab)
        return replace(self, vocab=rows, head=self.head + fewer)

    @property
    def parameters(self) -> int:
        """Number of parameters in matrix products, the output head included; the input embedding is excluded."""
        routed = self.expert.weights * self.experts * self.moe_layers
        return round(self.projections.weights + self.mlp.weights + self.head.weights + routed)

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
        """Bytes and FLOPs of a pass over ``width`` tokens in each of ``batch_size`` rows, by part, over all layers.

        It runs on one of ``devices`` tensor-parallel devices; rows have ``context`` tokens in the cache.
        """
        n, d = batch_size * width, devices
        read, used = self.experts_read(n) * self.moe_layers, self.active * self.moe_layers * n

        def work(products: Products, read: float = 0.0, used: float = 0.0) -> PassWork:
            weights = products.weights + read * self.expert.weights
            moved = n * products.moved + used * self.expert.moved
            flops = 2 * (n * products.weights + used * self.expert.weights)
            return PassWork((weights * weight_bytes + moved * _BFLOAT16) / d, flops / d)

        cached, flops, queries = 0.0, 0.0, 0.0
        for cache in self.caches:
            attended = cache.layers * (cache.tokens(context) + width)
            # Each device has at least one KV head: KV heads are replicated on more devices than KV heads.
            cached += batch_size * attended * cache.values * max(1 / d, 1 / cache.heads)
            queries += n * cache.layers * 2 * cache.queries / d
            flops += 4 * n * attended * cache.queries / d
        # Recurrent states are read once, and written behind every token, of which any may be the last accepted one.
        states = batch_size * (1 + width) * self.states * _STATE_BYTES / d
        attention = PassWork(cached * cache_bytes + queries * _BFLOAT16 + states, flops + 4 * n * self.states / d)
        return {
            "projections": work(self.projections),
            "attention": attention,
            "mlp": work(self.mlp, read, used),
            "head": work(self.head),
        }


#: In the path of a parameter: a layer; a routed expert, numbered or stacked; what reads images or sound; an MLP,
#: router or shared expert.
_LAYER = re.compile(r"\.(?:\w*layers|h|blocks)\.\d+\.")
_EXPERT = re.compile(r"\bexperts\.(?:(\d+)\.)?")
_OF_IMAGES = re.compile(r"vision|visual|image|audio|multi_modal")
_MLP = re.compile(r"mlp|feed_forward|ffn|moe|router|expert|\bfc\d|\bgate\b")


def _product(rows: int, columns: int) -> Products:
    return Products(rows * columns, rows + columns)


def _first(config: Any, keys: Sequence[str]) -> int:
    for key in keys:
        if value := getattr(config, key, None):
            return value
    raise ModelError(f"the config of model_type {config.model_type!r} has none of the keys {', '.join(keys)}")


def _memory(config: Any) -> tuple[tuple[Cache, ...], float]:
    """Caches of the attention layers, and elements of the recurrent states of a row."""
    window = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None) or 0
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"]
    kinds = kinds if len(kinds) > 1 else [*kinds] * config.num_hidden_layers
    configs = getattr(config, "per_layer_config", None) or [config] * len(kinds)
    states, caches = 0.0, Counter[Cache]()
    for kind, layer in zip(kinds, configs, strict=False):
        if kind in _RECURRENT:
            dims = ([getattr(layer, key, None) or 0 for key in keys] for keys in _STATES)
            if not (size := next((math.prod(dim) for dim in dims if all(dim)), 0)):
                raise ModelError(f"model_type {config.model_type!r} has recurrent layers whose dimensions are unknown")
            states += size
        if kind == "indexed_attention" and (kept := getattr(layer, "index_topk", None)):  # keys of an index choose
            keys, heads = layer.index_head_dim, layer.index_n_heads
            caches[Cache(1, keys, heads * keys / 2, 1)] += 1
            caches[_cache(layer, kept)] += 1
        elif kind in _ATTENTION:
            caches[_cache(layer, 0 if kind in ("full_attention", "hybrid") else window)] += 1
        elif kind not in _RECURRENT | {"moe", "mlp"}:
            raise ModelError(f"layer_types has {kind!r}, whose cost is unknown")
    return tuple(cache._replace(layers=layers) for cache, layers in caches.items()), states


def _cache(config: Any, window: int) -> Cache:
    heads = config.num_attention_heads
    if rank := getattr(config, "kv_lora_rank", None):
        return Cache(1, rank + config.qk_rope_head_dim, heads * (rank + config.qk_rope_head_dim / 2), 1, window)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    if heads % kv_heads:
        raise ModelError(f"the config has {heads} heads, which {kv_heads} key-value heads do not divide")
    return Cache(1, 2 * kv_heads * width, heads * width, kv_heads, window)


@dataclass(frozen=True)
class Roofline:
    """Seconds of a pass of ``shape`` on ``devices`` tensor-parallel accelerators; implements `Curve`.

    Attributes:
        weight_bytes, cache_bytes: bytes of a weight and of a key or value.
    """

    shape: Shape
    accelerator: Accelerator
    devices: int = 1
    weight_bytes: float = _BFLOAT16
    cache_bytes: float = _BFLOAT16
    efficiency: tuple[float, float] = EFFICIENCY  # shares of the stated bandwidth and FLOP rate that are reached
    layer_overhead: float = LAYER_OVERHEAD  # additional seconds per layer
    # include two ring all-reduces per layer for tensor parallelism, at the stated rate of the link
    all_reduce: bool = field(default=True)

    def __post_init__(self) -> None:
        for name in ("devices", "weight_bytes", "cache_bytes"):
            if not 0 < getattr(self, name) < math.inf:
                raise UsageError(f"{name.replace('_', ' ')} must be a positive number, not {getattr(self, name)}")

    def description(self, context: float) -> str:
        """Model, machine and assumptions, for readers."""
        memory, compute = self.efficiency
        parameters = f"{self.shape.parameters / 1e9:.2f} G parameters in matrix products"
        shares = f"{100 * memory:.0f} % of the bandwidth and {100 * compute:.0f} % of the FLOP rate"
        return (
            f"{self.shape.name} ({parameters}) on {self.devices} x {self.accelerator.name}, context {context}\n"
            f"roofline at {shares} of: {self.accelerator.source}" + "\n" * bool(self.caveat) + self.caveat
        )

    @property
    def caveat(self) -> str:
        """The bytes of a weight, if the config has another format of them; else empty."""
        if not self.shape.stored or self.weight_bytes != _BFLOAT16:
            return ""
        name = self.shape.name
        return f"weights of {name}, stored as {printable(self.shape.stored)}, count as 16 bits each; set --weight-bytes"

    def seconds(self, batch_size: float, width: float, context: float) -> float:
        """Seconds of a pass over ``width`` tokens in each of ``batch_size`` rows with ``context`` tokens each.

        Raises UsageError if the numbers of the model or the accelerator do not give a positive, finite time.
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
        machine: dict[str, Any] = {name: getattr(self, name) for name in ("devices", "weight_bytes", "cache_bytes")}
        work = self.shape.work(batch_size, width, context, **machine)
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
        shape, devices = self.shape, self.devices
        caches = (c.layers * c.tokens(context) * c.values * max(1 / devices, 1 / c.heads) for c in shape.caches)
        row = sum(caches) * self.cache_bytes + shape.states * _STATE_BYTES / devices
        return (shape.parameters + shape.embedding) * self.weight_bytes / devices + batch_size * row


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
        from crossdraft.models import resolve

        path = resolve(name).path
    directory = kind_of(path) == "directory"
    file = path / "config.json" if directory else path
    if kind_of(file) != "file":
        raise UsageError(
            f"{printable(name)} is not a config.json, a model directory or a registered model; give one of these"
        )
    config = read_config(file)
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
    from transformers import CONFIG_MAPPING, AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    options = dict(config)
    kind = options.pop("model_type", None)
    if isinstance(kind, str) and kind not in CONFIG_MAPPING:  # of a class of another type, as Kimi K2 of DeepSeek's
        named = options.get("architectures") or ()
        kind = next((known for known, name in CLASSES.items() if name in named), kind)
    if kind is None:
        raise ModelError('the config has no model_type; add one, as in "model_type": "llama"')
    try:
        return AutoConfig.for_model(kind, **options)
    except Exception as error:  # errors of transformers and of its validation
        raise ModelError(
            f"transformers cannot read a config of model_type {quoted(kind)}: {first_line(error)}"
        ) from None
