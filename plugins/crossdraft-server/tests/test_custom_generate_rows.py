"""Outputs of ``model.generate(custom_generate=...)``: padded rows, several samples, seeds and streams."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from crossdraft_server.custom_generate import custom_generate
from recording_streamer import Listener

from crossdraft.framework.errors import UsageError

IDS = torch.tensor([[0, 0, 5, 6, 7, 5, 6], [9, 8, 7, 9, 8, 7, 9]])
MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])


def generate_ids(model: Any, ids: Any = IDS[1:], **options: Any) -> Any:
    return model.generate(ids, custom_generate=custom_generate, **{"max_new_tokens": 12, **options})


def test_greedy_equals_generate(model: Any) -> None:
    options: dict[str, Any] = {"attention_mask": MASK, "max_new_tokens": 12, "do_sample": False}
    assert torch.equal(generate_ids(model, IDS, drafter="prompt-lookup", **options), model.generate(IDS, **options))
    assert torch.equal(
        generate_ids(model, IDS, **(options | {"attention_mask": MASK.bool()})), model.generate(IDS, **options)
    )


def test_ends_and_padding_equal_generate(model: Any) -> None:
    output = generate_ids(model, IDS, attention_mask=MASK)[:, 7:].tolist()
    end = output[1][3]  # now the second row ends early and is padded
    for options in ({"eos_token_id": [end, 39]}, {"eos_token_id": end, "pad_token_id": 33}, {"max_length": 11}):
        options = {"attention_mask": MASK, "max_new_tokens": None if "max_length" in options else 12, **options}
        ours, theirs = generate_ids(model, IDS, **options), model.generate(IDS, **options)
        assert torch.equal(ours, theirs)
    assert generate_ids(model, IDS.int(), attention_mask=MASK).dtype == torch.int32


@pytest.mark.parametrize(
    "mask",
    [
        [[1, 1, 1, 1, 1, 0, 0], [1] * 7],  # on the right
        [[0, 1, 1, 0, 1, 1, 1], [1] * 7],  # a hole
        [[0] * 7, [1] * 7],  # nothing at all
    ],
)
def test_masks_that_are_not_padding_on_left(model: Any, mask: list[list[int]]) -> None:
    with pytest.raises(UsageError, match=r"cannot honour this attention_mask: .*padding_side='left'"):
        generate_ids(model, IDS, attention_mask=torch.tensor(mask))


def test_default_position_ids_are_accepted(model: Any) -> None:
    usual = torch.tensor([[1, 1, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6]])
    plain = generate_ids(model, IDS, attention_mask=MASK)
    assert torch.equal(generate_ids(model, IDS, attention_mask=MASK, position_ids=usual), plain)
    for wrong in (usual + 1, torch.zeros(2, 3, dtype=torch.long)):
        with pytest.raises(UsageError, match="cannot honour position_ids="):
            generate_ids(model, IDS, attention_mask=MASK, position_ids=wrong)


def test_more_tokens_than_context_are_refused_beforehand(model: Any) -> None:
    assert generate_ids(model, max_new_tokens=57, eos_token_id=None).shape[1] == 64
    with pytest.raises(UsageError, match="7 tokens and 58 new ones exceed the model's context of 64"):
        generate_ids(model, max_new_tokens=58)
    generate_ids(model, IDS[:1], attention_mask=MASK[:1], max_new_tokens=59)  # padding takes no place


def test_ids_outside_vocabulary(model: Any) -> None:
    with pytest.raises(
        UsageError, match="prompt 0 has the token id 40, but the ids of LlamaForCausalLM go from 0 to 39"
    ):
        generate_ids(model, torch.tensor([[5, 40]]))


# -- samples ----------------------------------------------------------------------------------------------


def test_torchs_generator_decides_samples(model: Any) -> None:
    def output(manual_seed: int, **options: Any) -> tuple[int, ...]:
        torch.manual_seed(manual_seed)
        return tuple(generate_ids(model, do_sample=True, top_k=0, max_new_tokens=5, **options)[0].tolist())

    assert len({output(1), output(2), output(3)}) == 3
    assert output(1) == output(1)
    assert output(1, seed=4) == output(2, seed=4) != output(1)  # an explicit seed wins
    torch.manual_seed(1)
    assert (
        len({tuple(generate_ids(model, do_sample=True, top_k=0, max_new_tokens=5)[0].tolist()) for _ in range(3)}) == 3
    )  # it moves on
    for wrong in (1.5, "3", True):
        with pytest.raises(UsageError, match="must be an integer"):
            generate_ids(model, do_sample=True, seed=wrong)


def test_greedy_decoding_does_not_advance_torchs_generator(model: Any) -> None:
    before = torch.get_rng_state()
    generate_ids(model)
    generate_ids(model, do_sample=True, seed=3)
    assert torch.equal(torch.get_rng_state(), before)


def test_returned_sequences_are_independent(model: Any) -> None:
    """First tokens of 120 sequences of one call, by the target's distribution: 5 standard deviations a token."""
    n, options = 120, {"do_sample": True, "temperature": 0.7, "top_k": 6}
    torch.manual_seed(0)
    result = generate_ids(model, num_return_sequences=n, max_new_tokens=1, **options)
    assert result.shape == (n, 8)
    logits = model(IDS[1:]).logits[0, -1].detach() / 0.7
    probs = logits.masked_fill(logits < logits.topk(6).values[-1], -math.inf).softmax(-1)
    counts = Counter(result[:, 7].tolist())
    assert sum(counts.values()) == n and counts.keys() <= set(probs.nonzero().flatten().tolist())
    for token, p in enumerate(probs.tolist()):
        assert abs(counts[token] - n * p) <= 5 * math.sqrt(n * p * (1 - p))


def test_returned_sequences_are_ordered_by_prompt(model: Any) -> None:
    result = generate_ids(
        model, IDS, attention_mask=MASK, do_sample=True, num_return_sequences=3, max_new_tokens=8, seed=0
    )
    assert torch.equal(result[:, :7], IDS.repeat_interleave(3, 0))
    assert len({tuple(row) for row in result.tolist()}) == 6


# -- streams ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [None, 3], ids=["to the length", "to an end of sequence"])
def test_streamer_receives_same_as_from_transformers(model: Any, end: int | None) -> None:
    options: dict[str, Any] = {"eos_token_id": None}
    if end is not None:
        options["eos_token_id"] = generate_ids(model, eos_token_id=None)[0, 7 + end].item()
    ours, theirs = Listener(), Listener()
    generate_ids(model, streamer=ours, **options)
    model.generate(IDS[1:], streamer=theirs, max_new_tokens=12, **options)
    assert ours.events == theirs.events and ours.events[-1] == "end"


def test_streamer_of_several_rows_is_refused(model: Any) -> None:
    with pytest.raises(UsageError, match="streams only one sequence, but there are 2"):
        generate_ids(model, IDS, attention_mask=MASK, streamer=Listener())
