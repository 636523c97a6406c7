"""Training: exact gradients, an honest log, and runs that survive bad numbers and machines."""
import contextlib
import copy
import csv
import functools
import io
import itertools
import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.optim.optimizer import register_optimizer_step_pre_hook

import train_llama
from conftest import TINY_MODEL, TINY_RUN, as_flags
from train_llama import (BOT, EOT, LlamaConfig, LlamaForPretraining, PretrainingDataset,
                         TrainConfig, add_gradients, compile_model, evaluate, flops_per_token,
                         learning_rate_at, load_checkpoint, main, make_optimizers, rows_of_step)

VOCABULARY = 300
PEAK = 1e9  # FLOP/s, in place of those measured
NO_SCALER = torch.amp.GradScaler("cpu", enabled=False)


@pytest.fixture(autouse=True)
def same_numbers_every_time():
    torch.manual_seed(0)


def tiny_model() -> LlamaForPretraining:
    return LlamaForPretraining(LlamaConfig(VOCABULARY, **TINY_MODEL))


@pytest.fixture
def ragged(tmp_path):
    """Build the dataset of documents of 1 to 45 tokens, in rows of 16."""
    def dataset(packing: bool) -> PretrainingDataset:
        draw = np.random.default_rng(0)
        documents = [[BOT, *draw.integers(4, VOCABULARY, size), EOT]
                     for size in (1, 30, 2, 45, 3, 14, 7, 1, 16, 5)]
        tokens = np.concatenate(documents).astype("u2")
        tokens.tofile(tmp_path / "documents.train.u2")
        return PretrainingDataset(str(tmp_path / "documents.train.u2"), len(tokens), 16, packing)
    return dataset


@pytest.fixture(scope="module")
def flags_of(corpus, tokenizer_path, tmp_path_factory):
    """Flags of a tiny run in an out_dir of its own; all runs share the token files."""
    cache_dir = tmp_path_factory.mktemp("tokens")

    def flags(**changes) -> tuple[list[str], Path]:
        out_dir = tmp_path_factory.mktemp("out")
        return as_flags(TINY_MODEL | TINY_RUN | dict(
            dataset=corpus, tokenizer_path=tokenizer_path, cache_dir=cache_dir, out_dir=out_dir,
            log_every=1, learning_rate=0.01) | changes), out_dir
    return flags


@pytest.fixture(autouse=True, scope="module")
def known_peak():
    """Measuring it takes seconds, which each of the runs here would pay."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_llama, "measure_peak", lambda device, dtype: PEAK)
        yield


@pytest.fixture(scope="module")
def run(flags_of, known_peak):
    """Run main() to its end: what it printed, its metrics and its last checkpoint."""
    def finish(**changes) -> SimpleNamespace:
        flags, out_dir = flags_of(**changes)
        with contextlib.redirect_stdout(io.StringIO()) as text:
            assert main(flags) is None  # exit status 0
        return SimpleNamespace(text=text.getvalue(), out_dir=out_dir, rows=metrics(out_dir),
                               checkpoint=load_checkpoint(str(out_dir)))
    return finish


@pytest.fixture(scope="module")
def plain(run):
    """The tiny run, undisturbed, with a line of metrics for each step."""
    return run()


def metrics(out_dir: Path) -> list[dict[str, str]]:
    with open(out_dir / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def numbers(rows: list[dict[str, str]], column: str) -> list[float]:
    return [float(row[column]) for row in rows if row[column]]


def settings_of(checkpoint: dict) -> TrainConfig:
    return TrainConfig(**{name: value for name, value in checkpoint["config"].items()
                          if name in TrainConfig.__dataclass_fields__})


# ---- gradients -----------------------------------------------------------------------------------

def gradients(model) -> dict[str, torch.Tensor]:
    found = {name: weight.grad.double() for name, weight in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest difference of two gradients, as a share of the largest entry of the second."""
    largest = max(gradient.abs().max() for gradient in b.values())
    return (max((a[name] - b[name]).abs().max() for name in b) / largest).item()


