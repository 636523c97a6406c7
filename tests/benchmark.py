"""Time this trainer beside others, on the same text, at the same size, in one run.

    python tests/benchmark.py                 # throughput of all, then the race: about 20 minutes
    python tests/benchmark.py --quick         # two minutes, for a first look
    python tests/benchmark.py --sizes default --micro_batch_sizes 8 16 32 --no-race   # on a GPU
    python tests/benchmark.py --heads --micro_batch_sizes 8 16 32 64    # forms of the head and loss

Every contender runs in a process of its own, one after the other, and all of them again in the next
round, so that a noisy machine is noisy for all; a row is the median of the rounds, with its range.
Only ratios within one run mean something. Tokens are real ones: padding does not count. On a CPU,
ours tells the allocator to keep freed memory, which a plain loop does not (--keep_memory: all do).

ours           train_llama's own step: packed rows, autocast, the causal kernel without a mask
transformers   LlamaForCausalLM of transformers in a plain loop, same rows, precision, optimiser
nanogpt        GPT of a nanoGPT checkout (--nanogpt PATH), with our depth, width and heads: another
               model, with more weights in its layers and one matrix for embedding and head
naive          one document a row, clipped and padded; float32; an additive mask; tokenised in the
               loop; PyTorch's default initialisation; AdamW at 1e-3 with weight decay 0.01 on all
"""
from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch
import torch.utils.checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_llama as ours
import train_tokenizer

SIZES = {
    "demo": train_tokenizer.DEMO | ours.DEMO,
    "small": dict(hidden_size=256, intermediate_size=768, num_hidden_layers=4,
                  num_attention_heads=4, num_key_value_heads=2, seq_len=256, batch_size=16,
                  vocab_size=4096),
    "default": dict(hidden_size=768, intermediate_size=3072, num_hidden_layers=12,
                    num_attention_heads=12, num_key_value_heads=3, seq_len=512, batch_size=64,
                    vocab_size=50_000),
}
CONTENDERS = ["ours", "ours compiled", "transformers", "transformers compiled", "naive"]
NANOGPT = ["nanogpt", "nanogpt compiled"]


def documents() -> list[str]:
    """The texts of the demo's corpus."""
    rows, _ = ours.open_rows(ours.STDLIB, "", "text")
    return list(ours.load_documents(rows, "text", Counter()))


def prepare(folder: Path, size: str) -> None:
    """A tokenizer and token files of the standard library's sources, in `folder`."""
    path = folder / f"{size}.json"
    if not path.exists():
        train_tokenizer.main(["--demo", "--vocab_size", str(SIZES[size]["vocab_size"]),
                              "--tokenizer_path", str(path)])


