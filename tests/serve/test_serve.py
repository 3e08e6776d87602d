"""The endpoint, asked by the `openai` client: it says what `generate` says, and refuses what it cannot do."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tiny_models import save_model

pytest.importorskip("uvicorn", reason="the endpoint needs the extra serve")
openai = pytest.importorskip("openai", reason="the endpoint is tested with the openai client")

from server_thread import Running, arguments, serving  # noqa: E402

from crossdraft import generate, load_model  # noqa: E402
from crossdraft.framework.cli import serve  # noqa: E402
from crossdraft.framework.errors import UsageError  # noqa: E402

PROMPT = "w5 w6 w7 w5 w6"
TEXTS = [f"w{5 + i} w{9 + i % 7} w{5 + i}" for i in range(20)]


@pytest.fixture(scope="module")
def name(tmp_path_factory: Any) -> str:
    return save_model(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def target(name: str) -> Any:
    return load_model(name, dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def greedy(name: str) -> Iterator[Running]:
    with serving("--target", name, "--temperature", "0", "--slots", "4", "--max-new-tokens", "40") as running:
        yield running


@pytest.fixture(scope="module")
def sampled(name: str) -> Iterator[Running]:
    with serving("--target", name, "--temperature", "0.9", "--top-p", "0.95", "--slots", "2", "--seed", "5") as running:
        yield running


def client(running: Running) -> Any:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=30)


def test_it_says_what_generate_says(greedy: Running, name: str, target: Any) -> None:
    ask = client(greedy)
    assert [model.id for model in ask.models.list()] == [name]
    options: dict[str, Any] = {"temperature": 0, "max_new_tokens": 20}
    (plain,) = generate(target, PROMPT, chat=False, **options)
    found = ask.completions.create(model=name, prompt=PROMPT, max_tokens=20, temperature=0, top_p=0.5)
    assert found.choices[0].text == plain.text and found.choices[0].finish_reason == "length"
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (5, len(plain.tokens))
    assert found.usage.completion_tokens_details.accepted_prediction_tokens == sum(one.tau for one in plain.steps)
    (plain,) = generate(target, PROMPT, chat=True, **options)
    found = ask.chat.completions.create(model=name, messages=[{"role": "user", "content": PROMPT}], max_tokens=20)
    assert found.choices[0].message.content == plain.text
    several = ask.completions.create(model=name, prompt=TEXTS[:3], max_tokens=8)
    wanted = generate(target, TEXTS[:3], chat=False, temperature=0, max_new_tokens=8)
    assert [choice.text for choice in several.choices] == [response.text for response in wanted]
    ids = ask.completions.create(model=name, prompt=[5, 6, 7], max_tokens=8, extra_body={"ignore_eos": True})
    assert (
        ids.choices[0].text == generate(target, [[5, 6, 7]], ignore_eos=True, temperature=0, max_new_tokens=8)[0].text
    )


def test_samples_follow_their_seed_and_come_with_log_p(sampled: Running, name: str, target: Any) -> None:
    ask = client(sampled)
    plain = generate(target, [PROMPT] * 4, chat=False, temperature=0.9, top_p=0.95, seed=5, max_new_tokens=12)
    for seed in (3, 1):
        found = ask.completions.create(model=name, prompt=PROMPT, max_tokens=12, seed=seed, logprobs=0)
        choice, tokens = found.choices[0], plain[seed].tokens
        assert choice.text == plain[seed].text
        assert choice.logprobs.token_logprobs == pytest.approx(plain[seed].logprobs, rel=1e-3)
        assert choice.logprobs.tokens == [target.tokenizer.decode([token]) for token in tokens]
        for token, offset in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True):
            assert choice.text[offset:].strip().startswith(token) or token in ("</s>", "<s>", "<unk>", "")
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 6, "logprobs": True}
    found = ask.chat.completions.create(model=name, temperature=0.9, top_p=0.95, seed=0, **chat)
    (plain,) = generate(target, PROMPT, chat=True, temperature=0.9, top_p=0.95, seed=5, max_new_tokens=6)
    assert [one.logprob for one in found.choices[0].logprobs.content] == pytest.approx(plain.logprobs, rel=1e-3)


@pytest.mark.parametrize("stop", [None, ["w1", "3 w"]])
def test_a_stream_joins_to_the_whole(sampled: Running, name: str, stop: Any) -> None:
    ask = client(sampled)
    options: dict[str, Any] = {"model": name, "max_tokens": 24, "seed": 7, "stop": stop}
    whole = ask.completions.create(prompt=PROMPT, logprobs=0, **options)
    chunks = list(
        ask.completions.create(
            prompt=PROMPT, stream=True, logprobs=0, stream_options={"include_usage": True}, **options
        )
    )
    told = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.text for choice in told) == whole.choices[0].text and len(told) > 3
    logprobs = [one for choice in told for one in choice.logprobs.token_logprobs]
    assert logprobs == whole.choices[0].logprobs.token_logprobs
    offsets = [one for choice in told for one in choice.logprobs.text_offset]
    assert offsets == whole.choices[0].logprobs.text_offset
    assert [choice.finish_reason for choice in told if choice.finish_reason] == [whole.choices[0].finish_reason]
    assert chunks[-1].usage == whole.usage and not any(chunk.usage for chunk in chunks[:-1])
    messages = [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]
    whole = ask.chat.completions.create(messages=messages, **options)
    parts = list(ask.chat.completions.create(messages=messages, stream=True, **options))
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.choices[0].message.content
    assert parts[0].choices[0].delta.role == "assistant"


def test_stop_strings(greedy: Running, name: str) -> None:
    ask = client(greedy)
    plain = ask.completions.create(model=name, prompt=PROMPT, max_tokens=30).choices[0].text
    word = plain.split()[3]
    cut = ask.completions.create(model=name, prompt=PROMPT, max_tokens=30, stop=word).choices[0]
    assert cut.text == plain.partition(word)[0] and cut.finish_reason == "stop"


@pytest.mark.parametrize(
    "options, param, sentence",
    [
        ({"temperature": "hot"}, "temperature", "must be a number"),
        ({"temperature": -1}, "temperature", "temperature=-1 is not valid"),
        ({"temperature": 1, "top_p": 0}, "top_p", "top_p=0 is not valid"),
        ({"n": 2}, "n", "each prompt is answered once"),
        ({"logprobs": 3}, "logprobs", "asks for other tokens than the chosen one; say 0"),
        ({"presence_penalty": 0.5}, "presence_penalty", "changes the law along the draft"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "changes the law along the draft"),
        ({"echo": True}, "echo", "prompts are not repeated"),
        ({"extra_body": {"novelty": 3}}, "novelty", "this server does not know it"),
        ({"extra_body": {"n": True}}, "n", "each prompt is answered once"),
        ({"max_tokens": 41}, "max_tokens", "started with --max-new-tokens 40"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"seed": -1}, "seed", "at least 0"),
        ({"stop": ["a", ""]}, "stop", "none of them empty"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream_options are for stream=true"),
        ({"prompt": []}, "prompt", "prompt must be a text"),
        ({"prompt": [5, 99]}, "prompt", "has the token id 99"),
        ({"prompt": "w5 " * 95}, "prompt", None),
        ({"prompt": "w5 " * 70}, "max_tokens", "exceed the 96 tokens that a slot holds"),
        ({"model": "other"}, "model", "there is no model 'other' here"),
    ],
    ids=str,
)
def test_what_cannot_be_honoured_is_refused(
    greedy: Running, name: str, options: dict[str, Any], param: str, sentence: str | None
) -> None:
    with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as caught:
        client(greedy).completions.create(**{"model": name, "prompt": PROMPT, "max_tokens": 30, **options})
    if sentence is not None:
        assert caught.value.param == param and sentence in caught.value.body["message"]
    assert greedy.idle()


def test_chunks_count_tokens_where_that_is_asked_for(sampled: Running, name: str) -> None:
    """As guidellm asks."""
    counting = {"include_usage": True, "continuous_usage_stats": True}
    options: dict[str, Any] = {"model": name, "max_tokens": 9, "stream": True, "stream_options": counting}
    ask = client(sampled)
    for chunks in (
        list(ask.completions.create(prompt=[PROMPT, "w5"], extra_body={"ignore_eos": True}, **options)),
        list(ask.chat.completions.create(messages=[{"role": "user", "content": PROMPT}], **options)),
    ):
        counts = [chunk.usage.completion_tokens for chunk in chunks]
        assert counts == sorted(counts) and counts[-2] == counts[-1] > 0 and counts[0] < counts[-1]
        assert len({chunk.usage.prompt_tokens for chunk in chunks}) == 1
        assert chunks[-1].usage.completion_tokens_details and not chunks[-1].choices


def test_other_addresses_are_refused_as_the_protocol_has_it(greedy: Running) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client(greedy).embeddings.create(model="any", input="w5")
    assert "this server answers /v1/models, /v1/completions" in caught.value.body["message"]


def test_conversations_that_are_none(greedy: Running, name: str) -> None:
    for messages, sentence in [
        ([], "must be a list of objects"),
        ([{"role": "user"}], r"messages\[0\] must have role and content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "a list of parts of type text"),
    ]:
        with pytest.raises(openai.BadRequestError, match=sentence):
            client(greedy).chat.completions.create(model=name, messages=messages)
    with pytest.raises(openai.BadRequestError, match="cannot be honoured: log P of the chosen"):
        client(greedy).chat.completions.create(
            model=name, messages=[{"role": "user", "content": "w5"}], logprobs=True, top_logprobs=2
        )


def test_twenty_clients_share_four_slots(greedy: Running, name: str, target: Any) -> None:
    ask = client(greedy)

    def one(i: int) -> str:
        if i % 2:
            return ask.completions.create(model=name, prompt=TEXTS[i], max_tokens=8).choices[0].text
        parts = ask.completions.create(model=name, prompt=TEXTS[i], max_tokens=8, stream=True)
        return "".join(part.choices[0].text for part in parts)

    with ThreadPoolExecutor(20) as pool:
        found = list(pool.map(one, range(20)))
    wanted = generate(target, TEXTS, chat=False, temperature=0, max_new_tokens=8)
    assert found == [response.text for response in wanted]
    assert greedy.idle() and greedy.health() == {"slots": 4, "running": 0, "waiting": 0}


def test_a_client_that_leaves_frees_its_slot(greedy: Running, name: str) -> None:
    steps = greedy.served.decoder
    before = steps.batch_steps
    stream = client(greedy).completions.create(
        model=name, prompt=PROMPT, max_tokens=40, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    assert greedy.idle() and steps.batch_steps > before


def test_a_step_that_fails_ends_its_answers_and_not_the_server(greedy: Running, name: str, monkeypatch: Any) -> None:
    ask, drafter = client(greedy), greedy.served.decoder.drafter
    with monkeypatch.context() as patch:
        patch.setattr(drafter, "propose", lambda *_: 1 / 0)
        with pytest.raises(openai.InternalServerError, match=r"decoding failed.*ZeroDivisionError"):
            ask.completions.create(model=name, prompt=PROMPT)
        with pytest.raises(openai.APIError, match=r"decoding failed.*ZeroDivisionError"):
            list(ask.completions.create(model=name, prompt=PROMPT, stream=True))
    assert ask.completions.create(model=name, prompt=PROMPT, max_tokens=3).usage.completion_tokens == 3


def test_wrong_numbers_end_one_answer(tmp_path: Any) -> None:
    broken = save_model(tmp_path / "nan", nan=True)
    with (
        serving("--target", broken, "--slots", "1", most_waiting=1) as running,
        pytest.raises(openai.InternalServerError, match="produced NaN"),
    ):
        client(running).completions.create(model=broken, prompt=PROMPT)


def test_options_that_cannot_be(name: str) -> None:
    with pytest.raises(UsageError, match="--slots 0 must be at least 1"):
        serve.main(arguments("--target", name, "--slots", "0"))
    with pytest.raises(UsageError, match="--max-length 97 is more than the target's context of 96"):
        serve.main(arguments("--target", name, "--max-length", "97"))
    with pytest.raises(UsageError, match=r"cannot listen at --host .* --port 99999"):
        serve.listening("127.0.0.1", 99999)
    assert "for evaluation, not for production" in serve.PURPOSE