@pytest.mark.parametrize("packing", [False, True])
def test_the_gradient_does_not_depend_on_the_size_of_the_micro_batches(packing, ragged):
    model, dataset, rows = tiny_model(), ragged(packing), np.array([3, 1, 8, 0, 7, 2, 5, 4])
    found = {}
    for at_once in (1, 2, 4, 8):
        nats = add_gradients(model, dataset, rows, at_once, contextlib.nullcontext, NO_SCALER)
        found[at_once] = gradients(model)

    exact = copy.deepcopy(model).double()
    input_ids, labels = dataset.batch(rows)
    loss = F.cross_entropy(exact(input_ids).flatten(0, 1), labels.flatten(), ignore_index=-100)
    loss.backward()  # the mean over all labels that are not ignored
    expected = gradients(exact)
    assert nats.item() == pytest.approx(loss.item() * (labels != -100).sum().item(), rel=1e-6)
    for at_once in (1, 2, 4):
        assert distance(found[at_once], found[8]) < 1e-6
        assert distance(found[at_once], expected) < 1e-6
    assert distance(found[8], expected) < 1e-6


def test_a_mean_of_the_micro_batches_means_would_be_another_gradient(ragged):
    model, dataset, rows = tiny_model(), ragged(packing=False), np.arange(8)
    add_gradients(model, dataset, rows, 1, contextlib.nullcontext, NO_SCALER)
    ours = gradients(model)
    for row in rows:
        input_ids, labels = dataset.batch(rows[row : row + 1])
        (F.cross_entropy(model(input_ids)[0], labels[0], ignore_index=-100) / len(rows)).backward()
    assert distance(gradients(model), ours) > 0.01


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_one_batch_is_learnt_by_heart(kind, ragged):
    model, dataset, rows = tiny_model(), ragged(packing=True), np.arange(8)
    optimizers = make_optimizers(model, TrainConfig(optimizer=kind, learning_rate=0.01))
    for _ in range(50):
        nats = add_gradients(model, dataset, rows, 8, contextlib.nullcontext, NO_SCALER)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
    assert nats.item() / dataset.count_labels(rows) < 0.1


@pytest.mark.parametrize("packing", [False, True])
def test_the_validation_loss_of_trained_samples_is_their_training_loss(packing, ragged):
    model, dataset = tiny_model(), ragged(packing)
    everything = np.arange(len(dataset))
    nats = add_gradients(model, dataset, everything, 4, contextlib.nullcontext, NO_SCALER)
    training_loss = nats.item() / dataset.count_labels(everything)
    for batch_size in (1, 3, 4, len(dataset), 64):  # the last batch may be short
        assert evaluate(model, dataset, batch_size) == pytest.approx(training_loss, rel=1e-6)
    assert all(weight.grad is not None for weight in model.parameters())


# ---- a whole run ---------------------------------------------------------------------------------

def test_the_metrics_have_the_documented_columns_and_rows(plain):
    header = (plain.out_dir / "metrics.csv").read_text().splitlines()[0]
    assert header == ("step,tokens,seconds,loss,val_loss,bits_per_byte,learning_rate,grad_norm,"
                      "tokens_per_second,peak_share,memory_gb")
    assert [row["step"] for row in plain.rows] == [str(step) for step in range(1, 14)]
    for column in header.split(","):
        assert all(map(math.isfinite, numbers(plain.rows, column))), column
        steps = [int(row["step"]) for row in plain.rows if row[column]]
        evaluated = column in ("val_loss", "bits_per_byte")
        assert steps == ([6, 12, 13] if evaluated else list(range(1, 14))), column
    assert numbers(plain.rows, "seconds") == sorted(numbers(plain.rows, "seconds"))


@pytest.mark.parametrize("packing", [True, False])
def test_the_tokens_are_the_labels_trained_on(packing, run):
    checkpoint = (finished := run(packing=packing, eval_every=100)).checkpoint
    (path,) = Path(checkpoint["config"]["cache_dir"]).glob("*.train.u*")
    tokens = checkpoint["fingerprint"]["train"]["tokens"]
    dataset = PretrainingDataset(str(path), tokens, 16, packing)
    labels = np.array([(dataset[i]["labels"] != -100).sum() for i in range(len(dataset))])
    assert packing == (labels[:-1] == 16).all()

    steps = math.ceil(TINY_RUN["train_tokens"] / (4 * labels.mean()))
    expected = [labels[rows_of_step(step, 4, len(dataset), seed=1)].sum() for step in range(steps)]
    assert numbers(finished.rows, "tokens") == np.cumsum(expected).tolist()
    assert (checkpoint["step"], checkpoint["tokens"]) == (steps, sum(expected))


