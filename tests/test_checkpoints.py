"""A run that nothing can break: exact resume, whole checkpoints, orderly stops, full disks."""
import contextlib
import csv
import functools
import hashlib
import importlib
import inspect
import io
import itertools
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time
import traceback
import zipfile
import zlib
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file

import train_llama
import train_tokenizer
from conftest import ROOT, TINY_MODEL, TINY_RUN, as_flags
from train_llama import (LlamaForPretraining, PretrainingDataset, TrainConfig,
                         UserError, load_checkpoint, load_tokenizer, rows_of_step, save_checkpoint)

# Two and a half epochs: packed 36 rows are 6 steps an epoch, unpacked 56 rows are 7.
EPOCHS = dict(train_tokens=10**6, max_epochs=2.5, eval_every=100, save_every=100, log_every=100)
PACKED = EPOCHS | dict(seq_len=52, batch_size=6, micro_batch_size=3)
UNPACKED = EPOCHS | dict(packing=False, seq_len=60, batch_size=8, micro_batch_size=4)
# Runs of different lengths agree at equal steps only when the rate does not depend on the length.
STEADY = dict(warmup_steps=0, min_learning_rate=1e-3)

source_of = functools.cache(inspect.getsource)  # takes 0.1 s for the classes with the settings


def shorten(patch):
    """Leave out what costs a tiny run most; no test here cuts the power, so nothing need sync."""
    patch.setattr(inspect, "getsource", source_of)
    patch.setattr(os, "fsync", lambda file: None)
    patch.setattr(train_llama, "measure_peak", lambda device, dtype: 1e9)
    patch.setitem(sys.modules, "torch.utils.tensorboard", None)


@pytest.fixture(autouse=True)
def quick_start(monkeypatch):
    shorten(monkeypatch)


def at_step(patch, number, act):
    """Do something while step `number`, counted from 1, is under way."""
    original = train_llama.rows_of_step

    def watched(step, *rest):
        if step + 1 == number:
            act()
        return original(step, *rest)

    patch.setattr(train_llama, "rows_of_step", watched)


@pytest.fixture
def run(run_flags, monkeypatch):
    """A tiny run with some settings changed, in this process; returns its exit status.

    stop_after=N delivers a signal in step N.
    """
    def start(stop_after=0, by=signal.SIGINT, **changes):
        with monkeypatch.context() as patch:
            at_step(patch, stop_after, lambda: os.kill(os.getpid(), by))
            try:
                return train_llama.main(run_flags(**changes)) or 0
            except SystemExit as stop:
                return stop.code
    return start


@pytest.fixture(scope="module")
def tiny_runs(corpus, tokenizer_path, tmp_path_factory):
    """A folder with the out_dirs of two tiny runs: `stopped` at step 6 of 13, and `finished`."""
    folder = tmp_path_factory.mktemp("tiny")
    for name, stop_after in (("stopped", 6), ("finished", 0)):
        with pytest.MonkeyPatch.context() as patch:
            shorten(patch)
            at_step(patch, stop_after, lambda: os.kill(os.getpid(), signal.SIGINT))
            with contextlib.suppress(SystemExit):
                train_llama.main(as_flags(TINY_MODEL | TINY_RUN | dict(
                    dataset=corpus, tokenizer_path=tokenizer_path, cache_dir=folder / "tokens",
                    out_dir=folder / name)))
    return folder


@pytest.fixture
def finished(tiny_runs):
    return tiny_runs / "finished"


@pytest.fixture
def out(tiny_runs, tmp_path):
    """A copy of the stopped run's folder, where `run` and `run_flags` look for it."""
    return Path(shutil.copytree(tiny_runs / "stopped", tmp_path / "out"))


def child(work, *, wait=True):
    """Do `work` in a forked process: its exit status (-9: killed by signal 9) and its output.

    With wait=False its process id and a function that returns these.
    """
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        status = 99
        try:
            os.close(reader)
            sys.stdout = sys.stderr = os.fdopen(writer, "w", buffering=1)
            work()
            status = 0
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else 1
            print("" if isinstance(stop.code, int) else stop.code)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writer)

    def result():
        with open(reader) as output:
            text = output.read()
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), text

    return result() if wait else (pid, result)


def limited_to(size, work):
    """`work` on a disk where no file can grow beyond some bytes."""
    def limited():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        work()
    return limited


def bits(tree, name=""):
    """The leaves of nested containers by their path; of a tensor the hash of its bytes."""
    if isinstance(tree, torch.Tensor):
        data = tree.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return {name: (tree.dtype, tree.shape, hashlib.sha256(data).hexdigest())}
    if not isinstance(tree, (dict, list, tuple)):
        return {name: (type(tree), repr(tree))}
    leaves = {name: (type(tree), len(tree))}
    for key, part in tree.items() if isinstance(tree, dict) else enumerate(tree):
        leaves |= bits(part, f"{name}/{key}")
    return leaves


def read_checkpoint(folder):
    return torch.load(folder / "checkpoint.pt", weights_only=True)


def result_of(folder):
    """All that must not depend on interruptions: weights, optimiser, position, exported model."""
    checkpoint = read_checkpoint(folder)
    state = {key: checkpoint[key] for key in ("model", "optimizer", "scaler", "step", "tokens")}
    return bits(state) | {"exported": hashlib.sha256(
        (folder / "model" / "model.safetensors").read_bytes()).hexdigest()}


def files_of(folder):
    """Content hash and time of change of all files but the locks, which name a process."""
    return {str(path.relative_to(folder)): (hashlib.sha256(path.read_bytes()).hexdigest(),
                                            path.stat().st_mtime_ns)
            for path in sorted(folder.rglob("*"))
            if path.is_file() and not path.name.startswith("lock")}


def logged(folder):
    with open(folder / "metrics.csv") as file:
        return list(csv.DictReader(file))


def logged_steps(folder):
    return [int(row["step"]) for row in logged(folder)]


def rows_an_epoch(tokens, settings):
    facts = json.loads(next(tokens.glob("*.json")).read_text())["train"]
    return len(PretrainingDataset(facts["path"], facts["tokens"], settings["seq_len"],
                                  settings.get("packing", True)))


# ---- Exact resume --------------------------------------------------------------------------------

@pytest.mark.parametrize("settings, stops", [
    pytest.param(PACKED, [3], id="mid-epoch"),
    pytest.param(PACKED, [6], id="at an epoch's end"),
    pytest.param(PACKED, [5], id="one step before it"),
    pytest.param(PACKED, [7], id="one step after it"),
    pytest.param(PACKED, [9], id="in epoch 2"),
    pytest.param(PACKED, [2, 4], id="twice in one epoch"),
    pytest.param(UNPACKED, [3, 6, 7, 8, 10], id="unpacked"),
    pytest.param(PACKED | dict(optimizer="muon"), [2, 6, 9], id="muon"),
    pytest.param(PACKED | dict(dtype="bfloat16"), [2, 6, 9], id="bfloat16"),
    pytest.param(PACKED | dict(dtype="float16"), [2, 6, 9], id="float16"),
    pytest.param(PACKED | dict(tie_word_embeddings=True), [2, 6, 9], id="tied"),
])
def test_a_stopped_run_ends_bit_for_bit_like_an_undisturbed_one(run, tmp_path, settings, stops):
    assert run(out_dir=tmp_path / "straight", **settings) == 0
    assert rows_an_epoch(tmp_path / "tokens", settings) == (36 if settings["seq_len"] == 52 else 56)
    for step in stops:
        assert run(stop_after=step, **settings) == 130
        assert read_checkpoint(tmp_path / "out")["step"] == step
    assert run(**settings) == 0
    assert result_of(tmp_path / "out") == result_of(tmp_path / "straight")
    last, undisturbed = (logged(tmp_path / name)[-1] for name in ("out", "straight"))
    assert all(last[name] == undisturbed[name] for name in ("step", "tokens", "val_loss"))


