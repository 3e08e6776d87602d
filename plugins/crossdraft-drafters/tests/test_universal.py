"""Drafters with another tokenizer: what they draft, how they are refused, and that the text stays the target's own."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from crossdraft_drafters.other_tokenizer.mutable_tail_lm import MutableTailLM
from crossdraft_drafters.other_tokenizer.universal import FED
from tiny_models import make_tokenizer, save_model
from two_tokenizers import TEXTS, byte_level, metaspace, renumbered, save

import crossdraft
from crossdraft.framework import plugins
from crossdraft.framework.certificate.certify import certify
from crossdraft.framework.certificate.draft_faults import check_independence_on
from crossdraft.framework.certificate.drafts import NamedDrafter, named_drafter
from crossdraft.framework.certificate.rows import certify_row
from crossdraft.framework.certificate.table_lm import ToyContext, tokenizer_of
from crossdraft.framework.certificate.toys import toys_of_two_vocabularies
from crossdraft.framework.cli import main as cli
from crossdraft.framework.contracts.draft import Sequences
from crossdraft.framework.contracts.rng import CounterRng
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.errors import ModelError, UsageError

MODES = ["tli", "slem"]
#: Ragged prompts: characters of several bytes, a mark of no token's, code, one token.
PROMPTS = [
    "three rivers of europe:",
    "<s>das schöne grüne Mädchen 東京",
    "def add(a, b):\n    return",
    "</s></s>",
    "the dog, and the dog sleeps on in the sun. name three more rivers! the quick brown fox",
    " naïve\n\n\n café",
]
#: Rules that tests leave out by default.
SLOWER = ("token", "specinfer", "traversal", "sample-match", "greedy", "spectr", "multipath-block")
W = {toy.name: toy for toy in toys_of_two_vocabularies()}


def universal() -> Any:
    return plugins.get("drafters", "universal")


def toy_drafter(mode: str, gamma: int) -> NamedDrafter:
    config = universal().Config(model="toy", mode=mode, gamma=gamma, **({"temperature": 1} if mode == "tli" else {}))
    return NamedDrafter(mode, universal(), config, translated=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: Any) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    single = save(root / "single", byte_level(258), 3, spare=0)
    return {
        "target": save(root / "target", byte_level(300), 0),
        "other": save(root / "other", byte_level(340, ["the theory of rivers and foxes, 東京"], eos_token="<end>"), 1),
        "metaspace": save(root / "metaspace", metaspace(), 2),
        "single": single,
        "renumbered": renumbered(root / "renumbered", single, byte_level(258, order=-1)),
        "words": save_model(root / "words", context=256),
    }


@pytest.fixture(scope="module")
def loaded(models: dict[str, str]) -> dict[str, Any]:
    names = ("target", "single")
    return {name: crossdraft.load_model(models[name], dtype="float32", device="cpu") for name in names}


@pytest.fixture(scope="module")
def baseline(loaded: Any) -> list[Any]:
    return answers(loaded["target"], "none", 1)


def answers(target: Any, drafter: Any, batch_size: int, **more: Any) -> list[Any]:
    ids = [target.tokenizer.encode(prompt) for prompt in PROMPTS]
    options = {"temperature": 0, "max_new_tokens": 12, "batch_size": batch_size, "seed": 3, **more}
    return crossdraft.generate(target, ids, drafter=drafter, **options)


# -- the text is the target's own ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("other", ["other", pytest.param("metaspace", marks=pytest.mark.slow)])
def test_greedy_decoding_is_targets_own(loaded: Any, models: Any, baseline: Any, mode: str, other: str) -> None:
    for batch_size in (1, 8):
        drafter = {"name": "universal", "mode": mode, "model": models[other], "gamma": 4}
        outputs = answers(loaded["target"], drafter, batch_size)
        assert [item.tokens for item in outputs] == [item.tokens for item in baseline]
        assert sum(round.nodes for item in outputs for round in item.steps) > 50


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch_size", [1, 8])
def test_drafter_that_is_target_under_other_numbers_is_always_right(
    loaded: Any, models: Any, mode: str, batch_size: int
) -> None:
    """Single bytes are tokens in one way alone. So whatever is rejected is a mistake: of ids, of the cache, of rows."""
    drafter = {"name": "universal", "mode": mode, "model": models["renumbered"], "gamma": 4}
    outputs = answers(loaded["single"], drafter, batch_size)
    steps = [round for item in outputs for round in item.steps]
    assert all(round.tau == min(round.nodes, round.emitted) for round in steps)
    full = np.mean([round.nodes == 4 for round in steps])
    assert full > (0.6 if mode == "tli" else 0.2)  # incomplete characters are held back


def test_slot_is_fed_again_after_many_steps_without_drafts(loaded: Any, models: Any, monkeypatch: Any) -> None:
    """A pass is at most `FED` tokens wide, because the slots hold no more behind the longest text."""
    widths: list[int] = []
    root = MutableTailLM.root

    def watched(self: Any, texts: Any, device: Any) -> Any:
        widths.append(max(len(ids) - n for ids, n in zip(texts, self.lm.lengths, strict=True)))
        return root(self, texts, device)

    monkeypatch.setattr(MutableTailLM, "root", watched)
    policy = {"name": "batch-size", "lengths": [[1, 2], [2, 0]]}
    drafter = {"name": "universal", "model": models["renumbered"], "gamma": 2, "policy": policy}
    options: dict[str, Any] = {"drafter": drafter, "temperature": 0, "max_new_tokens": [FED + 9, FED + 4]}
    responses = crossdraft.generate(loaded["single"], [[70, 71], [72, 73]], **options)
    assert [step.nodes for step in responses[0].steps][-2:] == [2, 1]
    assert widths and max(widths) <= FED


def test_constraint_does_not_mask_another_vocabulary(loaded: Any, models: Any) -> None:
    """The grammar is in the target's ids, and the draft model's logits in its own."""
    drafter = {"name": "universal", "model": models["other"], "gamma": 2}
    options: dict[str, Any] = {"constraint": {"regex": "[a-z ]{40}"}, "max_new_tokens": 4}
    plain, outputs = ([r.tokens for r in answers(loaded["target"], name, 8, **options)] for name in ("none", drafter))
    assert outputs == plain


def test_sampled_drafts_of_same_distribution_are_always_accepted(loaded: Any, models: Any) -> None:
    drafter = {"name": "universal", "model": models["renumbered"], "gamma": 3}
    outputs = answers(loaded["single"], drafter, 4, temperature=1.0, top_p=0.9, verifier="token")
    steps = [round for item in outputs for round in item.steps]
    # Ids without a token exist only in the target and are practically never emitted.
    assert np.mean([round.tau == min(round.nodes, round.emitted) for round in steps]) > 0.95


@pytest.mark.parametrize("mode", MODES)
def test_text_that_does_not_fit_is_read_from_later_place(tmp_path: Path, loaded: Any, models: Any, mode: str) -> None:
    """Single bytes are many more tokens than the target's."""
    short = save(tmp_path / "short", byte_level(258, order=-1), 5, context=100)
    long = [loaded["target"].tokenizer.encode("the lazy dog sleeps on in the sun and the sun. " * 2)]
    drafter = {"name": "universal", "mode": mode, "model": short, "gamma": 3}
    options = {"temperature": 0, "max_new_tokens": 12}
    whole = crossdraft.generate(loaded["target"], long, drafter="none", **options)
    assert len(long[0]) < 57 < 94  # of 100, 43 are for drafts and for what is fed again
    (one,) = crossdraft.generate(loaded["target"], long, drafter=drafter, **options)
    assert one.tokens == whole[0].tokens and any(round.nodes for round in one.steps)


