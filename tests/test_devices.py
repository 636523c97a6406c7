"""Other systems: no call that only CUDA has, the right precision and kernel for each card.

No such card is needed: what torch says about the machine is replaced, the rest runs on the CPU.
"""
import ctypes
import functools
import inspect
import multiprocessing
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import train_llama
from conftest import TINY_MODEL, TINY_RUN, as_flags
from train_llama import (LlamaConfig, LlamaForPretraining, PretrainingDataset, UserError,
                         choose_device, main, memory_gb)


def index_of(device: torch.device | str | int | None) -> int:
    """Which card a function of torch.cuda means by its argument."""
    if device is None or isinstance(device, int):
        return device or 0
    return torch.device(device).index or 0


def forbid_cuda(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let every function of torch.cuda fail that the script calls; the list tells which it did."""
    calls = []

    def guarded(function):
        @functools.wraps(function)
        def call(*arguments, **options):
            if sys._getframe(1).f_code.co_filename == train_llama.__file__:
                calls.append(function.__name__)
                raise AssertionError(f"torch.cuda.{function.__name__} was called")
            return function(*arguments, **options)  # torch asks its own questions
        return call

    for name, function in list(vars(torch.cuda).items()):
        if inspect.isfunction(function):
            monkeypatch.setattr(torch.cuda, name, guarded(function))
    return calls


@pytest.fixture
def cuda_calls(monkeypatch) -> list[str]:
    return forbid_cuda(monkeypatch)


@pytest.fixture
def machine(monkeypatch):
    """Let torch find these CUDA cards (their capabilities) in the machine, or Apple's GPU, or none;
    returns what the script then sets."""
    def set_up(*cards: tuple[int, int], mps: bool = False) -> SimpleNamespace:
        done = SimpleNamespace(card=None, precision=None)

        def capability(device=None):
            return cards[index_of(device)]

        monkeypatch.delenv("LOCAL_RANK", raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(cards))
        monkeypatch.setattr(torch.mps, "is_available", lambda: mps)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
        if cards:
            monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
            monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
            monkeypatch.setattr(torch.cuda, "set_device", lambda card: vars(done).update(card=card))
        monkeypatch.setattr(torch, "set_float32_matmul_precision",
                            lambda precision: vars(done).update(precision=precision))
        return done
    return set_up


# ---- which device, which precision ---------------------------------------------------------------

@pytest.mark.parametrize("capability, dtype", [
    ((7, 0), "float16"), ((7, 5), "float16"), ((8, 0), "bfloat16"), ((8, 9), "bfloat16"),
    ((9, 0), "bfloat16"), ((12, 0), "bfloat16")])
def test_a_card_trains_in_bfloat16_where_it_has_it_and_in_float16_where_not(
        capability, dtype, machine):
    done = machine(capability)
    assert choose_device("auto", "auto") == (torch.device("cuda:0"), dtype)
    assert done.card == torch.device("cuda:0")
    assert done.precision == "high"  # TF32 for what stays float32


def test_a_card_of_amd_looks_like_cuda_to_torch_and_goes_the_same_way(machine, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0.0")
    monkeypatch.setattr(torch.version, "cuda", None)
    machine((9, 4))
    assert choose_device("auto", "auto") == (torch.device("cuda:0"), "bfloat16")


def test_apples_gpu_trains_in_float32_and_nothing_of_cuda_is_called(
        cuda_calls, machine, monkeypatch, capsys):
    done = machine(mps=True)
    assert choose_device("auto", "auto") == (torch.device("mps"), "float32")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("mps was asked for"))
    assert choose_device("mps", "auto") == (torch.device("mps"), "float32")
    assert choose_device("mps", "bfloat16") == (torch.device("mps"), "bfloat16")
    assert not cuda_calls and done.card is None
    assert not capsys.readouterr().out


@pytest.mark.parametrize("unit, dtype", [
    ("avx512_bf16", "bfloat16"), ("amx_bf16", "bfloat16"), ("bf16", "bfloat16"),
    ("avx512_f", "float32"), ("neon", "float32")])
def test_a_processor_trains_in_bfloat16_where_it_has_units_for_it(
        unit, dtype, cuda_calls, machine, monkeypatch):
    machine()
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, unit: True})
    assert choose_device("auto", "auto") == choose_device("cpu", "auto") == (
        torch.device("cpu"), dtype)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {unit: False})
    assert choose_device("auto", "auto") == (torch.device("cpu"), "float32")
    assert not cuda_calls


def faults_of_fresh_tensors(chosen: bool) -> int:
    """Page faults of ten tensors of 64 MB, one after the other, in this process."""
    import resource

    if chosen:
        choose_device("cpu", "float32")
    for _ in range(20):
        torch.ones(1 << 24)  # the first ones need pages in any case
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.ones(1 << 24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt") if sys.platform == "linux" else True,
                    reason="only glibc has mallopt")
def test_memory_that_a_step_has_freed_is_kept_for_the_next():
    faults = []
    for chosen in (False, True):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            faults.append(pool.apply(faults_of_fresh_tensors, [chosen]))
    assert faults[1] < faults[0] / 4


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_precision_that_was_asked_for_is_kept_on_every_device(dtype, machine):
    for cards, mps in (([(7, 5)], False), ([(9, 0)], False), ([], True), ([], False)):
        machine(*cards, mps=mps)
        assert choose_device("auto", dtype)[1] == dtype


def test_every_process_of_a_machine_takes_a_card_of_its_own(machine, monkeypatch):
    done = machine((7, 5), (8, 0), (7, 5))
    for rank, dtype in (("0", "float16"), ("1", "bfloat16"), ("2", "float16")):
        monkeypatch.setenv("LOCAL_RANK", rank)
        for name in ("auto", "cuda"):
            done.card = None
            assert choose_device(name, "auto") == (torch.device(f"cuda:{rank}"), dtype)
            assert done.card == torch.device(f"cuda:{rank}")


def test_more_processes_than_cards_are_refused_in_one_sentence(machine, monkeypatch):
    done = machine((8, 0))
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(UserError, match="--device cuda:1 .* this machine has 1$"):
        choose_device("auto", "auto")
    assert done.card is None


def test_a_card_that_was_named_is_taken(machine):
    done = machine((7, 5), (8, 0))
    assert choose_device("cuda:1", "auto") == (torch.device("cuda:1"), "bfloat16")
    assert done.card == torch.device("cuda:1")


@pytest.mark.parametrize("sign", ["nvidia-smi", "/dev/kfd"])
def test_a_gpu_that_torch_cannot_use_is_said(sign, machine, monkeypatch, capsys):
    machine()
    monkeypatch.setattr(shutil, "which", lambda name, *_: f"/usr/bin/{name}" * (name == sign))
    monkeypatch.setattr(train_llama.os.path, "exists", lambda path: path == sign)
    assert choose_device("auto", "float32")[0] == torch.device("cpu")
    said = capsys.readouterr().out
    assert "GPU" in said and str(torch.__version__) in said and said.count("\n") == 1
    choose_device("cpu", "float32")  # nobody wants it
    assert not capsys.readouterr().out


def test_nothing_is_said_about_a_machine_without_a_gpu(machine, monkeypatch, capsys):
    machine()
    monkeypatch.setattr(shutil, "which", lambda *_: None)
    monkeypatch.setattr(train_llama.os.path, "exists", lambda path: False)
    assert choose_device("auto", "float32")[0] == torch.device("cpu")
    assert not capsys.readouterr().out


# ---- memory --------------------------------------------------------------------------------------

@pytest.mark.parametrize("device", ["cpu", "mps"])
@pytest.mark.parametrize("system, unit", [("linux", 1024), ("darwin", 1)])
def test_without_cuda_memory_is_that_of_the_process_in_the_units_of_the_system(
        system, unit, device, cuda_calls, monkeypatch):
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setitem(sys.modules, "resource", SimpleNamespace(
        RUSAGE_SELF=0, getrusage=lambda who: SimpleNamespace(ru_maxrss=3_000_000)))
    assert memory_gb(torch.device(device)) == pytest.approx(3_000_000 * unit / 1e9)
    assert not cuda_calls


def test_memory_is_zero_where_the_system_does_not_tell(cuda_calls, monkeypatch):
    monkeypatch.setitem(sys.modules, "resource", None)  # as on Windows: importing it fails
    assert memory_gb(torch.device("cpu")) == 0
    assert not cuda_calls


def test_memory_of_a_card_is_the_most_that_torch_took_of_this_card(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated",
                        lambda device=None: {0: 3e9, 1: 5e9}[index_of(device)])
    assert memory_gb(torch.device("cuda:1")) == 5.0


# ---- attention's kernel --------------------------------------------------------------------------

@pytest.fixture
def learn(monkeypatch):
    """Train a small model for one batch, with this precision, on this card (None: no CUDA);
    returns the key-value heads that attention's kernel got, the loss and all gradients."""
    def run(capability: tuple[int, int] | None, dtype: torch.dtype) -> tuple[set, list]:
        torch.manual_seed(0)
        model = LlamaForPretraining(LlamaConfig(300, **TINY_MODEL))
        input_ids, labels = torch.randint(300, (2, 2, 40))
        real, heads = F.scaled_dot_product_attention, set()

        def look(q, k, v, **options):
            heads.update([k.size(1), v.size(1)])
            assert q.dtype == k.dtype == v.dtype == dtype
            return real(q, k, v, **options)

        with monkeypatch.context() as patch:
            patch.setattr(F, "scaled_dot_product_attention", look)
            if capability:
                patch.setattr(torch.Tensor, "is_cuda", True)
                patch.setattr(torch.cuda, "get_device_capability", lambda *device: capability)
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                loss = model(input_ids, labels)
        loss.backward()
        return heads, [loss.detach(), *(weight.grad for weight in model.parameters())]
    return run


@pytest.mark.parametrize("capability, dtype, heads", [
    ((7, 0), torch.float16, 4), ((7, 5), torch.float16, 4), ((7, 5), torch.bfloat16, 4),
    ((7, 5), torch.float32, 4), ((8, 0), torch.float32, 4), ((9, 0), torch.float32, 4),
    ((8, 0), torch.bfloat16, 2), ((9, 0), torch.bfloat16, 2), ((12, 0), torch.bfloat16, 2)])
def test_keys_are_expanded_for_cards_and_precisions_without_flash_attention_only(
        capability, dtype, heads, learn):
    assert learn(capability, dtype)[0] == {heads}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_cuda_no_card_is_asked_and_keys_are_shared(dtype, cuda_calls, learn):
    assert learn(None, dtype)[0] == {TINY_MODEL["num_key_value_heads"]}
    assert not cuda_calls


def test_loss_and_gradients_are_the_same_with_expanded_keys(learn):
    (few, shared), (many, expanded) = learn(None, torch.float32), learn((7, 5), torch.float32)
    assert few == {2} and many == {4}
    for a, b in zip(shared, expanded, strict=True):
        assert a.abs().max() > 0
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5 * a.abs().max().item())


