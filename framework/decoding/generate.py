"""One call: generate text with any drafter and any verifier, for one prompt or many.

from crossdraft import generate, load_model
target = load_model("smollm2-135m-instruct")
for response in generate(target, ["What is a token?"], drafter="prompt-lookup", temperature=0):
    print(response.text)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from ..contracts.errors import UsageError
from ..contracts.models import TRANSFORMERS, LoadedModel
from ..contracts.rng import CounterRng
from ..contracts.rounds import Response, RoundEvent, raise_failed
from ..contracts.sampling import Sampling
from ..models.chat import encode
from ..models.load import load_model
from .build import (
    Configured,
    StrategyLike,
    TargetContext,
    build_decoder,
    check_pair,
    configured,
    default_rule,
    load_drafting_model,
    make_slots,
    slot_length,
)
from .layers import own_modules
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

    A transformers target is run in modules of its own, see `own_modules`: the caller's stay as they are.

    Args:
        verifier: if it is None, the one that ``docs/verifiers.md`` advises for the drafter, see `default_rule`.
        load: how drafting models are loaded.
        options: further ones of `build_decoder`.

    Raises:
        UsageError: a pair that is incompatible, or a prompt with an id outside of the target's vocabulary.
    """
    pair = fitting_pair(drafter, verifier, sampling)
    if target.backend == TRANSFORMERS:
        target = replace(target, model=own_modules(target.model))
    sequence = max(map(len, prompts)) + max_new_tokens
    if target.context_length is not None:
        sequence = min(sequence, target.context_length)
    slot = slot_length(sequence, [pair[0]], sampling)
    lm = make_slots(target, batch_size, slot)
    for i, prompt in enumerate(prompts):
        if outside := [token for token in prompt if not 0 <= token < lm.vocab_size]:
            raise UsageError(
                f"prompt {i} has the token id {outside[0]}, but the ids of {target.name} go from 0 to "
                f"{lm.vocab_size - 1}; encode the text with the target's own tokenizer"
            )
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

    The process is left as it was: the modules of ``model`` are not changed, nor are global random generators used.

    Args:
        model: a target from :func:`load_model`, or its name.
        inputs: texts, or lists of token ids; one text may stand alone, one list of ids is wrapped: ``[[1, 2, 3]]``.
        drafter, verifier: a name, a mapping with ``name`` and its options, e.g.
            ``{"name": "small-lm", "model": "smollm2-small-lm", "gamma": 4}``, or a class. The default verifier is
            ``greedy`` at temperature 0; otherwise the rule that ``docs/verifiers.md`` advises for such drafts:
            ``block`` for chains, ``spectr`` for K sequences, ``traversal`` for trees without replacement,
            ``greedy-draft-optimal`` for greedy siblings, ``sample-match`` for deterministic trees.
        max_new_tokens: most tokens of an answer, at least 1.
        temperature, top_k, top_p, min_p: see :class:`Sampling`; temperature 0 is greedy decoding.
        batch_size: most sequences decoded at once, at least 1.
        seed: any integer; equal seeds give equal texts.
        chat: put texts into the model's chat template; by default if it has one.
        on_round: called after every round with what was drafted, scored and decided.

    Returns:
        One :class:`Response` an input, in order, with ``tokens``, ``text``, ``finish`` and its ``rounds``.

    Raises:
        UsageError, UnknownNameError, ModelError: with a sentence that says what to change.
        NumericalError: NaN in some sequences; the others are finished first, see its ``responses``.
    """
    sampling = checked_sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    batch_size, most = whole("batch_size", batch_size, 1), whole("max_new_tokens", max_new_tokens, 1)
    seed = whole("seed", seed)
    if chat is not None and not isinstance(chat, bool):
        raise UsageError(f"chat={chat!r} must be True, False, or None for what the model's tokenizer has")
    if on_round is not None and not callable(on_round):
        raise UsageError(f"on_round={on_round!r} must be a function of a RoundEvent")
    if not isinstance(model, str | LoadedModel):
        raise UsageError(
            f"a {type(model).__name__} is no model here; give a name or what crossdraft.load_model returns, or call "
            "model.generate(..., custom_generate=crossdraft.custom_generate)"
        )
    texts = _separate(inputs)
    pair = fitting_pair(drafter, verifier, sampling)  # before anything is loaded
    if not texts:
        return []
    target = load_model(model) if isinstance(model, str) else model
    prompts = [_encoded(target, text, chat) if isinstance(text, str) else _ids(i, text) for i, text in enumerate(texts)]
    decoder = pair_decoder(
        target,
        *pair,
        prompts,
        sampling=sampling,
        batch_size=min(batch_size, len(prompts)),
        max_new_tokens=most,
        seed=seed,
        on_round=on_round,
    )
    responses = sorted(decoder.run(prompts, on_error="finish"), key=lambda response: response.index)
    if target.tokenizer is not None:
        for response in responses:
            response.text = str(target.tokenizer.decode(response.tokens, skip_special_tokens=True))
    raise_failed(responses)
    return responses


def fitting_pair(
    drafter: StrategyLike, verifier: StrategyLike | None, sampling: Sampling
) -> tuple[Configured, Configured]:
    """Drafter and verifier as classes and configs; `default_rule` for None. UsageError if they cannot run together."""
    drafting = configured("drafters", drafter)
    pair = drafting, default_rule(drafting, sampling) if verifier is None else configured("verifiers", verifier)
    check_pair(*pair, sampling)
    return pair


# -- what users hand over ---------------------------------------------------------------------------------


def checked_sampling(**parameters: Any) -> Sampling:
    """Sampling parameters from a user; UsageError names the first that cannot be."""
    try:
        return Sampling(**parameters)
    except ValidationError as error:
        first = error.errors()[0]
        name, message = first["loc"][0], first["msg"]
        raise UsageError(f"{name}={first['input']!r} cannot be: {message[0].lower()}{message[1:]}") from None


def whole(name: str, value: Any, least: int | None = None) -> int:
    """An integer from a user, of any integer type, at least ``least``; UsageError says what it is instead."""
    found = _index(value)
    if found is None or (least is not None and found < least):
        raise UsageError(f"{name}={value!r} must be an integer{'' if least is None else f' of at least {least}'}")
    return found


def _index(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # of numbers that are none, and of tensors with many
        return None


def _separate(inputs: Any) -> list[Any]:
    """The inputs one by one; what is no list of texts or lists is refused."""
    if isinstance(inputs, str):
        return [inputs]
    if isinstance(inputs, Mapping):
        raise UsageError(
            f"inputs is a {type(inputs).__name__}; give its token ids alone, without padding: a list of lists of ids"
        )
    if isinstance(inputs, bytes | bytearray | set | frozenset) or not isinstance(inputs, Iterable):
        raise UsageError(
            f"inputs must be a text, a list of texts or a list of lists of token ids, not {type(inputs).__name__}"
        )
    try:
        found = list(inputs)
    except TypeError:  # a tensor without dimensions
        raise UsageError(f"inputs must be a list of texts or a list of lists of token ids, not {inputs!r}") from None
    for i, one in enumerate(found):
        if _index(one) is not None:
            raise UsageError("inputs is one flat list of token ids; wrap it into a list of prompts: [[1, 2, 3]]")
        if isinstance(one, bytes | bytearray | set | frozenset | Mapping) or not isinstance(one, Iterable):
            raise UsageError(f"inputs[{i}] must be a text or a list of token ids, not {one!r}")
    return found


def _encoded(target: LoadedModel, text: str, chat: bool | None) -> list[int]:
    if target.tokenizer is None:
        raise UsageError(f"{target.name} has no tokenizer; give lists of token ids instead of texts")
    if chat and not getattr(target.tokenizer, "chat_template", None):
        raise UsageError(f"chat=True, but the tokenizer of {target.name} has no chat template; leave chat out")
    return encode(target.tokenizer, [text], chat=chat)


def _ids(i: int, prompt: Any) -> list[int]:
    listed = prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)  # tensors and arrays
    found = [_index(token) for token in listed]
    for token, index in zip(listed, found, strict=True):
        if index is None:
            raise UsageError(f"inputs[{i}] has {token!r} among its token ids, which are integers")
    return [index for index in found if index is not None]
