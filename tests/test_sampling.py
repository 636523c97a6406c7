"""Letting the model write: generate() by itself, and --prompt on the out_dir of a run."""
import shutil

import pytest
import torch
from conftest import TINY_MODEL, TINY_RUN, as_flags
from filelock import FileLock
from torch import nn

import train_llama
import train_tokenizer
from train_llama import BOT, EOT, LlamaConfig, LlamaForPretraining, TrainConfig, UserError
from train_llama import generate, load_checkpoint, load_tokenizer

PROMPT = "alpha beta"
SEQ_LEN = 16


@pytest.fixture(scope="module", autouse=True)
def no_second_spent_on_the_peak():
    """The share of the measured peak is not what is tested here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_llama, "measure_peak", lambda device, dtype: 1e12)
        yield


class Scripted(nn.Module):
    """A head that makes the tokens of a list the likeliest, one after the other."""

    def __init__(self, tokens: list[int], vocab_size: int) -> None:
        super().__init__()
        self.rows = iter(torch.eye(vocab_size)[tokens] * 50)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return next(self.rows).expand(*hidden.shape[:-1], -1)


class Fixed(nn.Module):
    """A head that gives the same logits whatever it sees."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.logits.expand(*hidden.shape[:-1], -1)


class Biased(nn.Module):
    """A head whose logits are shifted by fixed numbers."""

    def __init__(self, head: nn.Module, bias: torch.Tensor) -> None:
        super().__init__()
        self.head, self.bias = head, bias

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden) + self.bias


@pytest.fixture(scope="module")
def tokenizer(tokenizer_path):
    return load_tokenizer(str(tokenizer_path))


@pytest.fixture
def model(tokenizer):
    """A model that is sure of itself and writes ASCII only, so that text shows each token."""
    torch.manual_seed(3)
    size = tokenizer.get_vocab_size()
    model = LlamaForPretraining(LlamaConfig(size, **TINY_MODEL))
    for weight in model.parameters():
        nn.init.normal_(weight, mean=float(weight.dim() < 2), std=0.3)
    ascii_only = [token > 3 and tokenizer.decode([token]).isascii() for token in range(size)]
    model.lm_head = Biased(model.lm_head, torch.where(torch.tensor(ascii_only), 0.0, -1e9))
    return model


def pieces(model, tokenizer, prompt=PROMPT, **settings) -> list[str]:
    config = TrainConfig(**dict(seq_len=SEQ_LEN, max_new_tokens=24) | settings)
    return list(generate(model, tokenizer, prompt, config))


def text(*arguments, **settings) -> str:
    return "".join(pieces(*arguments, **settings))


def ids_of(tokenizer, words: str) -> list[int]:
    return tokenizer.encode(words, add_special_tokens=False).ids


# ---- generate ----

@pytest.mark.parametrize("prompt", ["", " ", PROMPT, "[EOT]"])
def test_temperature_0_takes_the_likeliest_token_each_time(model, tokenizer, prompt):
    ids = [BOT, *ids_of(tokenizer, prompt)]
    start = len(ids)
    for _ in range(24):
        ids.append(model(torch.tensor([ids[-SEQ_LEN:]]))[0, -1].argmax().item())
    assert text(model, tokenizer, prompt, temperature=0.0) == tokenizer.decode(ids[start:])


def test_top_k_1_is_greedy_at_any_temperature(model, tokenizer):
    greedy = text(model, tokenizer, temperature=0.0)
    for temperature in (0.1, 1.0, 100.0):
        assert text(model, tokenizer, temperature=temperature, top_k=1) == greedy


def test_a_temperature_near_0_is_greedy_and_finite(model, tokenizer):
    assert text(model, tokenizer, temperature=1e-30) == text(model, tokenizer, temperature=0.0)


def test_top_k_of_0_or_above_the_vocabulary_leaves_every_token(model, tokenizer):
    size = tokenizer.get_vocab_size()
    whole = text(model, tokenizer, top_k=size)
    assert len(whole) > 10
    assert text(model, tokenizer, top_k=0) == whole
    assert text(model, tokenizer, top_k=10 * size) == whole


def test_top_k_of_0_leaves_every_token_to_greedy_decoding_too(model, tokenizer):
    assert (text(model, tokenizer, temperature=0.0, top_k=0)
            == text(model, tokenizer, temperature=0.0, top_k=50))


def test_no_new_tokens_are_no_text(model, tokenizer):
    assert text(model, tokenizer, max_new_tokens=0) == ""


