"""The kinds of checkpoints, their marks, and what reads them: one table for models and for heads.

`identify` decides from ``config.json`` and the names of the tensors, before anything is loaded. Class names come last:
the authors of EAGLE write ``LlamaForCausalLM``, and DSpark's class names occur in DFlash heads. A checkpoint that is of
none of these kinds is not identified, and only its tensors decide if it loads.

Sources: the authors' releases of each method; vllm-project/speculators; SpecForge; NVIDIA Model-Optimizer; the configs
of vLLM (``transformers_utils/configs``) and SGLang.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple


class CheckpointKind(NamedTuple):
    """A row of the table.

    Attributes:
        noun: what the files are, for messages.
        drafters: names of the drafters that read them; the first one is recommended.
        tensors: patterns of tensor names, each of which must match one.
        names: pattern of a class, a ``model_type`` or a section of the config, in lower case without separators.
        remedy: what to do instead, if no drafter reads them.
        named: its name decides, whatever its tensors are; ``weak``: names of other kinds count before its tensors.
        inside: it may be a part of the checkpoint of its target.
        causal: transformers can load it as a causal language model.
    """

    noun: str
    drafters: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    names: str = ""
    remedy: str = "use heads of a supported method"
    named: bool = False
    weak: bool = False
    inside: bool = False
    causal: bool = False


_MODEL = r"^(?:model\.)?"
_LANGUAGE_MODEL = "use a causal language model"
#: The first row that fits decides.
KINDS = (
    CheckpointKind(
        "a Gemma 4 assistant, whose layers attend to the keys and values of its target's last layers",
        names="gemma4(?:unified)?assistant",
        named=True,
    ),
    CheckpointKind(
        "a Muse Glimmer assistant, a DFlash head with an encoder and sliding layers",
        names="museglimmerassistant",
        named=True,
    ),
    CheckpointKind("Hydra heads", tensors=(r"hydra_(?:lm_)?(?:head|mlp)",), names="hydra"),
    CheckpointKind("a ReDrafter", names="redrafter|recurrentdrafter"),
    CheckpointKind(
        "a LoRA adapter",
        tensors=(r"\.lora_(?:[AB]|embedding_[AB])\b",),
        remedy="name it behind its base model: BASE+ADAPTER",
    ),
    CheckpointKind(
        "DSpark heads", ("dspark",), (rf"{_MODEL}(?:markov_(?:head\.|w\d)|confidence_(?:head|proj)\.)",), "dspark"
    ),
    CheckpointKind("P-EAGLE heads", ("p-eagle",), (rf"{_MODEL}mask_hidden$",), "peagle", named=True),
    CheckpointKind(
        "EAGLE-3 heads", ("eagle3",), (rf"{_MODEL}(?:layers\.0|midlayer|transformer)\.hidden_norm\.",), "eagle3"
    ),
    CheckpointKind("DFlash heads", ("dflash",), (rf"{_MODEL}fc\.weight$", rf"{_MODEL}hidden_norm\.weight$"), "dflash"),
    CheckpointKind(
        "EAGLE heads",
        ("eagle",),
        (rf"{_MODEL}(?:fusion_)?fc\.weight$", rf"{_MODEL}(?:layers\.0|transformer)\."),
        "eagle(?!.*(?:vl|config))|^hass",
        weak=True,
    ),
    CheckpointKind(
        "Medusa heads",
        ("medusa",),
        (r"^(?:medusa_heads?\.)*(?:\d+\.\d+\.linear\.(?:weight|bias)|blocks\.\d+\.layers\.\d+\.(?:weight|bias))$",),
        "medusa",
        inside=True,
    ),
    CheckpointKind(
        "an MLP speculator",
        ("mlp-speculator",),
        (r"^(?:speculator\.)?(?:emb|proj)\.0\.weight$",),
        "mlpspeculator|speculatorpretrained",
    ),
    CheckpointKind(
        "a module of multi-token prediction (MTP)",
        ("mtp",),
        (rf"{_MODEL}mtp(?:_layers)?\.|\.eh_proj\.weight$",),
        "mtp(?!config)",
        inside=True,
    ),
    CheckpointKind("look-ahead embeddings", ("pass",), (r"^embeddings$",)),
    CheckpointKind(
        "an encoder or a classifier",
        names="for(?:maskedlm|pretraining|(?:sequence|token)classification|questionanswering|multiplechoice)$"
        "|rewardmodel$",
        remedy=_LANGUAGE_MODEL,
    ),
    CheckpointKind(
        "a model with images or audio",
        names="^(?:vision|vit|audio|speech)config$",
        remedy="use a model of text; the sizes of its text model are in the section text_config",
        causal=True,
    ),
    CheckpointKind("an encoder-decoder model", names="^isencoderdecoder$", remedy=_LANGUAGE_MODEL),
    CheckpointKind(
        "a causal language model",
        ("draft-model",),
        (
            r"\.(?:embed_tokens|wte|embed_in|word_embeddings|embeddings)\.weight$",
            r"^(?:model|transformer|gpt_neox|backbone|decoder)\.(?:\w+\.)?(?:norm|ln_f|norm_f|final_layer_?norm)\.",
        ),
        weak=True,
        causal=True,
    ),
)
LANGUAGE_MODEL = KINDS[-1]
_DRAFTERS = {drafter for kind in KINDS for drafter in kind.drafters}


class Identity(NamedTuple):
    """The kind of a checkpoint.

    Attributes:
        marks: the names that show it, for messages.
        parts: kinds of drafters that lie in the checkpoint of their target, a causal language model.
    """

    kind: CheckpointKind
    marks: str
    parts: tuple[CheckpointKind, ...] = ()

    @property
    def drafters(self) -> tuple[str, ...]:
        """Names of the drafters that read the checkpoint."""
        return tuple(drafter for kind in (*self.parts, self.kind) for drafter in kind.drafters)

    @property
    def remedy(self) -> str:
        if not self.drafters:
            return self.kind.remedy
        return f"use drafter {' or '.join(map(repr, self.drafters))}"

    def misused(self, drafter: str) -> bool:
        """True if other drafters than ``drafter`` read the checkpoint; False if the table does not have ``drafter``."""
        return drafter in _DRAFTERS and drafter not in self.drafters

    def __str__(self) -> str:
        parts = "".join(f", with {kind.noun}" for kind in self.parts)
        return f"{self.kind.noun}{parts} ({self.marks})"


def identify(config: Mapping[str, Any], tensors: Collection[str]) -> Identity | None:
    """Identify the kind of a checkpoint from its ``config.json`` and the names of its tensors; None if unknown."""
    names = {re.sub(r"[^a-z0-9]", "", name.lower()): name for name in _class_names(config)}

    def named(kind: CheckpointKind) -> Identity | None:
        marks = [text for name, text in names.items() if kind.names and re.search(kind.names, name)]
        return Identity(kind, f"config.json: {marks[0]}") if marks else None

    def stored(kind: CheckpointKind) -> Identity | None:
        marks = [next((name for name in tensors if re.search(p, name)), None) for p in kind.tensors]
        return Identity(kind, ", ".join(map(str, marks))) if marks and None not in marks else None

    results = [named(kind) for kind in KINDS if kind.named] + [stored(kind) for kind in KINDS if not kind.weak]
    parts = [result.kind for result in results if result is not None and result.kind.inside]
    if parts and (layer := _first_layer(tensors)):
        return Identity(LANGUAGE_MODEL, layer, tuple(parts))
    results += [named(kind) or stored(kind) for kind in KINDS]
    return next((result for result in results if result is not None), None)


def _class_names(config: Mapping[str, Any]) -> Iterator[str]:
    classes = config.get("architectures")
    for name in (*(classes if isinstance(classes, list) else [classes]), config.get("model_type")):
        if isinstance(name, str):
            yield name
    if isinstance(algorithm := config.get("speculators_model_type"), str):
        yield algorithm
    for key, value in config.items():
        if value and (str(key).endswith("_config") or key == "is_encoder_decoder"):
            yield str(key)


def _first_layer(tensors: Collection[str]) -> str | None:
    """Return the name of a tensor of layer 0 of a model, not of heads; None without one."""
    first = re.compile(r"^(?!(?:model\.)?(?:mtp|medusa|blocks))(?:.*\.)?(?:layers|h|blocks)\.0\.")
    if any(name.endswith("layers.0.eh_proj.weight") for name in tensors):
        return None
    return next(filter(first.search, tensors), None)


#: Tensors without a part in the logits of a model: buffers that the config determines, scales of a quantised cache,
#: heads that read its states, and parts that read other inputs than text.
_HARMLESS = re.compile(
    r"(?:^|\.)(?:rotary(?:_pos)?_emb\.inv_freq|masked_bias|position_ids|[kv]_scale|(?:attn|attention)\.(?:bias|mask))$"
    r"|^(?:model\.)?(?:mtp|mtp_layers|medusa_heads?|v_head|visual|vision\w*|audio\w*|multi_modal_\w+|mm_projector)\."
    r"|^(?:model\.)?(?:embed_vision|embed_audio|eagle_module)\."
)
_LAYER_NUMBER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def unknown_tensors(unused: Collection[str], tensors: Collection[str]) -> set[str]:
    """The ``unused`` ones of a model's ``tensors`` that are not known to be without influence on its logits."""
    heads = [name for name in tensors if name.endswith(".eh_proj.weight")]
    modules = {match[1] for name in heads if (match := _LAYER_NUMBER.search(name))}
    return {
        name
        for name in unused
        if not _HARMLESS.search(name) and not ((match := _LAYER_NUMBER.search(name)) and match[1] in modules)
    }
