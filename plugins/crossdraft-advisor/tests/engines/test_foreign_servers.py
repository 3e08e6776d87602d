"""Responses, counters and settings of servers, which are checked before they count."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from crossdraft_advisor import ServedCell
from crossdraft_advisor.engines import http_response
from crossdraft_advisor.engines.builtin.openai import OpenAiOptions, OpenAiServer
from crossdraft_advisor.engines.counter_definitions import DEFINITIONS
from crossdraft_advisor.engines.engine_cell import ServerCounters, contradiction, other_traffic
from crossdraft_advisor.engines.http_response import HttpResponse, NetworkError, headers_of, same_server, unfit
from crossdraft_advisor.limits import EVENT_BYTES
from engine_server import Script, engine_server, steps

from crossdraft import ModelError, Sampling
from crossdraft.framework.errors import UsageError
from crossdraft.framework.util.limits import Limit

GAMMA, MOST, END, VOCAB = 4, 8, 2, 50


class Words:
    """A tokenizer whose tokens are words."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [10 + i for i, _ in enumerate(text.split())]}


CELL = ServedCell(Path(), "float32", Sampling(temperature=0), 0, 1, 64, GAMMA, (), (END,), Words(), VOCAB)


def respond(script: Script, gamma: int = GAMMA, event_bytes: Limit = EVENT_BYTES, **options: Any) -> Any:
    cell = replace(CELL, gamma=gamma)
    with engine_server(script):
        settings = {
            "url": script.url,
            "baseline_url": script.url,
            "token_ids": True,
            "model": "m",
            "token_seconds": 20,
            **options,
        }
        server = OpenAiServer(OpenAiOptions(**settings), cell, Path())
        server.start()
        return server.complete([5, 6], MOST, event_bytes)


def text_steps(*texts: str, finish_reason: str = "length", tokens: int = 1) -> list[dict[str, Any]]:
    return [
        {
            "choices": [
                {
                    "text": text,
                    "finish_reason": finish_reason if i == len(texts) - 1 else None,
                    "logprobs": {"tokens": [text] * tokens},
                }
            ]
        }
        for i, text in enumerate(texts)
    ]


def test_possible_responses_are_accepted() -> None:
    eight = steps([1], [3, 4, 5, 6, 7], [8], [9])
    assert respond(Script(eight)).tokens == [1, 3, 4, 5, 6, 7, 8, 9]
    assert respond(Script(steps([1], [3, END], finish_reason="stop"))).finish_reason == "stop"
    assert respond(Script(steps([END], finish_reason="stop"))).tokens == [END]
    usage = [*steps([1], [END], [], finish_reason="stop"), {"choices": []}, b"data: [DONE]\n\n", b"data: garbage\n\n"]
    assert respond(Script(usage)).tokens == [1, END]
    assert respond(Script(steps(*[[i] for i in range(3, 11)])), gamma=0).tokens == list(range(3, 11))
    words = respond(Script(text_steps(*(f"{i} " for i in range(8)))), token_ids=False)
    assert words.tokens == list(range(10, 18))
    ended = respond(Script(text_steps("a ", "b", finish_reason="stop")), token_ids=False)
    assert ended.tokens == [10, 11, END] and [step.tokens for step in ended.steps] == [1, 1, 1]