def test_the_loss_starts_at_guessing_and_goes_down(plain):
    losses = numbers(plain.rows, "loss")
    vocabulary = plain.checkpoint["config"]["vocab_size"]
    assert losses[0] == pytest.approx(math.log(vocabulary), abs=0.3)
    assert losses[-1] < losses[0] - 1.5
    assert numbers(plain.rows, "val_loss")[-1] < losses[0] - 1.5


@pytest.fixture
def updates():
    """For each optimiser's update: its groups' learning rates with the factors they should have on
    the schedule's rate, and the squared norm of its gradients.
    """
    seen = []

    def look(optimizer, args, kwargs):
        squares = sum(weight.grad.square().sum().item()
                      for group in optimizer.param_groups for weight in group["params"])
        rates = [(group["lr"], group.get("scale", 1)) for group in optimizer.param_groups]
        seen.append((rates, squares))

    hook = register_optimizer_step_pre_hook(look)
    yield seen
    hook.remove()


@pytest.mark.parametrize("kind, optimisers", [("adamw", 1), ("muon", 2)])
def test_every_update_has_the_schedules_learning_rate(kind, optimisers, updates, run):
    finished = run(optimizer=kind, min_learning_rate=0.001)
    config = settings_of(finished.checkpoint)
    expected = [learning_rate_at(step, 13, config) for step in range(13)]
    assert numbers(finished.rows, "learning_rate") == expected
    wanted = [rate for rate in expected for _ in range(optimisers)]
    for (groups, _), rate in zip(updates, wanted, strict=True):
        assert all(given == rate * scale for given, scale in groups)
    assert {scale for groups, _ in updates for _, scale in groups} == {
        "adamw": {1}, "muon": {1, 12}}[kind]


@pytest.mark.parametrize("limit", [0.5, 0])
def test_the_norm_over_all_gradients_is_limited_before_the_update(limit, updates, run):
    finished = run(optimizer="muon", grad_clip=limit, eval_every=100)
    measured = numbers(finished.rows, "grad_norm")
    assert min(measured) > 0.6  # what is logged is the norm before
    found = [math.sqrt(one + two) for (_, one), (_, two) in zip(updates[::2], updates[1::2])]
    assert found == pytest.approx([limit or norm for norm in measured], rel=1e-5)


def test_the_loss_in_the_metrics_is_the_mean_since_the_last_line(plain, run):
    every_fifth = run(log_every=5, eval_every=100)
    assert [row["step"] for row in every_fifth.rows] == ["5", "10", "13"]
    losses = numbers(plain.rows, "loss")
    tokens = np.diff([0, *numbers(plain.rows, "tokens")])
    expected = [np.average(losses[since], weights=tokens[since])
                for since in (slice(0, 5), slice(5, 10), slice(10, 13))]
    assert numbers(every_fifth.rows, "loss") == pytest.approx(expected, rel=1e-6)


def test_bits_per_byte_are_the_held_out_loss_over_the_bytes_of_the_texts(plain, corpus):
    texts = [json.loads(line)["text"] for line in open(corpus / "documents.jsonl")]
    size = sum(len(text.encode()) for text in texts[::10])
    (path,) = Path(plain.checkpoint["config"]["cache_dir"]).glob("*.val.u2")
    labels = path.stat().st_size // 2 - 1  # every token but the first
    for loss, bits in zip(numbers(plain.rows, "val_loss"), numbers(plain.rows, "bits_per_byte")):
        assert bits == pytest.approx(loss * labels / math.log(2) / size, rel=1e-9)


