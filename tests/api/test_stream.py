"""Streams, stop strings, limits a prompt and answers that go on behind their end, through the library's calls."""

from collections import defaultdict
from io import StringIO
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from recording_streamer import Listener
from tiny_models import save_model
from transformers import TextStreamer

from crossdraft import Chunk, LoadedModel, NumericalError, StepEvent, generate, load_model, stream
from crossdraft.drafters.retrieval.prompt_lookup import PromptLookup
from crossdraft.framework.engine.decoder import Decoder
from crossdraft.framework.errors import UsageError

PROMPTS = ["w5 w6 w7 w5 w6", "w9 w8", "w20 w21 w22"]
OPTIONS: dict[str, Any] = {"max_new_tokens": 24, "seed": 3}


@pytest.fixture(scope="module")
def target(tmp_path_factory: Any) -> LoadedModel:
    return load_model(save_model(tmp_path_factory.mktemp("models") / "target"), dtype="float32", device="cpu")


def joined(pieces: list[Chunk]) -> dict[int, list[Chunk]]:
    result = defaultdict(list)
    for piece in pieces:
        result[piece.index].append(piece)
    return dict(result)


@pytest.mark.parametrize("more", [{}, {"temperature": 0}, {"stop": ["w1", "3 w"]}, {"batch_size": 2}], ids=str)
def test_stream_equals_generate(target: LoadedModel, more: dict[str, Any]) -> None:
    whole = generate(target, PROMPTS, **OPTIONS, **more)
    pieces = joined(list(stream(target, PROMPTS, **OPTIONS, **more)))
    for response in whole:
        own = pieces[response.index]
        assert own[-1].response == response and not any(piece.response for piece in own[:-1])
        assert list(chain(*(piece.tokens for piece in own))) == response.tokens
        assert "".join(piece.text or "" for piece in own) == response.text
        if response.logprobs is None:
            assert all(piece.logprobs is None for piece in own)
        else:
            assert list(chain(*(piece.logprobs or [] for piece in own))) == response.logprobs
        assert len(own) == len(response.steps) and all(piece.tokens for piece in own)
    assert {r.index for r in whole} == pieces.keys()


def test_stream_yields_every_step(target: LoadedModel) -> None:
    """After a piece, nothing but its step was decoded."""
    steps: list[StepEvent] = []
    for n, _ in enumerate(stream(target, PROMPTS[:1], on_step=steps.append, **OPTIONS), 1):
        assert len(steps) == n
    assert len(steps) > 5


def test_stream_that_is_left_frees_its_slots(target: LoadedModel, monkeypatch: Any) -> None:
    left: list[Decoder] = []
    abandon = Decoder.abandon
    monkeypatch.setattr(Decoder, "abandon", lambda self: (left.append(self), abandon(self))[1])
    pieces: Any = stream(target, PROMPTS, **OPTIONS)
    next(pieces)
    assert not left
    pieces.close()
    assert [decoder.occupied for decoder in left] == [0]


