"""The walk over every language model of the installed transformers, and the page that lists the results.

``python tests/support/architecture_walk.py`` walks (minutes) and writes docs/architectures.md.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import transformers
from architecture_checks import disagreement
from architecture_variants import OWN, variants
from fake_cuda_graphs import ReplayingLM
from tiny_architectures import tiny
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from crossdraft.framework.errors import ModelError
from crossdraft.framework.lm import graph_buckets
from crossdraft.framework.lm.architectures import BY_TRIAL, EXACT, RECURRENT, recurrent_layers
from crossdraft.framework.lm.transformers_lm import model_slots

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"
#: Largest difference of a logit that is rounding, in standard deviations; mistakes begin a thousand times higher.
TOLERANCE = 1e-3
#: Outcome of a model whose outputs in the decoder equal its own; any other outcome is the reason of a refusal.
SAME = "exact"
#: Model types that cannot be made here, and why.
NOT_MADE = {
    "gemma3n": "its image tower needs the package timm; its text model is gemma3n_text",
    "gemma4_assistant": "transformers cannot make it by itself: all of its layers share keys of another model",
    "gemma4_unified_assistant": "transformers cannot make it by itself: all of its layers share keys of another model",
}
#: Multimodal models without a small size here: their towers are large, need packages, or fit to no size by default.
_NOT_SMALL = """
apertus1p5 chameleon cosmos3_edge deepseek_ocr2 diffusion_gemma evolla fast_vlm florence2 fun_asr_nano glm5_next
granite4_vision granite_docling hy_v4_vl inkling2 inkling2_loop janus kosmos-2 kosmos-2.5 kyutai_speech_to_text mistral4
mistral_large4 molmo2 muse_spark nemo_speechlm nemotron_h_omni perception_lm qwen2_5_omni qwen3_asr qwen3_omni_moe
step3p7 t5gemma2 vibevoice_asr vision-encoder-decoder
"""
NOT_MADE |= dict.fromkeys(_NOT_SMALL.split(), "a multimodal model that the tests do not make in a tiny size")
#: Parts of transformers' own messages about nonexistent variants.
NO_VARIANT = (
    "rope_parameters",  # kinds of rotary positions that the config does not take, or not without further parameters
    "is a per-layer attribute",
    "division by zero",  # dynamic frequencies for two rotary dimensions
    "is not supported for",
    "does not support RoPE types",
    "no attribute 'max_position_embeddings'",
    "KeyError: 'sliding_attention'",
)


#: Every type of model that transformers has a causal language model for.
TYPES: tuple[str, ...] = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
#: Every other type that it has a multimodal model for, whose language model decodes text.
MULTIMODAL = tuple(name for name in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES if name not in TYPES)


def class_name(model_type: str) -> str:
    """The class that transformers makes for it."""
    result = {**MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES, **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}[model_type]
    return result if isinstance(result, str) else result[0]


def outcome(model_type: str, changes: Mapping[str, Any], lm_class: Any = model_slots) -> str | None:
    """`SAME`, or the sentence that refuses the model; None where transformers has no such variant.

    Raises AssertionError for a model that is run wrongly, and whatever a model raises that is neither.
    """
    try:
        model = tiny(CONFIG_MAPPING[model_type], **changes)
    except Exception as error:
        if changes and any(part in f"{type(error).__name__}: {error}" for part in NO_VARIANT):
            return None
        raise
    try:
        off = disagreement(model, lm_class=lm_class)
        if off >= TOLERANCE:  # some architectures magnify rounding
            off = disagreement(model.double(), lm_class=lm_class)
    except ModelError as refusal:
        return str(refusal)
    assert off < TOLERANCE, f"{type(model).__name__} {dict(changes)}: {off:.2g} standard deviations off"
    return SAME


@cache
def recurrent(model_type: str) -> bool:
    """True if the language model has recurrent layers, in some configurations at least."""
    inside = model_type in MULTIMODAL and recurrent_layers(tiny(CONFIG_MAPPING[model_type]))
    return class_name(model_type) in RECURRENT or bool(inside)


@cache
def outcomes(model_type: str) -> dict[str, str]:
    """Findings for the architecture ("") and its variants, by label."""
    if model_type in NOT_MADE:
        return {}
    config_class = CONFIG_MAPPING[model_type]
    results = {"": outcome(model_type, {})}
    more = variants(config_class) if results[""] == SAME and model_type in TYPES else {}
    for label, changes in (OWN.get(model_type, {}) | more).items():
        results[label] = outcome(model_type, changes)
    if results[""] == SAME and not recurrent(model_type):
        results["recorded"] = outcome(model_type, {}, RecordedLM)
    return {label: result for label, result in results.items() if result is not None}


class RecordedLM(ReplayingLM):
    """Passes as CUDA graphs replay them: they attend over more slots than they need."""

    def forward(self, *arguments: Any, **inputs: Any) -> Any:
        before, graph_buckets.BUCKET = graph_buckets.BUCKET, 16
        try:
            return super().forward(*arguments, **inputs)
        finally:
            graph_buckets.BUCKET = before


def page(by_type: Mapping[str, Mapping[str, str]]) -> str:
    """docs/architectures.md, from `outcomes` by model type."""
    exact: dict[str, list[str]] = {}
    partly: dict[tuple[str, str], list[str]] = {}
    refused: dict[str, list[str]] = {}
    not_made: dict[str, list[str]] = {}
    for model_type, results in by_type.items():
        name = class_name(model_type)
        if model_type in NOT_MADE:
            not_made.setdefault(NOT_MADE[model_type], []).append(f"`{name}` ({model_type})")
        elif SAME not in results.values():
            refused.setdefault(results[""].removeprefix(f"{name} "), []).append(f"`{name}` ({model_type})")
        else:
            exact.setdefault(name, []).append(model_type)
            for label, result in results.items():
                if result != SAME:
                    why = result.removeprefix(f"{name} ")
                    names = partly.setdefault((label or "as it is in the test", why), [])
                    names += [f"`{name}`"] if f"`{name}`" not in names else []
    tried = ", ".join(f"`{name}`" for name in sorted(BY_TRIAL))
    checked = sum(result == SAME for results in by_type.values() for result in results.values())
    lines = [
        _HEAD.format(
            version=transformers.__version__,
            types=len(by_type),
            classes=len(exact),
            checked=checked,
            by_trial=tried,
            recurrent=sum(any(map(recurrent, kinds)) for kinds in exact.values()),
        ).strip(),
        "",
        "## Exact",
        "",
        *_by_letter(exact),
        "",
        "## Exact, but not in every variant",
        "",
        "Bounds are those of the tiny models of the test; for a real one they come from its config.",
        "",
        "| variant | why it is refused | classes |",
        "|---|---|---|",
        *(f"| {label} | {why} | {', '.join(names)} |" for (label, why), names in sorted(partly.items())),
        "",
        "## Refused",
        "",
        *_rows("why", refused),
        "",
        "## Not tried",
        "",
        *_rows("why", not_made),
    ]
    return "\n".join(lines) + "\n"


def _rows(head: str, table: Mapping[str, list[str]]) -> list[str]:
    return [
        f"| {head} | classes (model types) |",
        "|---|---|",
        *(f"| {reason} | {', '.join(sorted(names))} |" for reason, names in sorted(table.items(), key=_key)),
    ]


def _by_letter(exact: Mapping[str, list[str]]) -> list[str]:
    """Classes, with model types that their names do not give."""
    lines: dict[str, list[str]] = {}
    for name, kinds in sorted(exact.items(), key=_key):
        own = re.sub("For(CausalLM|ConditionalGeneration)$|LMHeadModel$|_", "", name).lower()
        others = ", ".join(kind for kind in sorted(kinds) if re.sub("[-_]", "", kind) != own)
        lines.setdefault(name[0].lower(), []).append(f"`{name}`" + (f" ({others})" if others else ""))
    return [f"- {', '.join(names)}" for names in lines.values()]


def _key(item: tuple[str, Any]) -> str:
    return item[0].lower()


_HEAD = """
# Which architectures are decoded exactly

