"""Settings: each field is a flag, and a wrong one stops the run with a sentence that names it."""
import functools
import inspect
import os
import re
import shlex
import subprocess
import sys
from dataclasses import MISSING, fields

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

import train_llama
import train_tokenizer
from conftest import ROOT, TINY_MODEL, as_flags, run_script
from train_llama import DEMO, LlamaConfig, LlamaForPretraining, TrainConfig, main, parse_flags

FLAGS = {field.name: field.default for config in (LlamaConfig, TrainConfig)
         for field in fields(config) if field.default is not MISSING}
NUMBERS = [name for name, default in FLAGS.items() if type(default) in (int, float)]
SWITCHES = "tie_word_embeddings", "packing", "compile"
MAY_BE_ZERO = {"val_every", "min_learning_rate", "warmup_steps", "weight_decay", "grad_clip",
               "seed", "temperature", "top_k", "max_new_tokens"}


source_of = functools.cache(inspect.getsource)  # takes 0.1 s for the classes with the settings


@pytest.fixture(autouse=True)
def read_the_source_once(monkeypatch):
    monkeypatch.setattr(inspect, "getsource", source_of)


def parsed(*argv: str):
    return parse_flags(list(argv), [LlamaConfig, TrainConfig], DEMO)


def message_of(argv: list[str]) -> str:
    """What Python prints, before it exits with status 1, when main() refuses these flags."""
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert isinstance(stop.value.code, str)
    return stop.value.code


@pytest.fixture
def refused(monkeypatch):
    """message_of, for faults that must be found before the model is built."""
    def build(config):
        raise AssertionError("the model was built")

    monkeypatch.setattr(train_llama, "LlamaForPretraining", build)
    return message_of


@pytest.fixture
def accepted(monkeypatch):
    """Run main() with these flags up to the training, and return the two configurations."""
    def configs_of(argv: list[str]) -> tuple[LlamaConfig, TrainConfig]:
        calls = []
        monkeypatch.setattr(train_llama, "train", lambda *args: calls.append(args) or {})
        main(argv)
        return calls[0][:2]
    return configs_of


# ---- flags ---------------------------------------------------------------------------------------

def test_the_flags_are_exactly_the_documented_ones():
    assert list(FLAGS) == """
        max_position_embeddings hidden_size intermediate_size num_hidden_layers
        num_attention_heads num_key_value_heads rms_norm_eps rope_theta tie_word_embeddings
        dataset dataset_config text_column tokenizer_path cache_dir val_every packing seq_len
        train_tokens max_epochs batch_size micro_batch_size optimizer learning_rate
        min_learning_rate warmup_steps schedule weight_decay grad_clip
        out_dir init_from seed device dtype compile log_every eval_every save_every
        prompt temperature top_k max_new_tokens""".split()
    assert set(vars(parsed())) == {*FLAGS, "demo"}


def test_the_defaults_are_the_recipe():
    assert vars(parsed()) == FLAGS | {"demo": False}
    assert {name: FLAGS[name] for name in ("seq_len", "batch_size", "micro_batch_size")} == dict(
        seq_len=512, batch_size=512, micro_batch_size=8)
    assert (FLAGS["train_tokens"], FLAGS["max_epochs"]) == (3_600_000_000, 4)
    assert (FLAGS["learning_rate"], FLAGS["min_learning_rate"]) == (1e-3, 0)
    assert (FLAGS["warmup_steps"], FLAGS["weight_decay"], FLAGS["grad_clip"]) == (1000, 0.1, 1.0)


