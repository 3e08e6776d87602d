"""One call: generate text with any drafter and any verifier, for one prompt or many.

from crossdraft import generate, load_model
target = load_model("smollm2-135m-instruct")
for response in generate(target, ["What is a token?"], drafter="prompt-lookup", temperature=0):
    print(response.text)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from pydantic import ValidationError

from .decoding.lm import TransformersLM, fitted
from .decoding.loop import Decoder, Response, Stopwatch
from .decoding.sampling import Sampling
from .drafter import DraftContext
from .errors import ModelError, UsageError
from .lm import LM
from .models import LoadedModel, load_model, same_tokenizer, shares_embedding
from .plugins import get
from .rng import CounterRng
from .verifier import incompatible

#: A drafter or verifier: its name, or a mapping with ``name`` and the keys of its Config.
Strategy = str | Mapping[str, Any]


def configured(kind: str, strategy: Strategy) -> tuple[type, Any]:
    """The class and validated config of a drafter (``kind`` "drafters") or verifier ("verifiers").

    Raises UnknownNameError, or UsageError naming the key that does not fit.
    """
    options = {"name": strategy} if isinstance(strategy, str) else dict(strategy)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise UsageError(f"a {kind[:-1]} needs a 'name', got {strategy!r}")
    cls = get(kind, name)
    try:
        return cls, cls.Config(**options)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise UsageError(
            f"{kind[:-1]} '{name}', key '{key}': {first['msg']}; "
            f"its keys are {', '.join(cls.Config.model_fields) or 'none'}"
        ) from None


def drafter_lm(target: LoadedModel, name: str, batch_size: int, max_length: int, vocab_size: int) -> LM:
    """B slots of the model called ``name`` to draft for ``target``. Raises ModelError if the tokenizers differ."""
    share_with = target if shares_embedding(name, target) else None
    loaded = load_model(name, share_with=share_with, dtype=target.model.dtype, device=target.model.device)
    if difference := same_tokenizer(target.tokenizer, loaded.tokenizer):
        raise ModelError(f"'{name}' cannot draft for '{target.name}': {difference}")
    return fitted(TransformersLM(loaded.model, batch_size, max_length), vocab_size)


def build_decoder(
    target: LoadedModel,
    drafter: Strategy,
    verifier: Strategy,
    *,
    sampling: Sampling,
    batch_size: int,
    max_length: int,
    max_new_tokens: int,
    seed: int = 0,
    stopwatch: Stopwatch | None = None,
    load_drafter: Callable[..., LM] = drafter_lm,
) -> Decoder:
    """A decoder for a pair; ``max_length`` in tokens covers the longest prompt and its output.

    Raises:
        UsageError: an unknown name, a config that does not fit, or a pair that is incompatible (says why).
    """
    drafter_class, drafter_config = configured("drafters", drafter)
    verifier_class, verifier_config = configured("verifiers", verifier)
    traits = drafter_class.traits(drafter_config, sampling)
    if reason := incompatible(drafter_class.name, traits, verifier_class.name, verifier_class.traits, sampling):
        raise UsageError(reason)
    max_length += traits.nodes + 1  # the root and the widest draft
    lm = TransformersLM(target.model, batch_size, max_length, traits.hidden_layers)
    context = DraftContext(
        sampling=sampling,
        batch_size=batch_size,
        max_length=max_length,
        vocab_size=lm.vocab_size,
        device=lm.device,
        load_lm=lambda name: load_drafter(target, name, batch_size, max_length, lm.vocab_size),
        target_model=target.model,
        final_law=verifier_class.traits.modifies_target,
    )
    return Decoder(
        lm,
        drafter_class(drafter_config, context),
        verifier_class(verifier_config),
        sampling=sampling,
        eos=target.eos_token_ids,
        max_new_tokens=max_new_tokens,
        rng=CounterRng(seed),
        stopwatch=stopwatch,
    )


def generate(
    model: str | LoadedModel,
    inputs: str | Sequence[str] | Sequence[Sequence[int]],
    *,
    drafter: Strategy = "prompt-lookup",
    verifier: Strategy | None = None,
    max_new_tokens: int = 128,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    batch_size: int = 8,
    seed: int = 0,
    chat: bool | None = None,
) -> list[Response]:
    """Generate a continuation of every input with speculative decoding; the target's distribution is kept.

    Args:
        model: a target from :func:`load_model`, or its name.
        inputs: texts, or lists of token ids.
        drafter, verifier: a name, or a mapping with ``name`` and its options, e.g.
            ``{"name": "small-lm", "model": "smollm2-small-lm", "gamma": 4}``. The default verifier is
            ``greedy`` at temperature 0 and ``block`` otherwise.
        batch_size: most sequences decoded at once.
        chat: put texts into the model's chat template; by default if it has one.

    Returns:
        One :class:`Response` an input, in order, with ``tokens``, ``text``, ``finish`` and its ``rounds``.

    Raises:
        UsageError, UnknownNameError, ModelError: with a sentence that says what to change.
    """
    target = load_model(model) if isinstance(model, str) else model
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    texts = [inputs] if isinstance(inputs, str) else list(inputs)
    if not texts:
        return []
    prompts = [_encode(target, text, chat) if isinstance(text, str) else [int(t) for t in text] for text in texts]
    pair_verifier = verifier if verifier is not None else ("greedy" if temperature == 0 else "block")
    decoder = build_decoder(
        target,
        drafter,
        pair_verifier,
        sampling=sampling,
        batch_size=min(batch_size, len(prompts)),
        max_length=max(map(len, prompts)) + max_new_tokens,
        max_new_tokens=max_new_tokens,
        seed=seed,
    )
    responses = sorted(decoder.run(prompts), key=lambda response: response.index)
    for response in responses:
        response.text = str(target.tokenizer.decode(response.tokens, skip_special_tokens=True))
    return responses


def _encode(target: LoadedModel, text: str, chat: bool | None) -> list[int]:
    tokenizer: Any = target.tokenizer
    if chat is None:
        chat = getattr(tokenizer, "chat_template", None) is not None
    if chat:
        turns = [{"role": "user", "content": text}]
        return list(tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False))
    return list(tokenizer(text)["input_ids"])


def custom_generate(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    generation_config: Any = None,
    *,
    drafter: Strategy = "prompt-lookup",
    verifier: Strategy | None = None,
    seed: int = 0,
    **model_kwargs: Any,
) -> torch.Tensor:
    """For ``model.generate(..., custom_generate=crossdraft.custom_generate, drafter=..., verifier=...)``.

    Reads temperature, top_k, top_p, min_p, max_new_tokens and eos from the generation config; rows may be padded
    on the left as usual. Drafters that load another model need :func:`generate`.

    Returns:
        ``[B, longest]`` int64: prompt and output, padded on the right with the pad (or first EOS) id.
    """
    config = generation_config
    sampling = Sampling(
        temperature=(1.0 if config.temperature is None else config.temperature) if config.do_sample else 0.0,
        top_k=(config.top_k or 0) if config.do_sample else 0,
        top_p=(config.top_p or 1.0) if config.do_sample else 1.0,
        min_p=(getattr(config, "min_p", None) or 0.0) if config.do_sample else 0.0,
    )
    mask = model_kwargs.get("attention_mask")  # named as a parameter, transformers would pass it twice
    mask = torch.ones_like(input_ids) if mask is None else mask
    prompts = [row[keep.bool()].tolist() for row, keep in zip(input_ids, mask, strict=True)]
    most = config.max_length - input_ids.shape[1]
    eos = config.eos_token_id
    ends = () if eos is None else tuple(eos) if isinstance(eos, list | tuple) else (eos,)
    target = LoadedModel(model, None, type(model).__name__, "given", "", ends, None)  # type: ignore[arg-type]
    verifier = verifier if verifier is not None else ("greedy" if sampling.temperature == 0 else "block")

    def no_model(*_: Any) -> LM:
        raise UsageError("this drafter loads a model of its own; use crossdraft.generate instead of custom_generate")

    decoder = build_decoder(
        target,
        drafter,
        verifier,
        sampling=sampling,
        batch_size=len(prompts),
        max_length=max(map(len, prompts)) + most,
        max_new_tokens=most,
        seed=seed,
        load_drafter=no_model,
    )
    outputs = {response.index: response.tokens for response in decoder.run(prompts)}
    longest = max(len(tokens) for tokens in outputs.values())
    pad = config.pad_token_id if config.pad_token_id is not None else (ends[0] if ends else 0)
    new = [outputs[i] + [pad] * (longest - len(outputs[i])) for i in range(len(prompts))]
    return torch.cat([input_ids, torch.tensor(new, device=input_ids.device)], 1)