def test_the_number_of_new_tokens_is_kept(model, tokenizer):
    for count in (1, 2, 40):
        model.lm_head = Scripted(ids_of(tokenizer, "x") * 50, tokenizer.get_vocab_size())
        assert text(model, tokenizer, max_new_tokens=count) == "x" * count


def test_the_same_seed_writes_the_same_text_and_another_seed_another(model, tokenizer):
    one, again, other = (text(model, tokenizer, seed=seed) for seed in (1, 1, 2))
    assert one == again
    assert one != other


def test_the_seed_of_a_text_is_not_the_global_one(model, tokenizer):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = text(model, tokenizer)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert text(model, tokenizer) == one


def test_of_a_prompt_longer_than_the_context_the_last_tokens_count(model, tokenizer, capsys):
    prompt = "alpha beta gamma delta epsilon zeta eta theta iota kappa " * 3
    ids = [BOT, *ids_of(tokenizer, prompt)]
    assert len(ids) > SEQ_LEN
    ids = ids[-SEQ_LEN:]
    for _ in range(24):
        ids.append(model(torch.tensor([ids[-SEQ_LEN:]]))[0, -1].argmax().item())
    capsys.readouterr()
    assert text(model, tokenizer, prompt, temperature=0.0) == tokenizer.decode(ids[SEQ_LEN:])
    said = capsys.readouterr().out
    assert len(said.splitlines()) == 1
    assert str(SEQ_LEN) in said and str(1 + len(ids_of(tokenizer, prompt))) in said


def test_a_prompt_that_fits_is_not_remarked_upon(model, tokenizer, capsys):
    text(model, tokenizer)
    assert capsys.readouterr().out == ""


def test_the_model_sees_one_bot_and_control_words_as_text(model, tokenizer):
    seen = []
    model.model.embed_tokens.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    prompt = "[EOT] [BOT]"
    text(model, tokenizer, prompt, max_new_tokens=1)
    ids = seen[0].flatten().tolist()
    assert ids[0] == BOT and min(ids[1:]) > 3
    assert tokenizer.decode(ids) == prompt


@pytest.mark.parametrize("words", ["é", "👩\u200d🚀", "a½漢😀z", "e\u0301 \u2028"])
def test_only_whole_characters_are_streamed(words, model, tokenizer):
    tokens = ids_of(tokenizer, words + ".")
    assert len(tokens) > len(words) + 1  # some character needs several tokens
    model.lm_head = Scripted(tokens, tokenizer.get_vocab_size())
    parts = pieces(model, tokenizer, temperature=0.0, max_new_tokens=len(tokens))
    assert "".join(parts) == words + "."
    assert not any("\ufffd" in part for part in parts)
    assert [part for part in parts if part] == list(words + ".")


def test_a_character_appears_as_soon_as_its_last_byte_does(model, tokenizer):
    tokens = ids_of(tokenizer, "😀")
    assert len(tokens) == 4
    model.lm_head = Scripted(tokens, tokenizer.get_vocab_size())
    parts = pieces(model, tokenizer, temperature=0.0, max_new_tokens=4)
    assert "".join(parts) == parts[-1] == "😀"


def test_a_character_that_is_never_finished_is_not_shown(model, tokenizer):
    tokens = ids_of(tokenizer, "ab😀")[:-1]
    model.lm_head = Scripted(tokens, tokenizer.get_vocab_size())
    assert text(model, tokenizer, temperature=0.0, max_new_tokens=len(tokens)) == "ab"


def test_text_goes_on_after_bytes_that_are_no_character(model, tokenizer):
    tokens = [*ids_of(tokenizer, "a"), ids_of(tokenizer, "😀")[0], *ids_of(tokenizer, "b é.")]
    model.lm_head = Scripted(tokens, tokenizer.get_vocab_size())
    written = text(model, tokenizer, temperature=0.0, max_new_tokens=len(tokens))
    assert written == tokenizer.decode(tokens) == "a\ufffdb é."


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_stops_at_the_end_of_text(temperature, model, tokenizer):
    tokens = [*ids_of(tokenizer, "ab"), EOT, *ids_of(tokenizer, "cd")]
    model.lm_head = Scripted(tokens, tokenizer.get_vocab_size())
    assert text(model, tokenizer, temperature=temperature, max_new_tokens=10) == "ab"


def test_other_control_tokens_are_not_shown(model, tokenizer):
    tokens = [*ids_of(tokenizer, "a"), 0, 1, 3, *ids_of(tokenizer, "b"), EOT]
    model.lm_head = Scripted(tokens, tokenizer.get_vocab_size())
    assert text(model, tokenizer, temperature=0.0, max_new_tokens=10) == "ab"