def test_end_of_sequence_is_drafted_by_its_role(loaded: Any, models: Any) -> None:
    """The drafter uses another id for it; earlier tokens are text."""
    from crossdraft.framework.api.build import TargetContext, make_slots

    target = loaded["target"]
    slots = make_slots(target, 1, 128)
    context = TargetContext.of(target, slots, Sampling(temperature=0), slot=128, sequence=100)
    drafter = universal()(universal().Config(model=models["other"], mode="slem"), context)
    other = crossdraft.load_tokenizer(models["other"]).tokenizer
    drafter.start(0, target.tokenizer.encode("the"))
    end, ended = other.convert_tokens_to_ids("<end>"), target.tokenizer.eos_token_id
    resume_from = other.encode("é")[:1]
    assert drafter._retokenized(0, [*other.encode(" dog"), end, *other.encode("x")]) == [
        *target.tokenizer.encode(" dog"),
        ended,
    ]
    assert drafter._retokenized(0, [end]) == [ended] and drafter._retokenized(0, [*resume_from, end]) == []


# -- exact, by enumeration --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["block", *(pytest.param(rule, marks=pytest.mark.slow) for rule in SLOWER)])
@pytest.mark.parametrize("label", MODES)
@pytest.mark.parametrize("toy", W)
def test_certified(toy: str, label: str, rule: str) -> None:
    row = certify_row(W[toy], label, toy_drafter(label, W[toy].gamma), plugins.get("verifiers", rule))
    assert row.verdict == "yes" and len(row.lengths) == 2, row


