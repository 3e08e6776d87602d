"""Texts: equal after any kill and in any batch, endless loops, and third-party files."""

import errno
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from crossdraft_trainers import texts, writer
from crossdraft_trainers.contract import Text
from crossdraft_trainers.text_files import drop_half_line, line_of, read, read_finished
from crossdraft_trainers.texts import Questions, split, write
from crossdraft_trainers.writer import Chat, Writer
from hypothesis import given, settings
from hypothesis import strategies as st
from training_target import tied_llama

from crossdraft.framework.contracts.models import LoadedModel
from crossdraft.framework.errors import CrossdraftError, UsageError

QUESTIONS = [f"w{4 + i} w9 w{30 - i}" for i in range(24)]


@pytest.fixture(scope="module")
def fast_target(chat_target: LoadedModel) -> LoadedModel:
    return replace(chat_target, model=tied_llama(layers=1, vocab=40))


@pytest.fixture(scope="module")
def written(fast_target: LoadedModel) -> Callable[..., list[Text]]:
    """``written(directory, batch_size=4, tokens=80, ...)``: `write` with the tiny target."""
    writers: dict[Any, Writer] = {}

    def make(directory: Path, batch_size: int = 4, seed: int = 3, max_prompt: int = 40, **more: Any) -> list[Text]:
        directory.mkdir(exist_ok=True)
        key = (batch_size, seed, max_prompt)
        if key not in writers:
            writers[key] = Writer(fast_target, batch_size=batch_size, max_prompt=max_prompt, max_response=5, seed=seed)
        options = {"tokens": 80, "questions": QUESTIONS, "invented": 0.5, "temperatures": (1.0, 0.0), **more}
        return write(directory / "texts.jsonl", writers[key], **options)

    return make


@pytest.fixture(scope="module")
def undisturbed(written: Any, tmp_path_factory: Any) -> Path:
    """Directory of an uninterrupted run."""
    directory = tmp_path_factory.mktemp("undisturbed")
    written(directory)
    return directory


def test_texts_come_in_order_of_their_index_and_of_both_kinds(undisturbed: Path) -> None:
    result, indices = read(undisturbed / "texts.jsonl", 40, None)
    assert indices is not None and indices == sorted(set(indices))
    assert {text.source for text in result} == {"given", "invented"}
    sizes = [len(text.response) for text in result]
    assert sum(sizes) >= 80 > sum(sizes[:-1]), "it stops with the text that has the last token wanted"
    greedy = [text for text, index in zip(result, indices, strict=True) if index % 2]
    assert {text.source for text in greedy} == {"given", "invented"}, "temperatures go with one kind of question"


@pytest.mark.slow
def test_killed_run_ends_with_same_texts(undisturbed: Path, written: Any, tmp_path: Path) -> None:
    whole = (undisturbed / "texts.jsonl").read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    # Almost nothing, inside a line, a line without its end, whole lines.
    cuts = [1, ends[3] + 7, ends[-3] - 1, ends[-2]]
    for cut in cuts:
        repeat = tmp_path / str(cut)
        shutil.copytree(undisturbed, repeat)
        (repeat / "texts.jsonl").write_bytes(whole[:cut])
        result = written(repeat)
        assert (repeat / "texts.jsonl").read_bytes() == whole, cut
        assert result == read(undisturbed / "texts.jsonl", 40, None)[0]


@pytest.mark.slow
def test_texts_do_not_depend_on_batch_size_or_count(undisturbed: Path, written: Any, tmp_path: Path) -> None:
    whole = (undisturbed / "texts.jsonl").read_bytes()
    written(tmp_path / "other", batch_size=7)
    assert (tmp_path / "other" / "texts.jsonl").read_bytes() == whole
    first = written(tmp_path / "grown", tokens=30)
    assert whole.startswith((tmp_path / "grown" / "texts.jsonl").read_bytes())
    written(tmp_path / "grown", batch_size=7)
    assert (tmp_path / "grown" / "texts.jsonl").read_bytes() == whole
    assert written(tmp_path / "grown", tokens=30) == first, "fewer are those that would have been written"


def test_another_seed_writes_other_texts(undisturbed: Path, written: Any, tmp_path: Path) -> None:
    assert written(tmp_path, seed=4) != read(undisturbed / "texts.jsonl", 40, None)[0]


@pytest.mark.parametrize(
    "other",
    [{"seed": 4}, {"temperatures": (1.0,)}, {"invented": 0.4}, {"questions": QUESTIONS[1:]}, {"max_prompt": 30}],
)
def test_texts_of_other_options_are_not_gone_on_with(
    other: dict[str, Any], undisturbed: Path, written: Any, tmp_path: Path
) -> None:
    repeat = tmp_path / "again"
    shutil.copytree(undisturbed, repeat)
    before = (repeat / "texts.jsonl").read_bytes()
    (name,) = other
    with pytest.raises(UsageError, match=rf"written with other options \({name}\)"):
        written(repeat, tokens=100, **other)
    assert (repeat / "texts.jsonl").read_bytes() == before


