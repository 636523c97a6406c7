"""The tokenizer: no text is lost, no text becomes a control token, the same bytes every time."""
import base64
import json
import os
import random
import re
import runpy
import sys

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

import train_llama
import train_tokenizer
from cases import CONTROL_WORDS, UNICODE, WHITESPACE, lines, write
from conftest import as_flags, run_script
from train_llama import (BOT, EOT, SPECIAL_TOKENS, UNK, TrainConfig, UserError, load_tokenizer,
                         prepare_tokens)

ASCII = ["the quick brown fox jumps over the lazy dog, " * 3 + str(i) for i in range(200)]


@pytest.fixture(scope="module")
def ascii_tokenizer(tmp_path_factory):
    """A tokenizer of 400 tokens that has seen nothing but ASCII, through its file."""
    path = tmp_path_factory.mktemp("ascii") / "bpe.json"
    train_tokenizer.train_tokenizer(ASCII, 400, 2).save(str(path))
    return load_tokenizer(str(path))


@pytest.fixture
def learn(corpus, tmp_path):
    """Run the script on the shared corpus; keyword arguments change settings."""
    path = tmp_path / "learnt.json"

    def run(*flags: str, **changes):
        train_tokenizer.main([*flags, *as_flags(
            dict(dataset=corpus, vocab_size=300, val_every=10, tokenizer_path=path) | changes)])
        return path
    return run


# ---- Nothing is lost -----------------------------------------------------------------------------

ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]))
PIECES = st.lists(st.sampled_from([
    *SPECIAL_TOKENS, "[BOT", "EOT]", " ", "  ", "\t", "\r", "\n", "\r\n", "\x00", "\x1b[0m", "\x7f",
    "\x85", "\xa0", "\xad", "\u200d", "\u200b", "\ufeff", "\ufffd", "\u2028", "\u202e", "e\u0301",
    "\u0301", "\u212b", "\ufb01", "\uff12", "\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "\U0001f642\U0001f3fd", "\U0001f1e9\U0001f1ea", "\U0010ffff", "\u65e5\u672c", "\ud55c\u1112",
    "\u05e9\u05c1", "\u0627\u0644", "the", " fox", "123", "'s", "\u0130", "\u00df", "\u01c5"]))
TEXTS = st.one_of(ANY_TEXT, PIECES.map("".join), st.binary().map(lambda b: b.decode("latin-1")))


def assert_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert all(UNK < id < tokenizer.get_vocab_size() for id in ids)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(tokenizer.encode(text).ids) == text  # [BOT] is not shown


@given(TEXTS)
@settings(max_examples=500, deadline=None)
def test_every_text_comes_back_from_its_tokens(ascii_tokenizer, text):
    assert_comes_back(ascii_tokenizer, text)


@pytest.mark.parametrize("text", [UNICODE, WHITESPACE, CONTROL_WORDS, "", " ", "\x00"])
def test_texts_that_lose_something_elsewhere_come_back(text, ascii_tokenizer, tokenizer_path):
    assert_comes_back(ascii_tokenizer, text)
    assert_comes_back(load_tokenizer(str(tokenizer_path)), text)


def test_characters_of_every_script_come_back(ascii_tokenizer):
    points = [*range(0x3100), *range(0x3100, 0xD800, 37), *range(0xE000, 0x110000, 37)]
    assert_comes_back(ascii_tokenizer, "".join(map(chr, points)))


def test_all_256_bytes_are_tokens_even_of_a_tiny_text():
    tokenizer = train_tokenizer.train_tokenizer(["a"], 300, 2)
    vocabulary = tokenizer.get_vocab()
    assert set(pre_tokenizers.ByteLevel.alphabet()) <= set(vocabulary)
    assert sorted(vocabulary.values()) == list(range(260))


# ---- Control tokens ------------------------------------------------------------------------------

def test_the_control_tokens_are_the_first_four_ids(ascii_tokenizer):
    for id, token in enumerate(["[PAD]", "[BOT]", "[EOT]", "[UNK]"]):
        assert ascii_tokenizer.token_to_id(token) == id
        assert ascii_tokenizer.id_to_token(id) == token