`python tests/support/architecture_walk.py` generates this page from every causal language model of transformers
({version}: {types} model types), and from multimodal models, whose language model decodes text;
`tests/lm/test_architectures_walk.py` tests it. A tiny float32 model of each architecture decodes ragged batches of
chains and of trees for several steps. Either all logits equal those of the plain model (one prompt at a time, no
padding, no cache), or the model is rejected before anything is decoded.

{classes} classes are exact, in {checked} variants: both kinds of attention (`sdpa`, `eager`), passes as CUDA graphs
record them, sliding windows, tied and untied embeddings, and rotary positions of type linear, dynamic, yarn, llama3 and
longrope, each where the architecture has it. {recurrent} of them have recurrent layers: chains and trees are exact for
each; their passes are not recorded into CUDA graphs, and drafters that run some of the target's layers are refused.
Sparse attention is exact up to the number of keys that it selects; longer slots are refused. Model types are
in brackets where the class does not give them.

A model of a class that is not on this page (a newer one, or one with its own code) is tried when its slots are
created: seven tiny passes compare a ragged batch with a tree to the plain model. It is rejected if they differ. A trial
cannot detect differences that occur only in long texts (a window, frequencies that depend on the length).
Multimodal models are tried, too, and {by_trial}: older versions of transformers
give them no causal mask, or not every configuration is exact.
"""

if __name__ == "__main__":
    everything = {}
    for name in (*TYPES, *MULTIMODAL):
        everything[name] = outcomes(name)
        print(name, *everything[name].values(), sep="\n  ", file=sys.stderr)
    PAGE.write_text(page(everything), encoding="utf-8")
    exact = {class_name(name) for name in TYPES if SAME in everything[name].values()}
    print(
        f"not in EXACT: {sorted(exact - EXACT - BY_TRIAL)}; not found exact: {sorted(EXACT - exact)}", file=sys.stderr
    )
