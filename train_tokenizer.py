"""Train the tokenizer that train_llama.py needs: a byte-level BPE (arXiv:1508.07909).

    python train_tokenizer.py --demo            # on the sources of Python's library, seconds
    python train_tokenizer.py                   # on the first documents of FineWeb
    python train_tokenizer.py --dataset "texts/**/*.md" --tokenizer_path mine.json

It starts from the 256 bytes, so that any text can be written and none is lost, and then joins,
again and again, the most frequent pair of neighbours into a new token.
"""
import gzip, itertools, lzma
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm

from train_llama import (BOT, SPECIAL_TOKENS, STDLIB, load_documents, load_tokenizer, need,
                         open_rows, parse_flags, say, write_atomically)

@dataclass
class TokenizerConfig:
    """The settings; each is a flag, and its comment the flag's help."""
    dataset: str = "HuggingFaceFW/fineweb"  # a Hub name, or a local file, folder or pattern
    dataset_config: str = "sample-10BT"  # configuration of a Hub data set; "" for its only one
    text_column: str = "text"  # the column (or JSON key) that holds the text
    vocab_size: int = 50_000  # tokens to learn, with the 4 special ones and the 256 bytes
    min_frequency: int = 2  # a pair must occur so often to be joined
    max_documents: int = 100_000  # learn from so many documents, the first ones
    val_every: int = 1000  # of so many documents the first is left out, as in training; 0: none
    tokenizer_path: str = "bpe_50k.json"  # where the tokenizer is written

DEMO = dict(dataset=STDLIB, vocab_size=4096, val_every=20, tokenizer_path="demo_bpe.json")

def train_tokenizer(texts, vocab_size: int, min_frequency: int) -> Tokenizer:
    """A byte-level BPE learnt from an iterable of texts; deterministic."""
    tokenizer = Tokenizer(models.BPE())  # no normaliser: decoding must give back every character
    # Words, numbers and spaces are split first (GPT-2's pattern): pairs inside of words only. It
    # keeps the counting small; without it every document is one word of unbounded length.
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    # Learning takes time with the square of a word's length: a megabyte of "aaaa" would take long.
    runs = pre_tokenizers.Split(Regex(r"\S{1000}|\s{1000}"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([runs, words])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=vocab_size, min_frequency=min_frequency, special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    tokenizer.pre_tokenizer = words  # encoding has no such trouble
    bot = SPECIAL_TOKENS[BOT]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bot} $A", pair=f"{bot} $A {bot} $B:1", special_tokens=[(bot, BOT)])
    return tokenizer

def check_round_trip(tokenizer: Tokenizer, texts: list[str]) -> None:
    """Raise AssertionError if a text does not come back, or becomes a special token."""
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text, f"lost: {text[:200]!r}"
        assert min(ids, default=len(SPECIAL_TOKENS)) >= len(SPECIAL_TOKENS), f"special: {text!r}"

def report_demo(config, bits_per_byte: float) -> None:
    """Compare a model's bits per byte with those of compressors, on the same held-out texts."""
    rows, _ = open_rows(config.dataset, config.dataset_config, config.text_column)
    documents = load_documents(rows, config.text_column, Counter())
    texts = [text.encode() for text in itertools.islice(documents, 0, None, config.val_every)]
    size = sum(map(len, texts))
    others = {name: 8 * sum(len(compress(text)) for text in texts) / size
              for name, compress in (("gzip", gzip.compress), ("lzma", lzma.compress))}
    say(f"\nBits per byte of the {len(texts)} held-out texts ({size:,} bytes): this model "
        f"{bits_per_byte:.3f}, " + ", ".join(f"{name} {bits:.3f}" for name, bits in others.items())
        + ".\nThe model has read the other files of this library before; the compressors start "
        "each text cold.\n\nAnd this is how it goes on after two lines of code:\n")

def main(argv: list[str] | None = None) -> None:
    """Read documents, learn a vocabulary, write it, and show what it does."""
    config = parse_flags(argv, [TokenizerConfig], DEMO)
    for name, least in (("vocab_size", 256 + len(SPECIAL_TOKENS)), ("min_frequency", 1),
                        ("max_documents", 1), ("val_every", 0)):
        value = getattr(config, name)
        need(value >= least, f"--{name} {value} must be at least {least}")
    need(config.val_every != 1, "--val_every 1 would leave no text to learn from")
    path, skipped, examples, size = Path(config.tokenizer_path), Counter(), [], 0
    need(path.parent.is_dir(), f"--tokenizer_path {path}: the folder {path.parent} does not exist")
    rows, _ = open_rows(config.dataset, config.dataset_config, config.text_column)

    def texts():
        nonlocal size
        documents = load_documents(rows, config.text_column, skipped)
        for i, text in enumerate(tqdm(itertools.islice(documents, config.max_documents),
                                      total=config.max_documents, unit=" documents")):
            if not config.val_every or i % config.val_every:
                size += len(text.encode())
                examples.extend([text] * (len(examples) < 100))
                yield text

    tokenizer = train_tokenizer(texts(), config.vocab_size, config.min_frequency)
    held_out = f"; --val_every {config.val_every} leaves the first one out" * (config.val_every > 0)
    need(examples, f"--dataset {config.dataset} has no text to learn from (rows skipped: "
         f"{dict(skipped) or 'none'}{held_out})")
    hard = "Ünïcödé ½ e\u0301 ﬁ 👩\u200d🚀 \x00 [EOT]\r\n\t  end"
    tokenizer.encode_special_tokens = True  # as load_tokenizer does
    check_round_trip(tokenizer, [*examples, hard])
    write_atomically(path, lambda file: file.write(tokenizer.to_str(pretty=True).encode()))
    tokenizer = load_tokenizer(config.tokenizer_path)
    tokens = sum(len(encoding) for encoding in tokenizer.encode_batch_fast(examples))
    learnt = tokenizer.get_vocab_size()
    few = f" (fewer than the {config.vocab_size:,} wanted: the text is short)"
    sentence = tokenizer.encode("The quick brown fox counts to 1,000.", add_special_tokens=False)
    share = sum(len(text.encode()) for text in examples) / tokens
    say(f"{path}: {learnt:,} tokens{few * (learnt < config.vocab_size)}, learnt from {size:,} "
        f"bytes; {share:.2f} bytes a token; rows skipped or mended: {dict(skipped) or 'none'}\n"
        f"{sentence.tokens}\nAll of {len(examples)} texts come back exactly from their tokens.")

if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # a tokenizer is written whole or not at all
        raise SystemExit(130) from None
