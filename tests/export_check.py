"""Check the export against another version of transformers, by hand.

    python tests/export_check.py write FOLDER    # where the tests run: models and what they say
    python tests/export_check.py check FOLDER    # where the other version is: compare with that

The second needs torch, transformers and safetensors only, and none of this repository's code.
"""
import json
import sys
from pathlib import Path

import torch

SEQ_LEN = 48
TEXTS = ["alpha beta", "", " ", "\r\n\t x", "Ünïcödé ½ e\u0301 ﬁ", "👩\u200d🚀 \x00",
         "don't 1,234.5", "[EOT] [PAD] [BOT] [UNK]", "a[EOT]"]


def write(folder: Path) -> None:
    """Export an untied and a tied model, each with what it says in reference.pt beside it."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from train_llama import BOT, LlamaConfig, LlamaForPretraining, TrainConfig
    from train_llama import export_model, load_tokenizer
    from train_tokenizer import train_tokenizer

    for name, tied in (("untied", False), ("tied", True)):
        out_dir = Path(folder, name)
        out_dir.mkdir(parents=True, exist_ok=True)
        path = out_dir / "tokenizer.json"
        path.write_text(train_tokenizer(["alpha beta gamma delta\n"] * 9, 300, 2).to_str())
        tokenizer = load_tokenizer(str(path))
        torch.manual_seed(5)
        model = LlamaForPretraining(LlamaConfig(
            tokenizer.get_vocab_size(), max_position_embeddings=64, hidden_size=32,
            intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, rms_norm_eps=1e-3, rope_theta=500.0, tie_word_embeddings=tied))
        for weight in model.parameters():
            torch.nn.init.normal_(weight, mean=float(weight.dim() < 2), std=0.3)
        config = TrainConfig(out_dir=str(out_dir), seq_len=SEQ_LEN)
        export_model(model, tokenizer, config, 0, {})
        with torch.no_grad():
            ids = torch.randint(4, tokenizer.get_vocab_size(), (2, SEQ_LEN))
            greedy = [BOT, *tokenizer.encode(TEXTS[0], add_special_tokens=False).ids]
            for _ in range(20):
                greedy.append(model(torch.tensor([greedy]))[0, -1].argmax().item())
            torch.save(dict(ids=ids, logits=model(ids), greedy=greedy, tokens=[
                [BOT, *tokenizer.encode(text, add_special_tokens=False).ids] for text in TEXTS],
            ), out_dir / "reference.pt")


def check(folder: Path) -> list[str]:
    """What differs from the reference; nothing, if all is well."""
    from safetensors import safe_open
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer
    from transformers import GenerationConfig, pipeline

    faults = []

    def expect(holds: bool, what: object) -> None:
        if not holds:
            faults.append(f"{name}: {what}")

    for name in ("untied", "tied"):
        path, said = Path(folder, name, "model"), torch.load(Path(folder, name, "reference.pt"))
        for kind in (AutoModel, AutoModelForCausalLM):
            model, info = kind.from_pretrained(path, output_loading_info=True)
            for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
                headless = key == "unexpected_keys" and kind is AutoModel and name == "untied"
                expect(set(info[key]) == {"lm_head.weight"} if headless else not info[key],
                       f"{kind.__name__}: {key} {info[key]}")
        with torch.no_grad():
            gap = (model.eval()(said["ids"]).logits - said["logits"]).abs().max().item()
        print(f"{name}: the largest difference of two logits is {gap:.1e}")
        expect(gap < 1e-5, f"logits differ by {gap}")

        tokenizer, start = AutoTokenizer.from_pretrained(path), len(said["tokens"][0])
        batch = tokenizer(TEXTS[0], return_tensors="pt")
        expect(set(batch) == {"input_ids", "attention_mask"}, list(batch))
        greedy = model.generate(**batch, do_sample=False, max_new_tokens=20, eos_token_id=None)
        expect(greedy[0].tolist() == said["greedy"], f"greedy continuation {greedy[0].tolist()}")
        model.generation_config.eos_token_id = said["greedy"][start + 3]
        ended = model.generate(**batch, do_sample=False, max_new_tokens=20)[0].tolist()
        first = said["greedy"].index(said["greedy"][start + 3], start)
        expect(ended == said["greedy"][: first + 1], f"generate does not stop: {ended}")
        text = pipeline("text-generation", model=str(path))(TEXTS[0], max_new_tokens=5)
        expect(text[0]["generated_text"].startswith(TEXTS[0]), f"pipeline: {text}")

        for text, ids in zip(TEXTS, said["tokens"]):
            expect(tokenizer(text)["input_ids"] == ids, f"tokens of {text!r}: {tokenizer(text)}")
            back = tokenizer.decode(ids, skip_special_tokens=True)
            expect(back == text, f"{text!r} came back as {back!r}")
        batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
        expect(set(batch["input_ids"][batch["attention_mask"] == 0].tolist()) == {0}, "padding")
        config = AutoConfig.from_pretrained(path)
        for holder in (tokenizer, config, GenerationConfig.from_pretrained(path)):
            ids = holder.bos_token_id, holder.eos_token_id, holder.pad_token_id
            expect(ids == (1, 2, 0), f"{type(holder).__name__}: bos, eos, pad are {ids}")
        theta = (getattr(config, "rope_parameters", None) or vars(config))["rope_theta"]
        seen = theta, config.rms_norm_eps, config.max_position_embeddings
        expect(seen == (500.0, 1e-3, SEQ_LEN), f"rope_theta, rms_norm_eps, positions: {seen}")
        expect(len(tokenizer) == config.vocab_size, f"{len(tokenizer)} tokens")
        with safe_open(path / "model.safetensors", "pt") as file:
            expect(file.metadata() == {"format": "pt"}, file.metadata())
        expect(json.loads((path / "config.json").read_text())["architectures"]
               == [type(model).__name__], type(model).__name__)
    return faults


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("write", "check"):
        sys.exit(__doc__)
    if sys.argv[1] == "write":
        write(Path(sys.argv[2]))
    else:
        import transformers
        print(f"transformers {transformers.__version__}, torch {torch.__version__}")
        differences = check(Path(sys.argv[2]))
        print("\n".join(differences) or "all is equal")
        sys.exit(bool(differences))
