"""One call: generate text with any drafter and any verifier, for one prompt or many.

from crossdraft import generate, load_model
target = load_model("smollm2-135m-instruct")
for response in generate(target, ["What is a token?"], drafter="prompt-lookup", temperature=0):
    print(response.text)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..contracts.models import TRANSFORMERS, LoadedModel
from ..contracts.rng import CounterRng
from ..contracts.sampling import Sampling
from ..contracts.steps import Chunk, Request, Response, StepEvent, raise_failed
from ..engine.decoder import Decoder
from ..engine.logits_processors import Processor
from ..engine.structural_checks import check_prompt
from ..errors import UsageError
from ..lm.layer_surgery import own_modules
from ..models.load import load_model
from ..util.limits import PREFILL_TOKENS
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
from .generate_args import (
    check_streamer,
    checked_processors,
    encoded,
    explain_unexpected,
    ids,
    laws,
    limits,
    separate,
    stop_strings,
    tell,
    whole,
)
from .output_processor import Output, Outputs


def pair_decoder(
    target: LoadedModel,
    drafter: StrategyLike,
    verifier: StrategyLike | None,
    sequence: int,
    *,
    sampling: Sampling,
    batch_size: int,
    max_new_tokens: int,
    seed: int = 0,
    load: Callable[[str, LoadedModel], LoadedModel] = load_drafting_model,
    **options: Any,
) -> Decoder:
    """A decoder for one pair, with slots of its own for sequences of up to ``sequence`` tokens, prompt and output.

    A transformers target is run in modules of its own, see `own_modules`: the caller's stay as they are.

    Args:
        verifier: if it is None, the one that ``docs/verifiers.md`` advises for the drafter, see `default_rule`.
        load: how draft models are loaded.
        options: further ones of `build_decoder`.

    Raises:
        UsageError: a pair that is incompatible.
    """
    pair = fitting_pair(drafter, verifier, sampling)
    if target.backend == TRANSFORMERS:
        target = replace(target, model=own_modules(target.model))
    if target.context_length is not None:
        sequence = min(sequence, target.context_length)
    slot = slot_length(sequence, [pair[0]], sampling)
    lm = make_slots(target, batch_size, slot)
    context = TargetContext.of(target, lm, sampling, slot=slot, sequence=sequence, load=load)
    return build_decoder(
        context, *pair, eos=target.eos_token_ids, max_new_tokens=max_new_tokens, rng=CounterRng(seed), **options
    )


def check_ids(decoder: Decoder, name: str, prompt: Sequence[int], target: str) -> None:
    """Raise UsageError for a prompt that a decoder of the model ``target`` cannot take."""
    if outside := [token for token in prompt if not 0 <= token < decoder.target.vocab_size]:
        raise UsageError(
            f"{name} has the token id {outside[0]}, but the ids of {target} go from 0 to "
            f"{decoder.target.vocab_size - 1}; encode the text with the target's own tokenizer"
        )
    check_prompt(name, prompt, decoder.target.context_length)


@explain_unexpected
def generate(
    model: str | LoadedModel,
    inputs: str | Sequence[str] | Sequence[Sequence[int]],
    *,
    drafter: StrategyLike = "prompt-lookup",
    verifier: StrategyLike | None = None,
    max_new_tokens: int | Sequence[int] = 128,
    temperature: float | Sequence[float] = 1.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
    batch_size: int = 8,
    seed: int = 0,
    chat: bool | None = None,
    stop: str | Sequence[str] = (),
    ignore_eos: bool = False,
    logits_processor: Sequence[Processor] = (),
    prefill_tokens: int = PREFILL_TOKENS,
    streamer: Any = None,
    on_step: Callable[[StepEvent], None] | None = None,
) -> list[Response]:
    """Generate a continuation of every input with speculative decoding; the target's distribution is kept.

    The process is left as it was: the modules of ``model`` are not changed, nor are global random generators used.

    Args:
        model: a target from :func:`load_model`, or its name.
        inputs: texts, or lists of token ids; one text may stand alone, one list of ids is wrapped: ``[[1, 2, 3]]``.
        drafter, verifier: a name, a mapping with ``name`` and its options, e.g.
            ``{"name": "draft-model", "model": "smollm2-draft-model", "gamma": 4}``, or a class. The default verifier is
            ``greedy`` at temperature 0; otherwise the rule that ``docs/verifiers.md`` advises for such drafts:
            ``block`` for chains, ``spectr`` for K sequences, ``traversal`` for trees without replacement,
            ``greedy-draft-optimal`` for greedy siblings, ``sample-match`` for deterministic trees.
        max_new_tokens: most tokens of an answer, at least 1; or a list of them, one for each input.
        temperature, top_k, top_p, min_p: see :class:`Sampling`; temperature 0 is greedy decoding. Each may be a list,
            one for each input. Inputs that share a law are decoded together, one law after the other.
        batch_size: most sequences decoded at once, at least 1.
        seed: any integer; equal seeds give equal texts.
        chat: put texts into the model's chat template; by default if it has one.
        stop: strings that end an answer. Its text is cut before the first of them, its tokens behind the one that
            completes it.
        ignore_eos: go on behind end-of-sequence tokens.
        logits_processor: functions ``(ids [1, T], logits [1, V]) -> [1, V]``, such as transformers' logits processors,
            that change what the target says, before it is warped. They are asked about every node of a draft, one by
            one, so each must be a function of its text (prompt and answer so far) alone.
        prefill_tokens: most tokens of a pass over prompts. They share passes, which changes what is said by rounding
            alone; 0 = each prompt by itself.
        streamer: a streamer of transformers, for one input. It is told the prompt, then token after token, those of a
            stop string too.
        on_step: called after every step with what was drafted, scored and decided.

    Returns:
        One :class:`Response` an input, in order, with ``tokens``, ``text``, ``finish_reason`` and its ``steps``.

    Raises:
        UsageError, UnknownNameError, ModelError: with a sentence that says what to change.
        NumericalError: NaN in some sequences; the others are finished first, see its ``responses``.
    """
    settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    options = {"max_new_tokens": max_new_tokens, "batch_size": batch_size, "seed": seed, "chat": chat, "stop": stop}
    options |= {"ignore_eos": ignore_eos, "logits_processor": logits_processor, "prefill_tokens": prefill_tokens}
    options |= {"on_step": on_step, "live": streamer is not None}
    call = _prepare(model, inputs, (drafter, verifier), settings, **options)
    if streamer is not None:
        check_streamer(streamer, len(call.requests))
        tell(streamer, [[request.prompt] for request in call.requests])
    responses = []
    for piece in call.pieces():
        if streamer is not None:
            tell(streamer, [[token] for token in piece.tokens])
        if piece.response is not None:
            responses.append(piece.response)
    if streamer is not None:
        streamer.end()
    responses.sort(key=lambda response: response.index)
    raise_failed(responses)
    return responses


@explain_unexpected
def stream(
    model: str | LoadedModel,
    inputs: str | Sequence[str] | Sequence[Sequence[int]],
    *,
    drafter: StrategyLike = "prompt-lookup",
    verifier: StrategyLike | None = None,
    max_new_tokens: int | Sequence[int] = 128,
    temperature: float | Sequence[float] = 1.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
    batch_size: int = 8,
    seed: int = 0,
    chat: bool | None = None,
    stop: str | Sequence[str] = (),
    ignore_eos: bool = False,
    logits_processor: Sequence[Processor] = (),
    prefill_tokens: int = PREFILL_TOKENS,
    on_step: Callable[[StepEvent], None] | None = None,
) -> Iterator[Chunk]:
    """What :func:`generate` returns, while it is made: after every step, a piece of each answer in work.

    Arguments are checked by this call; decoding waits for the first piece to be asked for. The pieces of a prompt come
    in order, those of different prompts interleaved. The last piece of a prompt has what `generate` would return for it
    as its ``response``. A caller that stops early gives the rest up.

    Raises: as `generate`, a NumericalError behind all pieces.
    """
    settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    options = {"max_new_tokens": max_new_tokens, "batch_size": batch_size, "seed": seed, "chat": chat, "stop": stop}
    options |= {"ignore_eos": ignore_eos, "logits_processor": logits_processor, "prefill_tokens": prefill_tokens}
    options |= {"on_step": on_step, "live": True}
    return _streamed(_prepare(model, inputs, (drafter, verifier), settings, **options))


def _streamed(call: _Call) -> Iterator[Chunk]:
    responses = []
    for piece in call.pieces():
        if piece.response is not None:
            responses.append(piece.response)
        yield piece
    raise_failed(sorted(responses, key=lambda response: response.index))


@dataclass
class _Batch:
    """Requests of one law, and what makes the decoder that will answer them."""

    requests: list[Request]
    outputs: list[Output]
    decoder: Callable[[], Decoder]


@dataclass
class _Call:
    """A checked call: a batch for each law, in the order of their first inputs."""

    requests: list[Request]
    batches: list[_Batch]
    live: bool
    on_step: Callable[[StepEvent], None] | None

    def pieces(self) -> Iterator[Chunk]:
        while self.batches:
            yield from self._of(self.batches.pop(0))  # its slots are free before the next ones are made

    def _of(self, batch: _Batch) -> Iterator[Chunk]:
        outputs = Outputs(batch.decoder(), live=self.live, on_step=self.on_step)
        for pieces in outputs.steps(zip(batch.requests, batch.outputs, strict=True)):
            yield from pieces


def _prepare(
    model: str | LoadedModel,
    inputs: Any,
    pair: tuple[StrategyLike, StrategyLike | None],
    settings: Mapping[str, Any],
    *,
    max_new_tokens: int | Sequence[int],
    batch_size: int,
    seed: int,
    chat: bool | None,
    stop: str | Sequence[str],
    ignore_eos: bool,
    logits_processor: Sequence[Processor],
    prefill_tokens: int,
    on_step: Callable[[StepEvent], None] | None,
    live: bool,
) -> _Call:
    batch_size, seed = whole("batch_size", batch_size, 1), whole("seed", seed)
    stop, processors = stop_strings(stop), checked_processors(logits_processor)
    prefill_tokens = whole("prefill_tokens", prefill_tokens, 0)
    if chat is not None and not isinstance(chat, bool):
        raise UsageError(f"chat={chat!r} must be True, False, or None for what the model's tokenizer has")
    if not isinstance(ignore_eos, bool):
        raise UsageError(f"ignore_eos={ignore_eos!r} must be True or False")
    if on_step is not None and not callable(on_step):
        raise UsageError(f"on_step={on_step!r} must be a function of a StepEvent")
    if not isinstance(model, str | LoadedModel):
        raise UsageError(
            f"a {type(model).__name__} is no model here; give a name or what crossdraft.load_model returns, or call "
            "model.generate(..., custom_generate=crossdraft.custom_generate)"
        )
    texts = separate(inputs)
    wanted, sampled = limits(max_new_tokens, len(texts)), laws(len(texts), **settings)
    fitting = {law: fitting_pair(*pair, law) for law in dict.fromkeys(sampled)}  # before anything is loaded
    if not texts:
        return _Call([], [], live, on_step)
    target = load_model(model) if isinstance(model, str) else model
    if stop and target.tokenizer is None:
        raise UsageError(f"{target.name} has no tokenizer, so its answers have no text in which stop could be said")
    prompts = [
        encoded(target, i, text, chat) if isinstance(text, str) else ids(i, text) for i, text in enumerate(texts)
    ]
    eos: tuple[int, ...] | None = () if ignore_eos else None
    requests = [
        Request(prompt, i, i, f"prompt {i}", most, eos)
        for i, (prompt, most) in enumerate(zip(prompts, wanted, strict=True))
    ]

    def decoder_of(law: Sampling) -> Decoder:
        rows = [i for i, one in enumerate(sampled) if one == law]
        return pair_decoder(
            target,
            *fitting[law],
            max(len(prompts[i]) + wanted[i] for i in rows),
            sampling=law,
            batch_size=min(batch_size, len(rows)),
            max_new_tokens=max(wanted[i] for i in rows),
            seed=seed,
            processors=processors,
            prefill_tokens=prefill_tokens,
        )

    first = decoder_of(sampled[0])  # the others when it is their turn: each has slots of its own
    for request in requests:
        check_ids(first, request.name, request.prompt, target.name)
    batches = []
    for law in fitting:
        mine = [request for request, one in zip(requests, sampled, strict=True) if one == law]
        outputs = [Output(target.tokenizer, stop, live=live) for _ in mine]
        batches.append(_Batch(mine, outputs, partial(decoder_of, law)))
    batches[0].decoder = lambda: first
    return _Call(requests, batches, live, on_step)


def fitting_pair(
    drafter: StrategyLike, verifier: StrategyLike | None, sampling: Sampling
) -> tuple[Configured, Configured]:
    """Drafter and verifier as classes and configs; `default_rule` for None. UsageError if they cannot run together."""
    drafting = configured("drafters", drafter)
    pair = drafting, default_rule(drafting, sampling) if verifier is None else configured("verifiers", verifier)
    check_pair(*pair, sampling)
    return pair
