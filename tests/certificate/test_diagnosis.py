"""A failed certificate names the mistake: faulty verifiers and drafters, and the words that the answer must hold."""

import json
import sys
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import faulty_drafters
import faulty_verifiers
import pytest

from crossdraft.framework.certificate.drafts import DRAFTS
from crossdraft.framework.cli import main as cli
from crossdraft.testing import DrafterContract

#: Found by nothing but trees, or by drafts of several lengths.
DRAFTS_OF = {faulty_verifiers.LaterSiblings: ("chain", "tree-wor-2-1")}
CHAINS = ("chain", "point-mass", "stop-early")


@pytest.fixture
def toys(tmp_path: Path) -> str:
    """A toy file with T0, G1 and G2."""
    toys = json.loads(files("crossdraft.framework.certificate").joinpath("toys.json").read_text(encoding="utf-8"))
    path = tmp_path / "toys.json"
    path.write_text(json.dumps({name: toys[name] for name in ("T0", "G1", "G2")}), encoding="utf-8")
    return str(path)


def answer(capsys: Any, *options: str) -> tuple[int, str]:
    code = cli.main(["certify", *options])
    out, err = capsys.readouterr()
    sys.stderr.write(err)  # pytest prints it if the test fails
    return code, out


#: Cases of the default suite.
QUICK = {"NoResidual", "BonusElsewhere", "IndexByWidth", "Crashes", "TorchRand", "NumpyRandom", "SumOfCoins"}
QUICK |= {
    "PointMassResidual",
    "ArgmaxOfQ",
    "StateWrongLater",
    "WritesIntoTokens",
    "UncommittedTokens",
}
MARKS: dict[str, Any] = {**dict.fromkeys(QUICK, ()), "WithoutWarping": pytest.mark.thorough}


def cases(faulty: Any) -> list[Any]:
    return [
        pytest.param(cls, id=cls.__name__, marks=MARKS.get(cls.__name__, pytest.mark.slow))
        for cls in (faulty.Honest, *faulty.FAULTY)
    ]


EXIT = {"lossless": 0, "FAILED": 1, "ERROR": 3}


@pytest.mark.parametrize("verifier", cases(faulty_verifiers))
def test_verifiers_mistake_is_named(capsys: Any, install: Callable, toys: str, verifier: Any) -> None:
    verdict, token_texts = faulty_verifiers.FAULTY.get(verifier, ("lossless", []))
    install("verifiers", (verifier.name, verifier))
    drafts = [f"--draft={label}" for label in DRAFTS_OF.get(verifier, CHAINS)]
    code, out = answer(capsys, "--verifier", verifier.name, "--toy", toys, *drafts)
    assert out.splitlines()[-1].startswith(f"{verdict}: ") and code == EXIT[verdict], out
    assert not [word for word in token_texts if word not in out], out


@pytest.mark.parametrize("drafter", cases(faulty_drafters))
def test_drafters_mistake_is_named(capsys: Any, install: Callable, toys: str, drafter: Any) -> None:
    verdict, token_texts = faulty_drafters.FAULTY.get(drafter, ("lossless", []))
    install("drafters", (drafter.name, drafter))
    code, out = answer(capsys, "--drafter", drafter.name, "--verifier", "token", "--toy", toys)
    assert out.splitlines()[-1].startswith(f"{verdict}: ") and code == EXIT[verdict], out
    assert not [word for word in token_texts if word not in out], out


def test_counterexample_is_smallest(capsys: Any, install: Callable, toys: str) -> None:
    """T0: P = (1/3, 2/3) and Q = (2/3, 1/3), so token 0 is rejected with 1/2 and P draws it again with 1/3."""
    install("verifiers", ("faulty", faulty_verifiers.NoResidual))
    _, out = answer(capsys, "--verifier", "faulty", "--toy", toys, "--draft", "chain", "--json")
    (example,) = [row["diagnosis"]["counterexample"] for row in json.loads(out) if "diagnosis" in row]
    assert (example["toy"], example["tokens"], example["parents"], example["after"]) == ("T0", [0], [-1], [])
    assert example["token"] == 0 and example["target"] == pytest.approx(1 / 3)
    assert example["emitted"] == pytest.approx(2 / 3 * (1 / 2 + 1 / 2 * 1 / 3))


def test_labels_of_scope_exist() -> None:
    from crossdraft.framework.certificate import rows

    assert not (rows.POINT_MASSES | rows.CHAINS) - {*DRAFTS}


def test_only_one_test_reports_reset_without_remembers() -> None:
    contract = type("Contract", (DrafterContract,), {"drafter": faulty_drafters.ResetWithoutRemembers})()
    with pytest.raises(pytest.skip.Exception, match="see test_remembers"):
        contract.skip_after_wrong_memory("test_limits")
    contract.skip_after_wrong_memory("test_remembers")
    with pytest.raises(AssertionError, match="set remembers = True in the test class"):
        contract.test_remembers()
    type(contract).remembers = True
    contract.skip_after_wrong_memory("test_limits")
