"""The data: what becomes a document, the token files, the rows and their order."""
import datetime
import gzip
import itertools
import json
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import types
import zlib
from collections import Counter
from pathlib import Path
from typing import Iterable

import datasets
import huggingface_hub
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings, strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

import train_llama
import train_tokenizer
from cases import BAD, GOOD, compress, damage_column, lines, write, write_parquet
from conftest import ROOT, as_flags, run_script
from train_llama import (BOT, EOT, PAD, SPECIAL_TOKENS, UNK, PretrainingDataset, TrainConfig,
                         UserError, find_files, load_documents, load_tokenizer, open_rows,
                         prepare_tokens, rows_of_step)

ALL = 10**9  # more tokens than any corpus here has


def read(dataset, text_column="text") -> tuple[list[str], Counter]:
    """The documents of a local data set, and how many rows were skipped for what reason."""
    skipped = Counter()
    rows, _ = open_rows(str(dataset), "", text_column)
    return list(load_documents(rows, text_column, skipped)), skipped


def decode(path: str, tokens: int, tokenizer: Tokenizer) -> list[str]:
    """The texts in a token file, which must be [BOT] ids [EOT] and nothing else, end to end."""
    ids = np.fromfile(path, path.rpartition(".")[2])
    assert len(ids) == tokens
    before, *documents = np.split(ids, np.flatnonzero(ids == BOT))
    assert len(before) == 0
    assert all(ids[-1] == EOT and (ids[1:-1] > UNK).all() for ids in documents)
    return tokenizer.decode_batch([ids[1:-1].tolist() for ids in documents],
                                  skip_special_tokens=False)


def stop(main, flags: list[str]) -> str:
    """The one sentence with which a script stops."""
    with pytest.raises(SystemExit) as stopped:
        main(flags)
    sentence = stopped.value.code
    assert isinstance(sentence, str) and sentence.strip() and "\n" not in sentence.strip()
    return sentence


@pytest.fixture(scope="module")
def tokenizer(tokenizer_path):
    return load_tokenizer(str(tokenizer_path))


@pytest.fixture
def learn_flags(tmp_path):
    """Flags of train_tokenizer.py; keyword arguments change settings."""
    return lambda **changes: as_flags(dict(vocab_size=300, val_every=0,
                                           tokenizer_path=tmp_path / "learnt.json") | changes)


@pytest.fixture
def step_flags(run_flags, monkeypatch):
    """Flags of a training run of one short step."""
    monkeypatch.setattr(train_llama, "measure_peak", lambda device, dtype: 1e12)  # seconds
    return lambda **changes: run_flags(**dict(
        val_every=0, seq_len=8, train_tokens=8, batch_size=1, micro_batch_size=1, warmup_steps=0
    ) | changes)


@pytest.fixture
def no_model(monkeypatch):
    """Whatever stops a run must stop it before a model is built."""
    def build(config):
        raise AssertionError("a model was built")
    monkeypatch.setattr(train_llama, "LlamaForPretraining", build)


@pytest.fixture
def written(tmp_path, tokenizer):
    """What a run has left in its cache folder: the training and the validation documents."""
    def read_back():
        (path,) = (tmp_path / "tokens").glob("*.json")
        facts = json.loads(path.read_text())
        return [decode(str(tmp_path / "tokens" / Path(facts[split]["path"]).name),
                       facts[split]["tokens"], tokenizer) for split in ("train", "val")]
    return read_back


@pytest.fixture
def prepare(tmp_path, tokenizer):
    """Write the token files of a data set under tmp_path/tokens; returns their facts."""
    (tmp_path / "tokens").mkdir()
    default = tokenizer

    def run(dataset, needed=ALL, tokenizer=default, **changes) -> dict:
        config = TrainConfig(**dict(dataset=str(dataset), dataset_config="", val_every=5,
                                    cache_dir=str(tmp_path / "tokens")) | changes)
        return prepare_tokens(config, tokenizer, needed)
    return run


# ---- Inputs that have broken such scripts, through both scripts ----------------------------------

@pytest.mark.parametrize("case", GOOD)
def test_dirty_input_gives_its_documents_and_training_says_what_was_odd(
        case, tmp_path, step_flags, written, capsys):
    name, content, documents, said = GOOD[case]
    train_llama.main(step_flags(dataset=write(tmp_path, name, content)))
    assert written() == [documents, []]
    output = capsys.readouterr().out
    assert all(word in output for word in said)


@pytest.mark.parametrize("case", GOOD)
def test_a_tokenizer_learns_the_same_documents_from_dirty_input(
        case, tmp_path, learn_flags, capsys):
    name, content, documents, said = GOOD[case]
    train_tokenizer.main(learn_flags(dataset=write(tmp_path, name, content)))
    output = capsys.readouterr().out
    assert f"{sum(len(text.encode()) for text in documents):,} bytes" in output
    assert all(word in output for word in said)
    learnt = load_tokenizer(str(tmp_path / "learnt.json"))
    for text in documents:
        ids = learnt.encode(text, add_special_tokens=False).ids
        assert min(ids) > UNK and learnt.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("case", BAD)
def test_input_without_text_stops_training_with_a_sentence(
        case, tmp_path, step_flags, no_model, capsys):
    name, content, named = BAD[case]
    sentence = stop(train_llama.main, step_flags(dataset=write(tmp_path, name, content)))
    said = capsys.readouterr().out + sentence
    assert name in sentence and all(word in said for word in named)


@pytest.mark.parametrize("case", BAD)
def test_input_without_text_stops_the_tokenizer_with_a_sentence(
        case, tmp_path, learn_flags, capsys):
    name, content, named = BAD[case]
    sentence = stop(train_tokenizer.main, learn_flags(dataset=write(tmp_path, name, content)))
    said = capsys.readouterr().out + sentence
    assert name in sentence and all(word in said for word in named)
    assert not (tmp_path / "learnt.json").exists()


@pytest.mark.parametrize("script", ["train_llama.py", "train_tokenizer.py"])
def test_a_stop_is_one_line_on_stderr_and_an_exit_status(
        script, tmp_path, step_flags, learn_flags):
    name, content, _ = BAD["other_column"]
    path = write(tmp_path, name, content)
    flags = step_flags(dataset=path) if script == "train_llama.py" else learn_flags(dataset=path)
    process = run_script(script, *flags, cwd=tmp_path)
    assert process.returncode == 1
    (line,) = process.stderr.strip().splitlines()
    assert "--text_column" in line and "content" in line


def test_the_text_may_stand_in_another_column(tmp_path, step_flags, learn_flags, written, capsys):
    name, content, _ = BAD["other_column"]
    path = write(tmp_path, name, content)
    train_llama.main(step_flags(dataset=path, text_column="content"))
    documents = ["the text stands under another name", "second row"]
    assert written() == [documents, []]
    train_tokenizer.main(learn_flags(dataset=path, text_column="content"))
    assert f"{sum(map(len, documents))} bytes" in capsys.readouterr().out