def test_distribution_without_unshared_tokens_is_detected() -> None:
    """Reports the drafter's distribution as q, not renormalised over the shared tokens."""

    class Wrong(universal()):
        def propose(self, sequences: Any, rng: Any) -> Any:
            draft = super().propose(sequences, rng)
            if draft.q is not None:
                draft.q = draft.q * 0.5 + 0.5 / draft.q.shape[-1]
            return draft

    config = Wrong.Config(model="toy", gamma=2)
    certificate = certify(W["W1"], lambda context, _: Wrong(config, context), plugins.get("verifiers", "token"))
    assert certificate.tv > 1e-2


def test_named_drafters_are_certified_on_toys_of_two_vocabularies(capsys: Any) -> None:
    assert named_drafter("universal").translated and not named_drafter("draft-model").translated
    assert cli.main(["certify", "-v", "--drafter", "universal", "--verifier", "token", "--gamma", "1"]) == 0
    out = capsys.readouterr().out
    assert "W1" in out and "W2" in out and "T0" not in out


@pytest.mark.parametrize("mode", ["tli", "slem"])
def test_draft_follows_from_text(mode: str) -> None:
    """Two drafters of one text draft the same, also from a text without a token of the draft model."""
    check_independence_on(W["W1"], toy_drafter(mode, 2).build, (2,), Sampling(), mode)


def test_sampled_draft_cannot_modify_target() -> None:
    """Its distribution after a prefix depends on whether the prefix is drafted or committed."""
    with pytest.raises(Exception, match="is not replayable"):
        certify_row(W["W1"], "tli", toy_drafter("tli", 1), plugins.get("verifiers", "greedy-block"))


# -- replay -----------------------------------------------------------------------------------------------------


def test_replay_equals_drafting() -> None:
    pytest.importorskip("crossdraft_advisor")
    from crossdraft_advisor.replay.response import Response as Recorded
    from replay_fixtures import score_drafter

    toy, new = W["W1"], 6
    make = lambda rows, *_: ToyContext(toy.target, toy.drafter, Sampling(), rows, token_texts=toy.token_texts)  # noqa: E731
    text = Recorded("", "", [0, 1], [2, 1, 1, 2, 0, 1][:new])
    config = universal().Config(model="toy", gamma=2)
    (message,) = score_drafter((universal(), config), [text], make, depth=2)
    for t in range(new):
        drafter, history = universal()(config, make(1)), [*text.prompt, *text.tokens[:t]]
        drafter.start(0, history)
        sequences = Sequences([history], torch.zeros(1, 64, dtype=torch.long), [2], [0])
        draft = drafter.propose(sequences, CounterRng(0).for_step([0], [len(history)], sequences.device))
        expected = draft.q[0, 0, text.tokens[t]]
        assert np.exp(message.log_q[t, 0]) == pytest.approx(float(expected), abs=1e-12)
    with pytest.raises(UsageError, match="are not prefixes of longer ones"):
        list(score_drafter((universal(), universal().Config(model="toy", mode="slem")), [text], make))


# -- refusals ---------------------------------------------------------------------------------------------------


def refused(words: Any, **options: Any) -> str:
    toy = W["W1"]
    context = ToyContext(toy.target, toy.drafter, Sampling(), 1, token_texts=words)
    with pytest.raises(ModelError) as error:
        universal()(universal().Config(model="m", **options), context)
    return str(error.value)


def test_refusals(loaded: Any, models: Any) -> None:
    message = refused((("a", "b", "c"), ("d", "e", "f", "g")))
    assert message == "'m' cannot draft for 'toy' in mode tli: their vocabularies have no common token; use mode: slem"
    context = ToyContext(W["W1"].target, W["W1"].drafter, Sampling(), 1, token_texts=W["W1"].token_texts)
    context.tokenizer = None
    with pytest.raises(ModelError, match="the target's tokenizer is not known"):
        universal()(universal().Config(model="m"), context)
    with pytest.raises(crossdraft.CrossdraftError, match=r"omit spaces.*use mode: tli"):
        drafter = {"name": "universal", "model": models["words"], "mode": "slem"}
        crossdraft.generate(loaded["target"], ["a"], drafter=drafter)
    with pytest.raises(crossdraft.CrossdraftError, match="drafts the most probable text"):
        drafter = {"name": "universal", "model": "m", "mode": "slem", "temperature": 0.5}
        crossdraft.generate(loaded["target"], ["a"], drafter=drafter)