def test_stop_string_cuts_text_tokens_and_last_step(target: LoadedModel) -> None:
    """Greedy text is known: whatever is in it can be what stops it."""
    itself: Any = {"name": "draft-model", "model": target.name, "gamma": 4}  # every draft is accepted whole
    options: dict[str, Any] = {"drafter": itself, "temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
    (plain,) = generate(target, PROMPTS[:1], **options)
    words = (plain.text or "").split()
    assert len(words) > 20
    cuts = 0
    for k in (3, 7, 12, 15):
        word = words[k]
        (cut,) = generate(target, PROMPTS[:1], stop=word, **options)
        first = (plain.text or "").index(word)
        assert cut.finish_reason == "stop" and cut.text == (plain.text or "")[:first]
        assert cut.tokens == plain.tokens[: len(cut.tokens)]
        assert word in target.tokenizer.decode(cut.tokens) and word not in target.tokenizer.decode(cut.tokens[:-1])
        assert sum(item.emitted for item in cut.steps) == len(cut.tokens)
        assert all(0 <= item.tau <= item.emitted for item in cut.steps)
        cuts += cut.steps[-1].emitted < plain.steps[len(cut.steps) - 1].emitted
    assert cuts  # a step was cut in its middle, or this test would not know


def test_stopped_sequence_hands_its_slot_on(target: LoadedModel) -> None:
    plain = generate(target, PROMPTS, temperature=0, batch_size=1, ignore_eos=True)
    word = (plain[0].text or "").split()[2]
    stopped = generate(target, PROMPTS, temperature=0, batch_size=1, ignore_eos=True, stop=[word])
    assert len(stopped[0].tokens) <= 3 and len(stopped[0].steps) < len(plain[0].steps)
    for before, after in zip(plain, stopped, strict=True):
        assert (after.text or "") == (before.text or "").partition(word)[0]


def test_limits_per_prompt(target: LoadedModel) -> None:
    whole = generate(target, PROMPTS, max_new_tokens=24, ignore_eos=True)
    for batch_size in (1, 3):
        responses = generate(target, PROMPTS, max_new_tokens=[5, 24, 1], batch_size=batch_size, ignore_eos=True)
        assert [len(response.tokens) for response in responses] == [5, 24, 1]
        assert responses[1].tokens == whole[1].tokens
    # Greedy answers do not depend on where they end.
    long, short = (generate(target, PROMPTS[0], temperature=0, max_new_tokens=[n]) for n in (20, 6))
    assert short[0].tokens == long[0].tokens[:6]


@pytest.mark.parametrize("drafter", ["prompt-lookup", PromptLookup()], ids=["name", "instance"])
def test_sampling_parameters_per_prompt(target: LoadedModel, drafter: Any) -> None:
    """Equal to one call per set of parameters with all prompts; each set gets its own default verifier."""
    distributions = [(1.0, 0, 1.0), (0.0, 0, 1.0), (0.7, 5, 0.9), (1.0, 0, 1.0)]
    inputs = [[5, 6, 7, 5, 6], [9, 8, 9], [5, 6, 7, 5], [11, 12, 11, 12]]
    temperature, top_k, top_p = (list(values) for values in zip(*distributions, strict=True))
    named = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    options: dict[str, Any] = {"drafter": drafter, "max_new_tokens": 24, "ignore_eos": True, "seed": 3}
    mixed = generate(target, inputs, **named, **options)
    assert [response.index for response in mixed] == [0, 1, 2, 3]
    for i, probs in enumerate(distributions):
        separate = generate(target, inputs, **dict(zip(named, probs, strict=True)), **options)
        # Another number of rows is another shape of the passes: log P agrees to rounding.
        assert mixed[i].tokens == separate[i].tokens
        assert mixed[i].logprobs == pytest.approx(separate[i].logprobs, abs=1e-4)
        assert [item.emitted for item in mixed[i].steps] == [item.emitted for item in separate[i].steps]
    assert len({tuple(response.tokens) for response in separate}) == 4
    pieces = list(stream(target, inputs, **named, **options))
    for i, response in enumerate(mixed):
        assert [token for piece in pieces if piece.index == i for token in piece.tokens] == response.tokens


def test_ends_of_sequences_can_be_ignored(target: LoadedModel) -> None:
    (plain,) = generate(target, [[5, 6, 7]], temperature=0, max_new_tokens=30, ignore_eos=True)
    end = plain.tokens[4]
    ending = LoadedModel(target.model, target.tokenizer, "ending", "", "", (end,), None)
    (cut,) = generate(ending, [[5, 6, 7]], temperature=0, max_new_tokens=30)
    assert cut.finish_reason == "stop" and cut.tokens == plain.tokens[: plain.tokens.index(end) + 1]
    (on,) = generate(ending, [[5, 6, 7]], temperature=0, max_new_tokens=30, ignore_eos=True)
    assert on.finish_reason == "length" and on.tokens == plain.tokens


def test_streamer_receives_prompt_and_every_token(target: LoadedModel, capsys: Any) -> None:
    listener = Listener()
    (response,) = generate(target, [[5, 6, 7]], streamer=listener, **OPTIONS)
    assert listener.events == [[[5, 6, 7]], *[[token] for token in response.tokens], "end"]
    generate(target, [[5, 6, 7]], streamer=TextStreamer(target.tokenizer, skip_prompt=True), **OPTIONS)
    assert capsys.readouterr().out.split() == target.tokenizer.decode(response.tokens).split()


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"stop": ""}, "stop='' must be a text or a list of texts, none of them empty"),
        ({"stop": ["a", ""]}, "none of them empty"),
        ({"stop": [3]}, "stop=[3] must be a text"),
        ({"stop": None}, "stop=None must be a text"),
        ({"ignore_eos": 1}, "ignore_eos=1 must be True or False"),
        ({"max_new_tokens": [4]}, "max_new_tokens has 1 values for 2 inputs"),
        ({"max_new_tokens": [4, 0]}, "max_new_tokens[1]=0 must be an integer of at least 1"),
        ({"max_new_tokens": "44"}, "max_new_tokens='44' must be an integer"),
        ({"temperature": [0.5]}, "temperature has 1 values for 2 inputs"),
        ({"temperature": [0.5, -1.0]}, "temperature=-1.0 is not valid"),
        ({"temperature": [0.5, 0], "verifier": "greedy"}, "temperature"),
    ],
)
def test_invalid_arguments_are_refused_before_decoding(
    target: LoadedModel, options: dict[str, Any], sentence: str
) -> None:
    for call in (generate, stream):
        with pytest.raises(UsageError) as caught:
            call(target, [[5], [6]], **{"max_new_tokens": 4, **options})  # type: ignore[operator]
        assert sentence in str(caught.value)


def test_requirements_of_streamers_and_stop_strings(target: LoadedModel) -> None:
    with pytest.raises(UsageError, match=r"a streamer takes one output, but there are 2 inputs.*crossdraft\.stream"):
        generate(target, [[5], [6]], streamer=Listener())
    with pytest.raises(UsageError, match=r"must have put\(tokens\) and end\(\)"):
        generate(target, [[5]], streamer=StringIO())
    bare = LoadedModel(target.model, None, "bare", "", "", (), None)
    with pytest.raises(UsageError, match="stop needs text, but bare has no tokenizer"):
        generate(bare, [[5]], stop="a")
    assert [piece.text for piece in stream(bare, [[5]], max_new_tokens=1)] == [None]


def test_numerical_errors_are_raised_after_all_chunks(tmp_path: Path) -> None:
    broken = load_model(save_model(tmp_path / "nan", nan=True), dtype="float32", device="cpu")
    results = []
    with pytest.raises(NumericalError, match=r"1 more of 2 inputs failed"):
        results += list(stream(broken, [[5, 6], [7]], max_new_tokens=4))
    pieces: Any = stream(broken, [[5, 6], [7]], max_new_tokens=4)
    last = [next(pieces), next(pieces)]
    assert [piece.response.finish_reason for piece in last] == ["error", "error"]
    assert list(stream(broken, [])) == []