def test_bot_stands_in_front_of_every_text_exactly_once(ascii_tokenizer):
    alone = ascii_tokenizer.encode("fox", add_special_tokens=False).ids
    other = ascii_tokenizer.encode("dog", add_special_tokens=False).ids
    assert ascii_tokenizer.encode("fox").ids == [BOT, *alone]
    assert ascii_tokenizer.encode("fox", "dog").ids == [BOT, *alone, BOT, *other]
    assert ascii_tokenizer.encode("").ids == [BOT]
    for encoding in ascii_tokenizer.encode_batch(["fox", "dog"]):
        assert encoding.ids.count(BOT) == 1 and encoding.ids[0] == BOT


@given(PIECES.map("".join))
@settings(max_examples=100, deadline=None)
def test_control_words_in_a_text_are_text(ascii_tokenizer, text):
    text = f"[BOT]{text}[EOT] [PAD][UNK]"
    assert min(ascii_tokenizer.encode(text, add_special_tokens=False).ids) > UNK
    (encoding,) = ascii_tokenizer.encode_batch_fast([text], add_special_tokens=False)
    assert min(encoding.ids) > UNK
    assert ascii_tokenizer.encode(text, text).ids.count(BOT) == 2


def test_control_words_are_learnt_from_like_other_words(tmp_path, learn):
    path = write(tmp_path, "a.jsonl", lines(*[dict(text="see [EOT] and [EOT]")] * 50))
    tokenizer = load_tokenizer(str(learn(dataset=path, val_every=0)))
    assert_comes_back(tokenizer, "see [EOT] and [EOT]")
    assert "EOT" in tokenizer.encode("[EOT]", add_special_tokens=False).tokens


# ---- The same bytes every time -------------------------------------------------------------------

def test_training_twice_and_with_one_thread_writes_the_same_bytes(learn, corpus, tmp_path):
    first = learn().read_bytes()
    assert learn().read_bytes() == first
    flags = as_flags(dict(dataset=corpus, vocab_size=300, val_every=10,
                          tokenizer_path=tmp_path / "alone.json"))
    process = run_script("train_tokenizer.py", *flags, cwd=tmp_path, RAYON_NUM_THREADS="1",
                         TOKENIZERS_PARALLELISM="false", PYTHONHASHSEED="5")
    assert process.returncode == 0, process.stderr
    assert (tmp_path / "alone.json").read_bytes() == first


def test_the_order_of_the_documents_does_not_matter():
    texts = ASCII + [UNICODE, WHITESPACE]
    first = train_tokenizer.train_tokenizer(texts, 400, 2).to_str()
    assert train_tokenizer.train_tokenizer(reversed(texts), 400, 2).to_str() == first


# ---- What is read --------------------------------------------------------------------------------

@pytest.fixture
def pulled(monkeypatch):
    """The rows that the script has taken from a data set of a million."""
    numbers = []

    def rows():
        for i in range(1_000_000):
            numbers.append(i)
            yield {"text": f"document {i} of many"}
    monkeypatch.setattr(train_tokenizer, "open_rows", lambda *arguments: (rows(), None))
    return numbers


@pytest.mark.parametrize("documents", [2, 17, 1000])
def test_no_more_rows_are_read_than_documents_are_wanted(documents, pulled, learn):
    learn(max_documents=documents)
    assert pulled == list(range(documents))


def test_the_held_out_documents_are_left_out(tmp_path, learn, capsys):
    texts = ["zyxzyx " * 50 if i % 3 == 0 else f"plain words {i}" for i in range(9)]
    path = write(tmp_path, "a.jsonl", lines(*(dict(text=text) for text in texts)))
    size = sum(len(text) for i, text in enumerate(texts) if i % 3)
    vocabulary = load_tokenizer(str(learn(dataset=path, val_every=3))).get_vocab()
    assert "zy" not in vocabulary and "words" in "".join(vocabulary)
    assert f"{size} bytes" in capsys.readouterr().out
    assert "zyxzyx" in load_tokenizer(str(learn(dataset=path, val_every=0))).get_vocab()


