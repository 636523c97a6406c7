"""Compare AdamW and Muon fairly: every setting of each is varied, on one text, at one size.

    python tests/sweep.py --results demo.jsonl                          # the demo's text
    python tests/sweep.py --results english.jsonl --dataset words.txt --hidden_size 256 --quick

Each optimiser has its learning rate swept first; then, at its best rate, the other settings change
one at a time (--quick: two momenta alone). A finished run is a line of the results and is not done
again. Losses do not depend on how busy the machine is; the seconds do, so none are reported.
"""
from __future__ import annotations

import argparse
import functools
import json
import math
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_llama as ours
import train_tokenizer

RATES = dict(adamw=(1e-3, 2e-3, 4e-3, 8e-3, 16e-3), muon=(4e-3, 8e-3, 12e-3, 16e-3, 24e-3))
OTHERS = [dict(weight_decay=0.0), dict(weight_decay=0.3), dict(warmup_steps=10),
          dict(warmup_steps=80), dict(schedule="wsd"), dict(batch_size=8), dict(batch_size=32)]
APART = [dict(adamw_share=share) for share in (0.25, 0.5, 2.0)] + [  # of Muon's rate, for the rest
    dict(embedding_scale=scale) for scale in (1, 4, 64)] + [  # and for the embedding alone
    dict(momentum=momentum) for momentum in (0.85, 0.9, 0.98)]


def run(arguments: argparse.Namespace, changes: dict) -> dict:
    """Train once from the same first weights; returns the settings and the held-out loss."""
    settings = vars(ours.parse_flags(["--demo"], [ours.LlamaConfig, ours.TrainConfig], ours.DEMO))
    folder = Path(arguments.folder, Path(arguments.dataset).stem)
    settings |= dict(
        dataset=arguments.dataset, hidden_size=arguments.hidden_size, num_hidden_layers=4,
        intermediate_size=3 * arguments.hidden_size, cache_dir=str(folder),
        num_attention_heads=arguments.hidden_size // 64, tokenizer_path=f"{folder}.json")
    share = changes.get("adamw_share", 1.0)
    settings |= {name: value for name, value in changes.items() if name in settings}
    if not Path(settings["tokenizer_path"]).exists():
        folder.mkdir(parents=True)
        train_tokenizer.main(["--demo", "--dataset", arguments.dataset, "--tokenizer_path",
                              settings["tokenizer_path"]])
    tokenizer = ours.load_tokenizer(settings["tokenizer_path"])
    settings["vocab_size"] = tokenizer.get_vocab_size()
    shape, config = (kind(**{field.name: settings[field.name] for field in ours.fields(kind)})
                     for kind in (ours.LlamaConfig, ours.TrainConfig))
    facts = ours.prepare_tokens(config, tokenizer, 10**7)
    dataset, validation = (
        ours.PretrainingDataset(facts[split]["path"], facts[split]["tokens"], config.seq_len)
        for split in ("train", "val"))
    torch.manual_seed(config.seed)
    device, dtype = ours.choose_device("auto", "auto")
    model = ours.LlamaForPretraining(shape).to(device)
    optimizers = ours.make_optimizers(model, config)
    for group in optimizers[-1].param_groups:
        group |= {"momentum": changes["momentum"]} if "momentum" in changes else {}
    autocast = functools.partial(torch.autocast, device.type, getattr(torch, dtype),
                                 enabled=dtype != "float32")
    scaler = torch.amp.GradScaler(device.type, enabled=False)
    model.compile(dynamic=False)
    steps = arguments.tokens // (config.batch_size * config.seq_len)
    config.warmup_steps = config.warmup_steps * 16 // config.batch_size  # the same tokens
    for step in range(steps):
        rows = ours.rows_of_step(step, config.batch_size, len(dataset), config.seed)
        ours.add_gradients(model, dataset, rows, min(8, config.batch_size), autocast, scaler)
        rate = ours.learning_rate_at(step, steps, config)
        for optimizer in optimizers:
            apart = share if config.optimizer == "muon" and optimizer is optimizers[0] else 1.0
            for group in optimizer.param_groups:
                scale = group.get("scale", 1)
                if "embedding_scale" in changes:
                    scale = changes["embedding_scale"] if scale > 1 else 1
                group["lr"] = rate * apart * scale
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
    with autocast():
        loss = ours.evaluate(model, validation, 16)
    labels = validation.count_labels(np.arange(len(validation)))
    return dict(loss=loss, bits_per_byte=loss * labels / math.log(2) / facts["val"]["bytes"])


def main() -> None:
    """Do what the results lack; print each line as it is known."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--dataset", default=ours.STDLIB)
    parser.add_argument("--hidden_size", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=819_200)
    parser.add_argument("--quick", action="store_true", help="three rates, and two momenta of Muon")
    parser.add_argument("--folder", default="sweep")
    arguments = parser.parse_args()
    known = [json.loads(line) for line in arguments.results.read_text().splitlines()
             ] if arguments.results.exists() else []

    def loss_of(changes: dict) -> float:
        for line in known:
            if line["changes"] == changes:
                return line["loss"]
        known.append(dict(dataset=Path(arguments.dataset).name, hidden_size=arguments.hidden_size,
                          changes=changes) | run(arguments, changes))
        with open(arguments.results, "a") as file:
            file.write(json.dumps(known[-1]) + "\n")
        print(json.dumps(known[-1]), flush=True)
        return known[-1]["loss"]

    bests = {}
    for optimizer, rates in RATES.items():
        rates = rates[1:4] if arguments.quick else rates
        tries = [dict(optimizer=optimizer, learning_rate=rate) for rate in rates]
        bests[optimizer] = min(tries, key=loss_of)
    for change in APART[-3:-1] if arguments.quick else APART + OTHERS:
        for optimizer in ("muon",) if change in APART else RATES:
            loss_of(bests[optimizer] | change)
    print("| settings | held-out nats a token | bits per byte |\n|---|---|---|")
    for line in known:
        settings = ", ".join(f"{name} {value}" for name, value in line["changes"].items())
        print(f"| {settings} | {line['loss']:.3f} | {line['bits_per_byte']:.3f} |")


if __name__ == "__main__":
    main()