IMPOSSIBLE = {
    "more than gamma + 1 tokens in a step": steps([1], [3, 4, 5, 6, 7, 8], [9]),
    "more in the first": steps([1, 3, 4, 5, 6, 7], [8], [9]),
    "more than max_tokens": steps([1], *[[i] for i in range(3, 20)]),
    "more than max_tokens, without an end": steps(*[[i] for i in range(3, 30)], finish_reason=None),
    "beyond the vocabulary": steps([1], [VOCAB], *[[3]] * 6),
    "negative": steps([1], [-1], *[[3]] * 6),
    "only negative": steps(*[[-1]] * 8),
    "huge": steps([1], [10**30], *[[3]] * 6),
    "fraction": steps([1], [3.0], *[[3]] * 6),
    "truth": steps([1], [True], *[[3]] * 6),
    "text": steps([1], ["3"], *[[3]] * 6),
    "null": steps([1], [None], *[[3]] * 6),
    "list": steps([1], [[3]], *[[3]] * 6),
    "end inside a step": steps([1], [3, END, 4], *[[3]] * 4),
    "end in an earlier step": steps([1], [END], *[[3]] * 6),
    "stop without end": steps([1], [3], finish_reason="stop"),
    "length too early": steps([1], [3]),
    "another reason": steps([1], [END], finish_reason="abort"),
    "a reason that is not a text": steps([1], [END], finish_reason=["stop"]),
    "two reasons": [*steps([1], [END], finish_reason="stop"), *steps([], finish_reason="length")],
    "the same reason twice": [*steps([1], [END], finish_reason="stop"), *steps([], finish_reason="stop")],
    "tokens after the end": [*steps([1], [END], finish_reason="stop"), *steps([4], finish_reason=None)],
    "no tokens": steps([], finish_reason="stop"),
    "no reason": steps([1], [3], finish_reason=None),
    "nothing": [],
    "two choices": [{"choices": steps([1])[0]["choices"] * 2}],
    "not JSON": [b"data: {\n\n"],
    "nested": [b"data: " + b"[" * 100_000 + b"\n\n"],
    "a number": [b"data: 5\n\n"],
    "null choices": [{"choices": None}],
    "a text for a choice": [{"choices": ["x"]}],
    "not UTF-8": [b"data: \xff\n\n"],
    "an error": [{"error": "x" * 100_000}],
}


