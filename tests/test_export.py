"""The exported folder, seen by what will load it: transformers, tokenizers, safetensors."""
import csv
import json
import re
import struct

import export_check
import pytest
import safetensors
import safetensors.torch
import torch
import transformers
from conftest import TINY_MODEL, TINY_RUN, as_flags
from hypothesis import given, settings, strategies
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer
from transformers import GenerationConfig, pipeline

import train_llama
from train_llama import BOT, EOT, PAD, LlamaConfig, LlamaForPretraining, TrainConfig, UserError
from train_llama import export_model, generate, load_checkpoint, load_tokenizer

SEQ_LEN = 48  # what the model is said to be trained on, below its 64 positions
PROMPT = "alpha beta"
HARD_TEXTS = ["", " ", "\n\n\t ", "alpha  beta\r\ngamma", "Ünïcödé ½ e\u0301 ﬁ",
              "👩\u200d🚀 \x00 \x7f",
              "don't can 't ''' `x`", "漢字かな 123 456,789.0", "\ufeff\u2028\u00a0\ufffd",
              " . , ! ?", "[EOT] [PAD] [BOT] [UNK]", "<s></s><|endoftext|>", "a[BOT]b[EOT]"]


@pytest.fixture(scope="module", autouse=True)
def no_second_spent_on_the_peak():
    """The share of the measured peak is not what is tested here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_llama, "measure_peak", lambda device, dtype: 1e12)
        yield


def make_model(vocab_size: int, **changes) -> LlamaForPretraining:
    """A model with unusual settings, whose weights are large enough to make it sure of itself."""
    torch.manual_seed(5)
    model = LlamaForPretraining(LlamaConfig(
        vocab_size, **TINY_MODEL | dict(rms_norm_eps=1e-3, rope_theta=500.0) | changes))
    for weight in model.parameters():
        torch.nn.init.normal_(weight, mean=float(weight.dim() < 2), std=0.3)
    return model


def export(model, tokenizer, out_dir, loss: float = 1.25):
    """Export as at the end of a run; returns the folder."""
    config = TrainConfig(out_dir=str(out_dir), seq_len=SEQ_LEN)
    export_model(model, tokenizer, config, 1000, dict(step=10, loss=loss))
    return out_dir / "model"


@pytest.fixture(scope="module")
def tokenizer(tokenizer_path):
    return load_tokenizer(str(tokenizer_path))


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def exported(request, tokenizer, tmp_path_factory):
    """A model and the folder that it was exported to."""
    out_dir = tmp_path_factory.mktemp("exported")
    model = make_model(tokenizer.get_vocab_size(), tie_word_embeddings=request.param)
    return model, export(model, tokenizer, out_dir)


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    """An exported folder."""
    return export(make_model(tokenizer.get_vocab_size()), tokenizer,
                  tmp_path_factory.mktemp("folder"))


@pytest.fixture(scope="module")
def their_tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def finished(corpus, tokenizer_path, tmp_path_factory):
    """The flags and the out_dir of a run that has ended."""
    out_dir = tmp_path_factory.mktemp("finished") / "out"
    flags = as_flags(TINY_MODEL | TINY_RUN | dict(
        dataset=corpus, tokenizer_path=tokenizer_path, cache_dir=out_dir.parent, out_dir=out_dir))
    train_llama.main(flags)
    return flags, out_dir


def their_model(folder):
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def our_greedy_ids(model, ids: list[int], count: int) -> list[int]:
    """Greedy decoding, written out."""
    ids = list(ids)
    for _ in range(count):
        ids.append(model(torch.tensor([ids]))[0, -1].argmax().item())
    return ids


# ---- the model ----

def test_transformers_finds_every_weight_and_no_other(exported):
    _, folder = exported
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    for name in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        assert not info[name], f"{name}: {info[name]}"
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}


def test_the_headless_model_loads_as_from_a_folder_that_transformers_wrote(exported, tmp_path):
    """A head of its own is left over then: all that either report may name."""
    model, folder = exported
    their_model(folder).save_pretrained(tmp_path)
    _, theirs = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    _, ours = AutoModel.from_pretrained(folder, output_loading_info=True)
    assert ours == theirs
    assert not ours["missing_keys"] and not ours["mismatched_keys"]
    left_over = set() if model.config.tie_word_embeddings else {"lm_head.weight"}
    assert set(ours["unexpected_keys"]) == left_over


def test_the_model_class_that_transformers_chooses_is_llama(exported):
    _, folder = exported
    assert type(their_model(folder)) is transformers.LlamaForCausalLM
    assert type(AutoModel.from_pretrained(folder)) is transformers.LlamaModel


def test_logits_equal_ours(exported):
    model, folder = exported
    ids = torch.randint(4, model.config.vocab_size, (3, SEQ_LEN),
                        generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, theirs = model(ids), their_model(folder)(ids).logits
    assert ours.std() > 1  # the comparison is of something
    assert (ours - theirs).abs().max() < 1e-5


def test_hidden_states_of_the_headless_model_equal_ours(exported):
    model, folder = exported
    ids = torch.arange(4, 4 + SEQ_LEN)[None]
    with torch.no_grad():
        theirs = AutoModel.from_pretrained(folder).eval()(ids).last_hidden_state
        assert (model.model(ids) - theirs).abs().max() < 1e-5


def test_greedy_continuation_equals_ours(exported, tokenizer):
    model, folder = exported
    ids = [BOT, *tokenizer.encode(PROMPT, add_special_tokens=False).ids]
    theirs = their_model(folder).generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        do_sample=False, max_new_tokens=30, eos_token_id=None)
    assert theirs[0].tolist() == our_greedy_ids(model, ids, 30)


def test_generate_of_transformers_writes_the_text_that_ours_writes(exported, tokenizer):
    model, folder = exported
    config = TrainConfig(seq_len=SEQ_LEN, temperature=0.0, max_new_tokens=20)
    ours = "".join(generate(model, tokenizer, PROMPT, config))
    tokens = AutoTokenizer.from_pretrained(folder)
    batch = tokens(PROMPT, return_tensors="pt")
    ids = their_model(folder).generate(**batch, do_sample=False, max_new_tokens=20)[0].tolist()
    theirs = tokens.decode(ids[batch["input_ids"].size(1):], skip_special_tokens=True)
    assert theirs.startswith(ours)  # ours keeps back the bytes of an unfinished character
    assert not theirs[len(ours):].strip("\ufffd")


def test_the_text_generation_pipeline_works(exported, tokenizer):
    model, folder = exported
    write = pipeline("text-generation", model=str(folder))
    [answer] = write(PROMPT, do_sample=False, max_new_tokens=6)
    ids = our_greedy_ids(model, [BOT, *tokenizer.encode(PROMPT, add_special_tokens=False).ids], 6)
    ids = ids[: ids.index(EOT)] if EOT in ids else ids
    assert answer["generated_text"] == tokenizer.decode(ids)
    assert answer["generated_text"].startswith(PROMPT)
    assert write(PROMPT)[0]["generated_text"].startswith(PROMPT)  # as the folder says: sampling


def test_generate_stops_at_the_end_of_text(tokenizer, tmp_path):
    model = make_model(tokenizer.get_vocab_size())
    prompt = [BOT, *tokenizer.encode(PROMPT, add_special_tokens=False).ids]
    *kept, last = our_greedy_ids(model, prompt, 4)
    assert EOT not in kept and last not in kept
    rows = model.lm_head.weight.data  # exchange two rows: where it said `last`, it says [EOT]
    rows[[last, EOT]] = rows[[EOT, last]]
    folder = export(model, tokenizer, tmp_path)
    batch = AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="pt")
    theirs = their_model(folder).generate(**batch, do_sample=False, max_new_tokens=20)
    assert theirs[0].tolist() == [*kept, EOT]
    config = TrainConfig(seq_len=SEQ_LEN, temperature=0.0, max_new_tokens=20)
    assert "".join(generate(model, tokenizer, PROMPT, config)) == tokenizer.decode(
        kept[len(prompt):])


def test_a_padded_batch_gives_the_logits_of_its_texts_alone(folder, their_tokenizer):
    model, texts = their_model(folder), ["alpha", "beta gamma delta epsilon", "zeta eta"]
    batch = their_tokenizer(texts, padding=True, return_tensors="pt")
    assert set(batch["input_ids"][batch["attention_mask"] == 0].tolist()) == {PAD}
    with torch.no_grad():
        together = model(**batch).logits
        for text, logits, mask in zip(texts, together, batch["attention_mask"]):
            alone = model(**their_tokenizer(text, return_tensors="pt")).logits[0]
            assert torch.allclose(logits[mask == 1], alone, rtol=0, atol=1e-5)


def test_a_batch_padded_on_the_left_continues_as_its_texts_alone(folder):
    tokens = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model, texts = their_model(folder), ["alpha", "beta gamma delta epsilon", "zeta eta"]
    options = dict(do_sample=False, max_new_tokens=8, eos_token_id=None)
    batch = tokens(texts, padding=True, return_tensors="pt")
    together = model.generate(**batch, **options)
    for text, ids in zip(texts, together):
        alone = model.generate(**tokens(text, return_tensors="pt"), **options)
        assert ids[-8:].tolist() == alone[0, -8:].tolist()


def test_settings_that_are_not_the_defaults_survive(exported):
    model, folder = exported
    config = AutoConfig.from_pretrained(folder)
    assert config.rope_parameters["rope_theta"] == 500.0
    assert config.rope_parameters["rope_type"] == "default"
    assert config.rms_norm_eps == 1e-3
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                 "num_attention_heads", "num_key_value_heads", "tie_word_embeddings"):
        assert getattr(config, name) == getattr(model.config, name), name


def test_the_folder_says_what_transformers_4_would_otherwise_guess_wrongly(folder):
    config, tokens = (json.loads((folder / name).read_text())
                      for name in ("config.json", "tokenizer_config.json"))
    assert config["rope_theta"] == 500.0 and "rope_parameters" not in config
    assert config["torch_dtype"] == "float32"
    assert tokens["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert tokens["model_input_names"] == ["input_ids", "attention_mask"]  # no token types


def test_the_longest_sequence_is_the_one_that_was_trained_on(folder, their_tokenizer):
    assert AutoConfig.from_pretrained(folder).max_position_embeddings == SEQ_LEN
    assert their_tokenizer.model_max_length == SEQ_LEN


# ---- the tokenizer ----

def test_special_ids_agree_in_tokenizer_config_and_generation_config(folder, their_tokenizer):
    for holder in (their_tokenizer, AutoConfig.from_pretrained(folder),
                   GenerationConfig.from_pretrained(folder), their_model(folder).config,
                   their_model(folder).generation_config):
        assert (holder.bos_token_id, holder.eos_token_id, holder.pad_token_id) == (BOT, EOT, PAD)
    assert their_tokenizer.unk_token == "[UNK]"


def test_the_vocabulary_has_as_many_tokens_as_the_model(folder, tokenizer, their_tokenizer):
    assert (len(their_tokenizer) == tokenizer.get_vocab_size()
            == AutoConfig.from_pretrained(folder).vocab_size)
    assert their_tokenizer.get_vocab() == tokenizer.get_vocab()


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_every_text_comes_back_exactly(text, tokenizer, their_tokenizer):
    ids = their_tokenizer(text)["input_ids"]
    assert ids == [BOT, *tokenizer.encode(text, add_special_tokens=False).ids]
    assert their_tokenizer.decode(ids, skip_special_tokens=True) == text
    assert their_tokenizer.decode(ids[1:]) == text


@settings(max_examples=100, deadline=None, derandomize=True)
@given(text=strategies.text())
def test_any_text_comes_back_exactly(text, tokenizer, their_tokenizer):
    ids = their_tokenizer(text)["input_ids"]
    assert ids == [BOT, *tokenizer.encode(text, add_special_tokens=False).ids]
    assert their_tokenizer.decode(ids, skip_special_tokens=True) == text


def test_a_text_begins_with_one_bot_and_has_no_token_types(their_tokenizer):
    for text in ("alpha", ["alpha", "beta gamma"]):
        batch = their_tokenizer(text)
        assert set(batch) == {"input_ids", "attention_mask"}
        for ids in batch["input_ids"] if isinstance(text, list) else [batch["input_ids"]]:
            assert ids[0] == BOT and BOT not in ids[1:] and EOT not in ids
    assert BOT not in their_tokenizer("alpha", add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("call", [
    lambda tokens, text: tokens(text)["input_ids"],
    lambda tokens, text: tokens([text])["input_ids"][0],
    lambda tokens, text: tokens.encode(text),
    lambda tokens, text: [BOT, *tokens.convert_tokens_to_ids(tokens.tokenize(text))],
], ids=["call", "batch", "encode", "tokenize"])
def test_control_words_in_a_text_stay_text(call, their_tokenizer):
    text = "a [EOT] [PAD] [BOT] [UNK][EOT]"
    ids = call(their_tokenizer, text)
    assert ids[0] == BOT and min(ids[1:]) > 3
    assert their_tokenizer.decode(ids, skip_special_tokens=True) == text


def test_control_words_stay_text_after_transformers_has_saved_the_tokenizer(
        their_tokenizer, tmp_path):
    their_tokenizer.save_pretrained(tmp_path)
    assert min(AutoTokenizer.from_pretrained(tmp_path)("a [EOT] [PAD]")["input_ids"][1:]) > 3


# ---- model.safetensors ----

def test_the_safetensors_package_reads_the_state_dict_bit_for_bit(exported):
    model, folder = exported
    read, ours = safetensors.torch.load_file(folder / "model.safetensors"), model.state_dict()
    left_out = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    assert read.keys() == ours.keys() - left_out
    for name, tensor in read.items():
        assert tensor.dtype == torch.float32 and tensor.shape == ours[name].shape, name
        assert torch.equal(tensor.view(torch.int32), ours[name].view(torch.int32)), name


@pytest.mark.parametrize("length", range(8))
def test_a_safetensors_file_is_aligned_whatever_its_header(length, tmp_path):
    tensors = {"w" * (length + 1): torch.arange(6.0).view(2, 3).t(), "scalar": torch.tensor(-0.0),
               "empty": torch.empty(0, 4), "half": torch.tensor([1.5, -2.25]).bfloat16(),
               "odd": torch.tensor([float("inf"), float("nan"), 1e-45])}
    path = tmp_path / "file"
    with open(path, "wb") as file:
        train_llama.write_safetensors(tensors, file)
    data = path.read_bytes()
    assert struct.unpack("<Q", data[:8])[0] % 8 == 0
    with safetensors.safe_open(path, "pt") as reader:
        assert reader.metadata() == {"format": "pt"}
        assert set(reader.keys()) == tensors.keys()
        for name, tensor in tensors.items():
            read, wanted = reader.get_tensor(name), tensor.float().contiguous()
            assert read.shape == wanted.shape
            assert torch.equal(read.view(torch.int32), wanted.view(torch.int32))


def test_an_exported_model_can_start_a_new_run(exported):
    model, folder = exported
    weights = train_llama.load_weights(str(folder))
    fresh = make_model(model.config.vocab_size,
                       tie_word_embeddings=model.config.tie_word_embeddings)
    torch.nn.init.zeros_(fresh.model.norm.weight)
    fresh.load_state_dict(weights)  # a file with tied embeddings has the matrix once
    ids = torch.arange(4, 20)[None]
    assert torch.equal(fresh(ids), model(ids))


# ---- writing ----

def content(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def head_of(folder) -> torch.Tensor:
    return safetensors.torch.load_file(folder / "model.safetensors")["lm_head.weight"]


@pytest.mark.parametrize("fatal", range(6))
def test_an_export_that_fails_leaves_the_model_of_before(fatal, tokenizer, tmp_path, monkeypatch):
    """The disk is full at the first, second, ... file."""
    model, writes = make_model(tokenizer.get_vocab_size()), []
    before, real = content(export(model, tokenizer, tmp_path)), train_llama.write_atomically

    def full(path, write, keep=""):
        writes.append(path)
        if len(writes) > fatal:
            raise UserError(f"cannot write {path}")
        return real(path, write, keep)

    monkeypatch.setattr(train_llama, "write_atomically", full)
    torch.nn.init.ones_(model.lm_head.weight)
    with pytest.raises(UserError, match="cannot write"):
        export(model, tokenizer, tmp_path)
    assert content(tmp_path / "model") == before
    monkeypatch.undo()
    assert torch.equal(head_of(export(model, tokenizer, tmp_path)), model.lm_head.weight)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_first_export_that_fails_leaves_no_model(tokenizer, tmp_path, monkeypatch):
    def half(tensors, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(train_llama, "write_safetensors", half)
    with pytest.raises(UserError, match="No space left"):
        export(make_model(tokenizer.get_vocab_size()), tokenizer, tmp_path)
    assert not (tmp_path / "model").exists()
    assert not list(tmp_path.rglob("*.safetensors"))


def test_exporting_over_a_model_replaces_all_of_it(tokenizer, tmp_path):
    model = make_model(tokenizer.get_vocab_size())
    export(model, tokenizer, tmp_path, loss=3.5)
    (tmp_path / "model" / "stray").touch()
    torch.nn.init.normal_(model.lm_head.weight)
    folder = export(model, tokenizer, tmp_path, loss=2.75)
    assert sorted(content(folder)) == [
        "README.md", "config.json", "generation_config.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json"]
    assert "2.75" in (folder / "README.md").read_text()
    assert torch.equal(head_of(folder), model.lm_head.weight)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


# ---- what a run leaves ----

def test_a_finished_run_has_exported_the_weights_of_its_checkpoint(finished):
    _, out_dir = finished
    weights = load_checkpoint(str(out_dir))["model"]
    read = safetensors.torch.load_file(out_dir / "model" / "model.safetensors")
    assert read.keys() == weights.keys()
    assert all(torch.equal(read[name], weights[name]) for name in weights)
    config = AutoConfig.from_pretrained(out_dir / "model")
    assert config.max_position_embeddings == TINY_RUN["seq_len"]


def card_of(out_dir) -> tuple[str, list[float], dict[str, str]]:
    """A model's card, the numbers in it, and the last row of the run's metrics."""
    card = (out_dir / "model" / "README.md").read_text()
    with open(out_dir / "metrics.csv") as file:
        last = list(csv.DictReader(file))[-1]
    return card, [float(n.replace(",", "")) for n in re.findall(r"\d(?:,?\d)*\.?\d*", card)], last


def test_the_model_card_says_in_ten_lines_what_the_model_is(finished):
    _, out_dir = finished
    card, numbers, last = card_of(out_dir)
    assert len(card.splitlines()) <= 10
    assert "AutoModelForCausalLM.from_pretrained" in card
    assert int(last["tokens"]) in numbers
    for name in ("loss", "val_loss"):
        assert any(abs(n - float(last[name])) < 0.01 for n in numbers), name
    for name in ("dataset", "learning_rate", "batch_size", "seq_len", "optimizer", "seed"):
        assert name in card, name


def test_a_model_folder_that_was_removed_comes_back_with_the_same_command(finished):
    flags, out_dir = finished
    (out_dir / "model").rename(out_dir / "kept")
    train_llama.main(flags)
    back, kept = content(out_dir / "model"), content(out_dir / "kept")
    assert back.pop("README.md") and kept.pop("README.md")
    assert back == kept
    _, numbers, last = card_of(out_dir)
    assert any(abs(n - float(last["val_loss"])) < 0.01 for n in numbers)


def test_the_check_for_other_versions_of_transformers_passes_here(tmp_path):
    export_check.write(tmp_path)
    assert export_check.check(tmp_path) == []