def test_a_compressed_file_goes_through_both_scripts(
        tmp_path, step_flags, learn_flags, written, capsys):
    content = lines(dict(text="inside a gzip file"), dict(text="second"))
    path = write(tmp_path, "packed.jsonl.gz", gzip.compress(content))
    train_llama.main(step_flags(dataset=path))
    assert written() == [["inside a gzip file", "second"], []]
    train_tokenizer.main(learn_flags(dataset=path))
    assert "24 bytes" in capsys.readouterr().out


def make_fineweb(folder: Path) -> list[str]:
    """Two parquet files with FineWeb's columns, in its sub-folders; returns the 300 texts."""
    texts = [f"Web page number {i}. " + "Sentences about rivers. " * (i % 7) for i in range(300)]
    for i in (0, 150):
        write_parquet(folder / "sample" / "tiny" / f"{i // 150:03}_00000.parquet", dict(
            text=texts[i : i + 150], id=[f"<urn:uuid:{j}>" for j in range(150)],
            dump=["CC-MAIN-2024-10"] * 150, url=["https://example.org"] * 150,
            date=["2024-02-21T00:00:00Z"] * 150, file_path=["s3://bucket/x.warc.gz"] * 150,
            language=["en"] * 150, language_score=[0.97] * 150, token_count=[14] * 150),
            row_group_size=50)
    return texts


def test_a_folder_like_fineweb_goes_through_both_scripts(
        tmp_path, step_flags, learn_flags, written, capsys):
    texts = make_fineweb(tmp_path / "fineweb")
    train_llama.main(step_flags(dataset=tmp_path / "fineweb", val_every=100))
    assert written() == [[text for i, text in enumerate(texts) if i % 100], texts[::100]]
    train_tokenizer.main(learn_flags(dataset=tmp_path / "fineweb"))
    assert f"{sum(map(len, texts)):,} bytes" in capsys.readouterr().out


@pytest.fixture
def mixed(tmp_path):
    folder = tmp_path / "mixed"
    write(folder, "a.jsonl", lines(dict(text="json row", meta=dict(k=1))))
    write(folder, "b.jsonl", lines(dict(text="json row two", meta="a string here")))
    write(folder, "notes.md", "# a note\n")
    write(folder, ".hidden", "not data")
    return folder


def test_mixed_kinds_of_files_stop_both_scripts(mixed, step_flags, learn_flags, no_model):
    for main, flags in ((train_llama.main, step_flags), (train_tokenizer.main, learn_flags)):
        sentence = stop(main, flags(dataset=mixed))
        assert "json" in sentence and "text" in sentence and str(mixed) in sentence


@pytest.mark.parametrize("script", ["train_llama", "train_tokenizer"])
def test_both_scripts_list_the_files_that_a_pattern_takes(
        script, mixed, step_flags, learn_flags, capsys):
    flags = step_flags if script == "train_llama" else learn_flags
    sys.modules[script].main(flags(dataset=mixed / "*.jsonl"))
    output = capsys.readouterr().out
    assert "a.jsonl" in output and "b.jsonl" in output
    assert "notes.md" not in output and ".hidden" not in output


def test_rows_of_files_whose_other_column_differs_are_all_read(mixed, step_flags, written):
    train_llama.main(step_flags(dataset=mixed / "*.jsonl"))
    assert written() == [["json row", "json row two"], []]


def test_one_short_document_trains_one_filled_up_row(tmp_path, step_flags, tokenizer, written):
    path = write(tmp_path, "short.txt", "alpha beta")
    train_llama.main(step_flags(dataset=path, seq_len=512, max_position_embeddings=512))
    assert written() == [["alpha beta"], []]
    assert (tmp_path / "out" / "model" / "model.safetensors").exists()


def test_too_few_sequences_for_a_step_stop_with_a_sentence(tmp_path, step_flags, no_model):
    path = write(tmp_path, "short.txt", "alpha beta")
    sentence = stop(train_llama.main, step_flags(
        dataset=path, seq_len=512, max_position_embeddings=512, batch_size=8, train_tokens=10**6))
    assert "--batch_size 8" in sentence and "--seq_len 512" in sentence


def test_three_documents_with_a_validation_share_train_and_evaluate(tmp_path, step_flags, written):
    path = write(tmp_path, "three.jsonl", lines(*(dict(text=text) for text in ("a", "b", "c"))))
    train_llama.main(step_flags(dataset=path, val_every=2))
    assert written() == [["b"], ["a", "c"]]
    header, *rows = (tmp_path / "out" / "metrics.csv").read_text().splitlines()
    loss = dict(zip(header.split(","), rows[-1].split(",")))["val_loss"]
    assert 0 < float(loss) < 100


def test_a_single_document_that_is_held_out_stops_with_a_sentence(
        tmp_path, step_flags, learn_flags, no_model):
    path = write(tmp_path, "one.txt", "the only document")
    for main, flags in ((train_llama.main, step_flags), (train_tokenizer.main, learn_flags)):
        assert "--val_every 10" in stop(main, flags(dataset=path, val_every=10))


# ---- What is a document --------------------------------------------------------------------------

def test_every_unusable_json_row_is_skipped_and_counted_by_reason(tmp_path):
    values = ["null", "NaN", "-Infinity", "12", "1.5", "1e999", "true", '["a list"]', '{"a": "b"}',
              '""', '" \\n\\t\\u3000 "']
    content = "".join('{"text": %s}\n' % value for value in values) + (
        '{"other": "text"}\n[1, 2]\n"text"\n17\nnull\n{"text": "cut of\n{"text": "a"} {}\n'
        + "[" * 100_000 + '\n{"text": "good"}\n')
    documents, skipped = read(write(tmp_path, "rows.jsonl", content))
    assert documents == ["good"]
    assert skipped.total() == 11 + 8
    # a number, true, a list, an object; null and no text; blanks; floats; lines of no JSON object
    assert sorted(skipped.values()) == [1, 1, 1, 1, 2, 2, 4, 7]


NO_TEXT = {
    "null": pa.nulls(3), "number": pa.array([1, 2, 3]), "float": pa.array([1.0, np.nan, np.inf]),
    "bool": pa.array([True, False, True]), "list": pa.array([["a"], ["b", "c"], []]),
    "bytes": pa.array([b"text", b"\xff", b""]), "struct": pa.array([{"text": "a"}] * 3),
    "date": pa.array([datetime.date(2024, 1, 1)] * 3), "blank": pa.array(["", " ", "\n"]),
}


