"""Kill a run at random moments, start it again each time, and compare how it ends.

    python tests/kill_run.py --kills 50 --seed 1

A run trains a tokenizer, prepares tokens, trains a tiny model and exports it, on one CPU thread.
One is left alone. The others are killed (SIGKILL) and started again with the same command until
they finish: then their tokenizer, tokens, weights, optimiser state and exported model must equal
those of the first, bit for bit. Prints a table, and exits with 1 if any differ.
"""
import argparse, contextlib, hashlib, os, random, subprocess, sys, sysconfig, tempfile, time
from collections import Counter
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
DATA = ["--dataset", sysconfig.get_path("stdlib") + "/[a-h]*.py", "--val_every", "40"]
TRAINING = """--seq_len 64 --max_position_embeddings 64 --hidden_size 64 --intermediate_size 128
    --num_hidden_layers 2 --num_attention_heads 4 --num_key_value_heads 2 --batch_size 16
    --micro_batch_size 16 --train_tokens 100000 --warmup_steps 10 --optimizer muon --save_every 5
    --eval_every 1000 --log_every 1 --max_new_tokens 1 --device cpu --no-compile""".split()
COMMAND = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
import train_llama, train_tokenizer
open("imported", "w").close()
if not os.path.exists("bpe_50k.json"):
    train_tokenizer.main({[*DATA, "--vocab_size", "1000"]})
train_llama.main({[*DATA, *TRAINING]})
"""
PHASES = {  # and the file that appears or changes when one begins
    "tokenizer": "imported", "tokens": "tokens/*.train.u2", "training": "out/metrics.csv",
    "saving": "out/checkpoint*tmp", "export": "out/model.new"}
RESULTS = {"tokenizer": "bpe_50k.json", "tokens": "tokens/*.json"}  # of phases not repeated


def start(folder: Path, plan: list[tuple[str, float]], kill: bool) -> tuple[bool, list[float]]:
    """Start the command; await each phase of the plan and then some seconds; kill, or let it end.

    Returns whether it was killed, and the times at which the phases began and it ended.
    """
    times, since = [], time.time()

    def begun(phase: str) -> bool:
        with contextlib.suppress(FileNotFoundError):  # it was there, and has been renamed
            return any(path.stat().st_mtime > since for path in folder.glob(PHASES[phase]))

    with open(folder / "output.txt", "a") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", COMMAND], cwd=folder, stdout=output, stderr=output,
            env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    for phase, pause in plan:
        while process.poll() is None and not begun(phase):
            time.sleep(0.0005)
        times.append(time.time())
        while process.poll() is None and time.time() < times[-1] + pause:
            time.sleep(0.0005)
    if kill:
        process.kill()
    status = process.wait()
    if status not in (0, -9):
        sys.exit((folder / "output.txt").read_text()[-3000:] + f"\nended with {status}")
    return status == -9, [*times, time.time()]


def digest(folder: Path) -> dict[str, str]:
    """Hashes of what a run leaves behind, but for logs and the model card, which tell the time."""
    def content(tree: object) -> bytes:
        if isinstance(tree, torch.Tensor):
            return tree.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        if isinstance(tree, (dict, list, tuple)):
            return b"".join(map(content, tree.items() if isinstance(tree, dict) else tree))
        return repr(tree).encode()

    parts = torch.load(folder / "out" / "checkpoint.pt", weights_only=True)
    del parts["config"], parts["fingerprint"], parts["versions"]
    for name, pattern in (("export", "out/model/*"), ("token files", "tokens/*.u2"),
                          ("tokenizer", RESULTS["tokenizer"])):
        parts[name] = {path.name: path.read_bytes() for path in sorted(folder.glob(pattern))
                       if path.name != "README.md"}
    return {name: hashlib.sha256(content(part)).hexdigest() for name, part in parts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("--kills", 10), ("--seed", 0)):
        parser.add_argument(name, type=int, default=default)
    flags = parser.parse_args()
    chance, tried, kills, runs, equal = random.Random(flags.seed), Counter(), Counter(), 0, 0
    with tempfile.TemporaryDirectory() as place:
        (folder := Path(place, "undisturbed")).mkdir()
        _, times = start(folder, [(phase, 0.0) for phase in PHASES], kill=False)
        seconds = {phase: end - begin for phase, begin, end in zip(PHASES, times, times[1:])}
        seconds |= dict(training=times[4] - times[2], saving=0.02)
        expected = digest(folder)
        while kills.total() < flags.kills:
            (folder := Path(place, str(runs := runs + 1))).mkdir()
            before, killed = kills.copy(), True
            while killed:
                left = [name for name in PHASES if not any(folder.glob(RESULTS.get(name, "-")))]
                phase = min(left, key=lambda phase: (tried[phase], chance.random()))
                first = [("training", chance.random() * seconds["training"])]  # then a random save
                plan = first * (phase == "saving") + [(phase, chance.random() * seconds[phase])]
                killed, _ = start(folder, plan, kill=kills.total() < flags.kills)
                tried[phase] += 1
                kills[phase] += killed
            wrong = [name for name, value in digest(folder).items() if value != expected[name]]
            equal += not wrong
            print(f"run {runs}: killed in {', '.join((kills - before).elements()) or 'nothing'}; "
                  f"{'DIFFERENT: ' + ', '.join(wrong) if wrong else 'equal'}", flush=True)
    for phase in PHASES:
        print(f"{phase:<10}{seconds[phase]:>6.2f} s{kills[phase]:>4} kills")
    print(f"{kills.total()} kills in {runs} runs, of which {equal} ended bit-identical")
    sys.exit(equal < runs)


if __name__ == "__main__":
    main()
