"""Pretrain a Llama language model on your own GPU: the whole algorithm, read from top to bottom.

    python train_tokenizer.py --demo && python train_llama.py --demo    # minutes, without a GPU
    python train_tokenizer.py && python train_llama.py                  # the recipe, on FineWeb
    python train_llama.py --dataset "texts/**/*.md" --out_dir mine      # your own files
    python train_llama.py --prompt "The meaning of life is"             # let the model write
    torchrun --nproc_per_node 2 train_llama.py                          # two GPUs

Whatever interrupts a run, the same command goes on from its last checkpoint.
Contents: 1 Settings, 2 Model, 3 Data, 4 Optimiser and schedule, 5 Checkpoints, 6 Evaluation and
sampling, 7 Export, 8 Training. Shapes: B sequences in a micro-batch, T tokens in a sequence, C
hidden size, N heads, K key-value heads, D = C / N size of a head, V vocabulary size.
"""
import argparse, contextlib, ctypes, functools, glob, hashlib, inspect, io, json, math, os, re
import shlex, shutil, signal, sys, sysconfig, tempfile, time, timeit, zipfile, zlib
from collections import Counter
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import BinaryIO, Callable, Iterable, Iterator

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from filelock import FileLock, Timeout
from tokenizers import Tokenizer, decoders
from torch import Tensor, nn
from tqdm import tqdm

# ---- 1 Settings ----------------------------------------------------------------------------------
# What you may want to change stands here. A field is also a flag (--micro_batch_size 4), and its
# comment is the flag's help. One update of the weights sees batch_size x seq_len tokens.

@dataclass
class LlamaConfig:
    """The size of the model, under the names that Hugging Face gives it; the demo's is smaller."""
    vocab_size: int  # V; neither default nor flag: the tokenizer decides
    max_position_embeddings: int = 2048  # the longest sequence that rotary angles are made for
    hidden_size: int = 768  # C, the width of the residual stream
    intermediate_size: int = 3072  # the width inside the MLP
    num_hidden_layers: int = 12  # how many decoder layers
    num_attention_heads: int = 12  # N, the query heads
    num_key_value_heads: int = 3  # K, the key and value heads; K = N is plain attention
    rms_norm_eps: float = 1e-5  # keeps the norms from dividing by zero
    rope_theta: float = 10_000.0  # base of the rotary wavelengths
    tie_word_embeddings: bool = False  # let the head share the embedding's matrix

@dataclass
class TrainConfig:
    """Everything else: the data, the optimisation, the running and the sampling."""
    dataset: str = "HuggingFaceFW/fineweb"  # a Hub name, or a local file, folder or pattern
    dataset_config: str = "sample-10BT"  # configuration of a Hub data set; "" for its only one
    text_column: str = "text"  # the column (or JSON key) that holds the text
    tokenizer_path: str = "bpe_50k.json"  # made by train_tokenizer.py
    cache_dir: str = "tokens"  # folder for the token files
    val_every: int = 1000  # hold out one document in so many for validation; 0: none
    packing: bool = True  # join documents and cut blocks; else each document has its own rows
    seq_len: int = 512  # T, tokens in a training sequence

    train_tokens: int = 3_600_000_000  # length of the run; the recipe has 20 a parameter
    max_epochs: float = 4.0  # read the corpus at most so often (arXiv:2305.16264)
    batch_size: int = 512  # sequences in one optimiser step, over all processes
    micro_batch_size: int = 8  # sequences that one process holds at once; lower it to save memory
    optimizer: str = "adamw"  # adamw, or muon for the layers' matrices
    learning_rate: float = 1e-3  # the peak
    min_learning_rate: float = 0.0  # where the schedule ends
    warmup_steps: int = 1000  # steps over which the rate rises to its peak
    schedule: str = "cosine"  # after the warm-up: cosine, or wsd (stable, then decay)
    weight_decay: float = 0.1  # on matrices only
    grad_clip: float = 1.0  # largest norm of the gradient over all weights; 0: no limit

    out_dir: str = "out"  # checkpoints, metrics and the finished model
    init_from: str = ""  # start a new run from the weights of this checkpoint or model folder
    seed: int = 1  # of the first weights, the order of the data and the samples
    device: str = "auto"  # auto, cpu, cuda, cuda:1, mps
    dtype: str = "auto"  # of the matrix products: auto, bfloat16, float16, float32
    compile: bool | None = None  # torch.compile the model; by default not on mps and Windows
    log_every: int = 10  # steps between two lines of the log
    eval_every: int = 200  # steps between two evaluations
    save_every: int = 200  # steps between two checkpoints

    prompt: str | None = None  # continue this text with the model in out_dir, instead of training
    temperature: float = 0.8  # of sampling; 0 always takes the likeliest token
    top_k: int = 50  # sample among so many likeliest tokens; 0: among all
    max_new_tokens: int = 200  # tokens in a sample

STDLIB = "python-stdlib"  # names the demo's corpus: the source files of Python's own library
DEMO = dict(  # --demo is this set of other defaults; any flag still overrides it
    dataset=STDLIB, tokenizer_path="demo_bpe.json", val_every=20, out_dir="demo_out", seq_len=256,
    hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=256, batch_size=16, micro_batch_size=16,
    train_tokens=2_800_000, optimizer="muon", learning_rate=12e-3, warmup_steps=20)
# What must hold (check_settings evaluates it); val_every 1 would leave no text to train on.
RULES = ("hidden_size % (2 * num_attention_heads) == 0", "seq_len <= max_position_embeddings",
         "num_attention_heads % num_key_value_heads == 0", "min_learning_rate <= learning_rate",
         "batch_size % (micro_batch_size * processes) == 0", "max_epochs >= 1", "val_every != 1",
         "optimizer in ('adamw', 'muon')", "schedule in ('cosine', 'wsd')",
         "device in ('auto', 'cpu', 'cuda') or processes == 1",
         "dtype in ('auto', 'bfloat16', 'float16', 'float32')")
MAY_BE_ZERO = ("val_every min_learning_rate warmup_steps weight_decay grad_clip seed temperature "
               "top_k max_new_tokens").split()  # all other numbers are above 0
SPECIAL_TOKENS = ["[PAD]", "[BOT]", "[EOT]", "[UNK]"]  # padding, begin and end of text, unknown
PAD, BOT, EOT, UNK = range(4)  # their ids
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # by torchrun

class UserError(SystemExit):
    """A mistake that the user can mend: Python prints its sentence, and no traceback."""

def need(fact: object, sentence: str) -> None:
    """Raise UserError with the sentence if something is not as it must be."""
    if not fact:
        raise UserError(sentence)

def say(text: str) -> None:
    """Print a line, from the first process only, without breaking the progress bar."""
    if RANK == 0:
        tqdm.write(text)