@pytest.mark.parametrize("kind", NO_TEXT)
def test_every_unusable_parquet_value_is_skipped_and_counted(kind, tmp_path):
    documents, skipped = read(write_parquet(tmp_path / "rows.parquet", dict(text=NO_TEXT[kind])))
    assert documents == [] and list(skipped.values()) == [3]


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "dictionary"])
def test_every_text_type_of_parquet_is_read_and_nulls_are_skipped(kind, tmp_path):
    texts = ["one", None, "", "tw\u00f6", "one"]
    column = (pa.array(texts).dictionary_encode() if kind == "dictionary"
              else pa.array(texts, getattr(pa, kind)()))
    documents, skipped = read(write_parquet(tmp_path / "rows.parquet", dict(text=column)))
    assert documents == ["one", "tw\u00f6", "one"]
    assert sorted(skipped.values()) == [1, 1]


def test_parquet_files_may_differ_in_their_type_of_text_and_in_all_else(tmp_path):
    types_of_text = [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())]
    others = [dict(meta=[1, 2]), dict(meta=["a", None]), {}]
    for i, (kind, other) in enumerate(zip(types_of_text, others)):
        text = pa.array([f"first of {i}", f"second of {i}"], kind)
        write_parquet(tmp_path / "d" / f"{i}.parquet", {"text": text, **other})
    assert read(tmp_path / "d")[0] == [f"{nth} of {i}" for i in range(3)
                                       for nth in ("first", "second")]


def test_only_the_text_column_of_parquet_is_read(tmp_path):
    path = write_parquet(tmp_path / "d" / "broken.parquet",
                         dict(other=[f"{i:09}" for i in range(40)], text=["a", "b"] * 20),
                         compression="none", use_dictionary=False, row_group_size=10)
    damage_column(path, "other")
    with pytest.raises(OSError):
        pq.read_table(path)
    assert read(path)[0] == ["a", "b"] * 20


@pytest.mark.parametrize("compression", ["none", "snappy", "gzip", "zstd"])
def test_many_row_groups_and_any_compression_of_parquet_are_read_in_order(compression, tmp_path):
    texts = [f"document {i}" for i in range(2500)]
    path = write_parquet(tmp_path / "rows.parquet", dict(text=texts), row_group_size=7,
                         compression=compression)
    assert read(path) == (texts, Counter())


def test_a_parquet_file_may_have_the_signs_of_a_pattern_in_its_name(tmp_path):
    write_parquet(tmp_path / "r1.parquet", dict(text=["another"]))
    assert read(write_parquet(tmp_path / "r[12]*?.parquet", dict(text=["this"])))[0] == ["this"]


def test_a_parquet_column_of_another_name_must_be_named(tmp_path):
    path = write_parquet(tmp_path / "rows.parquet", dict(content=["a"], id=[1]))
    with pytest.raises(UserError, match="--text_column text .*content, id"):
        read(path)
    assert read(path, "content")[0] == ["a"]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.py", "a.rst", "a"])
def test_a_text_file_is_one_document_in_any_container(name, suffix, tmp_path):
    text = "caf\u00e9\r\n\n\ttwo\rthree \U0001f680\n\nno line end"
    path = write(tmp_path, name + suffix, compress(text.encode(), suffix))
    assert read(path) == ([text], Counter())


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.ndjson"])
def test_json_lines_are_documents_in_any_container(name, suffix, tmp_path):
    texts = ["caf\u00e9\r\ntwo", "line \u2028 separator \x85 next", "\U0001f680 [EOT]"]
    content = b"".join(json.dumps({"text": text}, ensure_ascii=ascii).encode() + b"\n"
                       for text in texts for ascii in (True, False))
    path = write(tmp_path, name + suffix, compress(content, suffix))
    assert read(path) == ([text for text in texts for _ in range(2)], Counter())


