"""Training that was killed ends as it would have ended: every tensor and every evaluation, to the bit."""

import copy
import errno
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from crossdraft_trainers import files, trainer
from crossdraft_trainers.checkpoints import Checkpoint
from crossdraft_trainers.contract import Text
from crossdraft_trainers.texts import split
from crossdraft_trainers.trainees.draft_model import DraftModelTraining
from crossdraft_trainers.trainees.eagle3 import Eagle3Training
from crossdraft_trainers.trainees.look_ahead import PassTraining
from crossdraft_trainers.trainees.medusa import MedusaTraining
from crossdraft_trainers.trainer import Trainer
from training_target import tied_llama

from crossdraft.framework.contracts.models import LoadedModel
from crossdraft.framework.errors import CrossdraftError, NumericalError, UsageError

COMMON = {"epochs": 2, "batch_tokens": 60, "learning_rate": 3e-3, "warm_up": 2, "save_minutes": 0}
RECIPES: dict[str, Callable[..., Any]] = {
    "draft-model": lambda **more: DraftModelTraining(**{"layers": (0, 2), "sampled_vocab": 8, **COMMON, **more}),
    "medusa": lambda **more: MedusaTraining(**{"heads": 2, "sampled_vocab": 8, **COMMON, **more}),
    "eagle3": lambda **more: Eagle3Training(**{"unroll": 2, "draft_vocab": 30, "layers": (0, 2, 1), **COMMON, **more}),
    "pass": lambda **more: PassTraining(**{"look_ahead": 2, "cuts": 3, "sampled_vocab": 8, **COMMON, **more}),
}


class Killed(BaseException):
    """An unhandled error, like SIGKILL."""


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return LoadedModel(tied_llama(), None, "tiny", "made here", "0" * 64, (1,), 128)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def texts() -> tuple[list[Text], list[Text]]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(2, 50, (20, 12), generator=generator).tolist()
    return split([Text(row[:4], row[4 : 8 + i % 5], "given") for i, row in enumerate(rows)], 0.2)