def test_min_frequency_is_how_often_a_pair_must_occur():
    texts = ["abab"] * 3 + ["xyxy"] * 2  # "ab" six times, "xy" four times
    for frequency, learnt in ((4, {"ab", "xy"}), (5, {"ab"}), (7, set())):
        vocabulary = train_tokenizer.train_tokenizer(texts, 300, frequency).get_vocab()
        assert {token for token in vocabulary if token in ("ab", "xy")} == learnt


def test_the_vocabulary_is_as_large_as_asked_and_starts_like_a_larger_one():
    small = train_tokenizer.train_tokenizer(ASCII, 280, 2).get_vocab()
    large = train_tokenizer.train_tokenizer(ASCII, 300, 2).get_vocab()
    assert (len(small), len(large)) == (280, 300)
    assert small == {token: id for token, id in large.items() if id < 280}


def test_tokens_do_not_reach_over_words():
    tokenizer = train_tokenizer.train_tokenizer(["good morning"] * 100, 400, 2)
    assert tokenizer.encode("good morning", add_special_tokens=False).tokens == [
        "good", "\u0120morning"]  # the space belongs to the word behind it


# ---- What is said and written --------------------------------------------------------------------

def test_a_vocabulary_smaller_than_asked_is_said_and_no_failure(learn, capsys):
    size = load_tokenizer(str(learn(vocab_size=5000))).get_vocab_size()
    assert 260 < size < 5000
    assert re.search(rf"\b{size}\b.*fewer.*5,000", capsys.readouterr().out)


def test_the_report_tells_size_bytes_per_token_a_sentence_and_the_round_trip(
        learn, corpus, capsys):
    tokenizer = load_tokenizer(str(learn(val_every=0, vocab_size=290)))
    texts = [json.loads(line)["text"] for line in open(corpus / "documents.jsonl")]
    report = capsys.readouterr().out
    assert "290 tokens" in report and "fewer" not in report
    assert f"{sum(map(len, texts)):,} bytes" in report
    tokens = sum(len(tokenizer.encode(text).ids) for text in texts)
    assert f"{sum(map(len, texts)) / tokens:.2f} bytes a token" in report
    sentence = next(line for line in report.splitlines() if line.startswith("["))
    shown = "".join(eval(sentence, {"__builtins__": {}})).replace("\u0120", " ")
    assert shown == "The quick brown fox counts to 1,000."
    assert f"{len(texts)} texts come back" in report


def test_a_failure_while_writing_leaves_the_old_file(learn, monkeypatch, tmp_path):
    path = learn()
    before, files = path.read_bytes(), sorted(tmp_path.iterdir())

    def no_space(descriptor):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(UserError, match="learnt.json.*No space left on device"):
        learn(vocab_size=280)
    assert path.read_bytes() == before
    assert sorted(tmp_path.iterdir()) == files


def lossy(texts, vocab_size, min_frequency) -> Tokenizer:
    """A tokenizer as many scripts make it: normalised, and without all bytes."""
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL_TOKENS, show_progress=False))
    return tokenizer


def test_a_tokenizer_that_loses_text_fails_loudly(learn, monkeypatch):
    monkeypatch.setattr(train_tokenizer, "train_tokenizer", lossy)
    with pytest.raises(AssertionError, match="lost|special"):
        learn()


def test_the_check_of_the_round_trip_finds_lost_text_and_control_ids(ascii_tokenizer):
    check = train_tokenizer.check_round_trip
    check(ascii_tokenizer, ["", "fox", UNICODE, WHITESPACE, CONTROL_WORDS])
    for text in ("\ufb01", "\u00e9"):
        with pytest.raises(AssertionError):
            check(lossy(ASCII, 400, 2), ["fox", text])
    as_control = Tokenizer.from_str(ascii_tokenizer.to_str())
    assert not as_control.encode_special_tokens
    with pytest.raises(AssertionError):
        check(as_control, ["fox", CONTROL_WORDS])


# ---- Rows that take others for ever --------------------------------------------------------------