def test_gzip_members_that_were_joined_are_all_read(tmp_path):
    path = write(tmp_path, "a.jsonl.gz", b"".join(
        gzip.compress(lines(dict(text=text))) for text in ("one", "two")))
    assert read(path)[0] == ["one", "two"]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_compressed_file_that_was_cut_off_stops_with_a_sentence(suffix, tmp_path):
    whole = compress(lines(*(dict(text=str(i) * 50) for i in range(999))), suffix)
    with pytest.raises(UserError, match="[Tt]runcated"):
        read(write(tmp_path, "a.jsonl" + suffix, whole[: len(whole) // 2]))


def test_bytes_that_are_not_text_in_parquet_stop_with_a_sentence(tmp_path):
    column = pa.Array.from_buffers(pa.string(), 1, pa.array([b"caf\xe9"]).buffers())
    with pytest.raises(UserError, match="utf-8"):
        read(write_parquet(tmp_path / "rows.parquet", dict(text=column)))


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path):
    assert read(write(tmp_path, "a.txt", b"\xef\xbb\xbftext"))[0] == ["text"]


LONG = {
    "lines": "".join(f"line {i} \u00e9\U0001f680 " + "x" * (i % 90) + "\n" for i in range(6000)),
    "crlf": "".join(f"line {i}\r\n" for i in range(30_000)),
    "cr": "".join(f"line {i}\r" for i in range(30_000)),
    "one giant line": "ab cd " * 500_000,
    "one giant word": "a" * 2_500_000,
    "exactly two pieces": ("x" * 65_535 + "\n") * 2,
    "blank lines at the cut": "x" * 65_530 + "\n" * 12 + "y" * 65_530,
}


@pytest.mark.parametrize("kind", LONG)
def test_a_long_text_is_cut_after_line_ends_and_nothing_is_lost(kind, tmp_path):
    documents, skipped = read(write(tmp_path, "long.txt", LONG[kind]))
    assert "".join(documents) == LONG[kind] and not skipped
    if kind in ("lines", "crlf"):
        assert all(text.endswith("\n") for text in documents)
        assert all(65_536 <= len(text) < 65_536 + 200 for text in documents[:-1])
        assert len(documents) > 3
    assert max(map(len, documents)) <= 65_536 + 1_000_000


def test_a_text_below_64_kb_is_not_cut(tmp_path):
    text = "line\n" * 13_000
    assert read(write(tmp_path, "a.txt", text))[0] == [text]


@given(st.lists(st.one_of(st.none(), st.integers(), st.text(
    st.characters(categories=["L", "N", "P", "Z", "Cc", "Cs"])))))
@settings(max_examples=100, deadline=None)
def test_documents_are_the_texts_with_a_mark_for_every_broken_character(values):
    values = [value + "x" * 5 * len(value) if isinstance(value, str) else value
              for value in values]  # what is mostly broken may be no text at all
    skipped, texts = Counter(), [value for value in values if isinstance(value, str)]
    kept = list(load_documents([{"text": value} for value in values], "text", skipped))
    assert kept == ["".join("\ufffd" if 0xD800 <= ord(c) < 0xE000 else c for c in text)
                    for text in texts if text.strip()]


def test_a_short_text_that_was_cut_in_the_middle_of_a_character_is_kept(tmp_path):
    assert read(write(tmp_path, "a.jsonl", b'{"text": "ok \\ud83d"}\n'))[0] == ["ok \ufffd"]


# ---- Which files ---------------------------------------------------------------------------------

def test_a_folder_gives_all_files_below_it_sorted_and_none_that_is_hidden(tmp_path):
    names = ["a.txt", "b/c d.txt", "b/e/f.md", "g.txt.gz", "\u00fcn\u00efc\u00f6de \u65e5.txt"]
    for name in names + [".hidden.txt", ".git/config", "b/.cache/x.txt"]:
        write(tmp_path / "d [1] *", name, "text")
    files, kind = find_files(str(tmp_path / "d [1] *"))
    assert files == sorted(str(tmp_path / "d [1] *" / name) for name in names)
    assert kind == "text"


def test_files_with_spaces_and_other_letters_in_their_names_are_read(tmp_path):
    for i, name in enumerate(["a b.txt", "\u00fcn\u00efc\u00f6de.txt", "\u65e5\u672c\u8a9e.txt"]):
        write(tmp_path / "d \u00e9", name, f"text {i}")
    assert read(tmp_path / "d \u00e9")[0] == ["text 0", "text 1", "text 2"]


def test_a_pattern_a_relative_path_and_the_home_folder_find_files(tmp_path, monkeypatch):
    for name in ("x/a.md", "x/y/b.md", "x/y/c.txt", "d.md"):
        write(tmp_path, name, "text")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_files("x/**/*.md")[0] == ["x/a.md", "x/y/b.md"]
    assert find_files("x/*.md")[0] == ["x/a.md"]
    assert find_files("x")[0] == ["x/a.md", "x/y/b.md", "x/y/c.txt"]
    assert find_files("d.md")[0] == ["d.md"]
    assert find_files("~/x/y")[0] == [str(tmp_path / "x/y/b.md"), str(tmp_path / "x/y/c.txt")]


def test_links_are_followed_and_a_file_with_two_names_is_read_once(tmp_path):
    write(tmp_path / "elsewhere", "far.txt", "far")
    write(tmp_path / "elsewhere", "single.txt", "single")
    write(tmp_path / "d", "a.txt", "near")
    (tmp_path / "d" / "again.txt").symlink_to(tmp_path / "d" / "a.txt")
    (tmp_path / "d" / "single.txt").symlink_to(tmp_path / "elsewhere" / "single.txt")
    (tmp_path / "d" / "folder").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (tmp_path / "d" / "dangling.txt").symlink_to(tmp_path / "nowhere")
    assert sorted(read(tmp_path / "d")[0]) == ["far", "near", "single"]


@pytest.mark.parametrize("links", [1, 2])
def test_folders_that_link_in_circles_are_read_once(links, tmp_path):
    for i in range(links):
        write(tmp_path / "d", f"{i}/a.txt", f"text {i}")
        (tmp_path / "d" / str(i) / "up").symlink_to(tmp_path / "d", target_is_directory=True)

    def give_up(number, frame):
        raise TimeoutError("the circle of links has no end")
    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(5)
    try:
        assert sorted(read(tmp_path / "d")[0]) == [f"text {i}" for i in range(links)]
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("dataset", ["/no/such/file.txt", "no/such/*.txt", "./a/b/c", "~/nothing"])
def test_a_path_that_does_not_exist_is_not_taken_for_a_name_on_the_hub(dataset, tmp_path,
                                                                     monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UserError, match="--dataset .*no such file"):
        find_files(dataset)


def test_a_folder_without_files_is_not_taken_for_a_name_on_the_hub(tmp_path, monkeypatch):
    (tmp_path / "texts").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="--dataset texts.*no such file"):
        find_files("texts")


def test_the_demo_reads_the_sources_of_the_library_but_not_its_tests(tmp_path, monkeypatch):
    library = tmp_path / "test" / "python"  # wherever that is installed
    for name in ("os.py", "json/decoder.py", "test/test_os.py", "json/tests/test_a.py",
                 "idlelib/a.py", "lib2to3/a.py", "site-packages/x/a.py", "dist-packages/y.py",
                 "LICENSE.txt", "unittest/case.py"):
        write(library, name, "text")
    monkeypatch.setattr(train_llama.sysconfig, "get_path", lambda name: str(library))
    files, kind = find_files("python-stdlib")
    assert [os.path.relpath(name, library) for name in files] == [
        "json/decoder.py", "os.py", "unittest/case.py"]
    assert kind == "text"


# ---- Data sets of the Hub ------------------------------------------------------------------------

@pytest.fixture
def no_network(monkeypatch):
    def connect(*arguments):
        raise AssertionError("the network was used")
    monkeypatch.setattr(socket.socket, "connect", connect)


@pytest.fixture
def hub(tmp_path, monkeypatch, no_network):
    """A folder laid out like a repository of the Hub, and opened as one by the real library."""
    folder = tmp_path / "hub"
    write(folder, "README.md", """---
configs:
- config_name: small
  data_files: data/small/**/*.parquet
- config_name: large
  data_files: data/large/*.parquet
---
# A data set
""")
    for i in range(3):
        write_parquet(folder / "data" / "small" / "deep" / f"{i}.parquet", dict(
            id=list(range(40)), text=[f"document {i} {j}" for j in range(40)]), row_group_size=15)
    monkeypatch.setattr(train_llama, "find_files", lambda dataset: ([], "hub"))
    monkeypatch.setattr(huggingface_hub, "dataset_info",
                        lambda name, **more: types.SimpleNamespace(sha="5" * 40))
    return folder


HUB_TEXTS = [f"document {i} {j}" for i in range(3) for j in range(40)]


def test_a_hub_data_set_gives_its_text_column_and_its_revision(hub):
    rows, revision = open_rows(str(hub), "small", "text")
    assert list(rows) == [{"text": text} for text in HUB_TEXTS]
    assert revision == "5" * 40


def test_a_hub_data_set_of_json_lines_needs_no_configuration(hub, tmp_path):
    write(tmp_path / "lines", "data/train-0.jsonl",
          lines(*(dict(text=f"line {i}", n=i) for i in range(9))))
    rows, _ = open_rows(str(tmp_path / "lines"), "", "text")
    assert list(rows) == [{"text": f"line {i}"} for i in range(9)]


def test_the_hub_is_asked_for_the_recipes_call_and_a_known_revision_is_kept(hub, monkeypatch):
    calls, load = [], datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset",
                        lambda *names, **more: calls.append((names, more)) or load(*names, **more))
    assert open_rows(str(hub), "small", "text", "4" * 40)[1] == "4" * 40
    for names, more in calls:
        assert names == (str(hub), "small")
        assert more["split"] == "train" and more["streaming"] is True
        assert more["revision"] == "4" * 40


