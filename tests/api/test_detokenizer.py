"""Incremental text: joined pieces are the whole text, no piece splits a character, stop strings are cut."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import make_tokenizer
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from crossdraft.framework.api.detokenizer import Detokenizer, decode_text


def byte_level() -> Any:
    """A token a byte, and an end of sequence that is special."""
    vocab = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE({**vocab, "</s>": 256}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def metaspace() -> Any:
    """Words that carry the space before them, not written at the start of a text, as SentencePiece has them."""
    tokenizer = Tokenizer(BPE({"▁a": 0, "▁b": 1, "c": 2, "▁": 3, "</s>": 4, ".": 5}, []))
    tokenizer.decoder = decoders.Metaspace()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


BYTES, SPACES, WORDS = byte_level(), metaspace(), make_tokenizer()
TEXTS = st.text(st.sampled_from("ab é€😀\ufffd"), max_size=12)


def outputs(
    tokenizer: Any, tokens: list[int], cuts: list[int], stop: tuple[str, ...] = ()
) -> tuple[list[str], Detokenizer, int]:
    """The pieces when tokens come in steps of the lengths ``cuts``, the text, and how many tokens were taken."""
    text, pieces, used, at = Detokenizer(tokenizer, stop), [], 0, 0
    for n in [*cuts, len(tokens)]:
        used += text.add(tokens[at : at + n])
        pieces.append(text.piece())
        at += n
        if text.stopped:
            break
    return [*pieces, text.flush()], text, used


@settings(max_examples=60, deadline=None)
@given(TEXTS, st.lists(st.integers(1, 4), max_size=12))
def test_pieces_of_bytes_join_to_text_and_split_no_character(whole: str, cuts: list[int]) -> None:
    tokens = BYTES(whole)["input_ids"]
    pieces, text, used = outputs(BYTES, tokens, cuts)
    assert "".join(pieces) == text.text == whole == decode_text(BYTES, tokens) and used == len(tokens)
    assert "\ufffd" in whole or not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 256), max_size=12), st.lists(st.integers(1, 4), max_size=12))
def test_invalid_bytes_are_flushed(tokens: list[int], cuts: list[int]) -> None:
    assert "".join(outputs(BYTES, tokens, cuts)[0]) == decode_text(BYTES, tokens)


@pytest.mark.parametrize("tokenizer, ids", [(SPACES, 6), (WORDS, 9)], ids=["metaspace", "words"])
def test_spaces_between_tokens_survive(tokenizer: Any, ids: int) -> None:
    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.integers(0, ids - 1), max_size=10), st.lists(st.integers(1, 4), max_size=10))
    def check(tokens: list[int], cuts: list[int]) -> None:
        assert "".join(outputs(tokenizer, tokens, cuts)[0]) == decode_text(tokenizer, tokens)

    check()


@settings(max_examples=80, deadline=None)
@given(
    st.text(st.sampled_from("ab€"), max_size=14),
    st.lists(st.text(st.sampled_from("ab€"), min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(1, 5), max_size=12),
)
def test_stop_string_ends_text_before_it_and_tokens_behind_it(whole: str, stop: list[str], cuts: list[int]) -> None:
    tokens = BYTES(whole)["input_ids"]
    pieces, text, used = outputs(BYTES, tokens, cuts, tuple(stop))
    # The first stop string to be completed; of several at once, the one that begins first.
    ends = {place + len(item): whole[: place + len(item)] for item in stop if (place := whole.find(item)) >= 0}
    if not ends:
        assert not text.stopped and "".join(pieces) == whole and used == len(tokens)
        return
    events = ends[min(ends)]
    assert text.stopped and "".join(pieces) == text.text == events[: min(events.find(s) for s in stop if s in events)]
    assert decode_text(BYTES, tokens[:used]) == events


def test_possible_stop_string_is_held_back() -> None:
    text = Detokenizer(BYTES, ("abc",))
    for letter, piece in [("x", "x"), ("a", ""), ("b", ""), ("a", "ab"), ("d", "ad")]:
        text.add(BYTES(letter)["input_ids"])
        assert text.piece() == piece
    text.add(BYTES("ab")["input_ids"])
    assert (text.piece(), text.flush(), text.stopped) == ("", "ab", False)