def ended(run: Trainer) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Values that must be equal in two runs: evaluations without times, and all tensors."""
    log = [{key: value for key, value in entry.items() if key != "minutes"} for entry in run.log]
    tensors = dict(run.trainee.student.state_dict())
    for number, state in run.optimizer.state_dict()["state"].items():
        tensors |= {f"{number}.{key}": value for key, value in state.items()}
    return [run.step, run.tokens, run.best, log], {key: tensor.clone() for key, tensor in tensors.items()}


def assert_same(one: Any, other: Any, when: object) -> None:
    assert one[0] == other[0], when
    assert one[1].keys() == other[1].keys()
    for name, tensor in one[1].items():
        assert torch.equal(tensor, other[1][name]), (when, name)


def moments(monkeypatch: Any, die_at: int) -> list[str]:
    """Kill a training at its ``die_at``-th event; returns the events up to then."""
    passed: list[str] = []

    def moment(name: str) -> None:
        passed.append(name)
        if len(passed) == die_at:
            raise Killed(name)

    def around(owner: Any, name: str, subject: str) -> None:
        original = getattr(owner, name)

        def watched(*args: Any, **more: Any) -> Any:
            moment(f"before {subject}")
            result = original(*args, **more)
            moment(f"after {subject}")
            return result

        monkeypatch.setattr(owner, name, watched)

    around(Trainer, "_train", "a step")
    around(Trainer, "_evaluate", "an evaluation")
    around(Checkpoint, "save", "a checkpoint")
    around(files.os, "fsync", "the file is on disk")
    return passed


@pytest.mark.parametrize(
    ("kind", "every"),
    [
        ("medusa", 17),
        pytest.param("draft-model", 71, marks=pytest.mark.slow),
        pytest.param("eagle3", 73, marks=pytest.mark.slow),
        pytest.param("pass", 31, marks=pytest.mark.slow),
        *(pytest.param(kind, 1, marks=pytest.mark.slow) for kind in ("medusa", "draft-model", "eagle3", "pass")),
    ],
)
def test_killed_at_any_moment(kind: str, every: int, target: Any, texts: Any, tmp_path: Path, monkeypatch: Any) -> None:
    with monkeypatch.context() as watching:
        passed = moments(watching, 0)
        whole = Trainer(target, RECIPES[kind](), tmp_path / "whole")
        whole.run(*texts)
        count = len(passed)
    assert whole.step >= 6 and count > 40
    assert [entry["step"] for entry in whole.log] == list(range(whole.step + 1)), "one each tenth of the way, of few"
    for die_at in range(1, count + 1, every):
        out = tmp_path / str(die_at)
        with monkeypatch.context() as watching:
            passed = moments(watching, die_at)
            with pytest.raises(Killed):
                Trainer(target, RECIPES[kind](), out).run(*texts)
        if (out / "checkpoint.pt").exists():  # half of another one beside it
            (out / "checkpoint.pt.part").write_bytes((out / "checkpoint.pt").read_bytes()[:999])
        with files.claim_directory(out):
            resumed = Trainer(target, RECIPES[kind](), out)
            resumed.run(*texts)
        assert_same(ended(resumed), ended(whole), (die_at, passed[-1]))
        assert not list(out.glob("*.part"))


def test_killed_again_and_again(target: Any, texts: Any, tmp_path: Path, monkeypatch: Any) -> None:
    whole = Trainer(target, RECIPES["medusa"](), tmp_path / "whole")
    whole.run(*texts)
    for attempt in range(99):
        with monkeypatch.context() as watching:
            moments(watching, 15 + attempt % 3)
            survivor = Trainer(target, RECIPES["medusa"](), tmp_path / "killed")
            try:
                survivor.run(*texts)
            except Killed:
                continue
        break
    assert 2 < attempt < 98
    assert_same(ended(survivor), ended(whole), attempt)


def test_neither_random_numbers_of_others_nor_clock_change_run(
    target: Any, texts: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    whole = Trainer(target, RECIPES["eagle3"](), tmp_path / "one")
    whole.run(*texts)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    rarely = Trainer(target, RECIPES["eagle3"](save_minutes=1000), tmp_path / "other")
    original = rarely._train

    def drawing(*args: Any) -> Any:
        torch.rand(3)  # as dropout would, inside of the step
        return original(*args)

    rarely._train = drawing  # type: ignore[method-assign]
    rarely.run(*texts)
    assert_same(ended(rarely), ended(whole), "saved once")
    assert torch.equal(torch.get_rng_state(), state), "the caller's random numbers are as they were"


class WithDropout(MedusaTraining):
    """Medusa heads whose loss is random, and whose student counts steps in a buffer."""

    def trainee(self, target: LoadedModel) -> Any:
        instance: Any = super().trainee(target)
        instance.student.register_buffer("steps", torch.zeros((), dtype=torch.long))
        loss = instance.loss

        def dropped(batch: Any, step: int) -> Any:
            instance.student.steps += 1
            batch = copy.copy(batch)
            batch.hidden = torch.nn.functional.dropout(batch.hidden, 0.1 * int(instance.student.steps))
            return loss(batch, step)

        instance.loss = dropped
        return instance


def test_random_losses_and_buffers_go_on_too(target: Any, texts: Any, tmp_path: Path, monkeypatch: Any) -> None:
    options = {**COMMON, "heads": 2, "epochs": 1}
    whole = Trainer(target, WithDropout(**options), tmp_path / "whole")
    whole.run(*texts)
    assert int(whole.trainee.student.steps) == whole.step > 2
    with monkeypatch.context() as watching:
        moments(watching, 30)
        with pytest.raises(Killed):
            Trainer(target, WithDropout(**options), tmp_path / "killed").run(*texts)
    torch.manual_seed(12345)  # another process has other random numbers to begin with
    resumed = Trainer(target, WithDropout(**options), tmp_path / "killed")
    resumed.run(*texts)
    assert_same(ended(resumed), ended(whole), "dropout")


# Checkpoints that do not fit, disks that are full.


@pytest.fixture
def saved(target: Any, texts: Any, tmp_path: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """A checkpoint, and what stands in it."""
    Trainer(target, RECIPES["medusa"](epochs=1), tmp_path).run(*texts)
    yield tmp_path / "checkpoint.pt", torch.load(tmp_path / "checkpoint.pt", weights_only=True)


def _weight(state: dict[str, Any]) -> str:
    return next(iter(state["student"]))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda state: state.clear(), "is damaged: it is not a checkpoint"),
        (lambda state: state.pop("optimizer"), "is damaged: it is not a checkpoint"),
        (lambda state: state.update(log="[]"), "has another log: should have at least 1 item"),
        (lambda state: state.update(log="[" * 99999), "is damaged"),
        (lambda state: state.update(made_with="[]"), "is damaged"),
        (lambda state: state.update(made_with="{}"), r"made with other options or texts \(batch_tokens"),
        (lambda state: state.update(step=-1), "has another step: should be greater than or equal to 0"),
        (lambda state: state.update(step=10**9), "1000000000 steps, more than"),
        (lambda state: state.update(seconds=float("nan")), "has another seconds: should be a finite number"),
        (lambda state: state.update(student={}), "contains another kind of drafter"),
        (
            lambda state: state["student"].update({"layers.99999999.x": torch.zeros(1)}),
            r"drafter \(layers\.99999999\.x\)",
        ),
        (lambda state: state["student"].update({_weight(state): torch.zeros(1)}), "contains another drafter"),
        (lambda state: state["student"].update({_weight(state): 1}), "has another student"),
        (lambda state: state.update(optimizer={}), "does not contain a state of this optimizer"),
        (lambda state: state["optimizer"]["state"][0].pop("exp_avg"), "does not contain a state of this optimizer"),
        (
            lambda state: state["optimizer"]["state"][0].update(exp_avg=torch.zeros(1)),
            "does not contain a state of this optimizer",
        ),
        (lambda state: state["optimizer"]["state"].update({99: {}}), "does not contain a state of this optimizer"),
    ],
)
def test_invalid_checkpoint_is_reported(change: Any, sentence: str, saved: Any, target: Any, texts: Any) -> None:
    path, state = saved
    change(state)
    torch.save(state, path)
    with pytest.raises(UsageError, match=sentence):
        Trainer(target, RECIPES["medusa"](epochs=1), path.parent).run(*texts)


@pytest.mark.parametrize("content", [b"", b"PK", [1, 2], {"a": object}])
def test_file_that_is_not_checkpoint_is_reported(content: Any, target: Any, texts: Any, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    with pytest.raises(UsageError, match=r"checkpoint\.pt is damaged: it (cannot be read|is not a checkpoint)"):
        Trainer(target, RECIPES["medusa"](), tmp_path).run(*texts)


def test_every_flipped_byte_that_is_seen_is_refused(saved: Any, target: Any, texts: Any) -> None:
    path, _ = saved
    whole = path.read_bytes()
    for at in range(0, len(whole), len(whole) // 12):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        try:
            Trainer(target, RECIPES["medusa"](epochs=1), path.parent).run(*texts)
        except CrossdraftError as error:
            assert "checkpoint.pt" in str(error)


def test_another_target_precision_or_held_out_text_is_refused(saved: Any, texts: Any, target: Any) -> None:
    path, _ = saved
    other = LoadedModel(target.model, None, "tiny", "made here", "1" * 64, (1,), 128)  # type: ignore[arg-type]
    for inputs, held_out, key in [(other, texts[1], "target"), (target, texts[1][1:], "held_out")]:
        with pytest.raises(UsageError, match=rf"other options or texts \({key}\)"):
            Trainer(inputs, RECIPES["medusa"](epochs=1), path.parent).run(texts[0], held_out)
    with pytest.raises(UsageError, match=r"--precision bf16: .* already configured"):  # accelerate has one for all
        Trainer(target, RECIPES["medusa"](epochs=1), path.parent, precision="bf16")
    try:
        AcceleratorState._reset_state(True)
        with pytest.raises(UsageError, match=r"other options or texts \(precision\)"):
            Trainer(target, RECIPES["medusa"](epochs=1), path.parent, precision="bf16").run(*texts)
    finally:
        AcceleratorState._reset_state(True)


def test_full_disk_keeps_checkpoint_before(target: Any, texts: Any, tmp_path: Path, monkeypatch: Any) -> None:
    whole = Trainer(target, RECIPES["medusa"](), tmp_path / "whole")
    whole.run(*texts)
    calls: list[int] = []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) > 8:
            raise OSError(errno.ENOSPC, "No space left on device")

    out = tmp_path / "full"
    with monkeypatch.context() as patched:
        patched.setattr(files.os, "fsync", full)
        with pytest.raises(
            CrossdraftError, match=r"cannot write .*checkpoint\.pt: No space left on device; completed files"
        ):
            Trainer(target, RECIPES["medusa"](), out).run(*texts)
    assert [path.name for path in out.iterdir()] == ["checkpoint.pt"]
    resumed = Trainer(target, RECIPES["medusa"](), out)
    resumed.run(*texts)
    assert_same(ended(resumed), ended(whole), "full disk")


def test_writer_errors_on_full_disk_are_reported(tmp_path: Path) -> None:
    """PyTorch hides the error of the disk behind one of its own."""

    def write(file: Any) -> None:
        class Small:
            room = 500

            def write(self, data: Any) -> int:
                self.room -= len(data)
                if self.room < 0:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return file.write(data)

            def flush(self) -> None:
                file.flush()

        torch.save({"a": torch.zeros(10_000)}, Small())

    with pytest.raises(CrossdraftError, match="No space left on device"):
        files.replace(tmp_path / "checkpoint.pt", write)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RuntimeError, match="a bug"), files.writing(tmp_path):
        raise RuntimeError("a bug")


def test_killed_export_leaves_one_before(saved: Any, target: Any, texts: Any) -> None:
    path, _ = saved
    out = path.parent
    trainer = Trainer(target, RECIPES["medusa"](epochs=1), out)
    trainer.run(*texts)
    trainer.export(texts[1])
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    assert json.loads(before["training.json"])["steps"] == trainer.step

    def dies(directory: Path, held_out: Any) -> None:
        (directory / "config.json").write_text("{")
        os.rename(directory, directory.with_name(".export-leftover"))  # SIGKILL cleans nothing
        raise Killed

    trainer.trainee.export = dies  # type: ignore[method-assign]
    with pytest.raises(Killed):
        trainer.export(texts[1])
    assert (out / ".export-leftover").is_dir()
    with files.claim_directory(out):
        pass
    assert {file.name: file.read_bytes() for file in out.iterdir() if file.name != ".lock"} == before


def test_nonfinite_distributions_are_not_saved(target: Any, texts: Any, tmp_path: Path, monkeypatch: Any) -> None:
    run = Trainer(target, RECIPES["medusa"](epochs=1, save_minutes=1000), tmp_path)
    original = run._train

    def breaks(*args: Any) -> Any:
        result = original(*args)
        with torch.no_grad():
            run.trained[0].fill_(float("nan"))
        return result

    monkeypatch.setattr(trainer, "EVALUATIONS", 1000)
    run._train = breaks  # type: ignore[method-assign]
    with pytest.raises(NumericalError, match="the student's probabilities are not finite after 1 steps"):
        run.run(*texts)
    assert torch.load(run.checkpoint, weights_only=True)["step"] == 0


def test_second_signal_does_not_wait(target: Any, texts: Any, tmp_path: Path) -> None:
    trainer = Trainer(target, RECIPES["medusa"](), tmp_path)
    reached: list[str] = []

    def train(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        reached.append("first")
        os.kill(os.getpid(), signal.SIGTERM)
        reached.append("second")

    trainer._train = train  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        trainer.run(*texts)
    assert reached == ["first"]
    assert torch.load(trainer.checkpoint, weights_only=True)["step"] == 0


@pytest.mark.parametrize("killed", [False, True])
def test_patience_keeps_the_best_evaluation(
    killed: bool, target: Any, texts: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """Acceptance rises, falls twice and stays down: the weights of the third evaluation are kept, also after a kill."""
    scripted = [[0.3, 0.9], [0.5, 0.5], [0.6, 0.6], [0.7, 0.1], [0.6, 0.5]]

    def make() -> tuple[Trainer, list[Any]]:
        run = Trainer(target, RECIPES["medusa"](patience=2), tmp_path / str(killed))
        weights: list[Any] = []

        def evaluate(held_out: Any) -> None:
            entry = {"step": run.step, "minutes": 0.0, "tokens": run.tokens, "held_out_acceptance": 0.0}
            run.log.append({**entry, "positions": scripted[len(run.log)]})
            weights.append([weight.detach().clone() for weight in run.trained])
            if killed and len(weights) == len(run.log) == 4:
                raise Killed

        run._evaluate = evaluate  # type: ignore[method-assign]
        return run, weights

    run, weights = make()
    if killed:
        with pytest.raises(Killed):
            run.run(*texts)
        best, (run, _) = weights[2], make()
        run.run(*texts)
    else:
        run.run(*texts)
        best = weights[2]
    assert [entry["positions"] for entry in run.log] == scripted[:3]
    assert [entry["positions"] for entry in run.later] == scripted[3:]
    assert all(map(torch.equal, run.trained, best))
    assert run.step == run.log[-1]["step"] > 0
