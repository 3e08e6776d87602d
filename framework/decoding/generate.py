"""One call: generate text with any drafter and any verifier, for one prompt or many.

from crossdraft import generate, load_model
target = load_model("smollm2-135m-instruct")
for response in generate(target, ["What is a token?"], drafter="prompt-lookup", temperature=0):
    print(response.text)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..contracts.errors import UsageError
from ..contracts.models import LoadedModel
from ..contracts.rng import CounterRng
from ..contracts.rounds import Response, RoundEvent, raise_failed
from ..contracts.sampling import Sampling
from ..models.chat import encode
from ..models.load import load_model
from .build import (
    StrategyLike,
    TargetContext,
    build_decoder,
    check_pair,
    configured,
    load_drafting_model,
    make_slots,
    slot_length,
)
from .loop import Decoder


def pair_decoder(
    target: LoadedModel,
    drafter: StrategyLike,
    verifier: StrategyLike | None,
    prompts: Sequence[Sequence[int]],
    *,
    sampling: Sampling,
    batch_size: int,
    max_new_tokens: int,
    seed: int = 0,
    load: Callable[[str, LoadedModel], LoadedModel] = load_drafting_model,
    **options: Any,
) -> Decoder:
    """A decoder for one pair, with slots of its own that are long enough for ``prompts`` and their outputs.

    Args:
        verifier: ``greedy`` at temperature 0 and ``block`` otherwise, if it is None.
        load: how drafting models are loaded.
        options: further ones of `build_decoder`.
    """
    verifier = verifier if verifier is not None else ("greedy" if sampling.temperature == 0 else "block")
    pair = configured("drafters", drafter), configured("verifiers", verifier)
    check_pair(*pair, sampling)
    sequence = max(map(len, prompts)) + max_new_tokens
    if target.context_length is not None:
        sequence = min(sequence, target.context_length)
    slot = slot_length(sequence, [pair[0]], sampling)
    lm = make_slots(target, batch_size, slot)
    context = TargetContext.of(target, lm, sampling, slot=slot, sequence=sequence, load=load)
    return build_decoder(
        context, *pair, eos=target.eos_token_ids, max_new_tokens=max_new_tokens, rng=CounterRng(seed), **options
    )


def generate(
    model: str | LoadedModel,
    inputs: str | Sequence[str] | Sequence[Sequence[int]],
    *,
    drafter: StrategyLike = "prompt-lookup",
    verifier: StrategyLike | None = None,
    max_new_tokens: int = 128,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    batch_size: int = 8,
    seed: int = 0,
    chat: bool | None = None,
    on_round: Callable[[RoundEvent], None] | None = None,
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
        on_round: called after every round with what was drafted, scored and decided.

    Returns:
        One :class:`Response` an input, in order, with ``tokens``, ``text``, ``finish`` and its ``rounds``.

    Raises:
        UsageError, UnknownNameError, ModelError: with a sentence that says what to change.
        NumericalError: NaN in some sequences; the others are finished first, see its ``responses``.
    """
    target = load_model(model) if isinstance(model, str) else model
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    texts = [inputs] if isinstance(inputs, str) else list(inputs)
    if not texts:
        return []
    prompts = [
        encode(target.tokenizer, [text], chat=chat) if isinstance(text, str) else [int(t) for t in text]
        for text in texts
    ]
    decoder = pair_decoder(
        target,
        drafter,
        verifier,
        prompts,
        sampling=sampling,
        batch_size=min(batch_size, len(prompts)),
        max_new_tokens=max_new_tokens,
        seed=seed,
        on_round=on_round,
    )
    responses = sorted(decoder.run(prompts, on_error="finish"), key=lambda response: response.index)
    for response in responses:
        response.text = str(target.tokenizer.decode(response.tokens, skip_special_tokens=True))
    raise_failed(responses)
    return responses


def custom_generate(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    generation_config: Any = None,
    *,
    drafter: StrategyLike = "prompt-lookup",
    verifier: StrategyLike | None = None,
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

    def no_model(*_: Any) -> LoadedModel:
        raise UsageError("this drafter loads a model of its own; use crossdraft.generate instead of custom_generate")

    decoder = pair_decoder(
        target,
        drafter,
        verifier,
        prompts,
        sampling=sampling,
        batch_size=len(prompts),
        max_new_tokens=most,
        seed=seed,
        load=no_model,
    )
    outputs = {response.index: response.tokens for response in decoder.run(prompts)}
    longest = max(len(tokens) for tokens in outputs.values())
    pad = config.pad_token_id if config.pad_token_id is not None else (ends[0] if ends else 0)
    new = [outputs[i] + [pad] * (longest - len(outputs[i])) for i in range(len(prompts))]
    return torch.cat([input_ids, torch.tensor(new, device=input_ids.device)], 1)