@pytest.mark.parametrize("events", IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
def test_impossible_responses_are_refused(events: Any) -> None:
    with pytest.raises(ModelError, match=r"the (server|stream) of openai") as error:
        respond(Script(events))
    assert len(str(error.value)) < 1000


def test_plain_decoding_has_one_token_a_step() -> None:
    with pytest.raises(ModelError, match="without speculation"):
        respond(Script(steps([1], [3, 4], *[[5]] * 5)), gamma=0)


def test_plain_decoding_by_fields_of_a_request() -> None:
    """One address serves both; the fields are sent for plain decoding only, and drafts are noticed all the same."""
    off, script = {"speculative.n_max": 0}, Script(steps(*[[i] for i in range(3, 11)]))
    assert len(respond(script, gamma=0, baseline_url="", plain=off).tokens) == MOST
    assert script.body["speculative.n_max"] == 0 and script.body["model"] == "m"
    respond(script, baseline_url="", plain=off)
    assert "speculative.n_max" not in script.body
    with pytest.raises(ModelError, match="without speculation"):
        respond(Script(steps([1], [3, 4], *[[5]] * 5)), gamma=0, baseline_url="", plain=off)
    with pytest.raises(UsageError, match=r"baseline_url is missing.* or plain"):
        respond(script, gamma=0, baseline_url="")


def test_key_and_served_name_of_a_remote_server(monkeypatch: Any) -> None:
    """The key is sent to its address only; the name is the first that the server lists, without /health, too."""
    models = json.dumps({"data": [{"id": "served"}, {"id": "adapter"}]})
    script = Script(
        steps([1], [END], finish_reason="stop"), key="secret", pages={"/v1/models": models, "/health": None}
    )
    with pytest.raises(UsageError, match=r"status 401\); check the address.*, and CROSSDRAFT_HEADERS"):
        respond(script, model="")
    for address, matches in (("http://127.0.0.1", True), ("http://127.0.0.2", False)):
        script = replace(script, requests=0)
        with engine_server(script):
            headers = {f"{address}:{script.url.rpartition(':')[2]}": {"Authorization": "Bearer secret"}}
            monkeypatch.setenv("CROSSDRAFT_HEADERS", json.dumps(headers))
            assert bool(headers_of(f"{script.url}/v1/models")) == matches
            assert not headers_of(script.url.replace("://", "://evil.") + "/v1/models")
            if matches:
                server = OpenAiServer(OpenAiOptions(url=script.url, token_ids=True), CELL, Path())
                server.start()
                assert server.complete([5, 6], MOST).tokens == [1, END] and script.body["model"] == "served"
    monkeypatch.setenv("CROSSDRAFT_HEADERS", '{"http://127.0.0.1": "secret"}')
    with pytest.raises(UsageError, match="CROSSDRAFT_HEADERS must be JSON of addresses"):
        headers_of("http://127.0.0.1/x")


def test_text_that_encodes_to_other_tokens_is_refused() -> None:
    with pytest.raises(ModelError, match="when encoded again"):
        respond(Script(text_steps("a ", "b", "c ", *["d "] * 5)), token_ids=False)


COUNTS: dict[str, dict[str, Any]] = {
    "accepted above drafted": {"drafted": [3], "accepted": [4]},
    "drafted above gamma": {"drafted": [5], "accepted": [4]},
    "other lengths": {"drafted": [4, 4], "accepted": [1]},
    "only one": {"drafted": [4]},
    "texts": {"drafted": ["4"], "accepted": [1]},
    "negative": {"drafted": [4], "accepted": [-1]},
    "too many steps": {"drafted": [4] * 9, "accepted": [1] * 9},
    "total above": {"totals": (4, 5)},
    "total too many": {"totals": (10_000, 3)},
    "total not a pair": {"totals": (4, 3, 2)},
    "total of texts": {"totals": ("4", "3")},
    "not a list": {"drafted": 4, "accepted": 1},
}


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
def test_impossible_counts_are_refused(counts: dict[str, Any], monkeypatch: Any) -> None:
    parse = OpenAiServer.event

    def event(self: OpenAiServer, data: Any) -> Any:
        result = parse(self, data)
        for name, value in counts.items():
            setattr(result, name, value)
        return result

    monkeypatch.setattr(OpenAiServer, "event", event)
    with pytest.raises(ModelError, match="impossible response"):
        respond(Script(steps([1], [3, 4, 5], [6], [7], [8], [9])))


ACCOUNTS: dict[str, dict[str, Any]] = {
    "usage": {"usage": {"completion_tokens": 99_999}},
    "usage below": {"usage": {"completion_tokens": 3}},
    "usage of text": {"usage": {"completion_tokens": "8"}},
    "model": {"model": "other"},
    "accepted above drafted": {"timings": {"draft_n": 3, "draft_n_accepted": 30}},
}


@pytest.mark.parametrize("account", ACCOUNTS.values(), ids=ACCOUNTS.keys())
def test_account_that_contradicts_the_response(account: dict[str, Any]) -> None:
    *events, last = steps([1], [3, 4, 5, 6], [7], [8], [9])
    with pytest.raises(ModelError, match="impossible response"):
        respond(Script([*events, last | account]))
    own = {"usage": {"completion_tokens": 8}, "model": "org/M", "timings": {"draft_n": 4, "draft_n_accepted": 3}}
    assert len(respond(Script([*events, last | own])).tokens) == MOST


ENDLESS = {
    "comments": Script(forever=b": still here\n" * 1000),
    "a line": Script(forever=b"data: " + b"x" * 1000),
    "events without tokens": Script(forever=b'data: {"choices": []}\n\n' * 1000),
    "tokens": Script(forever=b'data: {"choices": [{"token_ids": [3], "finish_reason": null}]}\n\n'),
    "after the end": Script(steps([1], [END], finish_reason="stop"), forever=b": more\n" * 1000),
    "body of an error": Script(status=500, forever=b"\x1b[31mno " * 1000),
    "comments, slowly": Script(forever=b": still here\n", pause=0.05),
    "a line, slowly": Script(forever=b"x", pause=0.05),
    "body of an error, slowly": Script(status=503, forever=b"no ", pause=0.05),
    "silence": Script(steps([1]), forever=b"\n", pause=60),
}


@pytest.mark.parametrize("script", ENDLESS.values(), ids=ENDLESS.keys())
def test_endless_responses_are_refused(script: Script) -> None:
    with pytest.raises(ModelError) as error:
        respond(script, token_seconds=1.0, event_bytes=Limit(200_000, "for a test"))
    assert len(str(error.value)) < 1000 and "\x1b" not in str(error.value)


def test_whole_response_is_limited() -> None:
    """Tokens restart the limit of an event, not those of the response; counted in bytes and by a simulated clock."""
    padding, tokens = b": empty\n" * 1000, [event for i in range(3, 10) for event in steps([i], finish_reason=None)]
    limit = Limit(250_000, "for a test")
    with pytest.raises(ModelError, match="without a finish reason"):
        respond(Script([part for event in tokens for part in (*[padding] * 8, event)]), event_bytes=limit)
    with pytest.raises(ModelError, match=r"too large; in bytes, the maximum is 774288: the tokens of the response"):
        respond(Script([part for event in tokens for part in (*[padding] * 20, event)]), event_bytes=limit)
    now, limits = iter(range(0, 10**6, 100)), {"seconds": 300.0, "maximum": EVENT_BYTES, "whole_seconds": 3600.0}
    with engine_server(Script(forever=b": still here\n" * 10_000)) as endless:
        response = HttpResponse(f"{endless.url}/v1/completions", {}, clock=lambda: next(now), **limits)
        with response, pytest.raises(NetworkError, match="was not complete after 3600 s"):
            while response.read():
                response.renew()
    assert next(now) < 10_000


def test_endless_health_is_not_ready(monkeypatch: Any) -> None:
    monkeypatch.setattr(http_response, "METRICS_BYTES", Limit(1000, "for a test"))
    with pytest.raises(UsageError, match=r"is not ready .the response is too large"):
        respond(Script(pages={"/health": "x" * 10_000}))


def test_redirects_are_not_followed() -> None:
    with pytest.raises(ModelError, match="status 307"):
        respond(Script(status=307))


# -- addresses ---------------------------------------------------------------------------------------------------

SAME = [
    ("http://localhost:8000", "http://127.0.0.1:8000/"),
    ("http://LOCALHOST:8000/", "http://localhost.:8000"),
    ("http://localhost", "http://localhost:80"),
    ("https://localhost", "https://localhost:443//"),
    ("http://[::1]:8000", "http://0.0.0.0:8000"),
    ("http://127.1:8000", "http://2130706433:8000"),
    ("http://[::ffff:127.0.0.1]:8000", "http://localhost:8000"),
    ("http://user@h.invalid:1/v", "http://h.invalid:1/./v/"),
    ("http://10.0.0.1:1", "http://10.0.0.1:1/%2e"),
]
OTHER = [
    ("http://localhost:8000", "http://localhost:8001"),
    ("http://localhost:8000/a", "http://localhost:8000/b"),
    ("http://a.invalid:8000", "http://b.invalid:8000"),
    ("http://10.0.0.1:1", "http://10.0.0.2:1"),
    ("http://localhost", "https://localhost"),
]


def test_same_server_by_another_name() -> None:
    assert all(same_server(*pair) and same_server(*reversed(pair)) for pair in SAME)
    assert not any(same_server(*pair) for pair in OTHER)


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000",
        "file:///etc/passwd",
        "ftp://h",
        "http://",
        "http://h:0",
        "http://h:x",
        "http://a b",
        "http://h/?q",
    ],
)
def test_unfit_addresses(url: str) -> None:
    assert unfit(url)
    with pytest.raises(ValueError, match="is not the address of a server"):
        OpenAiOptions(url=url)


