"""What each difference from the usual script is worth, one at a time, on the demo's text.

    python tests/differences.py                  # all of them
    python tests/differences.py --only tokenizer

Every row is the demo with one thing as the usual script has it: the speed beside the demo's own
(real labels a second, both without compilation, taken in turns) and the held-out bits per byte
after the same number of steps. The tokenizer's rows are the time and memory to learn it, and how
many held-out texts do not come back from their tokens.
"""
from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).resolve().parent))
import benchmark
from benchmark import ours

TOKENIZERS = ["as it is", "no splitting into words", "no alphabet of bytes"]
ROWS = ["as it is", "additive mask", "float32", "one document a row, clipped", "AdamW",
        "PyTorch's initialisation"]


def learn(name: str) -> dict:
    """Seconds and GB to learn 4,096 tokens, and held-out texts that are not restored."""
    documents, every = benchmark.documents(), ours.DEMO["val_every"]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start, cpu = time.perf_counter(), time.process_time()
    learnt = (text for i, text in enumerate(documents) if i % every)
    if name == "as it is":
        tokenizer = benchmark.train_tokenizer.train_tokenizer(learnt, 4096, 2)
    else:
        tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
            add_prefix_space=False, use_regex="splitting" not in name)
        tokenizer.decoder = benchmark.train_tokenizer.decoders.ByteLevel()
        alphabet = [] if "alphabet" in name else pre_tokenizers.ByteLevel.alphabet()
        if not alphabet:  # what a corpus in ASCII would have taught
            learnt = (text.encode("ascii", "ignore").decode() for text in learnt)
        tokenizer.train_from_iterator(learnt, trainers.BpeTrainer(
            vocab_size=4096, min_frequency=2, special_tokens=ours.SPECIAL_TOKENS,
            initial_alphabet=alphabet, show_progress=False))
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    held_out = documents[::every] + [text for text in documents if not text.isascii()]
    lost = sum(tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids,
                                skip_special_tokens=False) != text for text in held_out)
    return dict(seconds=seconds, cpu=cpu, memory=memory / 1e6, lost=lost, of=len(held_out))


class Row(benchmark.Job):
    """The demo's own recipe with one difference."""

    def __init__(self, name: str, folder: Path, steps: int) -> None:
        super().__init__("ours", folder, "demo", ours.DEMO["micro_batch_size"], "auto",
                         "float32" if name == "float32" else "auto")
        self.kind, self.steps = name, steps
        for setting in ("optimizer", "learning_rate", "warmup_steps"):
            setattr(self.config, setting, ours.DEMO[setting])
        if name == "AdamW":
            self.config.optimizer, self.config.learning_rate = "adamw", 4e-3
        if name == "PyTorch's initialisation":
            for module in self.model.modules():
                if hasattr(module, "reset_parameters"):
                    module.reset_parameters()
        self.optimizers = ours.make_optimizers(self.model, self.config)
        self.rows = np.arange(len(self.dataset))
        if name == "one document a row, clipped":
            self.dataset = ours.PretrainingDataset(self.dataset.path, self.dataset.tokens,
                                                   self.config.seq_len, packing=False)
            starts, _ = self.dataset.spans(slice(None))
            tokens = ours.map_tokens(self.dataset.path, self.dataset.tokens)
            self.rows = np.flatnonzero(tokens[starts] == ours.BOT)
        self.share = self.dataset.count_labels(self.rows) / (self.dataset.tokens - 1)

    def step(self) -> int:
        """One optimiser step; returns its real labels."""
        chosen = self.rows[ours.rows_of_step(self.done, self.config.batch_size, len(self.rows), 1)]
        attention = torch.nn.functional.scaled_dot_product_attention
        if self.kind == "additive mask":
            size = self.config.seq_len
            mask = torch.full((size, size), -torch.inf).triu(1)

            def masked(q, k, v, is_causal, enable_gqa):
                return attention(q, k, v, attn_mask=mask.to(q.device, q.dtype),
                                 enable_gqa=enable_gqa)
            torch.nn.functional.scaled_dot_product_attention = masked
        try:
            ours.add_gradients(self.model, self.dataset, chosen, self.config.micro_batch_size,
                               self.autocast, self.scaler)
        finally:
            torch.nn.functional.scaled_dot_product_attention = attention
        self.set_rate(min(self.done, self.steps - 1), self.steps)
        self.update(1.0)
        return self.dataset.count_labels(chosen)


def train(name: str, folder: Path, steps: int) -> dict:
    """Bits per byte after so many steps, and the share of the text that is ever read."""
    row = Row(name, folder, steps)
    for _ in range(steps):
        row.step()
    return dict(bits=row.bits_per_byte(), share=row.share)


def speeds(names: list[str], folder: Path) -> None:
    """Speeds of all rows in turns, ten rounds of three steps each: medians and their ratios."""
    rows = {name: Row(name, folder, 1000) for name in names}
    taken: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(11):
        for name, row in rows.items():
            start = time.perf_counter()
            labels = sum(row.step() for _ in range(3))
            if turn:
                taken[name].append(labels / (time.perf_counter() - start))
    base = statistics.median(taken[names[0]])
    print("| as the usual script | real tokens/s | range | ratio |\n|---|---|---|---|")
    for name, found in taken.items():
        middle = statistics.median(found)
        print(f"| {name} | {middle:,.0f} | {min(found):,.0f} to {max(found):,.0f} | "
              f"{middle / base:.2f} |", flush=True)


def main() -> None:
    """Run what the flags ask for, each row in a process of its own where it can be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=["tokenizer", "speed", "loss"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--folder", type=Path, default=Path("differences"))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        result = (learn(arguments.worker) if arguments.only == "tokenizer" else
                  train(arguments.worker, arguments.folder, arguments.steps))
        return print(json.dumps(result))

    def worker(kind: str, name: str) -> dict:
        done = subprocess.run([sys.executable, __file__, "--only", kind, "--worker", name,
                               "--folder", str(arguments.folder), "--steps", str(arguments.steps)],
                              stdout=subprocess.PIPE, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])

    arguments.folder.mkdir(exist_ok=True)
    benchmark.prepare(arguments.folder, "demo")
    if arguments.only in (None, "tokenizer"):
        print("| tokenizer | seconds | CPU seconds | memory GB | texts not restored |\n"
              "|---|---|---|---|---|")
        for name in TOKENIZERS:
            r = worker("tokenizer", name)
            print(f"| {name} | {r['seconds']:.1f} | {r['cpu']:.1f} | {r['memory']:.2f} | "
                  f"{r['lost']} of {r['of']} |", flush=True)
    if arguments.only in (None, "speed"):
        speeds(ROWS[:4], arguments.folder)
    if arguments.only in (None, "loss"):
        print(f"| as the usual script | bits per byte after {arguments.steps} steps | share of the "
              "text that is read |\n|---|---|---|")
        for name in ROWS:
            r = worker("loss", name)
            print(f"| {name} | {r['bits']:.3f} | {r['share']:.1%} |", flush=True)


if __name__ == "__main__":
    main()
