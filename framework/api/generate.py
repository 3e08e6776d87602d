"""One call: generate text with any drafter and any verifier, for one prompt or many.

from crossdraft import generate, load_model
target = load_model("smollm2-135m-instruct")
for response in generate(target, ["What is a token?"], drafter="prompt-lookup", temperature=0):
    print(response.text)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ..contracts.constraint import Grammar
from ..contracts.models import TRANSFORMERS, LoadedModel
from ..contracts.rng import CounterRng
from ..contracts.sampling import Sampling
from ..contracts.steps import Chunk, Request, Response, raise_failed
from ..engine.checks import check_prompt
from ..engine.decoder import Decoder
from ..errors import UsageError
from ..lm.layer_surgery import OwnModules
from ..lm.recomputing_lm import scoring_slots
from ..models.digests import model_sha256
from ..models.grammar import compile_constraint
from ..models.load import load_model
from ..models.resolve import resolve
from .build import (
    Configured,
    StrategyLike,
    TargetContext,
    build_decoder,
    check_pair,
    configured,
    default_verifier,
    load_draft_model,
    make_slots,
    slot_length,
    traits_of,
)
from .generate_args import (
    GenerateOptions,
    StreamOptions,
    check_streamer,
    checked_processors,
    encoded,
    keywords_of,
    put_tensors,
    separate,
    token_ids,
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
    load: Callable[[str, LoadedModel], LoadedModel] = load_draft_model,
    **options: Any,
) -> Decoder:
    """A decoder for one pair, with its own slots for sequences of up to ``sequence`` tokens, prompt and output.

    A transformers target is run in separate modules, so the caller's are not changed. On CUDA, the modules, slots,
    graphs, draft models and heads are used again by later decoders, see `OwnModules`.

    Args:
        verifier: None = the one that ``docs/verifiers.md`` advises for the drafter, see `default_verifier`.
        load: loads draft models.
        options: further keywords of `build_decoder`.

    Raises:
        UsageError: the pair is incompatible.
    """
    pair = compatible_pair(drafter, verifier, sampling)
    own, caller = OwnModules(target.model, None), target.model
    if target.backend == TRANSFORMERS:
        own = OwnModules.borrow(caller)
        target = replace(target, model=own.model)
    if target.context_length is not None:
        sequence = min(sequence, target.context_length)
    slot = slot_length(sequence, [pair[0]], sampling)
    # Without drafts no token is rejected, so models that cannot drop tokens from their caches can be decoded, too.
    plain = traits_of("drafters", *pair[0], sampling).nodes == 0
    lm = scoring_slots(target, batch_size, slot, make_slots) if plain else make_slots(target, batch_size, slot)
    own.lend(caller, lm)
    load = partial(_load_once, own) if load is load_draft_model else load
    context = TargetContext.of(target, lm, sampling, slot=slot, sequence=sequence, load=load, once=own.once)
    return build_decoder(
        context, *pair, eos=target.eos_token_ids, max_new_tokens=max_new_tokens, rng=CounterRng(seed), **options
    )


def _load_once(own: OwnModules, name: str, target: LoadedModel) -> LoadedModel:
    """Load a draft model, unless it is kept and its files are unchanged."""
    return own.once((name, model_sha256(resolve(name))), lambda: load_draft_model(name, target))


def check_ids(decoder: Decoder, name: str, prompt: Sequence[int], target: str) -> None:
    """Raise UsageError for a prompt with ids outside the vocabulary, or of a length that does not fit the context."""
    if outside := [token for token in prompt if not 0 <= token < decoder.target.vocab_size]:
        raise UsageError(
            f"{name} has the token id {outside[0]}, but the ids of {target} go from 0 to "
            f"{decoder.target.vocab_size - 1}; encode the text with the target's own tokenizer"
        )
    check_prompt(name, prompt, decoder.target.context_length)


@keywords_of(GenerateOptions)
def generate(
    model: str | LoadedModel, inputs: str | Sequence[str] | Sequence[Sequence[int]], options: GenerateOptions
) -> list[Response]:
    """Generate a continuation of every input with speculative decoding; the target's distribution is kept.

    Neither the modules of ``model`` nor the global random generators are changed.

    Args:
        model: a target from :func:`load_model`, or its name.
        inputs: texts, or lists of token ids. A single text may be given as it is; a single list of ids is wrapped:
            ``[[1, 2, 3]]``.
        drafter, verifier: a name, a mapping with ``name`` and its options, e.g.
            ``{"name": "draft-model", "model": "smollm2-draft-model", "gamma": 4}``, or a class. The default verifier is
            ``greedy`` at temperature 0; otherwise the one that ``docs/verifiers.md`` advises for such drafts:
            ``block`` for chains, ``spectr`` for K sequences, ``traversal`` for trees without replacement,
            ``greedy-draft-optimal`` for greedy siblings, ``sample-match`` for deterministic trees.
        max_new_tokens: maximum tokens of an output, at least 1; or a list with one value per input.
        temperature, top_k, top_p, min_p: see :class:`Sampling`; temperature 0 is greedy decoding. Each may be a list
            with one value per input. Inputs with the same parameters are decoded together, one group after the other.
        batch_size: maximum sequences decoded at once, at least 1.
        seed: an integer of 64 bits; equal seeds give equal texts.
        chat: put texts into the model's chat template; by default if it has one.
        stop: strings that end an output. The text is cut before the first of them, the tokens behind the one that
            completes it.
        ignore_eos: continue behind end-of-sequence tokens.
        constraint: language of the outputs, a mapping with one of ``json_schema``, ``regex``, ``grammar`` and
            ``choice``, see :class:`Constraint`; or a list with one value, or None, per input. The target's distribution
            is masked by it and then kept. An output that ends at ``max_new_tokens`` may be incomplete.
        logits_processor: functions ``(ids [1, T], logits [1, V]) -> [1, V]``, such as transformers' logits processors,
            applied to the target's logits before warping. They run on every node of a draft separately, so the result
            must depend only on the text (prompt and output so far).
        prefill_tokens: maximum tokens of a prefill pass. Prompts share passes, which changes results only by rounding;
            0 = each prompt separately.
        streamer: a streamer of transformers, for one input. Receives the prompt and every token, those of a stop
            string included.
        on_step: called after every step with its drafts, scores and verdicts.

    Returns:
        One :class:`Response` per input, in order, with ``tokens``, ``text``, ``finish_reason`` and its ``steps``.

    Raises:
        UsageError, UnknownNameError, ModelError: an argument is invalid; the message states the fix.
        NumericalError: NaN in a sequence, or a dead end of its constraint; raised after the others are finished, see
            its ``responses``.
    """
    streamer = options.streamer
    requests, chunks = _prepare(model, inputs, options, live=streamer is not None)
    if streamer is not None:
        check_streamer(streamer, len(requests))
        put_tensors(streamer, [[request.prompt] for request in requests])
    responses = []
    for chunk in chunks:
        if streamer is not None:
            put_tensors(streamer, [[token] for token in chunk.tokens])
        if chunk.response is not None:
            responses.append(chunk.response)
    if streamer is not None:
        streamer.end()
    responses.sort(key=lambda response: response.index)
    raise_failed(responses)
    return responses


@keywords_of(StreamOptions)
def stream(
    model: str | LoadedModel, inputs: str | Sequence[str] | Sequence[Sequence[int]], options: StreamOptions
) -> Iterator[Chunk]:
    """Generate as :func:`generate` does, with the same arguments, and yield a chunk per running output and step.

    Arguments are checked by the call; decoding starts when the first chunk is requested. Chunks of an input come in
    order, those of different inputs interleave. The last chunk of an input has its ``response``, equal to the one of
    `generate`. Closing the iterator aborts the rest.

    Raises: as `generate`; a NumericalError after all chunks.
    """
    _, chunks = _prepare(model, inputs, options, live=True)
    return _stream(chunks)


def _stream(chunks: Iterator[Chunk]) -> Iterator[Chunk]:
    responses = []
    for chunk in chunks:
        if chunk.response is not None:
            responses.append(chunk.response)
        yield chunk
    raise_failed(sorted(responses, key=lambda response: response.index))


#: Requests with equal sampling parameters, their outputs, and a function that makes their decoder.
_Batch = tuple[list[Request], list[Output], Callable[[], Decoder]]


def _chunks(batches: list[_Batch], options: StreamOptions, live: bool) -> Iterator[Chunk]:
    while batches:
        yield from _chunks_of(*batches.pop(0), options, live)  # frees its slots before the next ones are allocated


def _chunks_of(
    requests: list[Request], outputs: list[Output], decoder: Callable[[], Decoder], options: StreamOptions, live: bool
) -> Iterator[Chunk]:
    for chunks in Outputs(decoder(), live=live, on_step=options.on_step).steps(zip(requests, outputs, strict=True)):
        yield from chunks


def _prepare(
    model: str | LoadedModel, inputs: Any, options: StreamOptions, live: bool
) -> tuple[list[Request], Iterator[Chunk]]:
    """The requests of a checked call, and the chunks of their outputs, which are decoded as they are requested."""
    options = options.checked()
    if not isinstance(model, str | LoadedModel):
        raise UsageError(
            f"model is a {type(model).__name__}; pass a name or the result of crossdraft.load_model, or call "
            "model.generate(..., custom_generate=custom_generate), of crossdraft_server.custom_generate"
        )
    texts = separate(inputs)
    count = len(texts)
    constraints, max_new_tokens, samplings = options.constraints(count), options.limits(count), options.samplings(count)
    # Checked before anything is loaded.
    pairs = {params: compatible_pair(options.drafter, options.verifier, params) for params in dict.fromkeys(samplings)}
    if not texts:
        return [], iter(())
    target = load_model(model) if isinstance(model, str) else model
    if options.stop and target.tokenizer is None:
        raise UsageError(f"stop needs text, but {target.name} has no tokenizer; leave stop out")
    prompts = [
        encoded(target, i, text, options.chat) if isinstance(text, str) else token_ids(i, text)
        for i, text in enumerate(texts)
    ]
    eos: tuple[int, ...] | None = () if options.ignore_eos else None
    requests = [
        Request(prompt, i, i, f"prompt {i}", limit, eos)
        for i, (prompt, limit) in enumerate(zip(prompts, max_new_tokens, strict=True))
    ]

    def decoder_of(sampling: Sampling) -> Decoder:
        rows = [i for i, params in enumerate(samplings) if params == sampling]
        return pair_decoder(
            target,
            *pairs[sampling],
            max(len(prompts[i]) + max_new_tokens[i] for i in rows),
            sampling=sampling,
            batch_size=min(options.batch_size, len(rows)),
            max_new_tokens=max(max_new_tokens[i] for i in rows),
            seed=options.seed,
            processors=checked_processors(options.logits_processor),
            mask_drafts=any(constraint.mask_drafts for constraint in constraints if constraint is not None),
            prefill_tokens=options.prefill_tokens,
        )

    first = decoder_of(samplings[0])  # the other decoders are made later: each has its own slots
    for request in requests:
        check_ids(first, request.name, request.prompt, target.name)
    grammars: dict[str, Grammar] = {}
    for i, constraint in enumerate(constraints):
        if constraint is not None:
            if constraint.key not in grammars:
                grammars[constraint.key] = compile_constraint(constraint, target, first.target.vocab_size)
            requests[i] = requests[i]._replace(constraint=grammars[constraint.key])
    batches: list[_Batch] = []
    for sampling in pairs:
        members = [request for request, params in zip(requests, samplings, strict=True) if params == sampling]
        outputs = [Output(target.tokenizer, options.stop, live=live) for _ in members]
        batches.append((members, outputs, partial(decoder_of, sampling) if batches else lambda: first))
    return requests, _chunks(batches, options, live)


def compatible_pair(
    drafter: StrategyLike, verifier: StrategyLike | None, sampling: Sampling
) -> tuple[Configured, Configured]:
    """Classes and configs of a pair, with `default_verifier` for None. UsageError if it is incompatible."""
    first = configured("drafters", drafter)
    second = default_verifier(first, sampling) if verifier is None else configured("verifiers", verifier)
    check_pair(first, second, sampling)
    return first, second