def test_a_killed_run_goes_on_from_its_last_checkpoint_to_the_same_end(
        run, run_flags, monkeypatch, tmp_path, finished):
    with monkeypatch.context() as patch:
        at_step(patch, 7, lambda: os.kill(os.getpid(), signal.SIGKILL))
        assert child(lambda: train_llama.main(run_flags()))[0] == -signal.SIGKILL
    assert read_checkpoint(tmp_path / "out")["step"] == 4
    assert run() == 0
    assert result_of(tmp_path / "out") == result_of(finished)


def test_a_checkpoint_holds_only_plain_types_and_tensors(out):
    checkpoint = read_checkpoint(out)
    assert set(checkpoint) == set("model optimizer scaler step tokens config fingerprint "
                                  "versions".split())
    plain = {dict, OrderedDict, list, tuple, str, int, float, bool, type(None)}
    assert {kind for kind, *_ in bits(checkpoint).values()} <= plain | {torch.float32}


def test_the_step_that_a_signal_interrupts_is_finished_and_both_last_checkpoints_kept(out):
    assert read_checkpoint(out)["step"] == 6
    assert torch.load(out / "checkpoint.previous.pt", weights_only=True)["step"] == 4


# ---- Damaged checkpoints -------------------------------------------------------------------------

def truncated(share):
    return lambda data: data[: int(len(data) * share)]


def with_a_hole(data):
    middle = len(data) // 2
    return data[:middle] + bytes(4096) + data[middle + 4096 :]


@pytest.mark.parametrize("damage", [truncated(0), truncated(0.1), truncated(0.5), truncated(0.99),
                                    with_a_hole], ids=["0 %", "10 %", "50 %", "99 %", "hole"])
def test_a_damaged_checkpoint_is_named_and_the_previous_one_used(
        run, out, finished, capsys, damage):
    path = out / "checkpoint.pt"
    path.write_bytes(damage(path.read_bytes()))
    assert load_checkpoint(str(out))["step"] == 4
    assert "checkpoint.pt" in capsys.readouterr().out
    assert run() == 0
    assert result_of(out) == result_of(finished)


def test_only_the_first_process_moves_a_damaged_checkpoint_away(out, monkeypatch):
    """All processes read at the same time: a second renaming would fail, and the start with it."""
    (out / "checkpoint.pt").write_bytes(b"damaged")
    monkeypatch.setattr(train_llama, "RANK", 1)
    assert load_checkpoint(str(out))["step"] == 4 and (out / "checkpoint.pt").exists()
    monkeypatch.setattr(train_llama, "RANK", 0)
    assert load_checkpoint(str(out))["step"] == 4 and not (out / "checkpoint.pt").exists()