def brief(error: BaseException) -> str:
    """The kind of an error, and the first line of what it says."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"

def parse_flags(argv: list[str] | None, configs: list[type], demo: dict) -> argparse.Namespace:
    """All settings in one namespace: the fields' defaults, or the demo's, or what a flag says."""
    getattr(sys.stdout, "reconfigure", dict)(errors="replace", line_buffering=True)  # for logs
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(allow_abbrev=False, usage="%(prog)s [--flag value ...]")
    parser.error = lambda text: sys.exit(f"{parser.prog}: {text} (--help lists the flags)")
    parser.add_argument("--demo", action="store_true", help="needs minutes, no GPU, no network")
    usual = {field.name: field.default for config in configs for field in fields(config)}
    usual |= demo if "--demo" in argv else {}
    source = "".join(map(inspect.getsource, configs))  # as the comments are the flags' help
    for name, kind, comment in re.findall(r"^    (\w+): (\S+).*? = .*?  # (.*)$", source, re.M):
        form = dict(action=argparse.BooleanOptionalAction) if kind == "bool" else dict(
            type={"int": int, "float": float, "str": str}[kind], metavar=kind)
        spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))  # once, if equal
        parser.add_argument(*spellings, **form, default=usual[name],
                            help=f"{comment} (default: {usual[name]})")
    return parser.parse_args(argv)

def load_tokenizer(path: str) -> Tokenizer:
    """The tokenizer that train_tokenizer.py made."""
    tokenizer = Tokenizer.from_file(path)
    if [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] != [PAD, BOT, EOT, UNK]:
        raise ValueError(f"it lacks {SPECIAL_TOKENS} as ids 0 to 3")
    tokenizer.encode_special_tokens = True  # "[EOT]" in a text means five characters, no end
    return tokenizer

def check_settings(s: argparse.Namespace) -> None:
    """Raise one UserError that lists every fault that shows without the data."""
    faults, context = {}, dict(inf=math.inf, processes=WORLD)
    signs = [f"0 <{'=' * (name in MAY_BE_ZERO)} {name} < inf" for name, value in vars(s).items()
             if type(value) in (int, float)]
    for rule in (*signs, *RULES):
        given = {n: f"--{n} {v}" for n, v in vars(s).items() if re.search(rf"\b{n}\b", rule)}
        if not faults.keys() & given and not eval(rule, context, vars(s)):
            faults[" ".join(given)] = f"{', '.join(given.values())}: {rule} must hold" + (
                f" for {WORLD} processes" * ("processes" in rule))
    new = not Path(s.out_dir, "checkpoint.pt").exists()  # init_from is for the start of a run
    tries = dict(tokenizer_path=load_tokenizer, init_from=lambda p: p and new and load_weights(p),
                 device=lambda name: torch.empty(0, device=name.replace("auto", "cpu")).cpu())
    for folder in ("cache_dir", "out_dir") if s.prompt is None else ():
        tries[folder] = lambda path: (os.makedirs(path, exist_ok=True),
                                      tempfile.TemporaryFile(dir=path).close())
    for flag, attempt in tries.items():
        try:
            attempt(getattr(s, flag))
        except Exception as error:  # a file, a driver or a disk fails in too many ways to list
            faults.setdefault(flag, f"--{flag} {getattr(s, flag)} is no use: {brief(error)}")
    if "tokenizer_path" in faults:
        usual = vars(TrainConfig) | (DEMO if s.demo else {})
        faults["tokenizer_path"] += "; make it with: " + shlex.join([
            "python", "train_tokenizer.py", *["--demo"] * s.demo, *(
                f"--{name}={getattr(s, name)}" for name in ("dataset", "dataset_config",
                "text_column", "val_every", "tokenizer_path") if getattr(s, name) != usual[name])])
    need(not faults, "\n".join(faults.values()))

# ---- 2 Model -------------------------------------------------------------------------------------
# A Llama (arXiv:2302.13971): embed the tokens, let each layer add what attention and an MLP make
# of them, normalise, and score every token of the vocabulary as the next one. No biases.

Linear = functools.partial(nn.Linear, bias=False)

class RotaryEmbedding(nn.Module):
    """Turn queries and keys by their position, so that scores see distances (arXiv:2104.09864)."""
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size = config.hidden_size // config.num_attention_heads  # D
        frequencies = 1.0 / config.rope_theta ** (torch.arange(0, size, 2).repeat(2) / size)
        angles = torch.outer(torch.arange(config.max_position_embeddings).float(), frequencies)
        table = torch.stack((angles.cos(), angles.sin()))  # (2, max_position_embeddings, D)
        self.register_buffer("table", table, persistent=False)  # not in state_dict()

    def forward(self, x: Tensor) -> Tensor:  # (B, N or K, T, D)
        first, second = x.chunk(2, dim=-1)  # feature i turns with i + D/2, as in Hugging Face's
        cos, sin = self.table[:, : x.size(-2)].to(x.dtype)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

class LlamaAttention(nn.Module):
    """Causal attention with fewer key-value heads than query heads (arXiv:2305.13245)."""
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_size = config.hidden_size // config.num_attention_heads
        kv_size = config.num_key_value_heads * self.head_size
        self.q_proj = Linear(config.hidden_size, config.hidden_size)
        self.k_proj, self.v_proj = (Linear(config.hidden_size, kv_size) for _ in range(2))
        self.o_proj = Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, rotate: RotaryEmbedding) -> Tensor:  # (B, T, C)
        q, k, v = (project(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
                   for project in (self.q_proj, self.k_proj, self.v_proj))  # (B, N or K, T, D)
        q, k = rotate(q), rotate(k)
        if q.is_cuda and (q.dtype == torch.float32 or torch.cuda.get_device_capability() < (8, 0)):
            # No flash attention here, and the next best kernel wants as many k and v as q.
            k, v = (t.repeat_interleave(q.size(1) // k.size(1), dim=1) for t in (k, v))
        # is_causal stops the future from leaking into the past. No mask: one would switch flash
        # attention off, and padding stands on the right, where no real token can see it.
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(x.transpose(1, 2).flatten(2))  # (B, N, T, D) -> (B, T, C)

class LlamaMLP(nn.Module):
    """SwiGLU: one projection gates the other (arXiv:2002.05202)."""
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C)
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

class LlamaDecoderLayer(nn.Module):
    """Attention, then MLP: each reads the normalised residual stream and adds to it."""
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = LlamaAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(self, x: Tensor, rotate: RotaryEmbedding) -> Tensor:  # (B, T, C)
        x = x + self.self_attn(self.input_layernorm(x), rotate)
        return x + self.mlp(self.post_attention_layernorm(x))

class LlamaModel(nn.Module):
    """Token ids (B, T) to normalised hidden states (B, T, C)."""
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)  # arXiv:1910.07467
        self.rotary_emb = RotaryEmbedding(config)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x, self.rotary_emb)
        return self.norm(x)

class LlamaForPretraining(nn.Module):
    """The model and its head; state_dict() has the keys of Hugging Face's LlamaForCausalLM."""
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config, self.model = config, LlamaModel(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                # Each layer adds twice to the residual stream; smaller last projections keep the
                # sum's variance the same for any number of layers (GPT-2).
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                terms = 2 * config.num_hidden_layers if last else 1
                nn.init.normal_(weight, std=0.02 / math.sqrt(terms))
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """The logits (B, T, V), or with labels (B, T) the sum of their losses in nats, a scalar.

        Labels are already shifted, which Hugging Face's are not: labels[:, t] is the token that
        follows input_ids[:, t]. A label of -100 is ignored.
        """
        logits = self.lm_head(self.model(input_ids))
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")

def flops_per_token(model: LlamaForPretraining, seq_len: int) -> int:
    """Floating-point operations for one token, forward and backward (arXiv:2204.02311, app. B).

    Each weight that multiplies costs 2 + 4; scores and sums 3 x 4 x C x T a layer, half if causal.
    """
    matrices = sum(w.numel() for w in model.model.layers.parameters() if w.dim() == 2)
    attention = 6 * model.config.num_hidden_layers * model.config.hidden_size * seq_len
    return 6 * (matrices + model.lm_head.weight.numel()) + attention

# ---- 3 Data --------------------------------------------------------------------------------------
# Documents are tokenised once, before training, into one long file: [BOT] ids [EOT] [BOT] ids ...
# It only grows at its end, so a longer run appends and nothing is done twice. Training reads blocks
# of it, in an order that depends on the seed and the step alone.

WINDOW = 65_536  # blocks are shuffled inside windows of so many: one fits in the file cache
SURROGATES = re.compile("[\ud800-\udfff]")  # what stands in a string where no character was

def write_atomically(path: Path, write: Callable[[BinaryIO], object], keep: str = "") -> None:
    """Write a file that is there whole or not at all, whatever fails; the old one may be kept."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "w+b") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())  # on the disk before it gets its name
        if keep and path.exists():
            os.replace(path, path.with_name(keep))
        os.replace(temporary, path)
        if os.name == "posix":
            folder = os.open(path.parent, os.O_RDONLY)
            os.fsync(folder)  # the name, too
            os.close(folder)
    except Exception as error:  # torch.save raises RuntimeError on a full disk
        temporary.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}, the old one is intact: {error}") from error

def check_disk(folder: str, needed: float, what: str) -> None:
    """Say how much space is needed and free; raise UserError if it is too little."""
    needed, free = max(0, needed), shutil.disk_usage(folder).free
    say(f"disk: {needed / 1e9:.2f} GB for {what} in {folder}, {free / 1e9:.1f} GB are free")
    need(needed < free, f"too little free space for {what} in --cache_dir or --out_dir {folder}")

def find_files(dataset: str) -> tuple[list[str], str]:
    """The files of a local data set, sorted, and their one kind; for a Hub name [] and "hub"."""
    demo, seen = dataset == STDLIB, set()
    path = sysconfig.get_path("stdlib") if demo else os.path.expanduser(dataset)
    names = [path] if os.path.isfile(path) else glob.glob(path, recursive=True)
    left_out = re.compile(r"\.|(tests?|idlelib|lib2to3|(site|dist)-packages)$" if demo else r"\.")
    for folder, folders, _ in os.walk(path, followlinks=True):  # of a folder, what is below it
        new = os.path.realpath(folder) not in seen  # links can make a circle
        seen.add(os.path.realpath(folder))
        folders[:] = [name for name in sorted(folders) if new and not left_out.match(name)]
        names += glob.glob(os.path.join(glob.escape(folder), "*.py" if demo else "*"))
    files = list({os.path.realpath(name): name for name in sorted(names)  # each file once
                  if os.path.isfile(name)}.values())
    kinds = Counter("parquet" if name.endswith(".parquet") else "json" if re.search(
        r"\.(json|jsonl|ndjson)(\.gz|\.zst)?$", name) else "text" for name in files)
    need(len(kinds) < 2, f"--dataset {dataset} mixes {dict(kinds)} files: use '.../**/*.jsonl'")
    need(files or not names and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", dataset),
         f"--dataset {dataset}: there is no such file, folder or pattern of files")
    return files, next(iter(kinds), "hub")

def read_rows(files: list[str], kind: str, text_column: str) -> Iterator[dict]:
    """Rows of text or JSON-lines files, plain, .gz or .zst, line ends and all as they are.

    A long text is cut after line ends into rows of 64 kB. Bytes that are not UTF-8 become
    surrogates. A JSON line that is no object has a ValueError as its text.
    """
    from pyarrow import input_stream  # the readers of datasets change line ends and refuse much
    for file in files:
        with io.TextIOWrapper(input_stream(file, compression="detect"), encoding="utf-8-sig",
                              errors="surrogateescape", newline="\n") as stream:
            pieces = iter(lambda: stream.read(65_536) + stream.readline(1_000_000), "")
            for text in stream if kind == "json" else pieces:
                try:  # | {} raises TypeError where there is no object
                    row = json.loads(text) | {} if kind == "json" else {text_column: text}
                except (ValueError, TypeError, RecursionError):
                    row = {text_column: ValueError("no JSON object on a line")}
                yield row | {"__file__": file}

def open_rows(dataset: str, dataset_config: str, text_column: str, revision: str | None = None):
    """An IterableDataset of rows, whose state_dict() says where to go on, and its Hub revision."""
    import datasets, huggingface_hub  # a second that --help need not wait for
    files, kind = find_files(dataset)
    try:
        if kind == "hub":  # the revision is kept, so that appending finds the same rows
            revision = revision or huggingface_hub.dataset_info(dataset).sha
        source = ("parquet", None) if kind == "parquet" else (dataset, dataset_config or None)
        load = functools.partial(datasets.load_dataset, *source, split="train", streaming=True,
                                 data_files=[*map(glob.escape, files)] or None, revision=revision)
        rows = load() if kind in ("hub", "parquet") else datasets.IterableDataset.from_generator(
            read_rows, gen_kwargs=dict(files=files, kind=kind, text_column=text_column))
        columns = rows.column_names or sorted({key for row in rows.take(100) for key in row})
        if rows.info.builder_name == "parquet" and text_column in columns:
            rows = load(columns=[text_column], batch_size=1000)  # the others are not even read
    except Exception as error:  # networks, names and files fail in too many ways to list
        raise UserError(f"cannot open --dataset {dataset} --dataset_config '{dataset_config}' ("
                        f"{brief(error)}); without a network use --demo or local files") from error
    say(f"reading {dataset}: " + (f"{len(files)} {kind} files, {', '.join(files[:3])}" if files
                                  else f"revision {revision}"))
    need(text_column in columns or not columns, f"--text_column {text_column} is not a column of "
         f"{dataset}, these are: {', '.join(name for name in columns if name != '__file__')}")
    return (rows.select_columns(text_column) if kind == "hub" else rows), revision

def load_documents(rows: Iterable[dict], text_column: str, skipped: Counter) -> Iterator[str]:
    """The texts in the rows; `skipped` counts, by reason, those left out or mended."""
    try:
        for row in rows:
            text, file = row.get(text_column), row.get("__file__", "in a row")
            if not isinstance(text, str):
                known = isinstance(text, ValueError)
                skipped[str(text) if known else f"{type(text).__name__} instead of text"] += 1
            elif not text or text.isspace():
                skipped["blank"] += 1
            elif (broken := len(SURROGATES.findall(text))) + text.count("\0") > 8 + len(text) / 5:
                skipped[f"not UTF-8 text: {file}"] += 1  # a binary file
            else:
                skipped.update([f"kept, U+FFFD for what is not UTF-8: {file}"] * bool(broken))
                yield SURROGATES.sub("\ufffd", text) if broken else text
    except Exception as error:  # the network, or a damaged file
        raise UserError("--dataset cannot be read further, mend that and start again "
                        f"({brief(error)})") from error

def prepare_tokens(config: TrainConfig, tokenizer: Tokenizer, needed: int) -> dict:
    """The facts of token files with `needed` training tokens or the whole corpus, made if missing.

    Their name is a hash of what decides the content, never of the length, which can grow.
    """
    files, _ = find_files(config.dataset)
    source = [[os.path.abspath(name), os.path.getsize(name), os.stat(name).st_mtime_ns]
              for name in files] or [config.dataset, config.dataset_config]
    key = json.dumps([source, config.text_column, tokenizer.to_str(), config.val_every])
    stem = os.path.join(config.cache_dir, hashlib.sha256(key.encode()).hexdigest()[:16])
    size = 2 if tokenizer.get_vocab_size() <= 65_536 else 4  # bytes a token
    splits = {split: dict(path=f"{stem}.{split}.u{size}", tokens=0, bytes=0, crc32=0)
              for split in ("train", "val")}
    facts = dict(documents=0, ended=False, state=None, revision=None, skipped={}, **splits)
    with FileLock(stem + ".lock"):  # another process may be writing the same files
        with contextlib.suppress(FileNotFoundError):  # then all is made anew
            found = json.loads(Path(stem + ".json").read_text())
            for split, part in splits.items():
                found[split]["path"] = part["path"]  # the folder may have been moved
                if os.path.getsize(part["path"]) < found[split]["tokens"] * size:
                    raise FileNotFoundError  # some of it is missing
            facts = found
        train, val = facts["train"], facts["val"]
        if missing := not facts["ended"] and train["tokens"] < needed:
            most = sum(map(os.path.getsize, files)) or math.inf
            check_disk(config.cache_dir, size * (min(most, needed) - train["tokens"]), "tokens")
            append_tokens(config, tokenizer, facts, needed, Path(stem + ".json"), size, most)
    gb = sum(file.stat().st_size for file in Path(config.cache_dir).glob("*.u?")) / 1e9
    why = Counter(facts["skipped"]).most_common(8) or [("rows", 0)]
    why = "skipped or mended: " + ", ".join(f"{n:,} {reason}" for reason, n in why)
    say(f"data: {config.dataset}, {facts['documents']:,} documents; {why}\n"
        f"tokens: {'written' if missing else 'reused'}, {train['tokens']:,} to train on, "
        f"{val['tokens']:,} held out, {train['bytes'] / max(1, train['tokens']):.2f} bytes each; "
        f"{config.cache_dir} has {gb:.2f} GB")
    need(train["tokens"], f"--dataset {config.dataset} has no text to train on: --val_every "
         f"{config.val_every} holds out {facts['documents']} documents; {why}")
    return facts

def append_tokens(config: TrainConfig, tokenizer: Tokenizer, facts: dict, needed: int, path: Path,
                  size: int, most: float) -> None:
    """Tokenise further documents, about 4 MB at a time, to the end of the token files.

    The facts are written after the tokens they count: a death costs the work on those 4 MB.
    """
    rows, facts["revision"] = open_rows(config.dataset, config.dataset_config, config.text_column,
                                        facts["revision"])
    if facts["state"]:
        rows.load_state_dict(facts["state"])
    facts["skipped"] = Counter(facts["skipped"])
    documents = load_documents(rows, config.text_column, facts["skipped"])
    splits = (train := facts["train"]), facts["val"]
    with (open(train["path"], "ab") as a, open(splits[1]["path"], "ab") as b,
          tqdm(desc="tokenising", initial=train["bytes"], unit="B", unit_scale=True) as bar):
        for file, part in zip(files := (a, b), splits):
            file.truncate(part["tokens"] * size)  # what a death left beyond the facts
        while not facts["ended"] and train["tokens"] < needed:
            batch, room = [], 4_000_000
            while room > 0 and (text := next(documents, None)) is not None:
                batch.append(text)
                room -= len(text)
            for text, encoding in zip(batch, tokenizer.encode_batch_fast(
                    batch, add_special_tokens=False)):
                held_out = bool(config.val_every and facts["documents"] % config.val_every == 0)
                ids, part = np.array([BOT, *encoding.ids, EOT], f"u{size}"), splits[held_out]
                files[held_out].write(ids.tobytes())
                part |= dict(tokens=part["tokens"] + len(ids), crc32=zlib.crc32(ids, part["crc32"]),
                             bytes=part["bytes"] + len(text.encode()))
                facts["documents"] += 1
            facts |= dict(ended=room > 0, state=rows.state_dict())  # not full: no more documents
            bar.total = min(most, train["bytes"] * needed / max(1, train["tokens"]))  # a forecast
            bar.set_postfix_str(f"{facts['documents']:,} documents")
            bar.update(train["bytes"] - bar.n)
            for file in files:
                file.flush()
                os.fsync(file.fileno())
            write_atomically(path, lambda file: file.write(json.dumps(facts).encode()))

class PretrainingDataset(torch.utils.data.Dataset):
    """Rows of T tokens from a token file: dict(input_ids, labels), int64 tensors of shape (T,).

    packing=True: row i is the block of tokens iT .. iT+T: every token but the first is a label
    once. Clipped, documents would lose half of FineWeb; padded, they would waste a third.
    packing=False: each document has its own row, or rows; free places on the right hold [PAD],
    and as label -100, which the loss ignores.
    """
    def __init__(self, path: str, tokens: int, seq_len: int, packing: bool = True) -> None:
        self.path, self.tokens, self.seq_len, self.packing = path, tokens, seq_len, packing
        self.rows = -(-(tokens - 1) // seq_len) if packing else len(self.spans(slice(None))[0])

    def __len__(self) -> int:
        return self.rows

    def spans(self, rows: np.ndarray | slice) -> tuple[np.ndarray, np.ndarray]:
        """Where in the token file some rows start, and how many tokens each has, at most T + 1."""
        if not self.packing:
            starts, lengths = document_rows(self.path, self.tokens, self.seq_len)
            return starts[rows], lengths[rows]
        starts = rows * self.seq_len
        return starts, np.minimum(self.seq_len + 1, self.tokens - starts)

    def count_labels(self, rows: np.ndarray) -> int:
        """How many labels of some rows are not ignored; reads no tokens."""
        return int((self.spans(rows)[1] - 1).sum())

    def batch(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """input_ids and labels of some rows, (B, T) each."""
        tokens, (starts, lengths) = map_tokens(self.path, self.tokens), self.spans(rows)
        block = np.full((len(rows), self.seq_len + 1), PAD, dtype=np.int64)
        for row, start, length in zip(block, starts, lengths):
            row[:length] = tokens[start : start + length]
        labels = np.where(np.arange(1, self.seq_len + 1) < lengths[:, None], block[:, 1:], -100)
        return torch.from_numpy(block[:, :-1].copy()), torch.from_numpy(labels)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        input_ids, labels = self.batch(np.array([range(self.rows)[row]]))  # or IndexError
        return dict(input_ids=input_ids[0], labels=labels[0])

def map_tokens(path: str, tokens: int) -> np.ndarray:
    """The tokens in a file, whose suffix is their dtype; a fresh map holds no pages in memory."""
    return np.memmap(path, path.rpartition(".")[2], mode="r", shape=(tokens,))

@functools.lru_cache(maxsize=4)
def document_rows(path: str, tokens: int, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Starts and lengths of all rows without packing.

    A long document goes on in further rows, each from the last token of the row before.
    """
    ids, step = map_tokens(path, tokens), 1 << 26
    starts = np.concatenate([np.flatnonzero(ids[i : i + step] == BOT) + i
                             for i in range(0, tokens, step)])
    ends = np.append(starts[1:], tokens)
    counts = -(-(ends - starts - 1) // seq_len)  # rows of each document; [BOT] is never a label
    nth = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # in a document
    starts = np.repeat(starts, counts) + nth * seq_len
    return starts, np.minimum(seq_len + 1, np.repeat(ends, counts) - starts)

def rows_of_step(step: int, batch_size: int, rows: int, seed: int) -> np.ndarray:
    """The rows that a step trains on: a pure function, so that nothing need be saved to resume.

    Steps count from 0, so the log's step 1 is step 0. Positions step * batch_size + j run on
    through the epochs. In each, rows are shuffled inside fixed windows: the order of the early
    ones does not depend on how many follow.
    """
    places = (divmod(step * batch_size + j, rows) for j in range(batch_size))
    return np.array([shuffled(rows, seed, epoch, place // WINDOW * WINDOW)[place % WINDOW]
                     for epoch, place in places])

@functools.lru_cache(maxsize=4)
def shuffled(rows: int, seed: int, epoch: int, first: int) -> np.ndarray:
    """The rows of a window, ordered by raw bits: those are the same in every version of numpy."""
    bits = np.random.PCG64([seed, epoch, first]).random_raw(min(WINDOW, rows - first))
    return first + np.argsort(bits, kind="stable")

# ---- 4 Optimiser and schedule --------------------------------------------------------------------
# Small steps first, while the gradients are wild, then large ones, then ever smaller ones to settle
# in a minimum (arXiv:1608.03983).

def learning_rate_at(step: int, steps: int, config: TrainConfig) -> float:
    """The learning rate of step 0 .. steps - 1, a pure function; the last step has the minimum."""
    peak, lowest, warmup = config.learning_rate, config.min_learning_rate, config.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    if config.schedule == "cosine":
        progress = (step + 1 - warmup) / (steps - warmup)
        return lowest + (peak - lowest) * (1 + math.cos(math.pi * progress)) / 2
    decay = max(1, min(steps // 5, steps - warmup))  # wsd (arXiv:2404.06395): a last fifth
    return lowest + (peak - lowest) * min(1, (steps - 1 - step) / decay)

def make_optimizers(model: nn.Module, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """AdamW for all weights (arXiv:1711.05101), or Muon for the layers' matrices beside it.

    Muon sets the singular values of the momentum to about 1, scaled here to the size of AdamW's
    updates, so that one learning rate serves both (arXiv:2502.16982). Measured: it wants a momentum
    below the usual 0.95, and the embedding, of which a step sees few rows, `scale` times the rate.
    """
    muon, embedding, decayed, plain = [], [], [], []
    use_muon, tied = config.optimizer == "muon", model.config.tie_word_embeddings
    for name, weight in model.named_parameters():
        (plain if weight.dim() < 2 else muon if use_muon and ".layers." in name else embedding
         if use_muon and "embed" in name and not tied else decayed).append(weight)
    rate, decay = config.learning_rate, config.weight_decay
    groups = (dict(params=embedding, scale=12), dict(params=decayed),
              dict(params=plain, weight_decay=0.0))
    adamw = torch.optim.AdamW([group for group in groups if group["params"]], lr=rate,
                              betas=(0.9, 0.95), eps=1e-8, weight_decay=decay, fused=True)
    return [adamw] if not muon else [adamw, torch.optim.Muon(
        muon, lr=rate, momentum=0.9, weight_decay=decay, adjust_lr_fn="match_rms_adamw")]

# ---- 5 Checkpoints -------------------------------------------------------------------------------
# A checkpoint has the weights, the state of the optimisers and of float16's scaler, the step and
# the tokens so far; the order of the data and the learning rates follow from the step. Its settings
# and its fingerprint of data and tokenizer say whether a run may go on; the versions just tell.

def save_checkpoint(out_dir: str, checkpoint: dict) -> None:
    """Write checkpoint.pt; when it is proven good, the one before becomes the previous."""
    def write(file: BinaryIO) -> None:
        torch.save(checkpoint, file)
        if damaged := zipfile.ZipFile(file).testzip():  # reads all of it against its checksums
            raise OSError(f"{damaged} was read back with a wrong checksum")
    write_atomically(Path(out_dir, "checkpoint.pt"), write, keep="checkpoint.previous.pt")

def read_checkpoint(path: str | Path) -> dict:
    """A checkpoint in host memory. Raises whatever a damaged file makes the libraries raise."""
    if damaged := zipfile.ZipFile(path).testzip():  # torch.load ignores the checksums
        raise ValueError(f"{damaged} has a wrong checksum")
    return torch.load(path, map_location="cpu", weights_only=True)

def load_checkpoint(out_dir: str, mend: bool = True) -> dict | None:
    """The newest whole checkpoint; None if there is none, UserError if all are damaged."""
    paths = [Path(out_dir, name) for name in ("checkpoint.pt", "checkpoint.previous.pt")]
    paths = [path for path in paths if path.exists()]
    for path in paths:
        try:
            checkpoint = read_checkpoint(path)
            if mend and path != paths[0] and RANK == 0:  # or the next save would keep the bad one
                os.replace(paths[0], f"{paths[0]}.damaged")
            return checkpoint
        except Exception as error:  # damage shows in every way
            say(f"{path} is damaged ({brief(error)})")
    need(not paths, f"--out_dir {out_dir} has no whole checkpoint: restore one or take another")

def load_weights(path: str) -> dict[str, Tensor]:
    """The weights in a checkpoint or in an exported model folder, for --init_from."""
    if os.path.isfile(path):
        return read_checkpoint(path)["model"]
    with open(Path(path, "model.safetensors"), "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        data = torch.from_numpy(np.fromfile(file, np.float32))
    weights = {name: data[entry["data_offsets"][0] // 4 : entry["data_offsets"][1] // 4].view(
        entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    return {"lm_head.weight": weights["model.embed_tokens.weight"], **weights}  # if tied: once

def checksum(path: str, tokens: int) -> int:
    """The CRC-32 of the first tokens of a file, in constant memory."""
    crc, step = 0, 1 << 24
    for i in range(0, tokens, step):
        crc = zlib.crc32(map_tokens(path, tokens)[i : i + step], crc)
    return crc

def check_resume(checkpoint: dict, settings: dict, now: dict) -> None:
    """Say which settings have changed; raise UserError for those that make it another run."""
    saved, was = checkpoint["config"], checkpoint["fingerprint"]
    fixed = {field.name for field in fields(LlamaConfig)} | {
        "val_every", "packing", "seq_len", "batch_size", "optimizer", "seed", "init_from"}
    changed = {name: f"--{name} {saved.get(name)} -> {value}" for name, value in settings.items()
               if saved.get(name) != value}
    refused = [text for name, text in changed.items() if name in fixed]
    same = now["train"]["tokens"] == was["train"]["tokens"] or not was["ended"]
    for new, old in ((now[split], was[split]) for split in ("train", "val")):
        grown = new["tokens"] > old["tokens"]  # at its end, if it is the same text
        crc32 = checksum(new["path"], old["tokens"]) if grown else new["crc32"]
        same = same and new["tokens"] >= old["tokens"] and crc32 == old["crc32"]
    if was["tokenizer"] != now["tokenizer"]:
        refused.append(changed.get("tokenizer_path", f"another {settings['tokenizer_path']}"))
    elif not same:
        refused.append(changed.get("dataset", f"other text in --dataset {settings['dataset']}"))
    need(not refused, f"--out_dir {settings['out_dir']} has a run with other settings, change them "
                      f"back or choose another folder: {'; '.join(refused)}")
    for text in changed.values():
        say(f"changed: {text}")

# ---- 6 Evaluation and sampling -------------------------------------------------------------------
# The loss on documents that are never trained on, in nats per token and, so that other tokenizers
# compare, in bits per byte of text. And a look at what the model writes.

def evaluate(model: nn.Module, dataset: PretrainingDataset, batch_size: int) -> float:
    """The mean loss over a whole dataset, in nats per label; the processes share the work."""
    # No torch.no_grad(): under it, torch.compile would compile everything once more.
    device, last = next(model.parameters()).device, len(dataset) - 1
    nats = torch.zeros((), device=device)
    for start in range(RANK * batch_size, len(dataset), WORLD * batch_size):
        input_ids, labels = dataset.batch(np.arange(start, start + batch_size).clip(max=last))
        labels[last + 1 - start :] = -100  # the last batch has the shape of the others, too
        nats += model(input_ids.to(device), labels.to(device)).detach()
    if WORLD > 1:
        dist.all_reduce(nats)
    return nats.item() / dataset.count_labels(np.arange(len(dataset)))

@torch.no_grad()
def generate(model: nn.Module, tokenizer: Tokenizer, prompt: str, config: TrainConfig
             ) -> Iterator[str]:
    """The text that the model lets follow on a prompt, up to [EOT], in whole characters.

    Each token is drawn from the top_k likeliest by softmax(logits / temperature), or is the
    likeliest at temperature 0. The model sees the last seq_len tokens.
    """
    ids = [BOT, *tokenizer.encode(prompt, add_special_tokens=False).ids]
    if len(ids) > config.seq_len:
        say(f"the prompt has {len(ids)} tokens, of which the model sees the last {config.seq_len}")
    device, out = next(model.parameters()).device, decoders.DecodeStream(skip_special_tokens=True)
    generator = torch.Generator().manual_seed(config.seed)  # its own: sampling changes no run
    for _ in range(config.max_new_tokens):
        hidden = model.model(torch.tensor([ids[-config.seq_len :]], device=device))  # (1, T, C)
        logits, tokens = model.lm_head(hidden[0, -1]).float().cpu().sort(descending=True)
        logits, choice = logits[: config.top_k or None], 0
        if config.temperature > 0:
            chances = torch.softmax((logits - logits[0]) / config.temperature, dim=-1)
            choice = torch.multinomial(chances, 1, generator=generator)
        ids.append(tokens[choice].item())
        if ids[-1] == EOT:
            return
        yield out.step(tokenizer, ids[-1]) or ""

# ---- 7 Export ------------------------------------------------------------------------------------
# The finished model as a folder that transformers, and what builds on it, can load.

def write_safetensors(tensors: dict[str, Tensor], file: BinaryIO) -> None:
    """The safetensors format: the length of a header, the header in JSON, the raw float32s."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in tensors.items():
        start, end = end, end + 4 * tensor.numel()
        header[name] = dict(dtype="F32", shape=list(tensor.shape), data_offsets=[start, end])
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for tensor in tensors.values():
        file.write(tensor.detach().float().cpu().contiguous().numpy().tobytes())

def export_model(model: LlamaForPretraining, tokenizer: Tokenizer, config: TrainConfig,
                 tokens: int, metrics: dict) -> None:
    """Write out_dir/model, under another name first, so that it is there whole or not at all."""
    ids, weights = dict(bos_token_id=BOT, eos_token_id=EOT, pad_token_id=PAD), model.state_dict()
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    contents = {
        "config.json": asdict(model.config) | ids | dict(
            architectures=["LlamaForCausalLM"], model_type="llama", hidden_act="silu",
            torch_dtype="float32", max_position_embeddings=config.seq_len),  # as it was trained
        "generation_config.json": ids | dict(do_sample=True, temperature=0.8, top_k=50,
                                             max_new_tokens=64),
        "tokenizer_config.json": dict(  # without it, transformers 4 guesses another tokenizer
            tokenizer_class="PreTrainedTokenizerFast", pad_token="[PAD]", bos_token="[BOT]",
            eos_token="[EOT]", unk_token="[UNK]", model_max_length=config.seq_len,
            split_special_tokens=True, clean_up_tokenization_spaces=False,
            model_input_names=["input_ids", "attention_mask"]),
        "tokenizer.json": json.loads(tokenizer.to_str()),
        "README.md": "A Llama, pretrained with train_llama.py. To load it in Python:\n`transformers"
                     ".AutoModelForCausalLM.from_pretrained(folder)`\n\nTokens seen: "
                     f"{tokens:,}. Last metrics: {metrics}.\n\nSettings: {asdict(config)}.\n"}
    folder, scratch = Path(config.out_dir, "model"), Path(config.out_dir, "model.new")
    shutil.rmtree(scratch, ignore_errors=True)  # what a death has left
    (new := scratch / "model").mkdir(parents=True)
    for name, content in contents.items():
        text = content if name == "README.md" else json.dumps(content, ensure_ascii=False, indent=1)
        write_atomically(new / name, lambda file: file.write(text.encode()))
    write_atomically(new / "model.safetensors", lambda file: write_safetensors(weights, file))
    if folder.exists():
        os.replace(folder, scratch / "old")
    os.replace(new, folder)
    shutil.rmtree(scratch, ignore_errors=True)

# ---- 8 Training ----------------------------------------------------------------------------------
# The loop: choose the rows of the step, add up the gradients of its micro-batches, limit their
# norm, update. Around it: the device, several processes, the log, and an orderly stop.

METRICS = ("step tokens seconds loss val_loss bits_per_byte learning_rate grad_norm "
           "tokens_per_second peak_share memory_gb").split()

def choose_device(name: str, dtype: str) -> tuple[torch.device, str]:
    """The device, and the dtype of its matrix products: bfloat16 where the hardware has it."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.mps.is_available() else "cpu"
        if name == "cpu" and (shutil.which("nvidia-smi") or os.path.exists("/dev/kfd")):
            say(f"device: there is a GPU, but this torch ({torch.__version__}) cannot use it")
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if name == "cuda" else name)
    best = "float32"
    if device.type == "cuda":
        need((device.index or 0) < torch.cuda.device_count(), f"--device {device} is not there: a "
             f"torchrun needs a GPU for each process, this machine has {torch.cuda.device_count()}")
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32 for what stays float32
        best = "bfloat16" if torch.cuda.get_device_capability(device) >= (8, 0) else "float16"
    elif device.type == "cpu":
        if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
            libc.mallopt(-1, -1)  # no M_TRIM_THRESHOLD, 0 for M_MMAP_MAX: what is freed is kept,
            libc.mallopt(-4, 0)  # as fresh pages cost a tenth of a step
        units = getattr(torch.cpu, "get_capabilities", dict)()
        best = "bfloat16" if any(map(units.get, ("avx512_bf16", "amx_bf16", "bf16"))) else "float32"
    return device, best if dtype == "auto" else dtype

def measure_peak(device: torch.device, dtype: str) -> float:
    """The FLOP/s that this device reaches in a large matrix product: what 100 % means here."""
    size = 1024 if device.type == "cpu" else 8192
    a = torch.randn(size, size, dtype=getattr(torch, dtype), device=device)
    work = "for _ in range(8): b = a @ a\nb[0, 0].item()"  # which waits until the device is done
    return 8 * 2 * size**3 / min(timeit.repeat(work, globals=dict(a=a), number=1))

def memory_gb(device: torch.device) -> float:
    """The most memory used so far, by torch on CUDA, else by this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    with contextlib.suppress(ImportError):  # there is none on Windows
        import resource
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
    return 0.0

def compile_model(model: nn.Module, batch: Iterable[Tensor]) -> None:
    """torch.compile the forward pass with its loss, in place; say whether that works."""
    start, state = time.monotonic(), "on"
    try:
        model.compile(dynamic=False)  # what is missing for it shows only in the next line
        model(*(tensor.to(model.lm_head.weight.device) for tensor in batch)).backward()
    except Exception as error:
        model._compiled_call_impl = None  # takes compile() back
        state = f"off ({brief(error)})"
    model.zero_grad(set_to_none=True)
    say(f"compile: {state}, after {time.monotonic() - start:.0f} s")

@torch.no_grad()
def check_causality(model: LlamaForPretraining, device: torch.device) -> None:
    """Raise UserError if the last token changes an earlier logit: mps has had such a fault."""
    length = min(32, model.config.max_position_embeddings)
    one = torch.arange(length, device=device)[None] % model.config.vocab_size
    two = torch.cat((one[:, :-1], one[:, :1]), dim=1)
    a, b = (model.lm_head(model.model(ids))[0, :-1].float() for ids in (one, two))
    need(torch.allclose(a, b, rtol=1e-3, atol=1e-3, equal_nan=True), f"--device {device} lets "
         f"attention see the future in torch {torch.__version__}: use --device cpu")

def plan_run(model_config: LlamaConfig, config: TrainConfig, tokenizer: Tokenizer,
             checkpoint: dict | None) -> tuple:
    """Datasets to train and to validate on, steps, and a fingerprint of the data and tokenizer."""
    sequences = -(-config.train_tokens // (config.batch_size * config.seq_len)) * config.batch_size
    windows = -(-sequences // WINDOW)  # whole ones: a part would be shuffled anew when it grows
    needed = windows * WINDOW * config.seq_len * (1 if config.packing else 2) + 1  # + [BOT]
    before = checkpoint["fingerprint"]["train"]["tokens"] if checkpoint else 0
    facts = prepare_tokens(config, tokenizer, max(before, needed))
    fingerprint = {name: facts[name] for name in ("train", "val", "ended")} | dict(
        tokenizer=hashlib.sha256(tokenizer.to_str().encode()).hexdigest())
    if checkpoint:  # the held-out text stays the same, so that losses can be compared
        check_resume(checkpoint, asdict(model_config) | asdict(config), fingerprint)
        fingerprint["val"] = checkpoint["fingerprint"]["val"] | dict(path=facts["val"]["path"])
    dataset, validation = (
        PretrainingDataset(part["path"], part["tokens"], config.seq_len, config.packing)
        if part["tokens"] else None for part in (fingerprint["train"], fingerprint["val"]))
    rows = dataset.rows = len(dataset) if facts["ended"] else len(dataset) // WINDOW * WINDOW
    some = np.arange(min(rows, WINDOW))  # enough to know how full rows are; the same when it grows
    labels_per_step = config.batch_size * dataset.count_labels(some) / len(some)
    steps = math.ceil(config.train_tokens / labels_per_step)
    if facts["ended"]:
        steps = min(steps, int(config.max_epochs * rows) // config.batch_size)
    need(config.warmup_steps < steps, f"--warmup_steps {config.warmup_steps} must be below the "
         f"{steps:,} steps of --batch_size {config.batch_size} that --train_tokens and {rows:,} "
         f"sequences of --seq_len {config.seq_len} give")
    return dataset, validation, steps, fingerprint

def start_model(model_config: LlamaConfig, config: TrainConfig, device: torch.device,
                checkpoint: dict | None) -> tuple:
    """The model, its optimisers and float16's scaler, new or as the checkpoint has them."""
    torch.manual_seed(config.seed)  # all that a run owes to chance: the rest follows from the step
    model = LlamaForPretraining(model_config).to(device)
    optimizers = make_optimizers(model, config)
    scaler = torch.amp.GradScaler(device.type, enabled=config.dtype == "float16")
    if checkpoint:
        model.load_state_dict(checkpoint["model"])
        for optimizer, state in zip(optimizers, checkpoint["optimizer"]):
            now = optimizer.state_dict()["param_groups"]  # the settings of now, not of then
            optimizer.load_state_dict(state | dict(param_groups=now))
        scaler.load_state_dict(checkpoint["scaler"] or scaler.state_dict())  # none but for float16
    elif config.init_from:
        weights = load_weights(config.init_from)
        try:
            model.load_state_dict(weights)
        except RuntimeError as error:
            raise UserError(f"--init_from {config.init_from} has another shape: "
                            + str(error).splitlines()[1].strip()) from None
        need(all(torch.equal(now.cpu(), weights[name]) for name, now in model.state_dict().items()),
             f"--init_from {config.init_from} has a head of its own: use --no-tie_word_embeddings")
    return model, optimizers, scaler

def open_log(out_dir: str, step: int) -> tuple[dict, Callable[[dict], None]]:
    """The last row logged up to `step`, and a function that logs one; later rows are dropped."""
    path, board = Path(out_dir, "metrics.csv"), None
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [row for row in (line.split(",") for line in lines)  # a power cut may tear the last one
            if len(row) == len(METRICS) and row[0].isdecimal() and int(row[0]) <= step]
    text = "".join(",".join(row) + "\n" for row in [METRICS, *rows]).encode()
    write_atomically(path, lambda file: file.write(text))
    with contextlib.suppress(ImportError):
        from torch.utils.tensorboard import SummaryWriter
        board = SummaryWriter(out_dir, purge_step=step + 1)
    say(f"metrics: {path}, TensorBoard {'on' if board else 'not installed'}")
    def log(row: dict) -> None:
        with open(path, "a") as file:
            file.write(",".join(str(row.get(name, "")) for name in METRICS) + "\n")
        for name in row.keys() - {"step", "tokens", "seconds"} if board else ():
            (board.add_text if name == "sample" else board.add_scalar)(name, row[name], row["step"])
    return dict(zip(METRICS, rows[-1])) if rows else {}, log

def add_gradients(model: nn.Module, dataset: PretrainingDataset, rows: np.ndarray,
                  at_once: int, autocast: Callable, scaler: torch.amp.GradScaler) -> Tensor:
    """Add up the gradient of the mean loss over all labels of a step; returns the sum in nats.

    A mean of the micro-batches' means would give the labels of short rows more weight. Each
    process takes its share of the rows; DistributedDataParallel averages, hence the x WORLD.
    """
    device = next(model.parameters()).device
    nats, labels_of_step = torch.zeros((), device=device), dataset.count_labels(rows)
    mine = np.split(rows, WORLD)[RANK]
    for i in range(0, len(mine), at_once):
        batch = dataset.batch(mine[i : i + at_once])
        if device.type == "cuda":  # copies from pinned memory need no waiting for
            batch = [tensor.pin_memory().to(device, non_blocking=True) for tensor in batch]
        model.require_backward_grad_sync = i + at_once == len(mine)  # only the last exchanges
        with autocast():
            loss = model(*(tensor.to(device) for tensor in batch))
        scaler.scale(loss * (WORLD / labels_of_step)).backward()
        nats += loss.detach()
    return nats

def join_processes(model: nn.Module, config: TrainConfig, start: list) -> nn.Module:
    """The model with gradients averaged over the processes, which must agree where they start."""
    dist.init_process_group("nccl" if next(model.parameters()).is_cuda else "gloo")
    starts, owner = [[]] * WORLD, Path(config.out_dir).glob("lock.owner")
    dist.all_gather_object(starts, [*map(Path.read_text, owner), *start])
    need(starts.count(starts[0]) == WORLD, f"--out_dir {config.out_dir} and --cache_dir "
         f"{config.cache_dir} must be folders that all machines share")
    return nn.parallel.DistributedDataParallel(model)

@contextlib.contextmanager
def catch_signals() -> Iterator[list[int]]:
    """A list that gets the number of a Ctrl-C or SIGTERM: train() ends its step, saves, stops."""
    with contextlib.ExitStack() as before:
        def note(number: int, _: object) -> None:
            caught.append(number)
            for each in both:
                signal.signal(each, signal.SIG_DFL)  # a second one kills
        caught, both = [], (signal.SIGINT, signal.SIGTERM)
        for number in both:
            before.callback(signal.signal, number, signal.signal(number, note))
        yield caught

def describe(model: LlamaForPretraining, config: TrainConfig, device: torch.device, rows: int,
             first: int, steps: int, peak: float) -> None:
    """Say what the settings come to. Raises UserError if the disk has too little space."""
    weights, tokens = sum(w.numel() for w in model.parameters()), config.batch_size * config.seq_len
    hours = (steps - first) * tokens * flops_per_token(model, config.seq_len) / (0.4 * peak) / 3600
    say(f"model: {weights:,} parameters\nsteps: {first:,} to {steps:,}, {tokens:,} tokens each, "
        f"{steps * config.batch_size / rows:.2f} epochs of {rows:,} sequences\ndevice: {device}, "
        f"{config.dtype}, {peak / 1e12:.2f} TFLOP/s in a matrix product; at 40 % of that "
        f"{hours:.2g} hours to go")
    have = sum(file.stat().st_size for file in Path(config.out_dir).glob("checkpoint*.pt"))
    check_disk(config.out_dir, 40 * weights - have, "three checkpoints and the model")

def show(row: dict, bar: tqdm) -> None:
    """Put a row of metrics in the progress bar, or on a line where there is no terminal."""
    text = (f"loss {row['loss']:.3f}, lr {row['learning_rate']:.1e}, "
            f"{row['tokens_per_second']:,.0f} tok/s, {row['peak_share']:.0%} peak, "
            f"{row['memory_gb']:.1f} GB")  # with all of it, about 80 columns
    bar.set_postfix_str(text)
    if bar.disable:
        say(f"step {row['step']:,}/{bar.total:,}: {text}")

def validate(model: nn.Module, dataset: PretrainingDataset, tokenizer: Tokenizer,
             config: TrainConfig, text_bytes: int, step: int) -> dict:
    """The held-out loss in nats per token and in bits per byte; prints them and a sample."""
    loss = evaluate(model, dataset, config.micro_batch_size)
    bits = loss * dataset.count_labels(np.arange(len(dataset))) / math.log(2) / text_bytes
    sample = "".join(generate(model, tokenizer, "", config))
    say(f"step {step:,}: held-out loss {loss:.4f}, perplexity {math.exp(min(loss, 700)):.2f}, "
        f"{bits:.4f} bits per byte, and a sample:\n{sample}")
    return dict(val_loss=loss, bits_per_byte=bits, sample=sample)

def train(model_config: LlamaConfig, config: TrainConfig, tokenizer: Tokenizer) -> dict:
    """Train, from the newest checkpoint in out_dir if there is one; returns the last metrics."""
    checkpoint = load_checkpoint(config.out_dir)
    first, tokens = (checkpoint["step"], checkpoint["tokens"]) if checkpoint else (0, 0)
    if checkpoint and config.dtype == "auto":
        config.dtype = checkpoint["config"]["dtype"]
    device, config.dtype = choose_device(config.device, config.dtype)
    dataset, validation, steps, fingerprint = plan_run(model_config, config, tokenizer, checkpoint)
    card = Path(config.out_dir, "model", "README.md")  # it says how much its model has read
    if first >= steps and card.exists() and f"Tokens seen: {tokens:,}." in card.read_text("utf-8"):
        say(f"--out_dir {config.out_dir}: this run of {steps:,} steps is finished")
        return {}
    model, optimizers, scaler = start_model(model_config, config, device, checkpoint)
    del checkpoint  # it takes as much memory as model and optimisers
    autocast = functools.partial(torch.autocast, device.type, getattr(torch, config.dtype),
                                 enabled=config.dtype != "float32")
    peak, at_once = measure_peak(device, config.dtype) * WORLD, config.micro_batch_size
    describe(model, config, device, len(dataset), first, steps, peak)
    with autocast():
        check_causality(model, device)
        if config.compile or config.compile is None and device.type != "mps" and os.name == "posix":
            compile_model(model, dataset.batch(np.zeros(at_once, int)))
    parallel = model if WORLD == 1 else join_processes(
        model, config, [first, fingerprint["train"]["crc32"]])
    row, log = open_log(config.out_dir, first) if RANK == 0 else ({}, lambda row: None)
    bad, seconds = 0, float(row.get("seconds", 0))
    nats, labels, start = torch.zeros((), device=device), 0, time.monotonic()
    with catch_signals() as caught, tqdm(
            total=steps, initial=first, disable=True if RANK else None,
            bar_format="{n_fmt}/{total_fmt} [<{remaining}{postfix}]") as bar:
        for step in range(first, steps):
            chosen = rows_of_step(step, config.batch_size, len(dataset), config.seed)
            part = add_gradients(parallel, dataset, chosen, at_once, autocast, scaler)
            rate = learning_rate_at(step, steps, config)
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
                for group in optimizer.param_groups:
                    group["lr"] = rate * group.get("scale", 1)
            # Nothing before this .item() makes the step wait for a CUDA device.
            norm = nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf).item()
            if math.isfinite(norm):
                for optimizer in optimizers:
                    optimizer.step()
                bad, nats, labels = 0, nats + part, labels + dataset.count_labels(chosen)
            elif scaler.get_scale() <= 1:  # else float16's scale was too large, and is halved now
                bad += 1
                say(f"step {step + 1}: not applied, the gradient's norm is {norm}")
                need(bad < 10, "ten steps without a finite gradient: try a lower --learning_rate")
            scaler.update()
            model.zero_grad(set_to_none=True)
            tokens, done = tokens + dataset.count_labels(chosen), step + 1
            bar.update()
            stopping = caught  # no copy: a signal during the evaluation below still counts
            if WORLD > 1:  # all stop together
                signals = torch.tensor(caught[:1] or [0], device=device)
                dist.all_reduce(signals, dist.ReduceOp.MAX)
                stopping = [number for number in signals.tolist() if number]
            evaluating = validation and (done == steps or done % config.eval_every == 0)
            if done == steps or stopping or evaluating or done % config.log_every == 0:
                if WORLD > 1:
                    dist.all_reduce(nats)
                loss, took = nats.item() / (labels or math.nan), time.monotonic() - start
                speed, seconds = labels / took, seconds + took
                row = dict(step=done, tokens=tokens, seconds=seconds, loss=loss, learning_rate=rate,
                           grad_norm=norm, tokens_per_second=speed, memory_gb=memory_gb(device),
                           peak_share=speed * flops_per_token(model, config.seq_len) / peak)
                show(row, bar)
                if evaluating:
                    with autocast():
                        row |= validate(model, validation, tokenizer, config,
                                        fingerprint["val"]["bytes"], done)
                log(row)
                row.pop("sample", None)  # the model's card shows the row
                nats, labels, start = torch.zeros((), device=device), 0, time.monotonic()
            saving = done == steps or stopping or not bad and done % config.save_every == 0
            if saving and RANK == 0:
                save_checkpoint(config.out_dir, dict(
                    model=model.state_dict(), optimizer=[o.state_dict() for o in optimizers],
                    scaler=scaler.state_dict(), step=done, tokens=tokens, fingerprint=fingerprint,
                    config=asdict(model_config) | asdict(config),
                    versions=dict(torch=str(torch.__version__), numpy=np.__version__)))
            if saving and stopping and done < steps:
                say(f"stopped after step {done:,} and saved: the same command goes on from there")
                raise SystemExit(128 + stopping[0])
    if RANK == 0:
        export_model(model, tokenizer, config, tokens, row)
    return row

def continue_prompt(config: TrainConfig, tokenizer: Tokenizer) -> None:
    """Print the prompt and the text that the model in out_dir, finished or not, lets follow."""
    checkpoint = load_checkpoint(config.out_dir, mend=False)  # another process may train
    need(checkpoint, f"--out_dir {config.out_dir} has no checkpoint to take a model from")
    saved, known = checkpoint["config"], checkpoint["fingerprint"]["tokenizer"]
    need(known == hashlib.sha256(tokenizer.to_str().encode()).hexdigest(), f"--tokenizer_path "
         f"{config.tokenizer_path} is not this model's, which was {saved['tokenizer_path']}")
    model = LlamaForPretraining(LlamaConfig(**{f.name: saved[f.name] for f in fields(LlamaConfig)}))
    model.load_state_dict(checkpoint["model"])
    device, dtype = choose_device(config.device, config.dtype.replace("auto", saved["dtype"]))
    config.seq_len = saved["seq_len"]
    with torch.autocast(device.type, getattr(torch, dtype), enabled=dtype != "float32"):
        check_causality(model.to(device), device)
        print(config.prompt, end="")
        for text in generate(model, tokenizer, config.prompt, config):
            print(text, end="", flush=True)
    print()

def main(argv: list[str] | None = None) -> None:
    """Read the flags, check them, and train, or let the model write."""
    s = parse_flags(argv, [LlamaConfig, TrainConfig], DEMO)
    check_settings(s)
    tokenizer = load_tokenizer(s.tokenizer_path)
    s.vocab_size = tokenizer.get_vocab_size()
    model_config, config = (kind(**{field.name: getattr(s, field.name) for field in fields(kind)})
                            for kind in (LlamaConfig, TrainConfig))
    lock, owner = (Path(config.out_dir, f"lock{RANK or ''}{end}") for end in ("", ".owner"))
    try:
        if config.prompt is not None:
            return continue_prompt(config, tokenizer)
        with FileLock(lock, timeout=0):
            owner.write_text(str(os.getpid()))
            row = train(model_config, config, tokenizer)
        if RANK == 0 and config.dataset == STDLIB and row.get("bits_per_byte"):
            from train_tokenizer import report_demo
            report_demo(config, float(row["bits_per_byte"]))
            config.prompt = "class Stack:\n    def __init__(self"
            continue_prompt(config, tokenizer)
    except Timeout:
        who = owner.read_text() if owner.exists() else "another"
        raise UserError(f"process {who} uses --out_dir {config.out_dir}") from None
    except OSError as error:  # Timeout is one, too
        raise UserError(f"cannot use --out_dir {config.out_dir} or --cache_dir {config.cache_dir} "
                        f"({error}): when that is mended, the same command goes on") from error
    except KeyboardInterrupt:  # before the first step or after the last one
        raise SystemExit(130) from None
    except RuntimeError as error:  # CUDA's has a class of its own, those of mps and the host not
        advice = f"lower --micro_batch_size (now {s.micro_batch_size}); the result does not change"
        need(not re.search("out of memory|can't allocate memory|not enough memory", str(error)),
             f"out of memory: {advice if s.prompt is None else 'use --device cpu'}")
        raise

if __name__ == "__main__":
    main()