class Job:
    """One contender, ready to take steps; step() returns how many real labels it trained on."""

    def __init__(self, name: str, folder: Path, size: str, at_once: int, device: str, dtype: str,
                 nanogpt: str = "", keep_memory: bool = False):
        shape = SIZES[size]
        settings = vars(ours.parse_flags(["--demo"], [ours.LlamaConfig, ours.TrainConfig],
                                         ours.DEMO)) | shape
        settings |= dict(tokenizer_path=str(folder / f"{size}.json"), cache_dir=str(folder),
                         micro_batch_size=at_once, max_position_embeddings=shape["seq_len"])
        if name.startswith("ours") or keep_memory:
            self.device, dtype = ours.choose_device(device, dtype)
        else:  # without our setting of the memory allocator, as a plain loop is
            self.device = torch.device(device)
            torch.set_float32_matmul_precision("high")
        self.config = ours.TrainConfig(**{
            field.name: settings[field.name] for field in ours.fields(ours.TrainConfig)})
        self.tokenizer = ours.load_tokenizer(self.config.tokenizer_path)
        settings["vocab_size"] = self.tokenizer.get_vocab_size()
        self.shape = ours.LlamaConfig(**{
            field.name: settings[field.name] for field in ours.fields(ours.LlamaConfig)})
        with contextlib.redirect_stdout(sys.stderr):
            facts = ours.prepare_tokens(self.config, self.tokenizer, 10**9)
        self.facts = facts
        self.dataset = ours.PretrainingDataset(facts["train"]["path"], facts["train"]["tokens"],
                                               self.config.seq_len)
        self.name, self.done, self.dtype = name, 0, dtype
        naive = name == "naive"
        self.autocast = functools.partial(torch.autocast, self.device.type,
                                          getattr(torch, dtype),
                                          enabled=dtype != "float32" and not naive)
        torch.manual_seed(1)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=dtype == "float16")
        if name.startswith("ours"):
            self.model = ours.LlamaForPretraining(self.shape).to(self.device)
        elif name in NANOGPT:
            self.model = nanogpt_model(self.shape, nanogpt).to(self.device)
        else:
            self.model = transformers_model(self.shape, "eager" if naive else "sdpa")
            if naive:
                for module in self.model.modules():
                    if hasattr(module, "reset_parameters"):
                        module.reset_parameters()
            self.model.to(self.device)
        if naive:
            self.optimizers = [torch.optim.AdamW(self.model.parameters(), lr=1e-3,
                                                 weight_decay=0.01)]
            self.texts = [text for i, text in enumerate(documents()) if i % self.config.val_every]
        elif name in NANOGPT:
            self.optimizers = [torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True,
                                                 betas=(0.9, 0.95), weight_decay=0.1)]
        else:
            self.config.optimizer = "adamw"  # the same for both; the race has ours as it comes
            self.optimizers = ours.make_optimizers(self.model, self.config)
        if "compiled" in name:
            self.model.compile(dynamic=False)

    def step(self) -> int:
        """One optimiser step of batch_size sequences."""
        if self.name == "naive":
            return self.naive_step()
        rows = ours.rows_of_step(self.done, self.config.batch_size, len(self.dataset), 1)
        labels = self.dataset.count_labels(rows)
        if self.name.startswith("ours"):
            ours.add_gradients(self.model, self.dataset, rows, self.config.micro_batch_size,
                               self.autocast, self.scaler)
        else:
            for i in range(0, len(rows), self.config.micro_batch_size):
                part = rows[i : i + self.config.micro_batch_size]
                input_ids, targets = (each.to(self.device) for each in self.dataset.batch(part))
                with self.autocast():
                    if self.name in NANOGPT:  # the mean loss comes with the logits
                        loss = self.dataset.count_labels(part) * self.model(
                            input_ids, targets.masked_fill(targets < 0, -1))[1]
                    else:
                        logits = self.model(input_ids=input_ids).logits
                        loss = torch.nn.functional.cross_entropy(
                            logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
                self.scaler.scale(loss / labels).backward()
        self.update(1.0)
        return labels

    def naive_step(self) -> int:
        """What a first script does: pick texts, tokenise, clip, pad, mask, float32."""
        length, size = self.config.seq_len, self.config.batch_size
        generator = np.random.default_rng(self.done)
        labels = 0
        for _ in range(size // self.config.micro_batch_size):
            texts = generator.choice(self.texts, self.config.micro_batch_size)
            ids = torch.zeros(len(texts), length + 1, dtype=torch.long)
            mask = torch.zeros(len(texts), length, dtype=torch.long)
            for row, text in enumerate(texts):
                tokens = self.tokenizer.encode(str(text), add_special_tokens=False).ids
                tokens = [ours.BOT, *tokens, ours.EOT][: length + 1]
                ids[row, : len(tokens)] = torch.tensor(tokens)
                mask[row, : len(tokens) - 1] = 1
            targets = ids[:, 1:].masked_fill(mask == 0, -100).to(self.device)
            logits = self.model(input_ids=ids[:, :-1].to(self.device),
                                attention_mask=mask.to(self.device)).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            (loss / (size // self.config.micro_batch_size)).backward()
            labels += int((targets >= 0).sum())
        self.update(math.inf)
        return labels

    def set_rate(self, step: int, steps: int) -> None:
        """Give all groups of weights the learning rate of a step, as the training does."""
        rate = ours.learning_rate_at(step, steps, self.config)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * group.get("scale", 1)

    def update(self, clip: float) -> None:
        """Clip, step, and forget the gradients."""
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip).item()
        if math.isfinite(norm):
            for optimizer in self.optimizers:
                optimizer.step()
        self.scaler.update()
        self.model.zero_grad(set_to_none=True)
        self.done += 1

    def bits_per_byte(self) -> float:
        """Bits per byte of the held-out texts, each in rows of its own, as the naive one trains."""
        val = self.facts["val"]
        dataset = ours.PretrainingDataset(val["path"], val["tokens"], self.config.seq_len, False)
        model = self.model if self.name.startswith("ours") else Summed(self.model)
        with self.autocast():
            nats = ours.evaluate(model, dataset, 16)
        labels = dataset.count_labels(np.arange(len(dataset)))
        return nats * labels / math.log(2) / val["bytes"]


class Summed(torch.nn.Module):
    """A transformers model with the forward of ours: the sum of the label losses."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.inner(input_ids=input_ids).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(),
                                                 reduction="sum")


def transformers_model(shape: ours.LlamaConfig, attention: str) -> torch.nn.Module:
    """transformers' Llama of the same shape."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(
        **{name: value for name, value in ours.asdict(shape).items() if name != "rope_theta"},
        rope_theta=shape.rope_theta, attn_implementation=attention, use_cache=False))


def nanogpt_model(shape: ours.LlamaConfig, checkout: str) -> torch.nn.Module:
    """The GPT in a nanoGPT checkout, with the depth, width, heads and vocabulary of ours."""
    sys.path.insert(0, checkout)
    from model import GPT, GPTConfig

    with contextlib.redirect_stdout(sys.stderr):
        return GPT(GPTConfig(
            block_size=shape.max_position_embeddings, vocab_size=shape.vocab_size, dropout=0.0,
            n_layer=shape.num_hidden_layers, n_head=shape.num_attention_heads,
            n_embd=shape.hidden_size, bias=False))


def work(arguments: argparse.Namespace) -> None:
    """What the process of one contender does: some steps to warm up, then seconds of them."""
    job = Job(arguments.worker, arguments.folder, arguments.size, arguments.at_once,
              arguments.device, arguments.dtype, arguments.nanogpt, arguments.keep_memory)
    for _ in range(3):
        job.step()
    start, labels = time.perf_counter(), 0
    while time.perf_counter() - start < arguments.seconds:
        labels += job.step()
    speed = labels / (time.perf_counter() - start)
    flops = ours.flops_per_token(ours.LlamaForPretraining(job.shape), job.config.seq_len)
    if job.name in NANOGPT:  # all its matrices multiply but the one of the positions
        flops = 6 * job.shape.num_hidden_layers * job.shape.hidden_size * job.config.seq_len
        flops += 6 * sum(weight.numel() for name, weight in job.model.named_parameters()
                         if weight.dim() == 2 and "wpe" not in name)
    peak = ours.measure_peak(job.device, job.dtype)
    print(json.dumps(dict(speed=speed, share=speed * flops / peak,
                          memory=ours.memory_gb(job.device))))


def throughput(arguments: argparse.Namespace, size: str, at_once: int) -> None:
    """The table of tokens/s, share of the matrix peak and memory, ratios to ours."""
    results: dict[str, list[dict]] = {name: [] for name in arguments.contenders}
    for _ in range(arguments.rounds):
        for name in arguments.contenders:
            command = [sys.executable, __file__, "--worker", name, "--folder",
                       str(arguments.folder), "--size", size, "--at_once", str(at_once),
                       "--device", arguments.device, "--dtype", arguments.dtype, "--seconds",
                       str(arguments.seconds), "--nanogpt", arguments.nanogpt,
                       *["--keep_memory"] * arguments.keep_memory]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                print(f"{name}: {(done.stderr.strip() or 'no message').splitlines()[-1]}")
                continue
            results[name].append(json.loads(done.stdout.splitlines()[-1]))
    base = statistics.median(row["speed"] for row in results[arguments.contenders[0]])
    print(f"\n{size}, micro-batch {at_once}, {arguments.device} {arguments.dtype}, "
          f"{arguments.rounds} rounds of {arguments.seconds:g} s, "
          f"{torch.get_num_threads()} threads, torch {torch.__version__}\n")
    print(f"| contender | real tokens/s | range | ratio to {arguments.contenders[0]} | "
          "share of matrix peak | peak memory GB |\n|---|---|---|---|---|---|")
    for name, rows in results.items():
        if rows:
            speeds = [row["speed"] for row in rows]
            middle = statistics.median(speeds)
            print(f"| {name} | {middle:,.0f} | {min(speeds):,.0f} to {max(speeds):,.0f} | "
                  f"{middle / base:.2f} | {statistics.median(r['share'] for r in rows):.0%} | "
                  f"{statistics.median(r['memory'] for r in rows):.2f} |", flush=True)


HEADS = ["plain", "in pieces", "recomputed", "linear_cross_entropy"]


def head_loss(name: str, hidden: torch.Tensor, weight: torch.Tensor,
              labels: torch.Tensor) -> torch.Tensor:
    """The summed loss of the default model's head, in one of four forms."""
    linear, cross_entropy = torch.nn.functional.linear, torch.nn.functional.cross_entropy

    def loss(some: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return cross_entropy(linear(some, weight).float(), wanted, reduction="sum")

    if name == "plain":
        return loss(hidden, labels)
    if name == "in pieces":
        return sum(map(loss, hidden.split(512), labels.split(512)))
    if name == "recomputed":  # logits are made again in the backward pass, an eighth at a time
        size = -(-len(hidden) // 8)
        return sum(torch.utils.checkpoint.checkpoint(loss, some, wanted, use_reentrant=False)
                   for some, wanted in zip(hidden.split(size), labels.split(size)))
    return torch.nn.functional.linear_cross_entropy(  # knows no autocast, and sums in its dtype
        hidden.to(torch.bfloat16), weight.to(torch.bfloat16), labels, reduction="none",
        options=torch.nn.LinearCrossEntropyOptions()).float().sum()


def head_work(arguments: argparse.Namespace) -> None:
    """What the process of one form of the head does: some passes, the best of their times."""
    with contextlib.suppress(OSError):  # if memory runs out, this process is the one to go
        Path("/proc/self/oom_score_adj").write_text("1000")
    shape, (device, _) = SIZES["default"], ours.choose_device(arguments.device, "auto")
    torch.manual_seed(0)
    rows = arguments.at_once * shape["seq_len"]
    hidden = torch.randn(rows, shape["hidden_size"], device=device, requires_grad=True)
    weight = torch.nn.Parameter(0.02 * torch.randn(shape["vocab_size"], shape["hidden_size"],
                                                   device=device))
    labels = torch.randint(shape["vocab_size"], (rows,), device=device)
    before, times = ours.memory_gb(device), []
    for _ in range(arguments.passes):
        hidden.grad = weight.grad = None
        start = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16):
            loss = head_loss(arguments.head, hidden, weight, labels)
        loss.backward()
        total = loss.item()  # waits for the device
        times.append(time.perf_counter() - start)
    print(json.dumps(dict(seconds=min(times), memory=ours.memory_gb(device) - before,
                          loss=total / rows)))


def heads(arguments: argparse.Namespace) -> None:
    """The table of forms of the head, at the default model's size, in bfloat16."""
    print("| micro-batch | form | tokens/s of the head | memory GB | loss |\n|---|---|---|---|---|")
    for at_once in arguments.micro_batch_sizes:
        for name in HEADS:
            done = subprocess.run([sys.executable, __file__, "--head", name, "--at_once",
                                   str(at_once), "--device", arguments.device,
                                   "--passes", str(arguments.passes)],
                                  capture_output=True, text=True)
            if done.returncode:
                reason = (done.stderr.strip() or "killed: out of memory").splitlines()[-1]
                print(f"| {at_once} | {name} | {reason[:80]} | | |", flush=True)
                continue
            row = json.loads(done.stdout.splitlines()[-1])
            speed = at_once * SIZES["default"]["seq_len"] / row["seconds"]
            print(f"| {at_once} | {name} | {speed:,.0f} | {row['memory']:.2f} | "
                  f"{row['loss']:.4f} |", flush=True)


def data_path(arguments: argparse.Namespace, size: str) -> None:
    """How fast rows can be read, without a model."""
    job = Job("ours", arguments.folder, size, 16, "cpu", "float32")
    start, labels = time.perf_counter(), 0
    for step in itertools.count():
        rows = ours.rows_of_step(step, 512, len(job.dataset), 1)
        for i in range(0, 512, 16):
            job.dataset.batch(rows[i : i + 16])
        labels += job.dataset.count_labels(rows)
        if time.perf_counter() - start > 3:
            break
    print(f"\nthe data path alone, {size}: {labels / (time.perf_counter() - start):,.0f} tokens/s")


def race(arguments: argparse.Namespace) -> None:
    """Seconds that ours needs to reach what the naive recipe reaches in a fixed time.

    Ours is the demo's recipe with a whole schedule that fits a fifth of the time. Evaluations and
    the compilation of both are not counted, imports and the tokenizer neither.
    """
    naive = Job("naive", arguments.folder, "demo", 16, arguments.device, arguments.dtype)
    spent = 0.0
    while spent < arguments.race_seconds:
        start = time.perf_counter()
        naive.step()
        spent += time.perf_counter() - start
    goal = naive.bits_per_byte()
    print(f"\nnaive: {goal:.3f} bits per byte after {spent:.0f} s, {naive.done} steps", flush=True)
    job = Job("ours compiled", arguments.folder, "demo", 16, arguments.device, arguments.dtype)
    job.config.optimizer = ours.DEMO.get("optimizer", "adamw")
    for name in ("learning_rate", "warmup_steps"):
        setattr(job.config, name, ours.DEMO[name])
    start = time.perf_counter()
    for _ in range(5):
        job.step()
    job.model.zero_grad(set_to_none=True)
    start, warm = time.perf_counter(), job.done
    for _ in range(5):
        job.step()
    pace = (time.perf_counter() - start) / (job.done - warm)
    torch.manual_seed(1)
    fresh = ours.LlamaForPretraining(job.shape)
    job.model.load_state_dict(fresh.state_dict())
    job.optimizers, job.done = ours.make_optimizers(job.model, job.config), 0
    steps, spent = int(arguments.race_seconds / 5 / pace), 0.0
    job.config.warmup_steps = min(job.config.warmup_steps, steps // 5)
    reached = None
    for step in range(steps):
        start = time.perf_counter()
        job.set_rate(step, steps)
        job.step()
        spent += time.perf_counter() - start
        if reached is None and (step + 1) % max(1, steps // 10) == 0:
            bits = job.bits_per_byte()
            print(f"ours: {bits:.3f} bits per byte after {spent:.0f} s", flush=True)
            if bits <= goal:
                reached = spent
    bits = job.bits_per_byte()
    print(f"ours: {bits:.3f} bits per byte after {spent:.0f} s, {steps} steps; "
          + (f"naive's {goal:.3f} reached after {reached:.0f} s, "
             f"1/{arguments.race_seconds / reached:.1f} of its time" if reached else
             f"naive's {goal:.3f} not reached in a fifth of its time"))


def main() -> None:
    """Read the flags and run what they ask for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two minutes, for a first look")
    parser.add_argument("--sizes", nargs="+", default=["demo"], choices=SIZES)
    parser.add_argument("--micro_batch_sizes", nargs="+", type=int, default=[16])
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS + NANOGPT)
    parser.add_argument("--nanogpt", default="", help="a checkout of nanoGPT, to time it, too")
    parser.add_argument("--keep_memory", action="store_true",
                        help="on a CPU, let all contenders keep freed memory, as ours does")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--race", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--race_seconds", type=float, default=300)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "benchmark"))
    parser.add_argument("--heads", action="store_true", help="forms of the head alone")
    parser.add_argument("--passes", type=int, default=3, help="of each form, the best counts")
    parser.add_argument("--head", choices=HEADS, help=argparse.SUPPRESS)
    parser.add_argument("--worker", choices=CONTENDERS + NANOGPT, help=argparse.SUPPRESS)
    parser.add_argument("--size", default="demo", help=argparse.SUPPRESS)
    parser.add_argument("--at_once", type=int, default=16, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.contenders = arguments.contenders or CONTENDERS + NANOGPT * bool(arguments.nanogpt)
    if arguments.worker:
        return work(arguments)
    if arguments.head:
        return head_work(arguments)
    if arguments.quick:
        arguments.rounds, arguments.seconds, arguments.race_seconds = 1, 4, 30
    device, arguments.dtype = ours.choose_device(arguments.device, arguments.dtype)
    arguments.device = str(device)
    if arguments.heads:
        return heads(arguments)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for size in arguments.sizes:
        prepare(arguments.folder, size)
        data_path(arguments, size)
        for at_once in arguments.micro_batch_sizes:
            throughput(arguments, size, at_once)
    if arguments.race:
        race(arguments)


if __name__ == "__main__":
    main()