def test_the_share_of_the_peak_counts_all_floating_point_operations(plain):
    model = LlamaForPretraining(LlamaConfig(plain.checkpoint["config"]["vocab_size"], **TINY_MODEL))
    for row in plain.rows:
        flops = float(row["tokens_per_second"]) * flops_per_token(model, 16)
        assert float(row["peak_share"]) == pytest.approx(flops / PEAK, rel=1e-3)


def test_a_warm_up_may_last_until_the_step_before_the_last(run):
    rates = numbers(run(warmup_steps=12, min_learning_rate=0.001).rows, "learning_rate")
    assert rates == [0.01 * step / 12 for step in range(1, 13)] + [0.001]


def test_bfloat16_stays_within_two_hundredths_of_a_nat_of_float32(plain, run):
    half = run(dtype="bfloat16")
    assert half.checkpoint["config"]["dtype"] == "bfloat16"
    for column in ("loss", "val_loss"):
        one, two = numbers(plain.rows, column), numbers(half.rows, column)
        assert one != two and np.abs(np.subtract(one, two)).max() < 0.02
    assert all(weight.dtype == torch.float32 for weight in half.checkpoint["model"].values())


# ---- what must not spoil a run -------------------------------------------------------------------

@pytest.fixture
def poison(monkeypatch):
    """Make the loss of some steps, of their second micro-batch of two, not finite.

    Returns the list that gets the head's weights at the start of each step.
    """
    def make(steps, value: float = math.nan) -> list[torch.Tensor]:
        real, add, seen = LlamaForPretraining.forward, train_llama.add_gradients, []

        def add_poisoned(model, *args):
            seen.append(model.lm_head.weight.detach().clone())
            calls = itertools.count(1)

            def forward(self, input_ids, labels=None):
                bad = next(calls) == 2 and len(seen) in steps
                return real(self, input_ids, labels) * (value if bad else 1)

            with monkeypatch.context() as patch:
                patch.setattr(LlamaForPretraining, "forward", forward)
                return add(model, *args)

        monkeypatch.setattr(train_llama, "add_gradients", add_poisoned)
        return seen
    return make


def applied_steps(checkpoint: dict) -> set[float]:
    """How often AdamW has changed each weight."""
    return {state["step"].item() for state in checkpoint["optimizer"][0]["state"].values()}


def all_finite(checkpoint: dict) -> bool:
    return all(weight.isfinite().all() for weight in checkpoint["model"].values())


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_a_step_without_a_finite_gradient_is_not_applied_but_counted(value, poison, run):
    weights = poison({3, 13}, value)
    disturbed = run()
    weights.append(disturbed.checkpoint["model"]["lm_head.weight"])
    changed = [not torch.equal(a, b) for a, b in zip(weights, weights[1:])]
    # Step 13 is the last, whose rate is 0: nothing changes in it anyway.
    assert changed == [step not in (3, 13) for step in range(1, 14)]
    assert applied_steps(disturbed.checkpoint) == {11}
    assert disturbed.checkpoint["step"] == 13 and all_finite(disturbed.checkpoint)
    for step in range(1, 14):
        line = rf"(?m)^step {step}: not applied.*(nan|inf)"
        assert bool(re.search(line, disturbed.text)) == (step in (3, 13))


def test_a_step_that_was_not_applied_has_no_loss_in_the_metrics(poison, run, plain):
    poison({3})
    rows = run().rows
    assert [row["step"] for row in rows] == [row["step"] for row in plain.rows]
    assert rows[2]["loss"] in ("", "nan")
    assert rows[2]["tokens"] == plain.rows[2]["tokens"]  # the data has moved on
    assert all(math.isfinite(float(row["loss"])) for row in rows[:2] + rows[3:])


def test_nine_such_steps_in_a_row_are_survived(poison, run):
    poison({*range(2, 11), *range(12, 21)})
    disturbed = run(train_tokens=16 * 4 * 22, eval_every=100)
    assert applied_steps(disturbed.checkpoint) == {disturbed.checkpoint["step"] - 18}
    assert all_finite(disturbed.checkpoint)


