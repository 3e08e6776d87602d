"""The server under the `openai` client: responses equal those of `generate`, and unsupported fields are rejected."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tiny_models import save_model

openai = pytest.importorskip("openai", reason="the endpoint is tested with the openai client")

from server_thread import RunningServer, serve, serving  # noqa: E402

from crossdraft import generate, load_model  # noqa: E402
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
def greedy(name: str) -> Iterator[RunningServer]:
    with serving("--target", name, "--temperature", "0", "--slots", "4", "--max-new-tokens", "40") as running:
        yield running


@pytest.fixture(scope="module")
def sampled(name: str) -> Iterator[RunningServer]:
    with serving("--target", name, "--temperature", "0.9", "--top-p", "0.95", "--slots", "2", "--seed", "5") as running:
        yield running


def client(running: RunningServer) -> Any:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=30)


def test_responses_equal_those_of_generate(greedy: RunningServer, name: str, target: Any) -> None:
    api = client(greedy)
    assert [model.id for model in api.models.list()] == [name]
    options: dict[str, Any] = {"temperature": 0, "max_new_tokens": 20}
    (plain,) = generate(target, PROMPT, chat=False, **options)
    response = api.completions.create(model=name, prompt=PROMPT, max_tokens=20, temperature=0, top_p=0.5)
    assert response.choices[0].text == plain.text and response.choices[0].finish_reason == "length"
    assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (5, len(plain.tokens))
    assert response.usage.completion_tokens_details.accepted_prediction_tokens == sum(step.tau for step in plain.steps)
    (plain,) = generate(target, PROMPT, chat=True, **options)
    response = api.chat.completions.create(model=name, messages=[{"role": "user", "content": PROMPT}], max_tokens=20)
    assert response.choices[0].message.content == plain.text
    batch = api.completions.create(model=name, prompt=TEXTS[:3], max_tokens=8)
    expected = generate(target, TEXTS[:3], chat=False, temperature=0, max_new_tokens=8)
    assert [choice.text for choice in batch.choices] == [response.text for response in expected]
    ids = api.completions.create(model=name, prompt=[5, 6, 7], max_tokens=8, extra_body={"ignore_eos": True})
    assert (
        ids.choices[0].text == generate(target, [[5, 6, 7]], ignore_eos=True, temperature=0, max_new_tokens=8)[0].text
    )


def test_seeds_and_logprobs(sampled: RunningServer, name: str, target: Any) -> None:
    api = client(sampled)
    plain = generate(target, [PROMPT] * 4, chat=False, temperature=0.9, top_p=0.95, seed=5, max_new_tokens=12)
    for seed in (3, 1):
        response = api.completions.create(model=name, prompt=PROMPT, max_tokens=12, seed=seed, logprobs=0)
        choice, tokens = response.choices[0], plain[seed].tokens
        assert choice.text == plain[seed].text
        assert choice.logprobs.token_logprobs == pytest.approx(plain[seed].logprobs, rel=1e-3)
        assert choice.logprobs.tokens == [target.tokenizer.decode([token]) for token in tokens]
        for token, offset in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True):
            assert choice.text[offset:].strip().startswith(token) or token in ("</s>", "<s>", "<unk>", "")
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 6, "logprobs": True}
    response = api.chat.completions.create(model=name, temperature=0.9, top_p=0.95, seed=0, **chat)
    (plain,) = generate(target, PROMPT, chat=True, temperature=0.9, top_p=0.95, seed=5, max_new_tokens=6)
    assert [token.logprob for token in response.choices[0].logprobs.content] == pytest.approx(plain.logprobs, rel=1e-3)


@pytest.mark.parametrize("stop", [None, ["w1", "3 w"]])
def test_streamed_chunks_add_up(sampled: RunningServer, name: str, stop: Any) -> None:
    api = client(sampled)
    options: dict[str, Any] = {"model": name, "max_tokens": 24, "seed": 7, "stop": stop}
    usage: Any = {"include_usage": True, "continuous_usage_stats": None}  # null is as if not sent
    whole = api.completions.create(prompt=PROMPT, logprobs=0, **options)
    chunks = list(api.completions.create(prompt=PROMPT, stream=True, logprobs=0, stream_options=usage, **options))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.text for choice in choices) == whole.choices[0].text and len(choices) > 3
    logprobs = [value for choice in choices for value in choice.logprobs.token_logprobs]
    assert logprobs == whole.choices[0].logprobs.token_logprobs
    offsets = [offset for choice in choices for offset in choice.logprobs.text_offset]
    assert offsets == whole.choices[0].logprobs.text_offset
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == [whole.choices[0].finish_reason]
    assert chunks[-1].usage == whole.usage and not any(chunk.usage for chunk in chunks[:-1])
    messages = [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]
    whole = api.chat.completions.create(messages=messages, **options)
    parts = list(api.chat.completions.create(messages=messages, stream=True, **options))
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.choices[0].message.content
    assert parts[0].choices[0].delta.role == "assistant"


def test_stop_strings(greedy: RunningServer, name: str) -> None:
    api = client(greedy)
    plain = api.completions.create(model=name, prompt=PROMPT, max_tokens=30).choices[0].text
    word = plain.split()[3]
    cut = api.completions.create(model=name, prompt=PROMPT, max_tokens=30, stop=word).choices[0]
    assert cut.text == plain.partition(word)[0] and cut.finish_reason == "stop"


@pytest.mark.parametrize(
    "options, param, message",
    [
        ({"temperature": "hot"}, "temperature", "should be a valid number"),
        ({"temperature": -1}, "temperature", "temperature=-1.0 is not valid"),
        ({"temperature": 1, "top_p": 0}, "top_p", "top_p=0.0 is not valid"),
        ({"n": 2}, "n", "one choice is returned per prompt"),
        ({"logprobs": 3}, "logprobs", "only the log-probability of the sampled token is computed; send 0"),
        ({"presence_penalty": 0.5}, "presence_penalty", "changes the target's distribution"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "changes the target's distribution"),
        ({"echo": True}, "echo", "prompts are not scored"),
        ({"extra_body": {"novelty": 3}}, "novelty", "unknown field"),
        ({"extra_body": {"n": True}}, "n", "one choice is returned per prompt"),
        ({"max_tokens": 41}, "max_tokens", "exceeds the server's --max-new-tokens 40"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"seed": -1}, "seed", "greater than or equal to 0"),
        ({"stop": ["a", ""]}, "stop", "stop.1='' is not valid"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream_options requires stream=true"),
        ({"stream_options": {"usage": True}}, "stream_options", "has the unknown key 'usage'"),
        ({"stop": [""] * 1025}, "stop", "should have at most 1024 item(s)"),
        ({"prompt": []}, "prompt", "prompt must be a string"),
        ({"prompt": [5, 99]}, "prompt", "has the token id 99"),
        ({"prompt": "w5 " * 95}, "prompt", None),
        ({"prompt": "w5 " * 70}, "max_tokens", "exceed the 96 tokens of a slot"),
        ({"model": "other"}, "model", "model 'other' is not served"),
        ({"model": None}, "model", "names no model"),
    ],
    ids=str,
)
def test_unsupported_fields_are_rejected(
    greedy: RunningServer, name: str, options: dict[str, Any], param: str, message: str | None
) -> None:
    with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as caught:
        client(greedy).completions.create(**{"model": name, "prompt": PROMPT, "max_tokens": 30, **options})
    if message is not None:
        assert caught.value.param == param and message in caught.value.body["message"]
    assert greedy.idle()


def test_continuous_usage_stats(sampled: RunningServer, name: str) -> None:
    """As requested by guidellm."""
    counting = {"include_usage": True, "continuous_usage_stats": True}
    options: dict[str, Any] = {"model": name, "max_tokens": 9, "stream": True, "stream_options": counting}
    api = client(sampled)
    for chunks in (
        list(api.completions.create(prompt=[PROMPT, "w5"], extra_body={"ignore_eos": True}, **options)),
        list(api.chat.completions.create(messages=[{"role": "user", "content": PROMPT}], **options)),
    ):
        counts = [chunk.usage.completion_tokens for chunk in chunks]
        assert counts == sorted(counts) and counts[-2] == counts[-1] > 0 and counts[0] < counts[-1]
        assert len({chunk.usage.prompt_tokens for chunk in chunks}) == 1
        assert chunks[-1].usage.completion_tokens_details and not chunks[-1].choices


def test_unknown_paths(greedy: RunningServer) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client(greedy).embeddings.create(model="any", input="w5")
    assert "the endpoints are /v1/models, /v1/completions" in caught.value.body["message"]


def test_invalid_conversations(greedy: RunningServer, name: str) -> None:
    for messages, message in [
        ([], "must be a list of objects"),
        ([{"role": "user"}], r"messages\[0\] must have role and content only"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "a list of parts of type text"),
    ]:
        with pytest.raises(openai.BadRequestError, match=message):
            client(greedy).chat.completions.create(model=name, messages=messages)
    with pytest.raises(openai.BadRequestError, match="is not supported: only the log-probability"):
        client(greedy).chat.completions.create(
            model=name, messages=[{"role": "user", "content": "w5"}], logprobs=True, top_logprobs=2
        )


def test_messages_that_fill_a_slot(name: str) -> None:
    with (
        serving("--target", name, "--max-length", "20") as running,
        pytest.raises(openai.BadRequestError, match="the prompt has 20 tokens; a slot holds 20 tokens") as caught,
    ):
        client(running).chat.completions.create(model=name, messages=[{"role": "user", "content": "w5 " * 18}])
    assert caught.value.param == "messages"


def test_twenty_clients_share_four_slots(greedy: RunningServer, name: str, target: Any) -> None:
    api = client(greedy)

    def complete(i: int) -> str:
        if i % 2:
            return api.completions.create(model=name, prompt=TEXTS[i], max_tokens=8).choices[0].text
        parts = api.completions.create(model=name, prompt=TEXTS[i], max_tokens=8, stream=True)
        return "".join(part.choices[0].text for part in parts)

    with ThreadPoolExecutor(20) as pool:
        texts = list(pool.map(complete, range(20)))
    expected = generate(target, TEXTS, chat=False, temperature=0, max_new_tokens=8)
    assert texts == [response.text for response in expected]
    assert greedy.idle() and greedy.health() == {"slots": 4, "running": 0, "waiting": 0}


def test_client_that_disconnects_frees_its_slot(greedy: RunningServer, name: str) -> None:
    decoder = greedy.pool.decoder
    before = decoder.batch_steps
    stream = client(greedy).completions.create(
        model=name, prompt=PROMPT, max_tokens=40, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    assert greedy.idle() and decoder.batch_steps > before


def test_failed_step_aborts_its_batch_only(greedy: RunningServer, name: str, monkeypatch: Any) -> None:
    api, drafter = client(greedy), greedy.pool.decoder.drafter
    with monkeypatch.context() as patch:
        patch.setattr(drafter, "propose", lambda *_: 1 / 0)
        with pytest.raises(openai.InternalServerError, match=r"decoding failed.*ZeroDivisionError"):
            api.completions.create(model=name, prompt=PROMPT)
        with pytest.raises(openai.APIError, match=r"decoding failed.*ZeroDivisionError"):
            list(api.completions.create(model=name, prompt=PROMPT, stream=True))
    assert api.completions.create(model=name, prompt=PROMPT, max_tokens=3).usage.completion_tokens == 3


def test_nan_and_more_prompts_than_the_queue_holds(tmp_path: Any) -> None:
    broken = save_model(tmp_path / "nan", nan=True)
    with serving("--target", broken, "--slots", "1", max_waiting=1) as running:
        with pytest.raises(openai.InternalServerError, match="produced NaN"):
            client(running).completions.create(model=broken, prompt=PROMPT)
        with pytest.raises(openai.BadRequestError, match="2 prompts do not fit into the queue of at most 1 requests"):
            client(running).completions.create(model=broken, prompt=[PROMPT, PROMPT])


def test_invalid_options(name: str) -> None:
    with pytest.raises(UsageError, match="--max-length 97 exceeds the target's context length of 96"):
        serve("--target", name, "--max-length", "97").run()
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UsageError, match="cannot listen on --host"):
        serve("--target", name, "--port", str(taken.getsockname()[1])).run()
