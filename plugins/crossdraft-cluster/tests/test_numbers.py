"""Metrics and configs of cells as flat mappings."""

from crossdraft_cluster.numbers import numbers, options, title


def test_numbers_and_options() -> None:
    metrics = {
        "tokens": 5,
        "block_efficiency": {"value": 2.0, "low": 1.5, "high": 2.5},
        "speed_up": {"value": 1.25, "low": None, "high": None},
        "acceptance": [0.5, 0.25],
        "shares": {"draft": 0.125, "rest": 0.875},
        "decode_seconds": 2.0,
        "tokens_per_second": 2.5,
        "same_as_baseline": None,
        "by_category": {"a": {"prompts": 1}},
    }
    untimed = {
        "tokens": 5,
        "block_efficiency": 2.0,
        "block_efficiency_low": 1.5,
        "block_efficiency_high": 2.5,
        "acceptance_1": 0.5,
        "acceptance_2": 0.25,
    }
    timed = {
        "speed_up": 1.25,
        "draft_share": 0.125,
        "rest_share": 0.875,
        "decode_seconds": 2.0,
        "tokens_per_second": 2.5,
    }
    assert numbers(metrics) == untimed | timed
    assert numbers(metrics | {"decode_seconds": 0.0}) == untimed
    config = {
        "target": "t",
        "batch_size": 2,
        "attn_implementation": None,
        "sampling": {"temperature": 0.5},
        "drafter": {"name": "d", "label": "D", "gamma": 3},
        "verifier": {"name": "v"},
    }
    assert options(config) == {
        "target": "t",
        "batch_size": "2",
        "sampling.temperature": "0.5",
        "drafter.name": "d",
        "drafter.label": "D",
        "drafter.gamma": "3",
        "verifier.name": "v",
    }
    assert title(config) == "D × v, temperature 0.5, B = 2"