# -- spelling ---------------------------------------------------------------------------------------------------


def parts() -> Any:
    from crossdraft_drafters.other_tokenizer import retokenize, token_bytes

    return SimpleNamespace(**vars(token_bytes), Retokenizer=retokenize.Retokenizer)


@pytest.mark.parametrize("make", [lambda: byte_level(300), metaspace], ids=["byte-level", "metaspace"])
def test_tokens_spell_their_text(make: Any) -> None:
    token_bytes = parts().TokenBytes(make())
    assert token_bytes.faithful and list(token_bytes.pieces) == sorted(token_bytes.pieces)
    for text in [*PROMPTS, "x\ty  z", "\n", "é", "dog"]:
        data = text.encode()
        inside = token_bytes.encode(data, False)
        assert token_bytes.decode(inside) == data
        assert token_bytes.decode(token_bytes.encode(data, True)) in (data, b" " + data)
        for cut in range(len(data)):
            assert token_bytes.decode(token_bytes.encode(data[:cut], False)) == data[:cut]
    canonical = make()
    assert token_bytes.encode(b"the dog", True) == canonical.encode("the dog", add_special_tokens=False)
    assert not parts().TokenBytes(make_tokenizer()).faithful and parts().TokenBytes(tokenizer_of(("x", "yz"))).faithful


def test_same_tokens_of_two_manners() -> None:
    p = parts()
    a, b = byte_level(300), metaspace()
    theirs, own = p.TokenBytes(a), p.TokenBytes(b)
    result = p.shared_tokens(theirs, own, [(a.eos_token_id, b.eos_token_id), (None, 1)])
    assert result[a.eos_token_id] == b.eos_token_id and result[a.bos_token_id] == b.bos_token_id
    assert result[a.convert_tokens_to_ids("Ċ")] == b.convert_tokens_to_ids("<0x0A>")
    spaced = [(token, f"▁{token[1:]}") for token in a.get_vocab() if token.startswith("Ġ") and len(token) > 1]
    both = [(token, other) for token, other in spaced if other in b.get_vocab()]
    assert both and all(result[a.get_vocab()[token]] == b.get_vocab()[other] for token, other in both)
    assert len(set(result.values())) == len(result)


def test_incomplete_characters() -> None:
    complete, text = parts().complete, "aé東🙂b".encode()
    for cut in range(len(text) + 1):
        assert complete(text[:cut]) == len(text[:cut].decode(errors="ignore").encode())


@pytest.mark.parametrize("make", [lambda: byte_level(290, TEXTS[:1]), metaspace], ids=["byte-level", "metaspace"])
def test_retokenized_text_does_not_depend_on_chunking(make: Any) -> None:
    p, tokenizer = parts(), byte_level(300)
    theirs, own = p.TokenBytes(tokenizer), p.TokenBytes(make())
    for text in [*PROMPTS, "one-very-long-word-without-any-space-" * 4, "東京" * 30 + " x"]:
        ids = tokenizer.encode(text)
        whole, piecewise = p.Retokenizer(theirs, own, {}), p.Retokenizer(theirs, own, {})
        whole.add(ids)
        settled: list[int] = []
        for token in ids:
            piecewise.add([token])
            message, n = piecewise.ids()
            assert message[: len(settled)] == settled
            settled = message[:n]
        assert piecewise.ids() == whole.ids()
        decode = own.decode(whole.ids()[0])
        assert decode is not None and decode.replace(b" ", b"") == text.encode().replace(b" ", b"")


def test_text_becomes_targets_tokens() -> None:
    p, tokenizer = parts(), byte_level(300)
    theirs = p.TokenBytes(tokenizer)
    message = p.Retokenizer(theirs, theirs, {})
    message.add(tokenizer.encode("the riv"))
    text = tokenizer.encode("the rivers of")
    head = tokenizer.encode("the riv")
    expected = text[len(head) :] if text[: len(head)] == head else tokenizer.encode("ers of")
    assert message.retokenize(b"ers of") == expected
    assert message.retokenize("é".encode()[:1]) == [] and message.retokenize(b"") == []