# ---- a whole run ---------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def bare(corpus, tokenizer_path, tmp_path_factory) -> SimpleNamespace:
    """A run on a machine without any GPU: what it called that only CUDA has, how it copied."""
    folder, copies, pinned = tmp_path_factory.mktemp("bare"), [], []
    real = torch.Tensor.to

    def to(tensor, *arguments, **options):
        if sys._getframe(1).f_code.co_filename == train_llama.__file__:
            copies.append(options)
        return real(tensor, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        calls = forbid_cuda(patch)
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setattr(torch.mps, "is_available", lambda: False)
        patch.setattr(torch.Tensor, "to", to)
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor, *_: pinned.append(1) or tensor)
        main(as_flags(TINY_MODEL | TINY_RUN | dict(
            dataset=corpus, tokenizer_path=tokenizer_path, cache_dir=folder / "tokens",
            out_dir=folder / "out", device="auto", dtype="auto")))
    return SimpleNamespace(calls=calls, copies=copies, pinned=pinned,
                           tokens=folder / "tokens", out=folder / "out")


def test_a_run_without_cuda_calls_nothing_of_it_and_pins_no_memory(bare):
    assert (bare.out / "model" / "model.safetensors").exists()
    assert not bare.calls and not bare.pinned


def test_what_is_not_pinned_is_not_copied_in_the_background(bare):
    # On mps such a copy may read memory that the next micro-batch has taken, and the batch is
    # garbage without any error (github.com/pytorch/pytorch/issues/189690).
    assert bare.copies and not any(options.get("non_blocking") for options in bare.copies)


