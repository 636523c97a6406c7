"""Several processes do what one does: here two, with gloo, on the CPU."""
import csv
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY_MODEL, TINY_RUN, as_flags

import train_llama
from train_llama import LlamaConfig, LlamaForPretraining, PretrainingDataset, UserError
from train_llama import load_checkpoint

# Rounding: two float32 sums of the same numbers in another order, over some tens of small steps.
ROUNDING = dict(rtol=0, atol=1e-6)


def start(flags: list[str]) -> subprocess.Popen:
    """Start two processes of the script, as torchrun does, with one thread each."""
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
         str(ROOT / "train_llama.py"), *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def finish(process: subprocess.Popen) -> str:
    """Wait for the end, which must come, and return what else was printed."""
    try:
        return process.communicate(timeout=90)[0]
    finally:
        process.kill()


def read_until(process: subprocess.Popen, beginning: str) -> str:
    """Read what is printed up to a line that begins so."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(beginning):
            return "".join(lines)
    raise AssertionError(f"no line begins with {beginning}:\n{''.join(lines)}")


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
    """17 rows of random tokens, in documents of 2 to 40 tokens."""
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
    with pytest.raises(UserError, match="--batch_size 4 --micro_batch_size 4.*2 processes"):
        train_llama.main(run_flags(batch_size=4, micro_batch_size=4))


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
    process = start(as_flags(settings | dict(out_dir=folder / "two", cache_dir=folder)))
    output = finish(process)
    assert process.returncode == 0, output
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
    lines = Counter(line for line in output.splitlines() if line.strip())
    for beginning in ("data: ", "tokens: ", "model: ", "steps: ", "device: ", "step 2/"):
        assert sum(n for line, n in lines.items() if line.startswith(beginning)) == 1, output
    names = Counter(path.suffix or path.name for path in two.iterdir()
                    if not path.name.startswith("lock"))
    events = next((name for name in names if names[name] and ".tfevents" in str(name)), None)
    assert sum(".tfevents." in path.name for path in two.iterdir()) <= 1, events
    assert {path.name for path in two.iterdir() if ".tfevents." not in path.name
            and not path.name.startswith("lock")} == {
        "checkpoint.pt", "checkpoint.previous.pt", "metrics.csv", "model"}


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
    process = start(two)
    output = read_until(process, "step 8/")
    process.send_signal(signal.SIGTERM)
    output += finish(process)
    results = dict(output=output, status=process.returncode)
    results["two"] = load_checkpoint(str(folder / "two"))
    step = results["two"]["step"]
    run_until(step, one)
    results["one"] = load_checkpoint(str(folder / "one"))
    for flags in (one, two):
        run_until(step + 3, flags)
    return results | {f"{name} later": load_checkpoint(str(folder / name)) for name in ("one", "two")}


def test_a_signal_to_the_launcher_saves_a_checkpoint(there_and_back):
    assert there_and_back["status"] != 0
    assert there_and_back["two"]["step"] >= 8
    assert there_and_back["output"].count("stopped after step") == 1


@pytest.mark.parametrize("when", ["", " later"], ids=["with two", "back with one"])
def test_a_run_of_one_process_goes_on_with_two_and_back(when, there_and_back):
    expected, got = there_and_back["one" + when], there_and_back["two" + when]
    assert (got["step"], got["tokens"]) == (expected["step"], expected["tokens"])
    for name, weight in expected["model"].items():
        assert torch.allclose(got["model"][name], weight, **ROUNDING), name


def test_two_processes_with_a_micro_batch_each_equal_one_with_two_bit_for_bit(there_and_back):
    expected, got = there_and_back["one"], there_and_back["two"]
    for name, weight in expected["model"].items():
        assert torch.equal(got["model"][name], weight), name


def test_a_process_that_dies_ends_the_job(settings, tmp_path):
    process = start(as_flags(settings | dict(
        out_dir=tmp_path / "out", cache_dir=tmp_path, train_tokens=10**9, max_epochs=10**6,
        eval_every=10**6)))
    read_until(process, "step 8/")
    os.kill(int((tmp_path / "out" / "lock.owner").read_text()), signal.SIGKILL)
    finish(process)
    assert process.returncode != 0
    assert load_checkpoint(str(tmp_path / "out"))["step"] >= 4  # what was saved before is whole