def test_only_the_text_column_of_a_hub_data_set_is_read(hub):
    path = write_parquet(hub / "data" / "small" / "deep" / "0.parquet",
                         dict(id=list(range(40)), text=HUB_TEXTS[:40]),
                         compression="none", use_dictionary=False)
    damage_column(path, "id")
    rows, _ = open_rows(str(hub), "small", "text")
    assert [row["text"] for row in rows] == HUB_TEXTS


@pytest.mark.parametrize("read_before", [0, 1, 39, 40, 41, 55, 119, 120])
def test_reading_a_hub_data_set_goes_on_where_its_state_says(read_before, hub):
    rows, revision = open_rows(str(hub), "small", "text")
    before = [row["text"] for row in itertools.islice(rows, read_before)]
    reader, _ = open_rows(str(hub), "small", "text", revision)
    stream = iter(reader)
    assert [next(stream)["text"] for _ in range(read_before)] == before
    state = json.loads(json.dumps(reader.state_dict()))
    rows, _ = open_rows(str(hub), "small", "text", revision)
    rows.load_state_dict(state)
    assert before + [row["text"] for row in rows] == HUB_TEXTS


def test_tokens_of_a_hub_data_set_are_reused_without_asking_the_hub(hub, prepare, monkeypatch):
    first = prepare(hub, dataset_config="small")
    assert first["revision"] == "5" * 40 and first["documents"] == 120

    def fail(*arguments, **more):
        raise AssertionError("the Hub was asked")
    monkeypatch.setattr(huggingface_hub, "dataset_info", fail)
    monkeypatch.setattr(datasets, "load_dataset", fail)
    assert prepare(hub, dataset_config="small") == first


def test_a_longer_run_on_a_hub_data_set_appends_from_the_same_revision(
        hub, prepare, small_batches, monkeypatch):
    whole = stored(prepare(hub, dataset_config="small"))
    remove(whole)
    first = prepare(hub, dataset_config="small", needed=100)
    assert 100 <= first["train"]["tokens"] < 1000 and not first["ended"]
    monkeypatch.setattr(huggingface_hub, "dataset_info",
                        lambda name, **more: types.SimpleNamespace(sha="6" * 40))
    assert stored(prepare(hub, dataset_config="small")) == whole


@pytest.mark.parametrize("dataset", ["nobody/nothing", "nothing", "texts"])
def test_an_unknown_name_without_a_network_suggests_the_demo_and_local_files(
        dataset, tmp_path, monkeypatch, no_network, step_flags, learn_flags, no_model):
    monkeypatch.chdir(tmp_path)
    for main, flags in ((train_llama.main, step_flags), (train_tokenizer.main, learn_flags)):
        sentence = stop(main, flags(dataset=dataset))
        assert f"--dataset {dataset}" in sentence
        assert "--demo" in sentence and "local files" in sentence


class FakeResponse:
    """As much of an answer of the Hub as its errors want."""
    headers, status_code, request = {}, 401, None


@pytest.mark.parametrize("error", [
    huggingface_hub.errors.RepositoryNotFoundError(
        "401 Client Error.\n\nRepository Not Found for url.", response=FakeResponse()),
    huggingface_hub.errors.GatedRepoError(
        "403 Client Error.\n\nCannot access gated repo.", response=FakeResponse()),
    ConnectionError("Name or service not known"), TimeoutError(), OSError(" \n")],
    ids=["unknown", "gated", "no network", "no message", "blank message"])
def test_any_failure_of_the_hub_is_one_sentence_that_names_it(error, monkeypatch, no_network):
    def fail(name, **more):
        raise error
    monkeypatch.setattr(huggingface_hub, "dataset_info", fail)
    with pytest.raises(UserError) as stopped:
        open_rows("somebody/something", "", "text")
    assert "somebody/something" in stopped.value.code and "\n" not in stopped.value.code
    assert type(error).__name__ in stopped.value.code and "--demo" in stopped.value.code


def test_an_unknown_configuration_and_column_of_the_hub_are_named(hub):
    with pytest.raises(UserError, match="--dataset_config 'huge' .*small.*large"):
        open_rows(str(hub), "huge", "text")
    with pytest.raises(UserError, match="--text_column body .*id, text"):
        open_rows(str(hub), "small", "body")


def test_a_network_that_fails_while_reading_says_to_start_again():
    def rows():
        yield {"text": "one"}
        raise ConnectionError("reset by peer")
    documents = load_documents(rows(), "text", Counter())
    assert next(documents) == "one"
    with pytest.raises(UserError, match="start again .*ConnectionError: reset by peer"):
        next(documents)


# ---- Token files ---------------------------------------------------------------------------------

def stored(facts: dict) -> dict[Path, bytes | dict]:
    """The bytes of both token files, and the facts beside them but for the reader's state."""
    paths = [Path(facts[split]["path"]) for split in ("train", "val")]
    (facts_path,) = paths[0].parent.glob(paths[0].name.partition(".")[0] + ".json")
    noted = json.loads(facts_path.read_text())
    return {path: path.read_bytes() for path in paths} | {
        facts_path: {name: fact for name, fact in noted.items() if name != "state"}}


def remove(files: Iterable[Path]) -> None:
    for path in files:
        path.unlink(missing_ok=True)


class Long(str):
    """A text that counts as a million characters, so that few of them are a batch."""
    def __len__(self) -> int:
        return 1_000_000


@pytest.fixture
def small_batches(monkeypatch):
    """Documents are tokenised few at a time, and the facts are saved after every batch."""
    monkeypatch.setattr(train_llama, "load_documents",
                        lambda *arguments: map(Long, load_documents(*arguments)))
    monkeypatch.setattr(train_llama.time, "monotonic", itertools.count(0, 60).__next__)


class Interrupted:
    """A tokenizer that lets the program die in its n-th batch."""
    def __init__(self, tokenizer: Tokenizer, batches: float = float("inf")) -> None:
        self.tokenizer, self.batches, self.done = tokenizer, batches, 0

    def __getattr__(self, name: str):
        return getattr(self.tokenizer, name)

    def encode_batch_fast(self, *arguments, **more):
        if self.done >= self.batches:
            raise KeyboardInterrupt
        self.done += 1
        return self.tokenizer.encode_batch_fast(*arguments, **more)


TEXTS = [f"document {i} of caf\u00e9s [EOT]" + " alpha beta\r\n" * (i * 7 % 40) for i in range(37)]


@pytest.fixture(params=["text", "jsonl", "parquet"])
def library(request, tmp_path):
    """The same documents, and rows to skip, as files of each kind."""
    folder = tmp_path / "library"
    if request.param == "text":
        for i, text in enumerate(TEXTS):
            write(folder, f"{i:02}.txt", text)
        write(folder, "05b.txt", " \n")
        write(folder, "30b.txt", "\ufeff")
    for part, texts in enumerate((TEXTS[:14], TEXTS[14:15], TEXTS[15:])):
        rows = [*texts, None, " ", texts[0]][:-1]
        if request.param == "jsonl":
            write(folder, f"{part}.jsonl", lines(*(dict(text=text) for text in rows)))
        if request.param == "parquet":
            write_parquet(folder / f"{part}.parquet", dict(text=rows), row_group_size=4)
    return folder