# ---- how processes start: fork, spawn (macOS, Windows), forkserver (Python 3.14) -----------------

START_METHODS = [method for method in ("spawn", "forkserver")
                 if method in multiprocessing.get_all_start_methods()]


def test_runs_go_through_in_processes_that_were_started_anew(bare, run_flags, tmp_path):
    processes = [multiprocessing.get_context(method).Process(target=main, args=(run_flags(
        cache_dir=bare.tokens, out_dir=tmp_path / method),)) for method in START_METHODS]
    for process in processes:
        process.start()
    for process, method in zip(processes, START_METHODS):
        process.join(120)
        assert process.exitcode == 0, method
        assert (tmp_path / method / "model" / "model.safetensors").exists()


@pytest.mark.skipif("forkserver" not in START_METHODS, reason="this system has no forkserver")
def test_a_data_loader_whose_workers_come_from_a_fork_server_gives_the_rows(tmp_path):
    ids = np.random.default_rng(0).integers(4, 300, 1000, dtype="u2")
    ids[::50], ids[49::50] = train_llama.BOT, train_llama.EOT
    path = tmp_path / "tokens.train.u2"
    path.write_bytes(ids.tobytes())
    dataset = PretrainingDataset(str(path), len(ids), 16, packing=False)
    batches = list(torch.utils.data.DataLoader(dataset, batch_size=8, num_workers=2,
                                               multiprocessing_context="forkserver"))
    expected = dataset.batch(np.arange(len(dataset)))
    for name, tensor in zip(("input_ids", "labels"), expected):
        assert torch.equal(torch.cat([batch[name] for batch in batches]), tensor)