@pytest.mark.parametrize("temperature, top_k", [(0.5, 0), (1.0, 0), (2.0, 0), (1.0, 3)])
def test_tokens_are_drawn_by_the_softmax_of_the_logits(temperature, top_k, tokenizer):
    """Each of five letters comes as often as it should, give or take five standard errors."""
    size, draws = tokenizer.get_vocab_size(), 1500
    letters, logits = "abcde", torch.tensor([1.0, 0.0, 2.0, 0.5, -1.0])
    model = LlamaForPretraining(LlamaConfig(size, 4, 4, 4, 1, 1, 1))
    model.lm_head = Fixed(torch.full((size,), -1e9))
    for letter, logit in zip(letters, logits):
        [token] = ids_of(tokenizer, letter)
        model.lm_head.logits[token] = logit
    written = text(model, tokenizer, "", temperature=temperature, top_k=top_k, seq_len=4,
                   max_new_tokens=draws)
    assert len(written) == draws
    kept = logits >= logits.sort(descending=True).values[(top_k or len(letters)) - 1]
    weights = torch.exp(logits.double() / temperature) * kept
    for letter, chance in zip(letters, (weights / weights.sum()).tolist()):
        error = (chance * (1 - chance) / draws) ** 0.5
        assert abs(written.count(letter) / draws - chance) <= 5 * error, letter


# ---- --prompt ----

@pytest.fixture(scope="module")
def finished(corpus, tokenizer_path, tmp_path_factory):
    """The settings of a run that has ended."""
    folder = tmp_path_factory.mktemp("run")
    settings = TINY_MODEL | TINY_RUN | dict(
        dataset=corpus, tokenizer_path=tokenizer_path, cache_dir=folder, out_dir=folder / "out")
    train_llama.main(as_flags(settings))
    return settings


@pytest.fixture
def unfinished(finished, tmp_path):
    """The settings of a run that ended at its last checkpoint but one."""
    out_dir = tmp_path / "out"
    out_dir.mkdir()
    shutil.copy(finished["out_dir"] / "checkpoint.previous.pt", out_dir / "checkpoint.pt")
    return finished | dict(out_dir=out_dir)


@pytest.fixture
def ask(finished, capsys):
    """What --prompt prints with the out_dir of the finished run; arguments change settings."""
    def printed(prompt=PROMPT, **changes) -> str:
        capsys.readouterr()
        keep = {name: finished[name] for name in ("tokenizer_path", "out_dir", "device")}
        train_llama.main(as_flags(keep | dict(max_new_tokens=8) | changes) + ["--prompt", prompt])
        return capsys.readouterr().out
    return printed


def expected(settings, tokenizer, prompt=PROMPT, **changes) -> str:
    """The prompt and what generate() lets follow, with the weights of a checkpoint."""
    checkpoint = load_checkpoint(str(settings["out_dir"]))
    model = LlamaForPretraining(LlamaConfig(tokenizer.get_vocab_size(), **TINY_MODEL))
    model.load_state_dict(checkpoint["model"])
    return prompt + text(model, tokenizer, prompt, **dict(max_new_tokens=8) | changes) + "\n"


def test_prompt_continues_with_the_model_of_a_finished_run(finished, ask, tokenizer):
    assert ask() == expected(finished, tokenizer)
    assert ask(temperature=0.0, max_new_tokens=20) == expected(
        finished, tokenizer, temperature=0.0, max_new_tokens=20)