def test_facts_and_tokens_are_what_the_library_itself_counts(library, prepare, tokenizer):
    facts = prepare(library)
    texts = {"train": [text for i, text in enumerate(TEXTS) if i % 5], "val": TEXTS[::5]}
    for split, part in texts.items():
        ids = np.array([id for text in part for id in (*tokenizer.encode(text).ids, EOT)], "<u2")
        assert Path(facts[split]["path"]).read_bytes() == ids.tobytes()
        assert facts[split]["tokens"] == len(ids)
        assert facts[split]["bytes"] == sum(len(text.encode()) for text in part)
        assert facts[split]["crc32"] == zlib.crc32(ids.tobytes())
    assert facts["documents"] == len(TEXTS) and facts["ended"] is True
    assert sum(facts["skipped"].values()) == (1 if library / "30b.txt" in library.iterdir() else 6)


def test_the_held_out_documents_are_every_nth_and_not_trained_on(prepare, tokenizer, library):
    for every in (2, 3, 36, 37):
        facts = prepare(library, val_every=every)
        train, val = (decode(facts[split]["path"], facts[split]["tokens"], tokenizer)
                      for split in ("train", "val"))
        assert val == [text for i, text in enumerate(TEXTS) if i % every == 0]
        assert train == [text for i, text in enumerate(TEXTS) if i % every != 0]
    facts = prepare(library, val_every=0)
    assert decode(facts["train"]["path"], facts["train"]["tokens"], tokenizer) == TEXTS
    assert facts["val"]["tokens"] == 0


def test_tokens_that_grow_in_steps_equal_those_made_at_once(
        library, prepare, small_batches, monkeypatch):
    facts = prepare(library)
    whole, total = stored(facts), facts["train"]["tokens"]
    remove(whole)
    seen = set()
    for needed in (1, total // 4, total // 4, total // 2, total - 1, total, ALL):
        facts = prepare(library, needed=needed)
        assert facts["train"]["tokens"] >= needed or facts["ended"]
        grown = stored(facts)
        for path in list(whole)[:2]:
            assert whole[path].startswith(grown[path])
        seen.add(facts["documents"])
    assert grown == whole
    assert len(seen) >= 4


def test_tokens_of_a_long_text_grow_from_the_middle_of_its_file(
        tmp_path, prepare, small_batches, tokenizer):
    text = "".join(f"alpha beta {i}\r\n" for i in range(30_000))
    write(tmp_path / "d", "1.txt.gz", gzip.compress(text.encode()))
    write(tmp_path / "d", "2.txt", "the last")
    whole = stored(prepare(tmp_path / "d", val_every=0))
    remove(whole)
    first = prepare(tmp_path / "d", val_every=0, needed=1)
    assert not first["ended"] and 65_536 * 4 < first["train"]["bytes"] < len(text)
    facts = prepare(tmp_path / "d", val_every=0)
    assert stored(facts) == whole
    documents = decode(facts["train"]["path"], facts["train"]["tokens"], tokenizer)
    assert "".join(documents) == text + "the last"


def test_no_more_is_read_than_a_run_needs(tmp_path, prepare, monkeypatch):
    pulled = []

    def rows():
        for i in range(100_000):
            pulled.append(i)
            yield {"text": "alpha beta gamma " * 6000}  # 100 kB, 40 to a batch
    stream = datasets.IterableDataset.from_generator(rows)
    monkeypatch.setattr(train_llama, "open_rows", lambda *arguments: (stream, None))
    facts = prepare(write(tmp_path, "a.txt", "stands for much"), needed=1000)
    assert 1000 <= facts["train"]["tokens"] and not facts["ended"]
    assert len(pulled) <= 41


def test_an_interrupted_preparation_goes_on_as_if_nothing_had_been(
        library, prepare, small_batches, tokenizer, monkeypatch):
    whole_run = Interrupted(tokenizer)
    whole = stored(prepare(library, tokenizer=whole_run))
    assert whole_run.done >= 8
    for batch in range(whole_run.done):
        remove(whole)
        with pytest.raises(KeyboardInterrupt):
            prepare(library, tokenizer=Interrupted(tokenizer, batch))
        facts_path = list(whole)[2]
        assert facts_path.exists() == (batch > 0)
        for path in list(whole)[:2]:  # what a death leaves beyond the facts
            with open(path, "ab") as file:
                file.write(b"\x05\x00garbage" * batch)
        rest = Interrupted(tokenizer)
        assert stored(prepare(library, tokenizer=rest)) == whole
        assert rest.done == whole_run.done - batch


def test_a_token_file_that_lost_its_end_is_written_anew(library, prepare):
    facts = prepare(library)
    whole = stored(facts)
    for path in list(whole)[:2]:
        os.truncate(path, 10)
        assert stored(prepare(library)) == whole
        path.unlink()
        assert stored(prepare(library)) == whole


def test_equal_settings_reuse_the_tokens_without_reading_the_corpus(
        library, prepare, monkeypatch, capsys):
    first = prepare(library)
    assert "reused" not in capsys.readouterr().out
    whole = stored(first)

    def fail(*arguments):
        raise AssertionError("the corpus was read")
    monkeypatch.setattr(train_llama, "open_rows", fail)
    assert prepare(library) == first
    assert prepare(library, needed=10, seq_len=64, batch_size=8, train_tokens=5) == first
    assert stored(first) == whole
    assert "reused" in capsys.readouterr().out


def test_a_cache_folder_that_was_moved_is_reused(prepare, tmp_path, monkeypatch):
    library = write(tmp_path, "a.jsonl", lines(*(dict(text=text) for text in TEXTS)))
    first = prepare(library)
    (tmp_path / "tokens").rename(tmp_path / "moved")
    monkeypatch.setattr(train_llama, "open_rows", lambda *arguments: pytest.fail("read again"))
    facts = prepare(library, cache_dir=str(tmp_path / "moved"))
    assert facts["train"]["crc32"] == first["train"]["crc32"]
    assert Path(facts["train"]["path"]).parent == tmp_path / "moved"


def test_a_copied_cache_folder_never_writes_into_the_first(prepare, small_batches, tmp_path):
    library = write(tmp_path, "a.jsonl", lines(*(dict(text=text) for text in TEXTS)))
    first = prepare(library, needed=50)
    before = stored(first)
    shutil.copytree(tmp_path / "tokens", tmp_path / "copy")
    assert prepare(library, cache_dir=str(tmp_path / "copy"))["ended"]
    assert stored(first) == before


def test_changed_content_column_tokenizer_or_share_starts_another_file(tmp_path, prepare):
    path = write(tmp_path, "a.jsonl", lines(*(dict(text=f"one {i}", body=f"two {i}")
                                              for i in range(9))))
    learn = train_tokenizer.train_tokenizer
    first, other = (learn(texts, 270, 1) for texts in (["one"] * 5, ["body"] * 5))
    facts = [prepare(path, tokenizer=first), prepare(path, tokenizer=other),
             prepare(path, tokenizer=first, text_column="body"),
             prepare(path, tokenizer=first, val_every=3)]
    write(tmp_path, "a.jsonl", lines(*(dict(text=f"new {i}") for i in range(9))))
    facts.append(prepare(path, tokenizer=first))
    assert len({one["train"]["path"] for one in facts}) == 5
    for one in facts[1:]:
        assert one["train"]["crc32"] != facts[0]["train"]["crc32"]
    assert facts[2]["train"]["bytes"] == facts[0]["train"]["bytes"]
    texts = decode(facts[4]["train"]["path"], facts[4]["train"]["tokens"], first)
    assert texts == [f"new {i}" for i in range(9) if i % 5]


def test_one_more_file_in_the_folder_starts_another_token_file(tmp_path, prepare):
    write(tmp_path / "d", "a.txt", "one")
    write(tmp_path / "d", "b.txt", "two")
    first = prepare(tmp_path / "d", val_every=0)
    write(tmp_path / "d", "0.txt", "zero")
    second = prepare(tmp_path / "d", val_every=0)
    assert (first["documents"], second["documents"]) == (2, 3)


def test_a_touched_file_never_gives_wrong_tokens(tmp_path, prepare, tokenizer):
    path = write(tmp_path, "a.jsonl", lines(*(dict(text=f"one {i}") for i in range(9))))
    prepare(path)
    write(tmp_path, "a.jsonl", lines(*(dict(text=f"two {i}") for i in range(9))))
    os.utime(path, (1, 1))
    facts = prepare(path)
    assert decode(facts["val"]["path"], facts["val"]["tokens"], tokenizer) == ["two 0", "two 5"]


def make_wide_tokenizer(size: int) -> Tokenizer:
    """A tokenizer of `size` tokens that writes every byte with one of the last 256."""
    names = SPECIAL_TOKENS + [f"<{i}>" for i in range(size - 260)]
    names += sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[BOT] $A", special_tokens=[("[BOT]", BOT)])
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL_TOKENS])
    tokenizer.encode_special_tokens = True
    return tokenizer