def test_pathological_rows_train_and_encode_and_nothing_is_dropped(tmp_path):
    chance = random.Random(1)
    minified = json.dumps({f"k{i}": [i, {"v": "x" * (i % 9)}] for i in range(10_000)},
                          separators=(",", ":"))
    texts = ["a" * 1_000_000, base64.b64encode(chance.randbytes(1_500_000)).decode(), minified,
             " " * 100_000 + "end", "\U0001f680" * 50_000, *ASCII * 5]
    path = write(tmp_path, "rows.jsonl", lines(*(dict(text=text) for text in texts)))
    flags = as_flags(dict(dataset=path, vocab_size=1000, val_every=0,
                          tokenizer_path=tmp_path / "bpe.json"))
    process = run_script("train_tokenizer.py", *flags, cwd=tmp_path, timeout=100)
    assert process.returncode == 0, process.stderr
    assert f"{sum(len(text.encode()) for text in texts):,} bytes" in process.stdout
    tokenizer = load_tokenizer(str(tmp_path / "bpe.json"))
    (tmp_path / "tokens").mkdir()
    facts = prepare_tokens(TrainConfig(dataset=str(path), val_every=0,
                                       cache_dir=str(tmp_path / "tokens")), tokenizer, 10**9)
    assert facts["documents"] == len(texts) and not facts["skipped"]
    ids = train_llama.np.fromfile(facts["train"]["path"], "<u2")
    documents = train_llama.np.split(ids, train_llama.np.flatnonzero(ids == BOT))[1:]
    assert all(document[-1] == EOT for document in documents)
    assert tokenizer.decode_batch([document[1:-1].tolist() for document in documents],
                                  skip_special_tokens=False) == texts


# ---- Flags ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("flag, value", [
    ("vocab_size", 0), ("vocab_size", 259), ("vocab_size", "many"), ("min_frequency", 0),
    ("max_documents", 0), ("max_documents", -1), ("val_every", 1), ("val_every", -1),
    ("tokenizer_path", "no/such/folder/bpe.json"), ("dataset", "no/such/*.txt"),
    ("text_column", "body"), ("vocabulary", 300)])
def test_a_wrong_flag_gives_one_sentence_that_names_it(flag, value, learn, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        learn(**{flag: value})
    sentence = stopped.value.code
    assert isinstance(sentence, str) and "\n" not in sentence.strip()
    assert f"--{flag}" in sentence


def test_the_smallest_vocabulary_is_the_bytes_and_the_control_tokens(learn):
    tokenizer = load_tokenizer(str(learn(vocab_size=260)))
    assert tokenizer.get_vocab_size() == 260
    assert len(tokenizer.encode("fox \u00e9", add_special_tokens=False).ids) == 6


def test_the_demo_is_other_defaults_and_flags_override_them(learn, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = learn("--demo", vocab_size=270)
    assert load_tokenizer(str(path)).get_vocab_size() == 270
    assert not (tmp_path / "demo_bpe.json").exists()
    parse = train_tokenizer.parse_flags
    chosen = parse(["--vocab-size", "270", "--demo"], [train_tokenizer.TokenizerConfig],
                   train_tokenizer.DEMO)
    assert (chosen.vocab_size, chosen.val_every, chosen.dataset, chosen.tokenizer_path) == (
        270, train_llama.DEMO["val_every"], train_llama.DEMO["dataset"],
        train_llama.DEMO["tokenizer_path"])


def test_the_recipe_is_the_default():
    config = train_tokenizer.TokenizerConfig()
    assert (config.vocab_size, config.min_frequency, config.max_documents) == (50_000, 2, 100_000)
    for name in ("dataset", "dataset_config", "text_column", "val_every", "tokenizer_path"):
        assert getattr(config, name) == getattr(TrainConfig(), name)


def test_ctrl_c_ends_the_script_without_a_traceback(tmp_path, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(train_llama, "open_rows", interrupted)
    monkeypatch.setattr(sys, "argv", ["train_tokenizer.py", "--tokenizer_path",
                                      str(tmp_path / "bpe.json")])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(train_tokenizer.__file__, run_name="__main__")
    assert stop.value.code == 130 and not list(tmp_path.iterdir())