def test_no_flipped_bit_gets_into_a_run(out, capsys):
    path, chance = out / "checkpoint.pt", random.Random(3)
    data = path.read_bytes()
    newest, previous = (bits(torch.load(out / name, weights_only=True))
                        for name in ("checkpoint.pt", "checkpoint.previous.pt"))
    found = 0
    for _ in range(100):
        flipped, place = bytearray(data), chance.randrange(8 * len(data))
        flipped[place // 8] ^= 1 << place % 8
        path.write_bytes(flipped)
        loaded = bits(load_checkpoint(str(out)))
        named = "checkpoint.pt" in capsys.readouterr().out
        assert loaded == (previous if named else newest), f"bit {place}"
        found += named
    assert found > 90  # the rest hit bytes that mean nothing, such as the padding of the archive


def test_a_missing_newest_checkpoint_means_the_previous_one(out):
    (out / "checkpoint.pt").unlink()
    assert load_checkpoint(str(out))["step"] == 4


def test_no_checkpoint_at_all_means_a_new_run(tmp_path):
    assert load_checkpoint(str(tmp_path)) is None


def test_a_run_whose_checkpoints_are_all_damaged_stops_and_overwrites_nothing(
        run, out, capsys):
    for path in out.glob("checkpoint*"):
        path.write_bytes(truncated(0.9)(path.read_bytes()))
    before = files_of(out)
    message = run()
    assert isinstance(message, str) and str(out) in message
    text = message + capsys.readouterr().out
    assert "checkpoint.pt" in text and "checkpoint.previous.pt" in text
    assert files_of(out) == before


# ---- The windows of a save -----------------------------------------------------------------------

def break_at(patch, moment, act):
    """Call act() at one moment of a save; the moments lie around and inside what it does."""
    passed = itertools.count()

    def pass_moment():
        if next(passed) == moment:
            act()

    def watch(owner, name):
        original = getattr(owner, name)

        def call(*args, **kwargs):
            pass_moment()
            result = original(*args, **kwargs)
            pass_moment()
            return result

        patch.setattr(owner, name, call)

    torch_save = torch.save

    def save_in_halves(tree, file):
        torch_save(tree, buffer := io.BytesIO())
        data = buffer.getvalue()
        file.write(data[: len(data) // 2])
        file.flush()
        pass_moment()
        file.write(data[len(data) // 2 :])

    patch.setattr(torch, "save", save_in_halves)
    for owner, name in ((os, "fsync"), (os, "replace"), (zipfile.ZipFile, "testzip")):
        watch(owner, name)
    return passed


def tiny_checkpoint(step):
    return dict(step=step, model=dict(weight=torch.full((1000,), float(step))))


def make_none(folder):
    return None


def make_one(folder):
    save_checkpoint(folder, tiny_checkpoint(1))
    return tiny_checkpoint(1)


def make_two(folder):
    make_one(folder)
    save_checkpoint(folder, tiny_checkpoint(2))
    return tiny_checkpoint(2)


def make_two_with_the_newest_damaged(folder):
    make_two(folder)
    with open(Path(folder, "checkpoint.pt"), "r+b") as file:
        file.truncate(3000)
    return load_checkpoint(folder)  # of step 1; the run goes on from there


def fail(error):
    raise error


@pytest.mark.parametrize("start", [make_none, make_one, make_two, make_two_with_the_newest_damaged])
@pytest.mark.parametrize("act, expected_status", [
    pytest.param(lambda: os._exit(9), 9, id="death"),
    pytest.param(lambda: fail(OSError(28, "No space left on device")), 1, id="OSError"),
    pytest.param(lambda: fail(RuntimeError("unexpected pos 64 vs 0")), 1, id="RuntimeError")])
def test_a_save_that_breaks_at_any_moment_leaves_a_whole_checkpoint(
        tmp_path, monkeypatch, start, act, expected_status):
    for moment in itertools.count():
        folder = tmp_path / str(moment)
        folder.mkdir()
        old, new = start(str(folder)), tiny_checkpoint(3)

        def save():
            with monkeypatch.context() as patch:
                break_at(patch, moment, act)
                save_checkpoint(str(folder), new)

        status, output = child(save)
        if status == 0:  # the save was over before that moment
            break
        assert status == expected_status, output
        assert status == 9 or "checkpoint.pt" in output  # a UserError that names the file
        loaded = load_checkpoint(str(folder))
        assert (loaded and bits(loaded)) in (old and bits(old), bits(new)), f"moment {moment}"
        save_checkpoint(str(folder), new)  # and the next save is not disturbed by what was left
        assert bits(load_checkpoint(str(folder))) == bits(new)
        assert not list(folder.glob("*.tmp"))
    assert moment >= 9


def test_a_checkpoint_is_on_the_disk_before_it_gets_its_name_and_the_name_after(
        tmp_path, monkeypatch):
    make_one(str(tmp_path))
    events, replace = [], os.replace
    monkeypatch.setattr(os, "fsync", lambda file: events.append(
        "sync folder" if stat.S_ISDIR(os.fstat(file).st_mode) else "sync file"))
    monkeypatch.setattr(os, "replace", lambda old, new: (
        events.append(f"to {Path(new).name}"), replace(old, new)))
    save_checkpoint(str(tmp_path), tiny_checkpoint(2))
    assert events == ["sync file", "to checkpoint.previous.pt", "to checkpoint.pt", "sync folder"]


def test_the_temporary_file_of_a_killed_save_harms_no_later_start(
        run, run_flags, monkeypatch, tmp_path, finished):
    save = train_llama.save_checkpoint

    def die_when_half_is_written(*args):
        break_at(monkeypatch, 0, lambda: os._exit(9))
        save(*args)

    with monkeypatch.context() as patch:
        patch.setattr(train_llama, "save_checkpoint", die_when_half_is_written)
        assert child(lambda: train_llama.main(run_flags()))[0] == 9
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert any("checkpoint" in name for name in names) and "checkpoint.pt" not in names
    assert run() == 0
    assert result_of(tmp_path / "out") == result_of(finished)
    assert files_of(tmp_path / "out").keys() == files_of(finished).keys()


@pytest.mark.parametrize("damage", [truncated(0.5), with_a_hole], ids=["truncated", "hole"])
def test_a_checkpoint_that_reads_back_wrong_does_not_replace_the_old_one(
        tmp_path, monkeypatch, damage):
    save_checkpoint(str(tmp_path), old := tiny_checkpoint(1))
    torch_save = torch.save

    def save_badly(tree, file):
        torch_save(tree, buffer := io.BytesIO())
        file.write(damage(buffer.getvalue()))

    new = dict(step=2, model=dict(weight=torch.rand(100_000)))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", save_badly)
        with pytest.raises(UserError, match="checkpoint.pt"):
            save_checkpoint(str(tmp_path), new)
    assert bits(load_checkpoint(str(tmp_path))) == bits(old)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]


# ---- A full disk ---------------------------------------------------------------------------------

def test_a_full_disk_while_saving_is_named_and_leaves_the_old_checkpoints(
        run, run_flags, out, finished):
    before = files_of(out)
    status, output = child(limited_to(100_000, lambda: train_llama.main(run_flags())))
    assert status == 1 and "Traceback" not in output
    assert "checkpoint.pt" in output.splitlines()[-1]
    after = files_of(out)
    assert all(after[name] == before[name] for name in before if "checkpoint" in name)
    assert run() == 0
    assert result_of(out) == result_of(finished)


def test_a_full_disk_while_writing_tokens_is_named_and_the_next_start_goes_on(
        run, run_flags, tmp_path, tiny_runs):
    status, output = child(limited_to(1000, lambda: train_llama.main(run_flags())))
    assert status == 1 and "Traceback" not in output
    assert str(tmp_path / "tokens") in output.splitlines()[-1]
    assert run(stop_after=1) == 130
    assert token_bytes(tmp_path / "tokens") == token_bytes(tiny_runs / "tokens")


def test_a_full_disk_while_logging_is_named_and_the_next_start_goes_on(
        run, run_flags, tmp_path, tiny_runs):
    settings = dict(log_every=1, save_every=100, cache_dir=tiny_runs / "tokens")
    status, output = child(limited_to(500, lambda: train_llama.main(run_flags(**settings))))
    assert status == 1 and "Traceback" not in output
    assert str(tmp_path / "out") in output.splitlines()[-1]
    assert run(**settings) == 0
    assert logged_steps(tmp_path / "out") == list(range(1, 14))


def test_a_full_disk_while_exporting_is_named_and_the_next_start_exports(
        run, run_flags, tmp_path, finished):
    out = Path(shutil.copytree(finished, tmp_path / "out"))
    shutil.rmtree(out / "model")
    status, output = child(limited_to(100_000, lambda: train_llama.main(run_flags())))
    assert status == 1 and "Traceback" not in output
    assert "model.safetensors" in output.splitlines()[-1]
    assert not (out / "model").exists()
    assert run() == 0
    assert result_of(out) == result_of(finished)


def test_too_little_free_space_is_found_before_the_first_step(run, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100_000))
    at_step(monkeypatch, 1, lambda: pytest.fail("a step was begun"))
    message = run()
    assert isinstance(message, str) and str(tmp_path) in message


def test_checkpoints_that_are_there_need_no_space_once_more(run, out, monkeypatch):
    usage, weights = shutil.disk_usage(out), read_checkpoint(out)["model"].values()
    have = sum(path.stat().st_size for path in out.glob("checkpoint*.pt"))
    needed = 40 * sum(weight.numel() for weight in weights)
    for free, expected in ((needed - have, str), (needed - have + 1, int)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free))
        assert type(run()) is expected


def test_too_little_free_space_for_tokens_is_found_before_they_are_written(
        run, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    monkeypatch.setattr(train_llama, "append_tokens", lambda *args: pytest.fail("tokens written"))
    message = run()
    assert isinstance(message, str) and "tokens" in message and str(tmp_path / "tokens") in message


def test_a_resume_reads_the_token_file_only_if_it_has_grown(run, out, corpus, monkeypatch):
    read, checksum = [], train_llama.checksum
    monkeypatch.setattr(train_llama, "checksum", lambda path, tokens: (
        read.append(tokens), checksum(path, tokens))[1])
    assert run() == 0
    assert read == []


def test_the_checksum_of_a_beginning_is_that_of_its_bytes(tmp_path):
    tokens = np.arange(40_000, dtype="u2")
    tokens.tofile(tmp_path / "some.u2")
    for n in (0, 1, 39_999):
        assert train_llama.checksum(str(tmp_path / "some.u2"), n) == zlib.crc32(
            tokens[:n].tobytes())


# ---- Signals -------------------------------------------------------------------------------------

@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_finishes_the_step_saves_and_says_how_to_go_on(
        run, tmp_path, capsys, number, status):
    assert run(stop_after=7, by=number) == status
    assert read_checkpoint(tmp_path / "out")["step"] == 7
    assert logged_steps(tmp_path / "out")[-1] == 7
    last = capsys.readouterr().out.splitlines()[-1]
    assert "step 7" in last and "same command" in last


def test_a_real_process_stopped_by_sigterm_exits_with_143_and_a_checkpoint(run_flags, tmp_path):
    flags = run_flags(max_epochs=10**6, train_tokens=10**9, log_every=1, save_every=10**6)
    process = subprocess.Popen([sys.executable, str(ROOT / "train_llama.py"), *flags], text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                               env=os.environ | {"OMP_NUM_THREADS": "1"})
    log = tmp_path / "out" / "metrics.csv"
    while process.poll() is None and not (log.exists() and len(logged(tmp_path / "out")) > 2):
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143
    step = read_checkpoint(tmp_path / "out")["step"]
    assert logged_steps(tmp_path / "out") == list(range(1, step + 1))
    assert f"step {step}" in output.splitlines()[-1]


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_at_once_with_the_last_checkpoint_intact(
        run_flags, tmp_path, monkeypatch, first, second):
    def act():
        os.kill(os.getpid(), first)
        time.sleep(0)  # lets Python call the handler
        os.kill(os.getpid(), second)

    with monkeypatch.context() as patch:
        at_step(patch, 6, act)
        status, output = child(lambda: train_llama.main(run_flags(log_every=1)))
    assert status == -second, output
    assert load_checkpoint(str(tmp_path / "out"))["step"] == 4
    assert logged_steps(tmp_path / "out") == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("before", [signal.SIG_IGN, signal.default_int_handler], ids=str)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_after_the_first_signal_both_have_the_system_s_own_effect(before, number):
    """An exception of Python's could get lost: torch.save makes a RuntimeError of it."""
    both = signal.SIGINT, signal.SIGTERM
    old = [signal.signal(each, before) for each in both]
    try:
        with train_llama.catch_signals() as caught:
            assert not caught
            os.kill(os.getpid(), number)
            assert caught == [number]
            assert [signal.getsignal(each) for each in both] == [signal.SIG_DFL] * 2
        assert [signal.getsignal(each) for each in both] == [before] * 2
    finally:
        for each, handler in zip(both, old):
            signal.signal(each, handler)


def test_a_lock_whose_owner_has_not_said_its_number_yet_is_refused_too(run, tmp_path):
    (tmp_path / "out").mkdir()
    with FileLock(tmp_path / "out" / "lock"):
        message = run()
    assert f"--out_dir {tmp_path / 'out'}" in message and "\n" not in message


def test_a_signal_during_an_evaluation_still_saves_the_step(run, tmp_path, monkeypatch):
    evaluate = train_llama.evaluate

    def interrupted(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(*args)

    monkeypatch.setattr(train_llama, "evaluate", interrupted)
    assert run(eval_every=3, save_every=100) == 143
    assert read_checkpoint(tmp_path / "out")["step"] == 3


def test_a_signal_while_a_checkpoint_is_written_lets_it_be_finished(run, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        torch_save = torch.save
        patch.setattr(torch, "save", lambda tree, file: (
            os.kill(os.getpid(), signal.SIGINT), torch_save(tree, file)))
        assert run() == 130
    assert load_checkpoint(str(tmp_path / "out"))["step"] == 4


def test_a_stop_while_gradients_are_not_finite_says_which_step_is_saved(
        run, tmp_path, monkeypatch, capsys):
    add_gradients, broken = train_llama.add_gradients, []

    def break_gradients(model, *rest):
        nats = add_gradients(model, *rest)
        if broken:
            next(model.parameters()).grad.fill_(math.inf)
        return nats

    monkeypatch.setattr(train_llama, "add_gradients", break_gradients)
    at_step(monkeypatch, 6, lambda: broken.append(True))
    assert run(stop_after=6) == 130
    checkpoint = load_checkpoint(str(tmp_path / "out"))
    assert all(weight.isfinite().all() for weight in checkpoint["model"].values())
    assert f"step {checkpoint['step']} " in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("number, statuses", [
    (signal.SIGINT, {130}), (signal.SIGTERM, {143, -signal.SIGTERM})])
def test_a_signal_while_tokens_are_prepared_ends_the_process_and_the_next_start_is_whole(
        run, run_flags, tmp_path, monkeypatch, tiny_runs, number, statuses):
    load_documents = train_llama.load_documents

    def interrupted(*args):
        for i, text in enumerate(load_documents(*args)):
            if i == 30:
                os.kill(os.getpid(), number)
            yield text

    with monkeypatch.context() as patch:
        patch.setattr(train_llama, "load_documents", interrupted)
        status, output = child(lambda: train_llama.main(run_flags()))
    assert status in statuses and "Traceback" not in output
    assert run(stop_after=1) == 130
    assert token_bytes(tmp_path / "tokens") == token_bytes(tiny_runs / "tokens")


# ---- One run in a folder -------------------------------------------------------------------------

def test_a_second_run_in_the_same_folder_is_refused_and_a_killed_one_leaves_no_lock(
        run, run_flags, tmp_path, monkeypatch, finished):
    reached = tmp_path / "reached"

    def wait():
        reached.touch()
        time.sleep(60)

    with monkeypatch.context() as patch:
        at_step(patch, 6, wait)
        pid, result = child(lambda: train_llama.main(run_flags()), wait=False)
    while not reached.exists():
        time.sleep(0.01)
    before = files_of(tmp_path / "out")
    message = run()
    assert str(tmp_path / "out") in message and re.search(rf"\b{pid}\b", message)
    assert files_of(tmp_path / "out") == before
    os.kill(pid, signal.SIGKILL)
    assert result()[0] == -signal.SIGKILL
    assert run() == 0
    assert result_of(tmp_path / "out") == result_of(finished)


# ---- The end of a run ----------------------------------------------------------------------------

def test_a_finished_run_started_again_says_so_and_changes_no_file(
        run, tmp_path, capsys, finished):
    out = Path(shutil.copytree(finished, tmp_path / "out"))
    before = files_of(out)
    assert run() == 0
    assert "finished" in capsys.readouterr().out
    assert files_of(out) == before


@pytest.fixture
def run_without_export(run, monkeypatch):
    """A run that dies between its last checkpoint and the export."""
    def start(**changes):
        with monkeypatch.context() as patch:
            patch.setattr(train_llama, "export_model", lambda *args: fail(KeyboardInterrupt()))
            assert run(**changes) == 130
    return start


def test_a_run_that_died_before_its_export_exports_when_started_again(
        run, run_without_export, tmp_path, finished):
    run_without_export()
    assert read_checkpoint(tmp_path / "out")["step"] == 13
    assert not (tmp_path / "out" / "model").exists()
    assert run() == 0
    assert result_of(tmp_path / "out") == result_of(finished)


def test_a_longer_run_that_died_before_its_export_does_not_keep_the_shorter_ones_model(
        run, run_without_export, tmp_path, finished):
    out, longer = Path(shutil.copytree(finished, tmp_path / "out")), dict(train_tokens=16 * 4 * 16)
    run_without_export(**longer)
    assert run(**longer) == 0
    checkpoint = read_checkpoint(out)
    assert checkpoint["step"] > 13
    exported = load_file(out / "model" / "model.safetensors")
    assert bits(exported) == bits(dict(checkpoint["model"]))



def test_an_export_that_dies_at_any_moment_is_never_half_there_and_can_be_made_anew(
        run, tmp_path, monkeypatch):
    export_model, calls, folder = train_llama.export_model, [], tmp_path / "out" / "model"
    monkeypatch.setattr(train_llama, "export_model", lambda *args: calls.append(args))
    assert run() == 0
    (model, *rest), = calls

    def export(value):
        with torch.no_grad():
            model.lm_head.weight.fill_(value)
        export_model(model, *rest)
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    old, new, around = export(1), export(2), {path.name for path in folder.parent.iterdir()}
    assert old.keys() == new.keys() and old != new
    for moment in itertools.count():
        export(1)

        def die():
            with monkeypatch.context() as patch:
                break_at(patch, moment, lambda: os._exit(9))
                export(2)

        status, output = child(die)
        assert status in (0, 9), output
        if folder.exists():
            assert {path.name: path.read_bytes() for path in folder.iterdir()} in (old, new)
        assert export(2) == new
        assert {path.name for path in folder.parent.iterdir()} == around
        if status == 0:
            break
    assert moment >= 6


def test_a_demo_that_died_before_its_export_exports_when_started_again(
        run_flags, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(train_llama, "export_model", lambda *args: fail(KeyboardInterrupt()))
        with pytest.raises(SystemExit):
            train_llama.main(["--demo", *run_flags()])
    train_llama.main(["--demo", *run_flags()])
    assert (tmp_path / "out" / "model" / "model.safetensors").exists()


@pytest.mark.parametrize("rank, row, compared", [
    (0, dict(bits_per_byte=1.5), 1), (1, dict(bits_per_byte=1.5), 0), (0, dict(loss=2.0), 0),
    (0, dict(bits_per_byte=""), 0), (0, {}, 0)], ids=[
        "first process", "second process", "--val_every 0", "read from the log", "finished before"])
def test_the_demo_ends_with_its_comparison_once_and_where_there_is_one(
        run_flags, monkeypatch, rank, row, compared):
    import train_tokenizer

    calls = []
    monkeypatch.setattr(train_llama, "train", lambda *args: row)
    monkeypatch.setattr(train_llama, "continue_prompt", lambda *args: calls.append("sample"))
    monkeypatch.setattr(train_tokenizer, "report_demo", lambda *args: calls.append(args[1]))
    monkeypatch.setattr(train_llama, "RANK", rank)
    train_llama.main(["--demo", *run_flags(dataset=train_llama.STDLIB)])
    assert calls == [1.5, "sample"] * compared
    train_llama.main(["--demo", *run_flags()])  # of other texts there may be very many
    assert calls == [1.5, "sample"] * compared


# ---- The log -------------------------------------------------------------------------------------

def die_at(step, flags, monkeypatch):
    with monkeypatch.context() as patch:
        at_step(patch, step, lambda: os._exit(9))
        assert child(lambda: train_llama.main(flags))[0] == 9


def test_the_log_drops_what_lies_beyond_the_checkpoint(run, run_flags, tmp_path, monkeypatch):
    die_at(8, run_flags(log_every=1), monkeypatch)
    assert logged_steps(tmp_path / "out") == [1, 2, 3, 4, 5, 6, 7]  # the checkpoint is of step 4
    assert run(log_every=1) == 0
    assert logged_steps(tmp_path / "out") == list(range(1, 14))
    seconds = [float(row["seconds"]) for row in logged(tmp_path / "out")]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("tail", [b"4", b"4,2", b"\0" * 512, b"5,38\0\0\0"],
                         ids=["a step alone", "half a row", "zeros", "half a row and zeros"])
def test_a_log_with_a_torn_end_does_not_stop_the_next_start(
        run, run_flags, tmp_path, monkeypatch, tail):
    die_at(6, run_flags(log_every=1), monkeypatch)
    log = tmp_path / "out" / "metrics.csv"
    lines = log.read_bytes().splitlines(keepends=True)
    whole = 4 if tail.startswith(b"4") else 5  # lines, with the heading
    log.write_bytes(b"".join(lines[:whole]) + tail)
    assert run(log_every=1) == 0
    assert b"\0" not in log.read_bytes()
    assert logged_steps(tmp_path / "out") == [*range(1, whole), *range(5, 14)]
    assert all(row["memory_gb"] for row in logged(tmp_path / "out"))


def test_tensorboard_drops_what_lies_beyond_the_checkpoint(run, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    tensorboard = importlib.import_module("torch.utils.tensorboard")  # the one that a run imports
    writers = []

    class Writer(tensorboard.SummaryWriter):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            writers.append(self)

    monkeypatch.setattr(tensorboard, "SummaryWriter", Writer)
    with monkeypatch.context() as patch:
        at_step(patch, 8, lambda: fail(KeyboardInterrupt()))
        assert run(log_every=1) == 130
    writers.pop().close()  # writes what a process would at its end
    time.sleep(1.1)  # files are read in the order of the second in their names
    assert run(log_every=1) == 0
    writers.pop().close()
    events = EventAccumulator(str(tmp_path / "out")).Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(1, 14))
    rates = [float(row["learning_rate"]) for row in logged(tmp_path / "out")]
    assert [event.value for event in events.Scalars("learning_rate")] == [
        np.float32(rate) for rate in rates]
    from tensorboard.backend.event_processing import plugin_event_accumulator  # TensorBoard's own

    texts = plugin_event_accumulator.EventAccumulator(str(tmp_path / "out")).Reload()
    samples = texts.Tensors("sample/text_summary")
    assert [event.step for event in samples] == [6, 12, 13]
    assert all(event.tensor_proto.string_val[0] for event in samples)


# ---- Changed settings ----------------------------------------------------------------------------

@pytest.mark.parametrize("name, was, now", [
    ("max_position_embeddings", 64, 128), ("hidden_size", 32, 64), ("intermediate_size", 64, 32),
    ("num_hidden_layers", 2, 1), ("num_attention_heads", 4, 2), ("num_key_value_heads", 2, 4),
    ("rms_norm_eps", 1e-05, 1e-06), ("rope_theta", 10000.0, 500000.0),
    ("tie_word_embeddings", False, True), ("batch_size", 4, 8), ("seq_len", 16, 8),
    ("packing", True, False), ("seed", 1, 2), ("optimizer", "adamw", "muon"), ("val_every", 10, 5)])
def test_a_setting_that_makes_it_another_run_is_refused(run, out, name, was, now):
    before = files_of(out)
    message = run(**{name: now})
    assert f"{name} {was} -> {now}" in message and "--out_dir" in message
    assert files_of(out) == before


def test_all_refused_settings_are_listed_at_once(run, out):
    message = run(seed=2, batch_size=8, num_hidden_layers=1)
    assert all(text in message for text in ("seed 1 -> 2", "batch_size 4 -> 8",
                                            "num_hidden_layers 2 -> 1"))


def changed_copy(corpus, folder, line, old, new):
    """A copy of the corpus with one word changed in the document on one line."""
    lines = (corpus / "documents.jsonl").read_text().splitlines(keepends=True)
    assert old in lines[line]
    lines[line] = lines[line].replace(old, new, 1)
    folder.mkdir()
    (folder / "documents.jsonl").write_text("".join(lines))
    return folder


@pytest.mark.parametrize("line", [
    pytest.param(31, id="in training"), pytest.param(30, id="in validation")])
def test_a_changed_corpus_is_refused(run, out, corpus, tmp_path, line):
    word = json.loads((corpus / "documents.jsonl").read_text().splitlines()[line])["text"]
    word = word.split()[0]
    other = changed_copy(corpus, tmp_path / "other", line, f'"{word}', f'"{word[::-1]}')
    before = files_of(out)
    message = run(dataset=other)
    assert f"{corpus} -> {other}" in message and "--out_dir" in message
    assert files_of(out) == before


def test_a_corpus_changed_in_place_is_refused(run, corpus, tmp_path):
    here = changed_copy(corpus, tmp_path / "here", 31, ".", ".")
    run(stop_after=6, dataset=here)
    path = here / "documents.jsonl"
    path.write_text(path.read_text().replace("alpha", "omega"))
    message = run(dataset=here)
    assert str(here) in message and "--dataset" in message


def test_a_corpus_that_has_grown_is_refused_or_its_new_end_not_used(run, corpus, tmp_path):
    here = changed_copy(corpus, tmp_path / "here", 31, ".", ".")
    run(dataset=here, out_dir=tmp_path / "straight", **PACKED)
    run(dataset=here, stop_after=3, **PACKED)
    with open(here / "documents.jsonl", "a") as file:
        file.write('{"text": "beta beta beta beta"}\n' * 20)
    if isinstance(status := run(dataset=here, **PACKED), int):
        assert status == 0
        assert result_of(tmp_path / "out") == result_of(tmp_path / "straight")
    else:
        assert "--dataset" in status


@pytest.mark.parametrize("change", ["moved", "touched"])
def test_an_equal_corpus_elsewhere_or_with_another_date_goes_on(
        run, out, corpus, tmp_path, capsys, finished, change):
    here = changed_copy(corpus, tmp_path / "here", 31, ".", ".")
    if change == "touched":
        assert run(dataset=here, stop_after=7) == 130
        os.utime(here / "documents.jsonl", ns=(10**18, 10**18))
    capsys.readouterr()
    assert run(dataset=here) == 0
    assert f"steps: {7 if change == 'touched' else 6} to 13" in capsys.readouterr().out
    assert result_of(out) == result_of(finished)


def test_another_tokenizer_of_the_same_size_is_refused(run, out, tokenizer_path, tmp_path):
    tokenizer = json.loads(tokenizer_path.read_text())
    merges = tokenizer["model"]["merges"]
    merges[-1], merges[-2] = merges[-2], merges[-1]
    other = tmp_path / "other.json"
    other.write_text(json.dumps(tokenizer))
    before = files_of(out)
    message = run(tokenizer_path=other)
    assert f"{tokenizer_path} -> {other}" in message and "--out_dir" in message
    assert files_of(out) == before


def test_a_moved_tokenizer_of_equal_content_goes_on(
        run, out, tokenizer_path, tmp_path, finished):
    moved = shutil.copy(tokenizer_path, tmp_path / "moved.json")
    assert run(tokenizer_path=moved) == 0
    assert result_of(out) == result_of(finished)


def half_cosine(step, peak, lowest):
    """The rate of step 7 .. 13 of 13 with 2 steps of warm-up."""
    return lowest + (peak - lowest) * (1 + math.cos(math.pi * (step - 2) / 11)) / 2


@pytest.mark.parametrize("changes, rates", [
    (dict(learning_rate=3e-3), [half_cosine(step, 3e-3, 0) for step in range(7, 14)]),
    (dict(min_learning_rate=1e-4), [half_cosine(step, 1e-3, 1e-4) for step in range(7, 14)]),
    (dict(schedule="wsd"), [1e-3] * 5 + [5e-4, 0]),
    (dict(warmup_steps=9), [7e-3 / 9, 8e-3 / 9, 1e-3] + [
        1e-3 * (1 + math.cos(math.pi * n / 4)) / 2 for n in (1, 2, 3, 4)])],
    ids=["learning_rate", "min_learning_rate", "schedule", "warmup_steps"])
def test_changed_rates_are_said_and_applied_from_the_next_step_on(
        run, out, capsys, changes, rates):
    (name, now), = changes.items()
    was = (TINY_RUN | dict(learning_rate=1e-3, min_learning_rate=0.0, schedule="cosine"))[name]
    assert run(log_every=1, **changes) == 0
    assert f"{name} {was} -> {now}" in capsys.readouterr().out
    assert [float(row["learning_rate"]) for row in logged(out)[-7:]] == pytest.approx(
        rates, rel=1e-12, abs=1e-18)
    groups = read_checkpoint(out)["optimizer"][0]["param_groups"]
    assert all(group["lr"] == pytest.approx(rates[-1], abs=1e-18) for group in groups)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_changed_weight_decay_is_applied_to_the_matrices_alone(run, tmp_path, capsys, optimizer):
    run(stop_after=6, optimizer=optimizer)
    start = read_checkpoint(tmp_path / "out")["model"]
    shutil.copytree(tmp_path / "out", tmp_path / "unchanged")
    capsys.readouterr()
    assert run(stop_after=7, optimizer=optimizer, weight_decay=0.7) == 130
    assert "weight_decay 0.1 -> 0.7" in capsys.readouterr().out
    assert run(stop_after=7, optimizer=optimizer, out_dir=tmp_path / "unchanged") == 130
    changed, unchanged = (read_checkpoint(tmp_path / name) for name in ("out", "unchanged"))
    assert {group["weight_decay"] for state in changed["optimizer"]
            for group in state["param_groups"]} == {0.7, 0.0}
    # A step makes w (1 - rate x decay) - update of a weight w.
    rate = half_cosine(7, 1e-3, 0)
    for name, weight in start.items():
        difference = unchanged["model"][name] - changed["model"][name]
        scale = 12 if optimizer == "muon" and "embed" in name else 1
        expected = scale * rate * (0.7 - 0.1) * weight * (weight.dim() == 2)
        torch.testing.assert_close(difference, expected, rtol=1e-2, atol=1e-7)


@pytest.mark.parametrize("short, long", [
    (dict(train_tokens=52 * 6 * 4), dict(train_tokens=52 * 6 * 8)),
    (dict(max_epochs=1.0), dict(max_epochs=1.5))], ids=["train_tokens", "max_epochs"])
def test_a_longer_run_goes_on_from_where_it_ended(run, tmp_path, capsys, short, long):
    settings = PACKED | STEADY | dict(log_every=1)
    run(out_dir=tmp_path / "straight", **(settings | long))
    run(**(settings | short))
    end = read_checkpoint(tmp_path / "out")["step"]
    assert logged_steps(tmp_path / "out") == list(range(1, end + 1))
    capsys.readouterr()
    assert run(**(settings | long)) == 0
    (name, was), (_, now) = *short.items(), *long.items()
    assert f"{name} {was} -> {now}" in capsys.readouterr().out
    assert read_checkpoint(tmp_path / "out")["step"] > end
    assert logged_steps(tmp_path / "out") == logged_steps(tmp_path / "straight")
    assert result_of(tmp_path / "out") == result_of(tmp_path / "straight")


def test_a_run_made_shorter_than_it_is_ends_with_the_weights_it_has(run, out):
    weights = bits(read_checkpoint(out)["model"])
    assert run(train_tokens=16 * 4 * 3) == 0
    assert bits(OrderedDict(load_file(out / "model" / "model.safetensors"))) == weights
    assert read_checkpoint(out)["step"] == 6


@pytest.fixture(scope="module")
def long_corpus(tmp_path_factory):
    """Documents of 1 MB, more than are read at a time: preparing a short run leaves the last."""
    folder, chance = tmp_path_factory.mktemp("long"), random.Random(7)
    words = "alpha beta gamma delta epsilon".split()
    pieces = ["".join(chance.choices(words, k=40)) for _ in range(30)]
    with open(folder / "documents.jsonl", "w") as file:
        for size in [10**6] * 4 + [10**5]:
            text = " ".join(chance.choices(pieces, k=2 * size // len(pieces[0])))[:size]
            file.write(json.dumps({"text": text}) + "\n")
    return folder


def test_a_longer_run_that_needs_more_tokens_appends_them_and_changes_no_shorter_one(
        run, tmp_path, monkeypatch, long_corpus):
    monkeypatch.setattr(train_llama, "WINDOW", 8)
    short, long = (STEADY | dict(dataset=long_corpus, train_tokens=tokens, val_every=0)
                   for tokens in (16 * 4 * 6, 10**7))
    assert run(**short) == 0
    undisturbed = result_of(tmp_path / "out")
    assert run(out_dir=tmp_path / "shorter", stop_after=3, **short) == 130
    size = len(token_bytes(tmp_path / "tokens")[".train.u2"])
    assert run(stop_after=9, **long) == 130
    assert len(token_bytes(tmp_path / "tokens")[".train.u2"]) > size
    assert run(out_dir=tmp_path / "straight", cache_dir=tmp_path / "at once", stop_after=9,
               **long) == 130
    assert token_bytes(tmp_path / "tokens") == token_bytes(tmp_path / "at once")
    assert bits(read_checkpoint(tmp_path / "out")["model"]) == bits(
        read_checkpoint(tmp_path / "straight")["model"])
    assert run(out_dir=tmp_path / "shorter", **short) == 0
    assert result_of(tmp_path / "shorter") == undisturbed


def test_a_changed_micro_batch_size_is_applied(run, out, monkeypatch, capsys):
    sizes, forward = [], LlamaForPretraining.forward

    def watched(self, input_ids, labels=None):
        sizes.append(len(input_ids))
        return forward(self, input_ids, labels)

    monkeypatch.setattr(LlamaForPretraining, "forward", watched)
    assert run(micro_batch_size=4, eval_every=100, stop_after=8) == 130
    assert sizes == [4, 4]
    assert "micro_batch_size 2 -> 4" in capsys.readouterr().out


def test_changed_intervals_are_applied(run, out, monkeypatch, capsys):
    saved, save = [], train_llama.save_checkpoint
    monkeypatch.setattr(train_llama, "save_checkpoint", lambda folder, checkpoint: (
        saved.append(checkpoint["step"]), save(folder, checkpoint)))
    assert run(log_every=5, eval_every=4, save_every=3) == 0
    assert saved == [9, 12, 13]
    rows = [row for row in logged(out) if int(row["step"]) > 6]
    assert [int(row["step"]) for row in rows] == [8, 10, 12, 13]
    assert [int(row["step"]) for row in rows if row["val_loss"]] == [8, 12, 13]
    text = capsys.readouterr().out
    assert all(f"{name} -> {now}" in text for name, now in (
        ("log_every 2", 5), ("eval_every 6", 4), ("save_every 4", 3)))


def test_a_changed_compile_is_applied(run, out, monkeypatch, capsys):
    compiled = []
    monkeypatch.setattr(train_llama, "compile_model", lambda *args: compiled.append(args))
    assert run(compile=True) == 0
    assert len(compiled) == 1
    assert "compile False -> True" in capsys.readouterr().out


@pytest.mark.parametrize("was, now", [("float32", "bfloat16"), ("float32", "float16"),
                                      ("float16", "float32"), ("bfloat16", "float16")])
def test_an_explicit_dtype_is_applied(run, tmp_path, monkeypatch, capsys, was, now):
    used, forward = [], LlamaForPretraining.forward

    def watched(self, input_ids, labels=None):
        used.append(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu")
                    else torch.float32)
        return forward(self, input_ids, labels)

    run(stop_after=6, dtype=was)
    capsys.readouterr()
    monkeypatch.setattr(LlamaForPretraining, "forward", watched)
    assert run(dtype=now) == 0
    assert f"dtype {was} -> {now}" in capsys.readouterr().out
    assert set(used) == {getattr(torch, now)}
    assert read_checkpoint(tmp_path / "out")["config"]["dtype"] == now


def test_dtype_auto_is_resolved_once_and_stored(run, tmp_path, monkeypatch):
    choose_device = train_llama.choose_device
    for found in ("bfloat16", "float32"):  # the second time on a machine that has no bfloat16
        monkeypatch.setattr(train_llama, "choose_device", lambda name, dtype: choose_device(
            name, found if dtype == "auto" else dtype))
        assert run(stop_after=6 if found == "bfloat16" else 9, dtype="auto") == 130
        assert read_checkpoint(tmp_path / "out")["config"]["dtype"] == "bfloat16"


# ---- Starting from weights -----------------------------------------------------------------------

@pytest.fixture
def first_weights(run, monkeypatch):
    """A function that starts a run and returns the weights its first step sees."""
    def start(**changes):
        seen, add_gradients = [], train_llama.add_gradients

        def watched(model, *rest):
            seen.append(bits(dict(model.state_dict())))
            return add_gradients(model, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(train_llama, "add_gradients", watched)
            assert run(stop_after=1, **changes) == 130
        return seen[0]
    return start


@pytest.mark.parametrize("source", ["checkpoint.pt", "checkpoint.previous.pt", "model"])
def test_init_from_starts_at_step_0_with_exactly_those_weights(
        first_weights, finished, tmp_path, source):
    weights = (load_file(finished / source / "model.safetensors") if source == "model"
               else torch.load(finished / source, weights_only=True)["model"])
    settings = dict(init_from=finished / source, out_dir=tmp_path / "new", warmup_steps=3)
    assert first_weights(**settings) == bits(dict(weights))
    checkpoint = read_checkpoint(tmp_path / "new")
    assert checkpoint["step"] == 1 and checkpoint["tokens"] == 4 * 16
    assert {float(state["step"]) for part in checkpoint["optimizer"]
            for state in part["state"].values()} == {1.0}


def test_init_from_takes_other_data_lengths_and_schedules(
        first_weights, finished, corpus, tmp_path):
    other = changed_copy(corpus, tmp_path / "other", 31, ".", "!")
    weights = torch.load(finished / "checkpoint.pt", weights_only=True)["model"]
    assert first_weights(
        init_from=finished / "model", out_dir=tmp_path / "new", dataset=other, seq_len=48,
        max_position_embeddings=512, batch_size=2, micro_batch_size=1, packing=False,
        schedule="wsd", optimizer="muon", seed=5, val_every=7) == bits(dict(weights))


def test_init_from_takes_an_exported_model_with_tied_embeddings(first_weights, run, tmp_path):
    assert run(tie_word_embeddings=True) == 0
    weights = read_checkpoint(tmp_path / "out")["model"]
    assert first_weights(init_from=tmp_path / "out" / "model", out_dir=tmp_path / "new",
                         tie_word_embeddings=True) == bits(dict(weights))


@pytest.mark.parametrize("source", ["checkpoint.pt", "model"])
def test_init_from_a_model_with_a_head_of_its_own_cannot_be_tied(run, finished, tmp_path, source):
    message = run(init_from=finished / source, out_dir=tmp_path / "new", tie_word_embeddings=True)
    assert f"--init_from {finished / source}" in message
    assert "--no-tie_word_embeddings" in message and "\n" not in message


def test_a_run_started_from_weights_resumes_from_its_own_checkpoint(run, finished, tmp_path):
    settings = dict(init_from=finished / "model", seed=5)
    run(out_dir=tmp_path / "straight", **settings)
    assert run(stop_after=6, **settings) == 130
    assert run(**settings) == 0
    assert result_of(tmp_path / "out") == result_of(tmp_path / "straight")


@pytest.mark.parametrize("source", ["checkpoint.pt", "model"])
@pytest.mark.parametrize("changes", [dict(hidden_size=64), dict(num_hidden_layers=3),
                                     dict(num_hidden_layers=1)], ids=str)
def test_init_from_with_other_shapes_is_refused_in_one_sentence(
        run, finished, tmp_path, source, changes):
    message = run(init_from=finished / source, out_dir=tmp_path / "new", **changes)
    assert isinstance(message, str) and "--init_from" in message and "\n" not in message.strip()
    assert not (tmp_path / "new" / "checkpoint.pt").exists()


def with_a_flipped_bit_in_a_weight(data):
    checkpoint = torch.load(io.BytesIO(data), weights_only=True)
    place = data.index(checkpoint["model"]["lm_head.weight"].numpy().tobytes())
    return data[:place] + bytes([data[place] ^ 64]) + data[place + 1 :]


@pytest.mark.parametrize("damage", [truncated(0.5), with_a_flipped_bit_in_a_weight],
                         ids=["truncated", "flipped bit"])
def test_init_from_a_damaged_checkpoint_is_refused(run, out, tmp_path, damage):
    path = out / "checkpoint.pt"
    path.write_bytes(damage(path.read_bytes()))
    message = run(init_from=path, out_dir=tmp_path / "new")
    assert isinstance(message, str) and str(path) in message
    assert not (tmp_path / "new" / "checkpoint.pt").exists()


def test_a_run_goes_on_without_the_weights_it_was_started_from(run, finished, tmp_path):
    weights = shutil.copytree(finished / "model", tmp_path / "weights")
    assert run(stop_after=6, init_from=weights) == 130
    shutil.rmtree(weights)
    assert run(init_from=weights) == 0


def test_init_from_for_a_run_that_has_begun_is_refused(run, out, finished):
    before = files_of(out)
    message = run(init_from=finished / "model")
    assert f"--init_from  -> {finished / 'model'}" in message and "another folder" in message
    assert files_of(out) == before


def test_init_from_nothing_is_refused(run, tmp_path):
    assert str(tmp_path / "nothing") in run(init_from=tmp_path / "nothing")


# ---- The cost of resuming ------------------------------------------------------------------------

def test_finding_the_rows_of_a_step_takes_no_more_work_at_step_1_000_000():
    def work(step):
        events = []
        sys.setprofile(lambda frame, event, argument: events.append(event))
        try:
            rows_of_step(step, 512, 10**10 // 512, seed=11)
        finally:
            sys.setprofile(None)
        return len(events)

    work(3)  # warms up what is made once in a process
    assert work(1000) == work(1_000_000)


def test_a_sparse_token_file_of_20_gigabytes_opens_and_serves_late_steps(tmp_path):
    path, tokens = tmp_path / "sparse.train.u2", 10**10
    path.touch()
    os.truncate(path, 2 * tokens)
    dataset = PretrainingDataset(str(path), tokens, 512)
    assert len(dataset) == math.ceil((tokens - 1) / 512)
    rows = rows_of_step(1_000_000, 8, len(dataset), seed=1)
    input_ids, labels = dataset.batch(rows)
    assert input_ids.shape == labels.shape == (8, 512)
    assert len(set(rows.tolist())) == 8 and dataset.count_labels(rows) == 8 * 512


# ---- Preparing -----------------------------------------------------------------------------------

def token_bytes(folder):
    """The token files and what is noted of them, without their place."""
    content = {path.suffixes[-2] + path.suffix: path.read_bytes() for path in folder.glob("*.u2")}
    (facts,) = (json.loads(path.read_text()) for path in folder.glob("*.json"))
    for split in ("train", "val"):
        facts[split].pop("path")
    return content | dict(facts=facts)


def prepare(corpus, tokenizer_path, folder):
    folder.mkdir(exist_ok=True)
    config = TrainConfig(dataset=str(corpus), cache_dir=str(folder), val_every=10)
    return train_llama.prepare_tokens(config, load_tokenizer(str(tokenizer_path)), 10**6)


def test_two_processes_that_prepare_the_same_tokens_write_the_undisturbed_files(
        corpus, tokenizer_path, tmp_path, monkeypatch, tiny_runs):
    load_documents, opened = train_llama.load_documents, tmp_path / "opened"

    def slow_documents(*args):
        for text in load_documents(*args):
            with open(opened, "a") as file:
                file.write(".")
            time.sleep(0.01)
            yield text

    with monkeypatch.context() as patch:
        patch.setattr(train_llama, "load_documents", slow_documents)
        results = [child(lambda: prepare(corpus, tokenizer_path, tmp_path / "shared"), wait=False)
                   for _ in range(2)]
        for _, result in results:
            status, output = result()
            assert status == 0, output
    assert token_bytes(tmp_path / "shared") == token_bytes(tiny_runs / "tokens")
    assert opened.stat().st_size == 60  # one wrote, the other waited and read


def test_a_preparation_that_dies_at_any_moment_ends_with_the_undisturbed_files(
        corpus, tokenizer_path, tmp_path, monkeypatch, tiny_runs):
    expected = token_bytes(tiny_runs / "tokens")
    for moment in itertools.count():
        def die():
            with monkeypatch.context() as patch:
                break_at(patch, moment, lambda: os._exit(9))
                prepare(corpus, tokenizer_path, tmp_path / str(moment))

        status, output = child(die)
        prepare(corpus, tokenizer_path, tmp_path / str(moment))
        assert token_bytes(tmp_path / str(moment)) == expected, f"moment {moment}"
        if status == 0:
            break
        assert status == 9, output
    assert moment >= 6


def test_a_tokenizer_training_that_dies_at_any_moment_leaves_no_half_of_a_file(
        corpus, tokenizer_path, tmp_path, monkeypatch):
    for moment in itertools.count():
        path = tmp_path / f"{moment}.json"
        flags = as_flags(dict(dataset=corpus, vocab_size=300, tokenizer_path=path, val_every=10))

        def die():
            with monkeypatch.context() as patch:
                break_at(patch, moment, lambda: os._exit(9))
                train_tokenizer.main(flags)

        status, output = child(die)
        assert not path.exists() or path.read_bytes() == tokenizer_path.read_bytes()
        if status == 0:
            break
        assert status == 9, output
        train_tokenizer.main(flags)
        assert path.read_bytes() == tokenizer_path.read_bytes()
    assert moment >= 4