@pytest.mark.parametrize("size, item", [(65_536, 2), (65_537, 4), (70_000, 4)])
def test_tokens_take_two_bytes_and_four_when_the_vocabulary_needs_it(size, item, tmp_path, prepare):
    tokenizer, texts = make_wide_tokenizer(size), [*TEXTS, "\xad"]  # a byte of the last token
    path = write(tmp_path, "a.jsonl", lines(*(dict(text=text) for text in texts)))
    facts = prepare(path, tokenizer=tokenizer, val_every=0)
    ids = [id for text in texts for id in (*tokenizer.encode(text).ids, EOT)]
    assert max(ids) == size - 1
    stored_ids = np.fromfile(facts["train"]["path"], f"<u{item}")
    assert stored_ids.tolist() == ids
    input_ids, labels = PretrainingDataset(facts["train"]["path"], len(ids), 8).batch(np.arange(9))
    assert input_ids.flatten().tolist() == ids[:72] and labels.flatten().tolist() == ids[1:73]


def test_preparation_says_what_it_read_kept_and_skipped(library, prepare, capsys):
    facts = prepare(library)
    output = capsys.readouterr().out
    train, val = facts["train"], facts["val"]
    for words in (f"{len(TEXTS)} documents", "blank", f"{train['tokens']:,}", f"{val['tokens']:,}",
                  f"{train['bytes'] / train['tokens']:.2f} bytes"):
        assert words in output


def test_one_line_names_the_cache_folder_and_its_size(tmp_path, prepare, capsys):
    path = write(tmp_path, "a.jsonl", lines(*(dict(text=text) for text in TEXTS)))
    for _ in range(2):  # written, and reused
        prepare(path)
        said = capsys.readouterr().out.splitlines()
        (line,) = [line for line in said if str(tmp_path / "tokens") in line and "free" not in line]
        assert re.search(r"\d ?[kMG]?B\b", line)


# ---- Rows ----------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def write_tokens(tmp_path_factory):
    """A token file of documents with so many tokens each between [BOT] and [EOT]."""
    folder, number = tmp_path_factory.mktemp("rows"), itertools.count()

    def write_documents(lengths: list[int]) -> tuple[str, np.ndarray]:
        fresh = itertools.cycle(range(UNK + 1, 60_000))
        ids = np.array([id for n in lengths
                        for id in (BOT, *itertools.islice(fresh, n), EOT)], "<u2")
        path = folder / f"{next(number)}.u2"
        ids.tofile(path)
        return str(path), ids
    return write_documents


LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=12)