def test_ten_such_steps_in_a_row_stop_the_run_and_leave_the_last_checkpoint(poison, flags_of):
    weights = poison(range(7, 1000))
    flags, out_dir = flags_of(train_tokens=16 * 4 * 22, eval_every=100)
    with pytest.raises(SystemExit) as stop:
        main(flags)
    assert "--learning_rate" in stop.value.code and "\n" not in stop.value.code
    assert len(weights) == 16
    checkpoint = load_checkpoint(str(out_dir))
    assert checkpoint["step"] == 4  # saved every 4 steps, but not among those that failed
    assert torch.equal(checkpoint["model"]["lm_head.weight"], weights[4])
    assert all_finite(checkpoint)
    assert not (out_dir / "model").exists()


def raise_out_of_memory(*arguments):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def fill_the_memory_of_the_host(*arguments):
    torch.empty(1 << 60)  # what the library raises here is a plain RuntimeError


@pytest.mark.parametrize("fault", [raise_out_of_memory, fill_the_memory_of_the_host])
def test_too_little_memory_is_answered_with_the_flag_to_lower(fault, flags_of, monkeypatch):
    monkeypatch.setattr(train_llama, "train", fault)
    with pytest.raises(SystemExit) as stop:
        main(flags_of(micro_batch_size=4)[0])
    assert "\n" not in stop.value.code
    assert "--micro_batch_size (now 4)" in stop.value.code
    assert "the result does not change" in stop.value.code
    monkeypatch.setattr(train_llama, "continue_prompt", fault)
    with pytest.raises(SystemExit) as stop:
        main([*flags_of(micro_batch_size=4)[0], "--prompt", "alpha"])
    assert "out of memory: use --device cpu" == stop.value.code


def test_another_runtime_error_keeps_its_traceback(flags_of, monkeypatch):
    def fail(*arguments):
        raise RuntimeError("sizes do not match")

    monkeypatch.setattr(train_llama, "train", fail)
    with pytest.raises(RuntimeError, match="sizes do not match"):
        main(flags_of()[0])


# ---- compiling -----------------------------------------------------------------------------------

def test_a_failing_compiler_costs_one_line_and_changes_nothing(plain, run, monkeypatch):
    def compiler(function, **options):
        def compiled(*arguments):
            raise RuntimeError("No working C++ compiler found\nwith many more lines")
        return compiled

    monkeypatch.setattr(torch, "compile", compiler)
    disturbed = run(compile=True)
    lines = [line for line in disturbed.text.splitlines() if "compile" in line]
    assert len(lines) == 1 and re.match("compile: off.*No working C\\+\\+ compiler found", lines[0])
    assert "many more lines" not in disturbed.text
    assert numbers(disturbed.rows, "loss") == numbers(plain.rows, "loss")
    assert {name: value.tolist() for name, value in disturbed.checkpoint["model"].items()} == {
        name: value.tolist() for name, value in plain.checkpoint["model"].items()}


def test_a_run_has_one_graph_to_train_and_to_evaluate_and_no_break(plain, run, monkeypatch):
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    traced = run(compile=True)
    assert "compile: on" in traced.text
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert list(traced.checkpoint["model"]) == list(plain.checkpoint["model"])
    for column in ("loss", "val_loss"):
        assert numbers(traced.rows, column) == numbers(plain.rows, column)


def test_the_forward_pass_and_its_loss_are_compiled_where_there_is_a_compiler(
        capsys, monkeypatch, tmp_path):
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # nothing compiled before
    model = LlamaForPretraining(LlamaConfig(VOCABULARY, **TINY_MODEL | dict(num_hidden_layers=0)))
    batch = torch.randint(VOCABULARY, (2, 2, 16))
    expected = model(*batch).item()
    names = list(model.state_dict())
    compile_model(model, batch)
    state = "on" if shutil.which("g++") else "off"
    assert re.fullmatch(rf"compile: {state},? .*\n", capsys.readouterr().out)
    assert model(*batch).item() == pytest.approx(expected, rel=1e-5)
    assert list(model.state_dict()) == names
    assert all(weight.grad is None for weight in model.parameters())
    if state == "on":
        assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
        assert list(tmp_path.rglob("*.so"))