def test_existing_texts_are_reused_if_sufficient(undisturbed: Path, written: Any, tmp_path: Path) -> None:
    rows_there = [line for line in (undisturbed / "texts.jsonl").read_text().splitlines()][::-1]
    (tmp_path / "texts.jsonl").write_text("\n".join(rows_there) + "\n")
    result = written(tmp_path, tokens=60)
    assert len(result) == len(rows_there)
    with pytest.raises(UsageError, match=r"response tokens, but texts\.json, which is needed to resume, is missing"):
        written(tmp_path, tokens=1000)
    assert not (tmp_path / "texts.json").exists()


def test_full_disk_keeps_complete_files(undisturbed: Path, written: Any, tmp_path: Path, monkeypatch: Any) -> None:
    whole = (undisturbed / "texts.jsonl").read_bytes()
    lines: list[int] = []

    def full(index: int, text: Text) -> bytes:
        lines.append(index)
        if len(lines) == 5:
            with (tmp_path / "texts.jsonl").open("ab") as file:
                file.write(line_of(index, text)[:9])  # as much as there was room for
            raise OSError(errno.ENOSPC, "No space left on device")
        return line_of(index, text)

    monkeypatch.setattr(texts, "line_of", full)
    with pytest.raises(
        CrossdraftError, match=r"cannot write .*texts\.jsonl: No space left on device; completed files are kept"
    ):
        written(tmp_path)
    assert whole.startswith((tmp_path / "texts.jsonl").read_bytes()[:-9])
    monkeypatch.undo()
    written(tmp_path)
    assert (tmp_path / "texts.jsonl").read_bytes() == whole


# Loops that cannot be.


def test_prompt_that_no_question_fits_into_is_refused_by_name(chat_target: LoadedModel) -> None:
    with pytest.raises(UsageError, match=r"--max-prompt 2: the chat template of .* alone takes 2 tokens.*at least 3|3"):
        Writer(chat_target, batch_size=1, max_prompt=2, max_response=8, seed=0)
    small = replace(chat_target, context_length=2)
    with pytest.raises(UsageError, match="the context of 2 tokens: the empty chat template"):
        Chat(small, 40)