@given(lengths=LENGTHS, seq_len=st.integers(1, 50))
@settings(max_examples=200, deadline=None)
def test_the_labels_of_all_blocks_are_the_token_file_without_its_first_token(
        write_tokens, lengths, seq_len):
    path, ids = write_tokens(lengths)
    dataset = PretrainingDataset(path, len(ids), seq_len)
    rows = np.arange(len(dataset))
    input_ids, labels = dataset.batch(rows)
    assert input_ids.shape == labels.shape == (len(rows), seq_len)
    assert input_ids.dtype == labels.dtype == torch.int64
    labels, input_ids = labels.flatten(), input_ids.flatten()
    real = len(ids) - 1
    assert labels[:real].tolist() == ids[1:].tolist() and (labels[real:] == -100).all()
    assert input_ids[:real].tolist() == ids[:-1].tolist()
    assert set(input_ids[real + 1 :].tolist()) <= {PAD}
    assert dataset.count_labels(rows) == real
    assert len(rows) == -(-real // seq_len)


@given(lengths=LENGTHS, seq_len=st.integers(1, 50))
@settings(max_examples=200, deadline=None)
def test_without_packing_every_document_has_rows_of_its_own_and_loses_nothing(
        write_tokens, lengths, seq_len):
    path, ids = write_tokens(lengths)
    dataset = PretrainingDataset(path, len(ids), seq_len, packing=False)
    rows = iter(zip(*dataset.batch(np.arange(len(dataset)))))
    for document in np.split(ids, np.flatnonzero(ids == BOT))[1:]:
        for start in range(0, len(document) - 1, seq_len):
            row, row_labels = next(rows)
            expected = document[start + 1 : start + 1 + seq_len].tolist()
            assert row_labels.tolist() == expected + [-100] * (seq_len - len(expected))
            given_ids = document[start : start + seq_len].tolist()
            assert row.tolist() == given_ids + [PAD] * (seq_len - len(given_ids))
    assert next(rows, None) is None
    assert dataset.count_labels(np.arange(len(dataset))) == len(ids) - len(lengths)


def test_a_dataset_may_end_before_its_file_does(write_tokens):
    path, ids = write_tokens([5, 6, 7])
    dataset = PretrainingDataset(path, 10, 4)
    assert dataset.batch(np.arange(len(dataset)))[1].flatten().tolist() == [
        *ids[1:10].tolist(), -100, -100, -100]


@pytest.mark.parametrize("packing", [True, False])
def test_one_row_is_the_same_as_in_a_batch_and_beyond_the_end_is_an_index_error(
        packing, write_tokens):
    path, ids = write_tokens([5, 30, 0, 7])
    dataset = PretrainingDataset(path, len(ids), 8, packing)
    input_ids, labels = dataset.batch(np.arange(len(dataset)))
    for i, row in enumerate(dataset):  # iterating ends by IndexError
        assert set(row) == {"input_ids", "labels"}
        assert torch.equal(row["input_ids"], input_ids[i]) and torch.equal(row["labels"], labels[i])
    assert i == len(dataset) - 1
    assert torch.equal(dataset[-1]["labels"], labels[-1])
    for beyond in (len(dataset), -len(dataset) - 1):
        with pytest.raises(IndexError):
            dataset[beyond]


@pytest.mark.parametrize("packing", [True, False])
def test_a_dataset_pickles_small_and_survives_it(packing, write_tokens):
    path, ids = write_tokens([50] * 2000)
    dataset = PretrainingDataset(path, len(ids), 16, packing)
    dataset.batch(np.arange(4))
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 1000
    copy = pickle.loads(pickled)
    assert len(copy) == len(dataset)
    assert torch.equal(copy.batch(np.arange(9))[1], dataset.batch(np.arange(9))[1])


def test_a_data_loader_with_spawned_workers_gives_the_rows(write_tokens):
    path, ids = write_tokens([50] * 20)
    dataset = PretrainingDataset(path, len(ids), 16)
    loader = torch.utils.data.DataLoader(dataset, batch_size=8, num_workers=2,
                                         multiprocessing_context="spawn")
    batches = list(loader)
    input_ids, labels = dataset.batch(np.arange(len(dataset)))
    assert torch.equal(torch.cat([batch["input_ids"] for batch in batches]), input_ids)
    assert torch.equal(torch.cat([batch["labels"] for batch in batches]), labels)


def test_a_file_of_ten_billion_tokens_opens_and_its_last_row_is_read():
    with tempfile.NamedTemporaryFile(suffix=".u2") as file:  # sparse: it takes no room
        os.truncate(file.name, 2 * 10**10)
        with open(file.name, "r+b") as end:
            end.seek(-6, os.SEEK_END)
            end.write(np.array([7, 8, EOT], "<u2").tobytes())
        dataset = PretrainingDataset(file.name, 10**10, 512)
        assert len(dataset) == 19_531_250
        assert dataset.count_labels(np.arange(len(dataset))) == 10**10 - 1
        assert dataset[-1]["labels"].tolist() == [0] * 508 + [7, 8, EOT] + [-100]


# ---- The order of the rows -----------------------------------------------------------------------

SEEDS = itertools.count(10**6)  # a fresh one where WINDOW differs, so that no memory helps


def order(steps: int, batch_size: int, rows: int, seed: int = 1) -> list[int]:
    return np.concatenate([rows_of_step(step, batch_size, rows, seed)
                           for step in range(steps)]).tolist()


@given(rows=st.integers(1, 40), batch_size=st.integers(1, 60), window=st.integers(1, 50))
@settings(max_examples=100, deadline=None)
def test_every_row_comes_once_an_epoch_and_batches_straddle_epochs(rows, batch_size, window):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_llama, "WINDOW", window)
        chosen = order(-(-3 * rows // batch_size), batch_size, rows, next(SEEDS))
    assert len(chosen) % batch_size == 0
    for epoch in range(3):
        assert sorted(chosen[epoch * rows : (epoch + 1) * rows]) == list(range(rows))


def test_the_order_differs_by_epoch_and_by_seed():
    one, two = order(20, 10, 100)[:100], order(20, 10, 100)[100:]
    assert one != two and one != list(range(100)) and order(10, 10, 100, seed=2) != one
    assert sorted(one) == sorted(two) == list(range(100))


def test_rows_are_shuffled_inside_their_window_only(monkeypatch):
    monkeypatch.setattr(train_llama, "WINDOW", 8)
    chosen = order(5, 8, 40, next(SEEDS))
    for window in range(5):
        part = chosen[8 * window : 8 * window + 8]
        assert sorted(part) == list(range(8 * window, 8 * window + 8))
    offsets = {tuple(row % 8 for row in chosen[8 * i : 8 * i + 8]) for i in range(5)}
    assert len(offsets) == 5  # each has a permutation of its own


@pytest.mark.parametrize("more", [17, 24, 31, 1000])
def test_the_order_of_early_rows_does_not_depend_on_how_many_follow(more, monkeypatch):
    monkeypatch.setattr(train_llama, "WINDOW", 8)
    seed = next(SEEDS)
    assert order(4, 4, more, seed) == order(4, 4, 16, seed)


def test_the_batch_size_only_cuts_the_order_into_steps():
    assert order(30, 4, 50) == order(10, 12, 50) == order(1, 120, 50)


def test_the_rows_of_a_step_are_the_same_for_ever():
    expected = [9, 2, 4, 7, 5, 0, 8, 6, 3, 1]
    assert order(1, 10, 10) == expected
    np.random.seed(3)
    torch.manual_seed(3)
    assert all(order(1, 10, 10, seed) != expected for seed in range(2, 20))
    assert order(1, 10, 10) == expected
    assert rows_of_step(777_777, 4, 200_000, 7).tolist() == [123916, 79804, 128235, 115675]


def test_another_process_finds_the_same_rows():
    code = "import train_llama; print(train_llama.rows_of_step(77, 6, 100_000, 5).tolist())"
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, check=True,
                             capture_output=True, env=os.environ | {"PYTHONHASHSEED": "7"})
    assert json.loads(process.stdout) == rows_of_step(77, 6, 100_000, 5).tolist()


# ---- Without packing, through the script ---------------------------------------------------------

def test_a_run_without_packing_goes_through_windows_of_long_documents(
        corpus, step_flags, tmp_path):
    train_llama.main(step_flags(dataset=corpus, packing=False, val_every=10, batch_size=4,
                                micro_batch_size=2, train_tokens=200))
    header, *rows = (tmp_path / "out" / "metrics.csv").read_text().splitlines()
    last = dict(zip(header.split(","), rows[-1].split(",")))
    assert 200 <= int(last["tokens"]) <= 200 + 4 * 8
    assert re.fullmatch(r"\d+\.\d+", last["loss"]) and 0 < float(last["loss"]) < 10