@pytest.mark.parametrize("demo", [False, True])
def test_help_lists_every_flag_with_its_default_and_an_explanation(demo, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")  # argparse breaks no line
    with pytest.raises(SystemExit) as stop:
        main(["--demo", "--help"] if demo else ["--help"])
    assert stop.value.code == 0
    entries = {re.match(r"\w*", entry)[0]: " ".join(entry.split())
               for entry in re.split(r"\n +--", capsys.readouterr().out)}
    for name, default in (FLAGS | DEMO if demo else FLAGS).items():
        assert f"(default: {default})" in entries[name]
        explanation = entries[name].split("(default:")[0].split(name.replace("_", "-"))[-1]
        assert len(explanation.split()) >= 3, entries[name]


def test_hyphens_are_as_good_as_underscores_and_equals_signs_as_spaces():
    values = {name: type(default)(7) if name in NUMBERS else "seven"
              for name, default in FLAGS.items() if name not in SWITCHES}
    for form in (str, lambda name: name.replace("_", "-")):
        spaced = as_flags({form(name): value for name, value in values.items()})
        equals = [f"--{form(name)}={value}" for name, value in values.items()]
        for argv in (spaced, equals):
            assert vars(parsed(*argv)) == FLAGS | values | {"demo": False}


def test_switches_have_an_opposite():
    for form in (str, lambda name: name.replace("_", "-")):
        for value, no in ((True, ""), (False, "no-")):
            settings = vars(parsed(*(f"--{no}{form(name)}" for name in SWITCHES)))
            assert settings == FLAGS | dict.fromkeys(SWITCHES, value) | {"demo": False}


def test_numbers_may_have_underscores():
    settings = parsed("--train_tokens", "100_000_000", "--rope_theta", "500_000.0")
    assert (settings.train_tokens, settings.rope_theta) == (100_000_000, 500_000.0)


def test_the_flags_reach_the_training(run_flags, accepted, tokenizer_path):
    model_config, config = accepted(run_flags(packing=False, tie_word_embeddings=True, seed=5))
    assert (config.packing, model_config.tie_word_embeddings, config.seed) == (False, True, 5)
    assert model_config.vocab_size == Tokenizer.from_file(str(tokenizer_path)).get_vocab_size()


def test_the_demo_is_other_defaults_and_any_flag_overrides_them():
    assert set(DEMO) <= set(FLAGS) and {"tokenizer_path", "out_dir"} <= set(DEMO)
    assert vars(parsed("--demo")) == FLAGS | DEMO | {"demo": True}
    for argv in (["--demo", "--seq_len", "32", "--out-dir", "mine"],
                 ["--seq-len", "32", "--out_dir", "mine", "--demo"]):
        assert vars(parsed(*argv)) == FLAGS | DEMO | dict(demo=True, seq_len=32, out_dir="mine")
    recipe = as_flags({name: FLAGS[name] for name in DEMO})
    assert vars(parsed("--demo", *recipe)) == FLAGS | {"demo": True}


def test_the_demo_can_be_prompted():
    assert parsed("--demo", "--prompt", "def main(").prompt == "def main("


# ---- one wrong flag ------------------------------------------------------------------------------

@pytest.mark.parametrize("argv", [["--hiden_size", "64"], ["--temp", "1"], ["--vocab_size", "9"],
                                  ["--no-seed"]])
def test_an_unknown_flag_stops_with_a_sentence_that_names_it(argv, refused, run_flags):
    message = refused([*run_flags(), *argv])
    assert argv[0] in message and "\n" not in message


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_of_the_wrong_type_or_sign_stops_with_a_sentence(name, refused, run_flags):
    for value in ("many", "", "-1", "nan", "inf"):
        message = refused(run_flags(**{name: value}))
        assert re.search(rf"--{name}\b", message) and value in message and "\n" not in message


@pytest.mark.parametrize("name", [name for name in NUMBERS if name not in MAY_BE_ZERO])
def test_zero_stops_with_a_sentence_where_it_means_nothing(name, refused, run_flags):
    message = refused(run_flags(**{name: 0}))
    assert re.search(rf"--{name} 0\b", message) and "\n" not in message


@pytest.mark.parametrize("name", sorted(MAY_BE_ZERO))
def test_zero_is_accepted_where_it_means_something(name, accepted, run_flags):
    assert getattr(accepted(run_flags(**{name: 0}))[1], name) == 0


@pytest.mark.parametrize("changes", [
    dict(hidden_size=30, num_attention_heads=4),  # heads divide the hidden size
    dict(hidden_size=36, num_attention_heads=4),  # and have an even size, for the rotation
    dict(num_key_value_heads=3, num_attention_heads=4),
    dict(seq_len=65, max_position_embeddings=64),
    dict(batch_size=5, micro_batch_size=2),
    dict(batch_size=2, micro_batch_size=4),
    dict(min_learning_rate=0.02, learning_rate=0.01),
    dict(val_every=1),  # nothing would be left to train on
    dict(schedule="linear"),
    dict(optimizer="sgd"),
    dict(dtype="int8"),
    dict(device="tpu"),
    dict(device="cuda:99"),
], ids=str)
def test_settings_that_do_not_fit_stop_with_one_sentence(changes, refused, run_flags):
    message = refused(run_flags(**changes))
    assert "\n" not in message
    for name, value in changes.items():
        assert f"--{name} {value}" in message


def test_micro_batches_of_all_processes_divide_the_batch(refused, run_flags, monkeypatch):
    monkeypatch.setattr(train_llama, "WORLD", 4)
    message = refused(run_flags(batch_size=4, micro_batch_size=2))
    assert "\n" not in message
    for part in ("--batch_size 4", "--micro_batch_size 2", "4 processes"):
        assert part in message


@pytest.mark.parametrize("device", ["cuda:0", "mps"])
def test_several_processes_cannot_share_a_device_that_is_named(
        device, refused, accepted, run_flags, monkeypatch):
    monkeypatch.setattr(train_llama, "WORLD", 2)
    message = refused(run_flags(device=device, micro_batch_size=1))
    assert "\n" not in message and f"--device {device}" in message and "2 processes" in message
    accepted(run_flags(device="cpu", micro_batch_size=1))


@pytest.mark.parametrize("script", ["train_tokenizer.py", "train_llama.py"])
def test_letters_that_the_log_cannot_hold_stop_nothing(script, run_flags, corpus, tmp_path):
    done = run_script(script, *(run_flags(max_new_tokens=40) if script == "train_llama.py" else
                                ["--dataset", str(corpus), "--vocab_size", "300"]),
                      cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr


def test_all_faults_come_in_one_message(refused, run_flags, tmp_path):
    (tmp_path / "file").touch()
    faults = dict(hidden_size=30, num_key_value_heads=3, seq_len=65, micro_batch_size=3,
                  optimizer="sgd", schedule="linear", dtype="int8", device="tpu", val_every=1,
                  tokenizer_path=tmp_path / "none.json", out_dir=tmp_path / "file",
                  init_from=tmp_path / "nowhere", learning_rate="nan", weight_decay=-1)
    message = refused(run_flags(**faults))
    assert [name for name, value in faults.items() if f"--{name} {value}" not in message] == []


def test_a_real_process_prints_the_sentence_and_nothing_else(run_flags, tmp_path):
    done = run_script("train_llama.py", *run_flags(weight_decay="nan"), cwd=tmp_path)
    assert done.returncode not in (0, None) and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "--weight_decay nan" in done.stderr


def test_importing_the_scripts_shows_nothing(tmp_path):
    done = subprocess.run([sys.executable, "-c", "import train_llama, train_tokenizer"],
                          cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True,
                          capture_output=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


# ---- files and folders ---------------------------------------------------------------------------

@pytest.mark.parametrize("argv", [
    [],
    ["--demo"],
    ["--dataset", "my texts/*.jsonl", "--text_column", "content", "--val_every", "50",
     "--tokenizer_path", "my own.json"],
], ids=["recipe", "demo", "own files"])
def test_a_missing_tokenizer_is_answered_with_the_exact_command_that_makes_it(
        argv, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = refused(argv)
    command = shlex.split(re.search(r"python train_tokenizer\.py.*", message)[0])
    made = parse_flags(command[2:], [train_tokenizer.TokenizerConfig], train_tokenizer.DEMO)
    wanted = parsed(*argv)
    for name in ("dataset", "dataset_config", "text_column", "val_every", "tokenizer_path"):
        assert getattr(made, name) == getattr(wanted, name)
    assert made.vocab_size == (4096 if "--demo" in argv else 50_000)


def test_a_truncated_tokenizer_stops_with_one_sentence(
        refused, run_flags, tokenizer_path, tmp_path):
    damaged, whole = tmp_path / "damaged.json", tokenizer_path.read_bytes()
    for share in (0, 0.5, 0.99):
        damaged.write_bytes(whole[: int(share * len(whole))])
        message = refused(run_flags(tokenizer_path=damaged))
        assert "\n" not in message and f"--tokenizer_path {damaged}" in message


def test_a_tokenizer_without_the_special_tokens_stops_with_one_sentence(
        refused, run_flags, tmp_path):
    foreign = tmp_path / "foreign.json"
    Tokenizer(models.BPE({"a": 0, "b": 1, "c": 2, "d": 3}, [])).save(str(foreign))
    message = refused(run_flags(tokenizer_path=foreign))
    assert "\n" not in message and f"--tokenizer_path {foreign}" in message
    assert all(token in message for token in ("[PAD]", "[BOT]", "[EOT]", "[UNK]"))


@pytest.mark.parametrize("name", ["out_dir", "cache_dir"])
def test_a_folder_that_cannot_be_written_stops_with_one_sentence(
        name, refused, run_flags, tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        message = refused(run_flags(**{name: folder}))
        assert "\n" not in message and f"--{name} {folder}" in message


@pytest.mark.parametrize("content", [None, "", " \n\t\n", "one document, and it is held out"],
                         ids=["no file", "empty", "blank", "all held out"])
def test_no_documents_stop_with_one_sentence(content, refused, run_flags, tmp_path):
    dataset = tmp_path / "texts"
    dataset.mkdir()
    if content is not None:
        (dataset / "text.txt").write_text(content)
    message = refused(run_flags(dataset=dataset))
    assert "\n" not in message and f"--dataset {dataset}" in message


def test_a_warm_up_as_long_as_the_run_stops_with_one_sentence(refused, run_flags):
    for warmup_steps in (13, 1000):  # the corpus' last row is not full: 12 full steps become 13
        message = refused(run_flags(warmup_steps=warmup_steps))
        assert "\n" not in message and f"--warmup_steps {warmup_steps}" in message
        assert "--train_tokens" in message


@pytest.mark.parametrize("name", ["nowhere", "empty", "notes.txt", "damaged", "foreign"])
def test_weights_that_cannot_be_read_stop_with_one_sentence(name, refused, run_flags, tmp_path):
    for folder in ("empty", "damaged", "foreign"):
        (tmp_path / folder).mkdir()
    (tmp_path / "notes.txt").write_text("no weights")
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"\x09\0\0\0\0\0\0\0{\"a\": nul")
    save_file({"a": torch.zeros(3, dtype=torch.int8)}, tmp_path / "foreign" / "model.safetensors")
    message = refused(run_flags(init_from=tmp_path / name))
    assert "\n" not in message and f"--init_from {tmp_path / name}" in message


def test_weights_of_another_shape_stop_with_one_sentence(run_flags, tmp_path):
    other = LlamaForPretraining(LlamaConfig(300, **TINY_MODEL | dict(num_hidden_layers=1)))
    train_llama.save_checkpoint(str(tmp_path), dict(model=other.state_dict()))
    path = tmp_path / "checkpoint.pt"
    message = message_of(run_flags(init_from=path))
    assert "\n" not in message and f"--init_from {path}" in message