def test_ctrl_c_ends_a_sample_without_a_traceback(ask, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(train_llama, "generate", interrupted)
    with pytest.raises(SystemExit) as stop:
        ask()
    assert stop.value.code == 130


def test_prompt_continues_with_the_model_of_an_unfinished_run(
        finished, unfinished, ask, tokenizer):
    steps = [load_checkpoint(str(run["out_dir"]))["step"] for run in (unfinished, finished)]
    assert 0 < steps[0] < steps[1]
    assert ask(out_dir=unfinished["out_dir"]) == expected(unfinished, tokenizer)


def test_prompt_works_while_a_run_goes_on(finished, ask):
    with FileLock(finished["out_dir"] / "lock").acquire(timeout=0):
        assert ask().startswith(PROMPT)


def test_prompt_changes_nothing_in_out_dir(finished, ask):
    def seen():
        return {path: path.read_bytes() for path in finished["out_dir"].rglob("*")
                if path.is_file()}
    before = seen()
    ask()
    assert seen() == before


def test_prompt_moves_no_checkpoint_away(finished, unfinished, ask, tokenizer):
    """A training run may be at work there; it alone may decide what to do with a file."""
    newest = unfinished["out_dir"] / "checkpoint.pt"
    shutil.copy(newest, newest.with_name("checkpoint.previous.pt"))
    newest.write_bytes(b"damaged")
    assert ask(out_dir=unfinished["out_dir"]).splitlines()[0].startswith(f"{newest} is damaged")
    assert newest.read_bytes() == b"damaged"


@pytest.mark.parametrize("dtype, used", [
    ("auto", "float32"), ("float32", "float32"), ("bfloat16", "bfloat16")])
def test_prompt_multiplies_in_the_dtype_of_the_run_or_of_the_flag(dtype, used, ask, monkeypatch):
    seen = []

    def watched(model, *rest):
        seen.append(model.lm_head(torch.zeros(1, TINY_MODEL["hidden_size"])).dtype)
        return generate(model, *rest)

    monkeypatch.setattr(train_llama, "generate", watched)
    ask(dtype=dtype)
    assert seen == [getattr(torch, used)]


def test_prompt_stops_with_a_sentence_where_attention_sees_the_future(ask, monkeypatch):
    attention = train_llama.F.scaled_dot_product_attention
    monkeypatch.setattr(train_llama.F, "scaled_dot_product_attention",
                        lambda *args, is_causal, **rest: attention(*args, **rest))
    with pytest.raises(UserError, match="--device cpu lets attention see the future"):
        ask()


def test_prompt_takes_the_shape_of_the_model_from_the_checkpoint(ask):
    assert ask(hidden_size=96, num_hidden_layers=3, seq_len=8) == ask()


@pytest.mark.parametrize(
    "prompt", ["", " ", "[EOT] [PAD]", "é👩\u200d🚀\r\n", "-5", "alpha " * 50])
def test_any_prompt_works(prompt, ask):
    lines = ask(prompt=prompt)
    assert prompt.replace("\r\n", "\n") in lines.replace("\r\n", "\n")
    assert lines.endswith("\n")


def test_a_long_prompt_says_that_its_beginning_is_not_seen(ask):
    assert f"the last {TINY_RUN['seq_len']}" in ask(prompt="alpha " * 50)
    assert "the last" not in ask()


def test_prompt_with_no_new_tokens_prints_the_prompt(ask):
    assert ask(max_new_tokens=0) == PROMPT + "\n"


def test_prompt_with_top_k_0_or_above_the_vocabulary_works(ask):
    assert ask(top_k=0) == ask(top_k=10**6)


def test_prompt_with_another_seed_prints_another_text(ask):
    assert ask(seed=1) == ask(seed=1) != ask(seed=2)


def test_prompt_without_a_checkpoint_is_refused_in_one_sentence(ask, tmp_path):
    with pytest.raises(UserError, match="--out_dir") as caught:
        ask(out_dir=tmp_path)
    assert len(str(caught.value).splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_prompt_with_another_tokenizer_is_refused_in_one_sentence(ask, corpus, tmp_path):
    other = tmp_path / "other.json"
    train_tokenizer.main(as_flags(dict(dataset=corpus, vocab_size=280, tokenizer_path=other)))
    with pytest.raises(UserError, match="--tokenizer_path") as caught:
        ask(tokenizer_path=other)
    assert len(str(caught.value).splitlines()) == 1


def test_the_tokenizer_of_the_model_may_have_moved(ask, tokenizer_path, tmp_path):
    assert ask(tokenizer_path=shutil.copy(tokenizer_path, tmp_path / "moved.json")) == ask()


@pytest.mark.parametrize("flag, value", [("temperature", -1), ("top_k", -1),
                                         ("max_new_tokens", -1), ("temperature", "nan")])
def test_a_bad_sampling_setting_is_refused_by_name(ask, flag, value):
    with pytest.raises(UserError, match=f"--{flag}"):
        ask(**{flag: value})


def test_sampling_does_not_change_the_training(finished, tmp_path):
    """A run that evaluates and writes after each step has the weights of one that does so twice."""
    train_llama.main(as_flags(finished | dict(
        eval_every=1, max_new_tokens=5, temperature=1.5, out_dir=tmp_path / "out")))
    often, seldom = (load_checkpoint(str(folder))["model"]
                     for folder in (tmp_path / "out", finished["out_dir"]))
    assert all(torch.equal(often[name], seldom[name]) for name in seldom)
