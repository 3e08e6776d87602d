"""Supported architectures, and the reasons why others are refused; docs/architectures.md is the list.

A pass of the decoder has rows of different length in one cache, with explicit masks and positions. A model that reads
anything else about its input (the length of the batch, the padding, one offset for all rows) would silently compute
other logits than for a single sequence. Architectures known to do so raise an error. A model that is not known, because
it comes with its own code or a newer transformers, goes through a trial once.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakSet

import torch
import transformers
from transformers.modeling_utils import PreTrainedModel

from .. import plugins
from ..errors import ModelError
from ..models.placement import input_device, is_spread, split_of
from ..util.cache_argument import cache_argument
from ..util.tensors import on_device
from .attention.sparse import indexers, selected_keys

#: True if transformers keeps recurrent states, and numbers and selects layers, as this package expects.
RECENT = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 23)

_EXACT = """
AfmoeForCausalLM Apertus1p5TextForCausalLM ApertusForCausalLM ArceeForCausalLM AriaTextForCausalLM AXK1ForCausalLM
BeamForCausalLM BertGenerationDecoder BertLMHeadModel BioGptForCausalLM BitNetForCausalLM CodeGenForCausalLM
Cohere2ForCausalLM Cohere2MoeForCausalLM CohereCompassForCausalLM CohereForCausalLM CTRLLMHeadModel CwmForCausalLM
DbrxForCausalLM DeepseekV2ForCausalLM DeepseekV3ForCausalLM DiffLlamaForCausalLM Dots1ForCausalLM ElectraForCausalLM
Emu3ForCausalLM Ernie4_5_MoeForCausalLM Ernie4_5ForCausalLM ErnieForCausalLM Exaone4ForCausalLM ExaoneMoeForCausalLM
FalconForCausalLM FlexOlmoForCausalLM FlintForCausalLM FuyuForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM
Gemma3ForConditionalGeneration Gemma3nForCausalLM Gemma4ForCausalLM Gemma4ForConditionalGeneration
Gemma4UnifiedForCausalLM Gemma4UnifiedForConditionalGeneration GemmaForCausalLM GitForCausalLM Glm4ForCausalLM
Glm4MoeForCausalLM Glm4MoeLiteForCausalLM GlmForCausalLM GotOcr2ForConditionalGeneration GPT2LMHeadModel
GPTBigCodeForCausalLM GPTJForCausalLM GPTNeoForCausalLM GPTNeoXForCausalLM GPTNeoXJapaneseForCausalLM GptOssForCausalLM
GraniteForCausalLM GraniteMoeForCausalLM GraniteMoeSharedForCausalLM GraniteMoeSWAForCausalLM GraniteSWAForCausalLM
HeliumForCausalLM HrmTextForCausalLM HunYuanDenseV1ForCausalLM HunYuanMoEV1ForCausalLM HyperCLOVAXForCausalLM
HYV3ForCausalLM Jais2ForCausalLM JetMoeForCausalLM Kolibri1ForCausalLM LagunaForCausalLM Lfm2ForCausalLM
Llama4ForCausalLM LlamaForCausalLM LongcatFlashForCausalLM MellumForCausalLM MiMoV2FlashForCausalLM MiniCPM3ForCausalLM
MiniMaxM2ForCausalLM MiniMaxM3VLForCausalLM Ministral3ForCausalLM MinistralForCausalLM MistralForCausalLM
MixtralForCausalLM MllamaForCausalLM ModernBertDecoderForCausalLM MoshiForCausalLM NanoChatForCausalLM
NemotronForCausalLM Olmo2ForCausalLM Olmo3ForCausalLM OlmoeForCausalLM OlmoForCausalLM OPTForCausalLM
PersimmonForCausalLM Phi3ForCausalLM Phi4MultimodalForCausalLM PhiForCausalLM PhimoeForCausalLM Qwen2ForCausalLM
Qwen2MoeForCausalLM Qwen3ForCausalLM Qwen3MoeForCausalLM RoCBertForCausalLM SeedOssForCausalLM SmolLM3ForCausalLM
SolarOpenForCausalLM StableLmForCausalLM Starcoder2ForCausalLM VaultGemmaForCausalLM XGLMForCausalLM YoutuForCausalLM
"""
#: Classes with recurrent layers, by crossdraft-layers; from transformers 5.23 on.
_RECURRENT = """
BailingHybridForCausalLM BambaForCausalLM FalconH1ForCausalLM FalconMambaForCausalLM GraniteMoeHybridForCausalLM
Inkling2ForCausalLM InklingForCausalLM JambaForCausalLM KimiLinearForCausalLM LaraMiniForCausalLM Lfm2MoeForCausalLM
Lfm3ForCausalLM Mamba2ForCausalLM MambaForCausalLM MiniMaxForCausalLM NemotronHForCausalLM OlmoHybridForCausalLM
Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM Qwen3NextForCausalLM RecurrentGemmaForCausalLM RwkvForCausalLM xLSTMForCausalLM
Zamba2ForCausalLM ZambaForCausalLM ZayaForCausalLM
"""
#: Classes with sparse attention, exact up to the number of keys that they select; from transformers 5.23 on.
_SPARSE = """
AXK2ForCausalLM DeepseekV32ForCausalLM Dots3NoteForCausalLM GlmMoeDsaForCausalLM HYV4ForCausalLM
"""
#: Classes whose logits in ragged batches of chains and trees equal those of transformers; the tests check all of them.
EXACT = frozenset(_EXACT.split() + ((_RECURRENT + _SPARSE).split() if RECENT else []))
#: Those of them that have recurrent layers, in some configurations at least.
RECURRENT = frozenset({*_RECURRENT.split(), "Lfm2ForCausalLM"})
#: Classes that go through the trial: older versions of transformers give them no causal mask, or, of Dory, not every
#: configuration is exact.
BY_TRIAL = frozenset(
    {"BigBirdForCausalLM", "DogeForCausalLM", "DoryForCausalLM", "MegatronBertForCausalLM", "RemBertForCausalLM"}
)

#: The preparation of models with recurrent layers.
RECURRENT_LAYERS = "recurrent-layers"
#: Attention that is compiled for CUDA, by its name in transformers, and its preparation.
FLEX, FLEX_ATTENTION = "flex_attention", "flex-attention"
#: Devices that it runs on. PyTorch compiles CPU code again for every length, which takes seconds each time.
FLEX_DEVICES = ("cuda",)
#: Layers that cache keys and values by position, so rejected tokens can be dropped.
_ROLLBACK_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
#: Layers that read no other token; some models list them among the others.
_STATELESS_LAYERS = {"mlp", "moe", "dense", "sparse"}
#: Layers that select or merge keys with the help of further keys.
_SPARSE_LAYERS = {
    "deepseek_sparse_attention",
    "qwen_sparse_attention",
    "indexed_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
    "minimax_m3_sparse",
}


def text_config(model: Any) -> Any:
    """The config of the part of ``model`` that decodes text."""
    try:
        return model.config.get_text_config()
    except ValueError:
        raise ModelError(
            f"{type(model).__name__} contains more than one text model, so crossdraft cannot choose; load one of them"
        ) from None


def sliding_window(config: Any) -> int | None:
    """Window of the sliding layers in tokens, the query included; None = no window, or several different ones."""
    try:
        return getattr(config, "sliding_window", None)
    except RuntimeError:  # it differs between layers
        return None


def _layer_types(config: Any) -> set[str]:
    return set(getattr(config, "layer_types", None) or ())


def recurrent_layers(model: Any) -> str:
    """Describe the recurrent layers of ``model``; empty without any."""
    if kinds := sorted(_layer_types(text_config(model)) - _ROLLBACK_LAYERS - _STATELESS_LAYERS - _SPARSE_LAYERS):
        return f"layers of type {', '.join(kinds)}"
    return "recurrent layers" if getattr(model, "_is_stateful", False) else ""


def attends(model: Any) -> bool:
    """False for a model that is recurrent throughout: it takes no cache of keys, no masks and no positions."""
    positions = "position_ids" in inspect.signature(model.forward).parameters
    cached = cache_argument(model.forward) == "past_key_values" or positions
    return cached or not recurrent_layers(model) or bool(_layer_types(text_config(model)) & _ROLLBACK_LAYERS)


def refuse_unsupported(model: Any, max_length: int | None = None, both_ropes: bool = False) -> None:
    """Raise ModelError with the reason if this decoder would run ``model`` wrongly.

    Args:
        max_length: longest sequence of a slot in tokens; some models are exact only up to a length.
        both_ropes: the slots keep both frequencies of longrope.
    """
    for reason in _reasons(model, text_config(model), max_length, both_ropes):
        raise ModelError(f"{type(model).__name__} {reason}")


def _reasons(model: Any, config: Any, max_length: int | None, both_ropes: bool) -> Iterator[str]:
    if getattr(config, "is_encoder_decoder", False) or getattr(model.config, "is_encoder_decoder", False):
        yield "is an encoder-decoder model; crossdraft decodes decoder-only causal models"
    if type(model).__name__ == "BltForCausalLM":
        yield (
            "cuts its text into patches of bytes, which have their own cache and positions; use a model that reads "
            "tokens"
        )
    kinds = _layer_types(config)
    sparse = sorted(kinds & _SPARSE_LAYERS)
    if sparse and not (RECENT and indexers(model)):
        yield (
            f"has layers of type {', '.join(sparse)}: they select keys with a further cache, which has one length for "
            "all rows and is not supported; use a model whose layers are all plain attention"
        )
    layers = recurrent_layers(model)
    if layers and not RECENT:
        yield (
            f"has {layers}, which are supported from transformers 5.23 on, but {transformers.__version__} is "
            "installed; update it"
        )
    if layers and RECURRENT_LAYERS not in plugins.entries("preparations"):
        yield f"has {layers}: {plugins.unknown('preparations', RECURRENT_LAYERS)}"
    slides = "sliding_attention" in kinds and getattr(config, "use_sliding_window", True) is not False
    if slides and sliding_window(config) is None:
        yield "has sliding layers, but its config has no single sliding_window for them; use another model"
    if getattr(config, "attention_chunk_size", None) is not None and not kinds:
        yield "has chunked attention, but its config does not list the layers (layer_types); use another model"
    if "flash" in str(getattr(config, "_attn_implementation", "")):
        yield (
            "was loaded with flash attention, which takes no masks of trees and of rows of different length; "
            "load it with attn_implementation sdpa"
        )
    if getattr(config, "_attn_implementation", None) == FLEX:
        yield from _flex_reasons(model)
    inputs = inspect.signature(model.forward).parameters
    if attends(model) and not cache_argument(model.forward):
        yield "takes no cache, so crossdraft cannot supply its cache of keys and values; use a model with a cache"
    if attends(model) and "position_ids" not in inputs:
        yield (
            "takes no position_ids (its positions follow from the padding mask), so rows of different "
            "length cannot share a batch; use a model with explicit positions"
        )
    if getattr(config, "alibi", False):
        yield (
            "uses alibi, whose positions follow from a padding mask, so rows of different length cannot share a batch; "
            "use a model with explicit positions"
        )
    if type(model).__name__ == "DogeForCausalLM" and config.is_moe:
        yield (
            "with experts (is_moe) routes each token by its neighbours in the pass, other rows included, so its output "
            "depends on the batch; use a model without experts"
        )
    both_ways = getattr(config, "use_bidirectional_attention", None) in (True, "all")
    # Models that began as encoders are both; other configs have `is_decoder` and never read it.
    encoder = getattr(config, "is_decoder", None) is False and hasattr(config, "add_cross_attention")
    if both_ways or encoder or getattr(config, "is_causal", True) is False:
        hint = "; set is_decoder in its config, if it was trained to be one" if encoder else ""
        yield f"attends in both directions, so it is not a causal language model as configured{hint}"
    if model.get_output_embeddings() is None:
        yield "has no output embedding, so it cannot predict tokens; load a causal language model"
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules()):
        yield (
            "counts positions from its padding token's id, but crossdraft counts from 0; use a model with plain "
            "positions"
        )
    if max_length is not None:
        yield from _too_long(model, config, max_length, both_ropes)


def _flex_reasons(model: Any) -> Iterator[str]:
    hint = "; leave attn_implementation out"
    if FLEX_ATTENTION not in plugins.entries("preparations"):
        yield f"was loaded with {FLEX}: {plugins.unknown('preparations', FLEX_ATTENTION)}"
    if input_device(model).type not in FLEX_DEVICES:
        yield (
            f"was loaded with {FLEX}, but PyTorch compiles code on a CPU again for every length of a text, which "
            f"takes longer than the text{hint}"
        )
    if is_spread(model) or split_of(model):
        yield f"was loaded with {FLEX}, whose masks lie on one device, but the model is on several devices{hint}"


def _too_long(model: Any, config: Any, max_length: int, both_ropes: bool) -> Iterator[str]:
    """Reasons that apply only to slots longer than some bound."""
    shorter = f"but slots reach {max_length} tokens here; shorten the prompts or max_new_tokens, or use another model"
    original = longrope_boundary(config)
    if original is not None and outgrows_longrope(config, max_length) and not both_ropes:
        # Dynamic frequencies change only beyond the context, which no sequence reaches.
        yield (
            f"has longrope positions: if any row of a pass is longer than {original} tokens, the frequencies of all "
            f"rows change, {shorter}; or add crossdraft-layers, which runs both "
            f"({plugins.installing('crossdraft-layers')})"
        )
    name = type(model).__name__
    if name == "GPTNeoForCausalLM":
        if "local" in config.attention_layers and max_length > config.window_size:
            yield (
                "counts the windows of its local attention from the longest row of a batch: "
                f"right up to {config.window_size} tokens, {shorter}"
            )
        if max_length > config.max_position_embeddings:
            yield f"has a mask of {config.max_position_embeddings} positions, {shorter}"
    if name == "DogeForCausalLM" and max_length > config.keep_window_size:
        yield (
            f"attends to the {config.keep_window_size} keys that it ranks highest, and ties depend on the length of "
            f"the pass: right up to {config.keep_window_size} tokens, {shorter}"
        )
    if name == "MoshiForCausalLM" and max_length > config.sliding_window:
        yield (
            f"has a window of {config.sliding_window} tokens that depends on its cache, not on its mask: "
            f"right up to {config.sliding_window} tokens, {shorter}"
        )
    selected = selected_keys(model)
    if selected is not None and max_length > selected:
        yield (
            f"attends to the {selected} keys that its indexer ranks highest, and ties depend on the length of the "
            f"pass: right up to {selected} tokens, {shorter}"
        )
    floor = getattr(config, "log_scaling_n_floor", None)
    if floor is not None and max_length > floor:
        yield (
            f"scales its attention from position {floor} on by the length of a cache that has one length for all rows, "
            f"{shorter}"
        )
    if name == "Llama4ForCausalLM" and config.attn_temperature_tuning and max_length >= config.floor_scale:
        yield (
            f"scales its attention from position {config.floor_scale} on by the length of a cache that has one length "
            f"for all rows, {shorter}"
        )


def longrope_boundary(config: Any) -> int | None:
    """Longest text in tokens with the short frequencies of longrope; None if no layer uses it."""
    boundaries = []
    for rope in _ropes(config):
        original = rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        if rope.get("rope_type", rope.get("type")) in ("longrope", "su") and original is not None:
            boundaries.append(original)
    return min(boundaries, default=None)


def outgrows_longrope(config: Any, max_length: int) -> bool:
    """True if a slot of ``max_length`` tokens may hold texts with the long frequencies of longrope."""
    boundary, context = longrope_boundary(config), getattr(config, "max_position_embeddings", None)
    return boundary is not None and (max_length if context is None else min(max_length, context)) > boundary


#: Length of a slot in a trial, in tokens.
TRIAL_LENGTH = 16
#: Models that passed the trial.
_tried: WeakSet[Any] = WeakSet()


def needs_trial(model: Any) -> bool:
    """True for a whole model of an architecture that neither the tests nor an earlier trial cover."""
    cls = type(model)
    tested = cls.__name__ in EXACT and cls.__module__.startswith("transformers.")
    return isinstance(model, PreTrainedModel) and not tested and model not in _tried


@torch.inference_mode()
def trial(lm: Any) -> None:
    """Raise ModelError if the logits of a ragged batch with a tree differ from those of plain sequences.

    Two rows of different length, each with a root, its child, a sibling of that and a grandchild: three small passes
    here, four of plain sequences without a cache. Windows and frequencies that matter only in longer sequences are not
    covered.

    Args:
        lm: two slots of `TRIAL_LENGTH` tokens; empty.
    """
    model, name = lm.model, type(lm.model).__name__
    ids = [(7 * i + 3) % lm.vocab_size for i in range(16)]
    texts, (child, sibling, grandchild) = (ids[:9], ids[9:12]), ids[12:15]
    try:
        for row, text in enumerate(texts):
            lm.start(row, text)
        feed = [[[text[-1], child] for text in texts], [[sibling, grandchild] for _ in texts]]
        parents = [[[-1, 0]] * 2, [[0, 1]] * 2]
        levels = [
            lm.forward(on_device(f, lm.device), on_device(p, lm.device))[0] for f, p in zip(feed, parents, strict=True)
        ]
        logits = torch.cat(levels, 1).double()  # root, child, sibling, grandchild
        worst = 0.0
        for row, text in enumerate(texts):
            for path, nodes in (([sibling], [0, 2]), ([child, grandchild], [0, 1, 3])):
                plain = model(input_ids=on_device([text + path], lm.device), use_cache=False).logits[0].double()
                error = (logits[row, nodes] - plain[len(text) - 1 :]).square().mean().sqrt() / plain.std()
                worst = max(worst, error.item() if error.isfinite() else float("inf"))
    except Exception as error:
        reason = ": ".join(filter(None, (type(error).__name__, str(error).partition("\n")[0])))
        raise ModelError(
            f"{name} failed a trial with rows of different length and a tree ({reason}), so crossdraft cannot decode "
            "with it; use another model"
        ) from error
    if worst > (1e-3 if lm.model.dtype in (torch.float32, torch.float64) else 0.1):
        raise ModelError(
            f"{name} failed a trial: with rows of different length and a tree its logits were {worst:.0%} off "
            "those of single sequences, so its text would be wrong; use another model or version of transformers"
        )
    _tried.add(model)


def _ropes(config: Any) -> Iterator[Mapping[str, Any]]:
    """The rotary position settings in a config: one set, or one per type of layer."""
    for name in ("rope_parameters", "rope_scaling"):
        settings = getattr(config, name, None)
        if isinstance(settings, Mapping):
            yield settings
            yield from (inner for inner in settings.values() if isinstance(inner, Mapping))
