"""What several test files share: a small corpus, its tokenizer, and a way to run the scripts."""
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["HF_HUB_OFFLINE"] = "1"  # a test that reaches for the network must fail
torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it

# A model and a run that take seconds: 2 layers of 32, blocks of 16 tokens, 4 sequences a step.
TINY_MODEL = dict(max_position_embeddings=64, hidden_size=32, intermediate_size=64,
                  num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
TINY_RUN = dict(val_every=10, seq_len=16, train_tokens=16 * 4 * 12, batch_size=4,
                micro_batch_size=2, warmup_steps=2, log_every=2, eval_every=6, save_every=4,
                device="cpu", dtype="float32", compile=False, max_new_tokens=8)


def as_flags(settings: dict) -> list[str]:
    """Settings as command-line flags."""
    flags = []
    for name, value in settings.items():
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        else:
            flags += [f"--{name}", str(value)]
    return flags


def run_script(script: str, *arguments: str, cwd: Path, timeout: float = 120, **environment: str):
    """Run one of the two scripts in a process of its own, as a user does."""
    return subprocess.run([sys.executable, str(ROOT / script), *arguments], cwd=cwd, text=True,
                          capture_output=True, timeout=timeout,
                          env=os.environ | {"OMP_NUM_THREADS": "1"} | environment)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A folder with one JSON-lines file of 60 documents of 1 to 60 words."""
    folder = tmp_path_factory.mktemp("corpus")
    words = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi".split()
    with open(folder / "documents.jsonl", "w") as file:
        for i in range(60):
            text = " ".join(words[(i * 7 + j * j) % len(words)] for j in range(1 + i * 17 % 60))
            file.write('{"text": "%s."}\n' % text)
    return folder


@pytest.fixture(scope="session")
def tokenizer_path(corpus, tmp_path_factory) -> Path:
    """A tokenizer of 300 tokens, learnt from the corpus by the real script."""
    import train_tokenizer

    path = tmp_path_factory.mktemp("tokenizer") / "bpe.json"
    train_tokenizer.main(as_flags(dict(dataset=corpus, vocab_size=300, tokenizer_path=path,
                                       val_every=10)))
    return path


@pytest.fixture
def run_flags(corpus, tokenizer_path, tmp_path):
    """Flags of a tiny run in folders of its own; keyword arguments change settings."""
    def flags(**changes) -> list[str]:
        return as_flags(TINY_MODEL | TINY_RUN | dict(
            dataset=corpus, tokenizer_path=tokenizer_path, cache_dir=tmp_path / "tokens",
            out_dir=tmp_path / "out") | changes)
    return flags
