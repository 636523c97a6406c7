"""Several processes do what one does: here two, with gloo, on the CPU."""
from __future__ import annotations

import csv
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY_MODEL, TINY_RUN, as_flags

import train_llama
from train_llama import LlamaConfig, LlamaForPretraining, PretrainingDataset, UserError
from train_llama import load_checkpoint

# Rounding: two float32 sums of the same numbers in another order, over some tens of small steps.
ROUNDING = dict(rtol=0, atol=1e-6)


@pytest.fixture(scope="module", autouse=True)
def no_second_spent_on_the_peak():
    """The share of the measured peak is not what is tested here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_llama, "measure_peak", lambda device, dtype: 1e12)
        yield


class Job:
    """Two processes of the script, started as torchrun does, with one thread each.

    With apart=True each starts in a folder of its own below the log's, called by its rank.
    """

    def __init__(self, flags: list[str], log: Path, apart: bool = False) -> None:
        self.log = log
        command = [str(ROOT / "train_llama.py"), *flags]
        if apart:
            command = ["--no-python", "sh", "-c", f'cd {log.parent}/"$RANK" && exec "$0" "$@"',
                       sys.executable, *command]
        with open(log, "w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", "--standalone",
                 "--nproc_per_node", "2", *command], stdout=file,
                stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "1"})

    def wait_for_line(self, beginning: str) -> None:
        deadline = time.monotonic() + 90
        while not any(line.startswith(beginning) for line in self.log.read_text().splitlines()):
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)

    def finish(self) -> tuple[int, str]:
        """The exit status and all that was printed, after the end, which must come."""
        return self.process.wait(timeout=90), self.log.read_text()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.terminate()
        self.process.wait()


def run_until(step: int, flags: list[str]) -> None:
    """One process, which is told to stop while it is in the last of so many steps."""
    real = train_llama.rows_of_step

    def rows_of_step(current, *arguments):
        if current == step - 1:
            signal.raise_signal(signal.SIGTERM)
        return real(current, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_llama, "rows_of_step", rows_of_step)
        with pytest.raises(SystemExit) as caught:
            train_llama.main(flags)
    assert caught.value.code == 128 + signal.SIGTERM


def metrics(out_dir) -> list[dict[str, str]]:
    with open(out_dir / "metrics.csv") as file:
        return list(csv.DictReader(file))


# ---- in one process: the arithmetic ----

@pytest.fixture(params=[True, False], ids=["packed", "unpacked"])
def dataset(request, tmp_path) -> PretrainingDataset:
    """17 rows or more of random tokens, in documents of 2 to 40 tokens."""
    random, tokens = np.random.default_rng(0), []
    while len(tokens) < 17 * 16:
        tokens += [1, *random.integers(4, 50, random.integers(0, 39)), 2]
    path = str(tmp_path / "tokens.u2")
    np.array(tokens, "u2").tofile(path)
    return PretrainingDataset(path, len(tokens), 16, packing=request.param)


@pytest.fixture
def model() -> LlamaForPretraining:
    torch.manual_seed(0)
    return LlamaForPretraining(LlamaConfig(50, **TINY_MODEL)).double()


@pytest.mark.parametrize("world, at_once", [(2, 2), (2, 4), (4, 1), (4, 2), (8, 1)])
def test_the_mean_of_the_processes_gradients_is_the_gradient_of_one(
        world, at_once, dataset, model, monkeypatch):
    rows = np.array([3, 9, 0, 5, 16, 1, 7, 12])
    scaler = torch.amp.GradScaler("cpu", enabled=False)

    def gradients(rank: int, size: int, at_once: int):
        monkeypatch.setattr(train_llama, "RANK", rank)
        monkeypatch.setattr(train_llama, "WORLD", size)
        model.zero_grad()
        nats = train_llama.add_gradients(model, dataset, rows, at_once,
                                         lambda: torch.autocast("cpu", enabled=False), scaler)
        return nats.item(), [weight.grad.clone() for weight in model.parameters()]

    nats, alone = gradients(0, 1, 8)
    shares = [gradients(rank, world, at_once) for rank in range(world)]
    assert sum(share for share, _ in shares) == pytest.approx(nats, rel=1e-6)
    for one, *parts in zip(alone, *(grads for _, grads in shares)):
        assert torch.allclose(sum(parts) / world, one, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_the_processes_share_an_evaluation(world, batch_size, dataset, model, monkeypatch):
    alone, parts, counts = train_llama.evaluate(model, dataset, batch_size), [], []
    monkeypatch.setattr(train_llama, "WORLD", world)
    monkeypatch.setattr(train_llama.dist, "all_reduce", lambda nats: counts.append(nats.item()))
    for rank in range(world):
        monkeypatch.setattr(train_llama, "RANK", rank)
        parts.append(train_llama.evaluate(model, dataset, batch_size))
    assert sum(parts) == pytest.approx(alone, rel=1e-6)
    assert len(counts) == world  # each process exchanges once, even one without a batch
    assert max(counts) < sum(counts)


def test_a_batch_that_the_processes_cannot_share_is_refused(run_flags, monkeypatch):
    monkeypatch.setattr(train_llama, "WORLD", 2)
    with pytest.raises(UserError) as caught:
        train_llama.main(run_flags(batch_size=4, micro_batch_size=4))
    for part in ("--batch_size 4", "--micro_batch_size 4", "2 processes"):
        assert part in str(caught.value)


@pytest.mark.parametrize("moment", ["during the exchange", "after the exchange"])
def test_a_process_stops_only_in_a_step_in_which_the_others_know_of_its_signal(
        moment, run_flags, tmp_path, monkeypatch):
    """Else it leaves the others waiting for it, and what they did since the last save is lost."""
    exchanged, signals = [], [signal.SIGTERM]

    def all_reduce(tensor, op=None):
        about_signals = not tensor.is_floating_point()
        if about_signals:
            exchanged.append(int(tensor))
        now = len(exchanged) == 4 and about_signals == (moment == "during the exchange")
        if now and signals:
            signal.raise_signal(signals.pop())

    monkeypatch.setattr(train_llama, "WORLD", 2)
    monkeypatch.setattr(train_llama.dist, "init_process_group", lambda backend: None)
    monkeypatch.setattr(train_llama.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(train_llama.dist, "all_gather_object", lambda starts, start: (
        starts.__setitem__(slice(None), [start, start])))
    monkeypatch.setattr(torch.nn.parallel, "DistributedDataParallel", lambda model: model)
    with pytest.raises(SystemExit) as caught:
        train_llama.main(run_flags(save_every=100, log_every=1))
    assert caught.value.code == 128 + signal.SIGTERM
    assert exchanged == [0, 0, 0, 0, signal.SIGTERM]
    assert load_checkpoint(str(tmp_path / "out"))["step"] == 5


# ---- two processes ----

@pytest.fixture(scope="module")
def settings(corpus, tokenizer_path):
    return TINY_MODEL | TINY_RUN | dict(dataset=corpus, tokenizer_path=tokenizer_path)


@pytest.fixture(scope="module")
def two_by_two(settings, tmp_path_factory):
    """One process with 4 micro-batches a step, and two with 2: the out_dirs, and the output.

    Rows are not joined, so that the micro-batches have different numbers of labels.
    """
    folder = tmp_path_factory.mktemp("two_by_two")
    settings = settings | dict(packing=False, batch_size=8, micro_batch_size=2)
    flags = as_flags(settings | dict(out_dir=folder / "two", cache_dir=folder))
    with Job(flags, folder / "log") as job:
        status, output = job.finish()
    assert status == 0, output
    train_llama.main(as_flags(settings | dict(out_dir=folder / "one", cache_dir=folder)))
    return folder / "one", folder / "two", output


def test_two_processes_with_two_micro_batches_train_as_one_with_four(two_by_two):
    one, two, _ = two_by_two
    expected, got = load_checkpoint(str(one)), load_checkpoint(str(two))
    assert (got["step"], got["tokens"]) == (expected["step"], expected["tokens"])
    assert got["fingerprint"] == expected["fingerprint"]
    assert got["model"].keys() == expected["model"].keys()
    for name, weight in expected["model"].items():
        assert torch.allclose(got["model"][name], weight, **ROUNDING), name


def test_two_processes_log_the_losses_of_one(two_by_two):
    one, two, _ = two_by_two
    expected, got = metrics(one), metrics(two)
    assert len(expected) == len(got) > 3
    assert [row["val_loss"] for row in got].count("") < len(got)
    for here, there in zip(expected, got):
        for name in ("step", "tokens", "learning_rate"):
            assert here[name] == there[name]
        for name in ("loss", "val_loss", "bits_per_byte", "grad_norm"):
            assert (here[name] == there[name] == ""
                    or float(here[name]) == pytest.approx(float(there[name]), rel=1e-6)), name


def test_the_first_process_alone_prints_and_saves(two_by_two):
    _, two, output = two_by_two
    lines = output.splitlines()
    for beginning in ("data: ", "tokens: ", "model: ", "steps: ", "device: ", "step 2/", "step 4/"):
        assert sum(line.startswith(beginning) for line in lines) == 1, output
    names = [path.name for path in two.iterdir() if not path.name.startswith("lock")]
    assert sum(".tfevents." in name for name in names) == 1
    assert sorted(name for name in names if ".tfevents." not in name) == [
        "checkpoint.previous.pt", "checkpoint.pt", "metrics.csv", "model"]


@pytest.fixture(scope="module")
def there_and_back(settings, tmp_path_factory):
    """Checkpoints of a run that had one process, then two, then one, and of one that had one.

    A step is 2 micro-batches: two of the one process, one of each of the two. The two are
    stopped by a signal to their launcher. The learning rate is constant.
    """
    folder = tmp_path_factory.mktemp("there_and_back")
    settings = settings | dict(
        cache_dir=folder, train_tokens=10**9, max_epochs=10**6, save_every=10**6, eval_every=10**6,
        learning_rate=1e-4, min_learning_rate=1e-4, batch_size=4, micro_batch_size=2)
    one, two = (as_flags(settings | dict(out_dir=folder / name)) for name in ("one", "two"))
    run_until(4, one)
    shutil.copytree(folder / "one", folder / "two")
    with Job(two, folder / "log") as job:
        job.wait_for_line("step 8/")
        job.process.send_signal(signal.SIGTERM)
        status, output = job.finish()
    states = {"two": load_checkpoint(str(folder / "two"))}
    step = states["two"]["step"]
    assert step >= 8, output
    run_until(step, one)
    states["one"] = load_checkpoint(str(folder / "one"))
    for name, flags in (("one later", one), ("two later", two)):
        run_until(step + 3, flags)
        states[name] = load_checkpoint(str(folder / name.split()[0]))
    return states, status, output


def test_a_signal_to_the_launcher_saves_a_checkpoint(there_and_back):
    states, status, output = there_and_back
    assert status != 0
    assert output.count("stopped after step") == 1
    assert f"stopped after step {states['two']['step']} " in output


@pytest.mark.parametrize("when", ["", " later"], ids=["with two", "back with one"])
def test_a_run_of_one_process_goes_on_with_two_and_back(when, there_and_back):
    expected, got = (there_and_back[0][name + when] for name in ("one", "two"))
    assert (got["step"], got["tokens"]) == (expected["step"], expected["tokens"])
    for name, weight in expected["model"].items():
        assert torch.allclose(got["model"][name], weight, **ROUNDING), name


def test_two_processes_with_a_micro_batch_each_equal_one_with_two_bit_for_bit(there_and_back):
    expected, got = (there_and_back[0][name] for name in ("one", "two"))
    for name, weight in expected["model"].items():
        assert torch.equal(got["model"][name], weight), name


@pytest.mark.parametrize("left_over", [None, "1"], ids=["a new folder", "an older run's folder"])
def test_machines_that_share_no_folders_are_refused(left_over, settings, tmp_path):
    for rank in "01":
        (tmp_path / rank / "out").mkdir(parents=True)
    if left_over:
        (tmp_path / "1" / "out" / "lock.owner").write_text(left_over)
    with Job(as_flags(settings | dict(out_dir="out", cache_dir="tokens")), tmp_path / "log",
             apart=True) as job:
        status, output = job.finish()
    assert status != 0 and "step 2/" not in output
    assert any("--out_dir out" in line and "--cache_dir tokens" in line
               and "that all machines share" in line for line in output.splitlines()), output


def test_a_process_that_dies_ends_the_job(settings, tmp_path):
    flags = as_flags(settings | dict(out_dir=tmp_path / "out", cache_dir=tmp_path, eval_every=10**6,
                                     train_tokens=10**9, max_epochs=10**6))
    with Job(flags, tmp_path / "log") as job:
        job.wait_for_line("step 8/")
        os.kill(int((tmp_path / "out" / "lock.owner").read_text()), signal.SIGKILL)
        status, _ = job.finish()
    assert status != 0
    assert load_checkpoint(str(tmp_path / "out"))["step"] >= 4  # what was saved before is whole