def test_questions_that_do_not_fit_are_named(written: Any, tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(UsageError, match=r"all questions exceed --max-prompt 4: .* has 5 .*'w4 w9 w30'"):
        written(tmp_path / "none", max_prompt=4)
    written(tmp_path / "some", max_prompt=6, tokens=40, questions=[*QUESTIONS, "w4 " * 9], invented=0)
    assert "1 of 25 questions are longer than 6 tokens and skipped, such as 'w4 w4" in capsys.readouterr().err


def test_target_that_never_ends_question_is_given_up(
    fast_target: LoadedModel, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(texts, "BARREN", 40)
    monkeypatch.setattr(texts, "ANSWERS_A_SLOT", 1)
    endless = replace(fast_target, eos_token_ids=())
    endless_writer = Writer(endless, batch_size=24, max_prompt=40, max_response=8, seed=0)
    with pytest.raises(UsageError, match="none of the last 48 questions became a text"):
        write(tmp_path / "t.jsonl", endless_writer, tokens=1000, questions=[], invented=1.0, temperatures=[1.0])


def test_template_without_prefix_cannot_invent(chat_target: LoadedModel, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(
        chat_target.tokenizer, "chat_template", "{% for m in messages %}{{ m.content }}{% endfor %} bot"
    )
    bare = Writer(chat_target, batch_size=1, max_prompt=40, max_response=8, seed=0)
    with pytest.raises(UsageError, match="cannot generate questions"):
        write(tmp_path / "t.jsonl", bare, tokens=10, questions=[], invented=1.0, temperatures=[1.0])
    monkeypatch.setattr(chat_target.tokenizer, "chat_template", "{{ raise_exception('no users here') }}")
    with pytest.raises(UsageError, match=r"the chat template of .* fails: no users here"):
        Chat(chat_target, 40)


@pytest.mark.slow
def test_questions_that_are_used_up(written: Any, tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(UsageError, match=r"the questions are used up after \d+ of 80 tokens"):
        written(tmp_path / "none", invented=0, questions=QUESTIONS[:5])
    result = written(tmp_path / "rest", invented=0.2, questions=QUESTIONS[:5], tokens=40)
    assert sum(text.source == "given" for text in result) == 5
    assert "all 5 questions are in use; the target invents the others" in capsys.readouterr().err


@settings(max_examples=25, deadline=None)
@given(
    count=st.integers(0, 30),
    share=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
    seed=st.integers(0, 2**32 - 1),
    look=st.lists(st.integers(0, 80), min_size=1, max_size=8),
)
def test_question_follows_from_its_index(count: int, share: float, seed: int, look: list[int]) -> None:
    given_ones = [str(i) for i in range(count)]

    def at(plan: Questions, index: int) -> str | None:
        try:
            return plan.at(index)
        except IndexError:
            return "none left"

    one, in_order = Questions(given_ones, share, seed), []
    for index in range(81):
        in_order.append(at(one, index))
    other = Questions(given_ones, share, seed)
    assert [at(other, index) for index in look] == [in_order[index] for index in look]
    used = [question for question in in_order if question not in (None, "none left")]
    assert used == given_ones[: len(used)], "each once, in order"
    if share == 0:
        assert None not in in_order
    if share == 1:
        assert set(in_order) == {None}


# Third-party files.


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "does not contain texts"),
        (b"\n \n", "does not contain texts"),
        (b'{"prompt": "w4", "response": "w5"}\n\xff\xfe\n', r"is not UTF-8 text \(line 2"),
        (b"[1, 2]\n", "line 1: not a JSON object"),
        (b"[" * 100_000 + b"\n", "it is nested too deeply"),
        (b'{"prompt": ' + b"9" * 5000 + b"}\n", "has 5000 digits"),
        (b'{"prompt": "w4", "resp', ":1: not JSON"),
        (b'{"prompt": ["w4"], "response": "w5"}\n', "line 1: needs 'prompt' and 'response'"),
        (b'{"question": "w4"}\n', "line 1: needs 'prompt' and 'response'"),
        (b'{"prompt": "w4 \\ud800", "response": "w5"}\n', "line 1: contains an unpaired surrogate"),
        (b'{"prompt": "' + b"w4 " * 99 + b'", "response": "w5"}\n', "all prompts of .* exceed --max-prompt 40"),
    ],
)
def test_hostile_texts_give_sentence(content: bytes, sentence: str, chat_target: LoadedModel, tmp_path: Path) -> None:
    file = tmp_path / "given.jsonl"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=sentence):
        read_finished(file, chat_target, 40, 8)


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"response": [5], "source": "given"}, "'prompt' must be a non-empty list of the target's token ids, 0 to 39"),
        ({"prompt": [], "response": [5], "source": "given"}, "'prompt' must be"),
        ({"prompt": [4], "response": [40], "source": "given"}, "'response' must be"),
        ({"prompt": [4], "response": [True], "source": "given"}, "'response' must be"),
        ({"prompt": [4], "response": ["w5"], "source": "given"}, "'response' must be"),
        ({"prompt": [4], "response": [5]}, "'source' must be text"),
        (
            {"prompt": [4] * 9, "response": [5], "source": "given"},
            "has 10 tokens, but the target's context length is 9",
        ),
    ],
)
def test_texts_of_wrong_shape_give_sentence(row: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_bytes(line_of(0, Text([4], [5], "given")) + json.dumps(row).encode() + b"\n")
    with pytest.raises(UsageError, match=rf"texts\.jsonl, line 2: {sentence}"):
        read(file, 40, 9)


@settings(max_examples=25, deadline=None)
@given(
    texts_there=st.lists(
        st.tuples(st.lists(st.integers(0, 39), min_size=1, max_size=5), st.lists(st.integers(0, 39), min_size=1)),
        min_size=1,
        max_size=4,
    ),
    data=st.data(),
)
def test_half_line_is_dropped_and_whole_ones_are_kept(texts_there: Any, data: Any, tmp_path_factory: Any) -> None:
    lines = [line_of(i, Text(*pair, "given")) for i, pair in enumerate(texts_there)]
    cut = data.draw(st.integers(0, sum(map(len, lines))))
    file = tmp_path_factory.mktemp("cut") / "texts.jsonl"
    file.write_bytes(b"".join(lines)[:cut])
    drop_half_line(file)
    sizes = [sum(map(len, lines[: i + 1])) for i in range(len(lines))]
    # A line that only lacks its end is whole.
    assert file.read_bytes() == b"".join(line for line, end in zip(lines, sizes, strict=True) if end - 1 <= cut)


def test_finished_texts_fit_into_context(chat_target: LoadedModel, tmp_path: Path) -> None:
    file = tmp_path / "given.jsonl"
    file.write_text(
        '{"question": "w4 w5", "answer": "w6 <<1+1=2>> w7 w8 w9"}\n{"prompt": "w4", "response": ""}\nno JSON'
    )
    small = replace(chat_target, context_length=7)
    first, second = read_finished(file, small, 40, 8, maximum=2)
    assert first.response == [6, 7, 8] and len(first.ids) == 7
    assert second.response == [1] and second.source == "finished"


def test_some_are_held_out_and_some_are_not() -> None:
    results = [Text([i], [i], "given") for i in range(4)]
    for share, count in [(1e-9, 1), (0.5, 2), (0.999, 3)]:
        train, held_out = split(results, share)
        assert (train + held_out, len(held_out)) == (results, count)


def test_room_of_question_is_kept(chat_target: LoadedModel) -> None:
    instance = Writer(chat_target, batch_size=1, max_prompt=3, max_response=1, seed=0)
    assert instance._length >= len(instance._opening) + writer.MOST_INVENTED
    assert all(text.split() for text in instance.invent(range(3)).values())