# -- settings and counters ----------------------------------------------------------------------------------------


def scrape(
    prefix: str = "vllm:", *, drafts: int | None = 3, positions: int = GAMMA, tokens: int = 20, requests: int = 2
) -> str:
    lines = [f"vllm:generation_tokens_total {tokens}", f"vllm:request_success_total {requests}"] * (prefix == "vllm:")
    if drafts is not None:
        lines += [f"{prefix}spec_decode_num_{name}_total {drafts * GAMMA}" for name in ("draft_tokens",)]
        lines += [f"{prefix}spec_decode_num_drafts_total {drafts}", f"{prefix}spec_decode_num_accepted_tokens_total 0"]
        name = f"{prefix}spec_decode_num_accepted_tokens_per_pos_total"
        lines += [f'{name}{{position="{i}"}} 0' for i in range(positions)]
    return "\n".join(lines) + "\n"


SGLANG = '{{"speculative_algorithm": {}, "speculative_num_steps": {}}}'
PAIR = '{{"data": [{{"id": "m", "pair": "m, drafter {}, verifier token, temperature 0"}}]}}'


@pytest.mark.parametrize(
    "path, body, drafter, gamma, reason",
    [
        ("/metrics", scrape(), "none", 0, "speculates"),
        ("/metrics", scrape(drafts=0), "none", 0, "speculates"),
        ("/metrics", scrape("llamacpp:"), "none", 0, "speculates"),
        ("/metrics", scrape("llamacpp:", drafts=0, positions=0), "none", 0, None),
        ("/metrics", scrape(drafts=None), "none", 0, None),
        ("/metrics", scrape(drafts=None), "draft-model", 4, "does not speculate"),
        ("/metrics", scrape(), "draft-model", 4, None),
        ("/metrics", scrape(positions=3), "draft-model", 4, "drafts 3 tokens"),
        ("/metrics", scrape(positions=5), "draft-model", 4, "drafts 5 tokens"),
        ("/metrics", scrape("llamacpp:", positions=2), "draft-model", 4, None),
        ("/metrics", scrape("llamacpp:", positions=5), "draft-model", 4, "drafts 5 tokens"),
        ("/metrics", "x 1\n", "none", 0, None),
        ("/get_server_info", SGLANG.format("null", "null"), "none", 0, None),
        ("/get_server_info", SGLANG.format('"EAGLE3"', 3), "none", 0, "speculative_algorithm is 'EAGLE3'"),
        ("/get_server_info", SGLANG.format('"EAGLE3"', 3), "eagle3", 3, None),
        ("/get_server_info", SGLANG.format('"EAGLE3"', 3), "eagle3", 4, "speculative_num_steps is 3"),
        ("/get_server_info", SGLANG.format('"EAGLE"', 3), "mtp", 3, None),
        ("/get_server_info", SGLANG.format('"NGRAM"', "null"), "draft-model", 3, "is 'NGRAM'"),
        ("/get_server_info", SGLANG.format("null", "null"), "own-drafter", 3, "is ''"),
        ("/get_server_info", SGLANG.format("[[1]]", "{}"), "own-drafter", 3, None),
        ("/v1/models", PAIR.format("suffix"), "none", 0, "drafter is 'suffix'"),
        ("/v1/models", PAIR.format("suffix"), "suffix", 4, None),
        ("/v1/models", PAIR.format("none"), "suffix", 4, "drafter is 'none'"),
        ("/v1/models", '{"data": 5}', "suffix", 4, None),
        ("/v1/models", "[[[", "suffix", 4, None),
    ],
)
def test_settings_of_a_server(path: str, body: str, drafter: str, gamma: int, reason: str | None) -> None:
    with engine_server(Script(pages={path: body})) as script:
        contradicted = contradiction(script.url, "/metrics", drafter, gamma)
    assert (contradicted is None) if reason is None else (contradicted and reason in contradicted)


def test_counters_of_other_requests() -> None:
    before, after = (ServerCounters.parse(scrape(tokens=t, requests=r), "m") for t, r in ((100, 5), (160, 9)))
    growth = after.since(before)
    assert other_traffic(growth, {"requests": 4, "tokens": 60}) == {}
    assert other_traffic(growth, {"requests": 3, "tokens": 50}) == {"requests": (4, 3), "tokens": (60, 50)}
    assert other_traffic(before.since(after), {"requests": 4, "tokens": 60})  # the server was started again
    rounded = "llamacpp:spec_decode_num_drafts_total 1.23457e+06\nllamacpp:spec_decode_num_draft_tokens_total 5e+06\n"
    counters = ServerCounters.parse(rounded, "m")
    assert other_traffic(counters.since(ServerCounters()), {"drafts": 1_234_567}) == {}
    assert other_traffic(counters.since(ServerCounters()), {"drafts": 1_234_500})
    assert DEFINITIONS["vllm"].prefix == "vllm:"
    with pytest.raises(UsageError, match="not a count"):
        ServerCounters.parse("vllm:generation_tokens_total NaN\n", "m")
