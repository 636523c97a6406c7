"""Model: the Llama that transformers builds, weight for weight and logit for logit."""
import math
from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from conftest import TINY_MODEL
from train_llama import (LlamaAttention, LlamaConfig, LlamaForPretraining, RotaryEmbedding,
                         UserError, check_causality, flops_per_token)

VOCABULARY = 300


@pytest.fixture(autouse=True)
def same_numbers_every_time():
    torch.manual_seed(0)


def tiny_model(**changes) -> LlamaForPretraining:
    """A small model whose every weight matters: larger than at the start, and norms that scale."""
    model = LlamaForPretraining(LlamaConfig(VOCABULARY, **TINY_MODEL | changes))
    for weight in model.parameters():
        torch.nn.init.normal_(weight, mean=0.0 if weight.dim() == 2 else 1.0, std=0.2)
    return model


def token_ids(*shape: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, shape)


# ---- the same model as transformers' -------------------------------------------------------------

def test_the_default_model_has_179_448_576_parameters():
    with torch.device("meta"):
        model = LlamaForPretraining(LlamaConfig(50_000))
    assert sum(weight.numel() for weight in model.parameters()) == 179_448_576


@pytest.mark.parametrize("tied", [False, True])
def test_names_and_shapes_of_the_weights_are_those_of_transformers(tied):
    import transformers

    config = LlamaConfig(50_000, tie_word_embeddings=tied)
    with torch.device("meta"):
        ours = LlamaForPretraining(config).state_dict()
        theirs = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**asdict(config))).state_dict()
    assert ({name: weight.shape for name, weight in ours.items()}
            == {name: weight.shape for name, weight in theirs.items()})


@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_those_of_transformers_on_the_same_weights(tied):
    import transformers

    model = tiny_model(max_position_embeddings=512, rope_theta=5000.0, rms_norm_eps=1e-2,
                       tie_word_embeddings=tied)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**asdict(model.config))).eval()
    theirs.load_state_dict(model.state_dict(), strict=True)
    assert (theirs.lm_head.weight is theirs.model.embed_tokens.weight) == tied
    input_ids = token_ids(2, 300)
    with torch.no_grad():
        ours, theirs = model(input_ids), theirs(input_ids).logits
    assert ours.shape == theirs.shape == (2, 300, VOCABULARY)
    assert ours.std() > 0.5  # logits that a wrong rotation, head or norm would change by far more
    assert (ours - theirs).abs().max() < 1e-5


def test_tied_embeddings_are_one_matrix():
    model = LlamaForPretraining(LlamaConfig(VOCABULARY, **TINY_MODEL, tie_word_embeddings=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    apart = LlamaForPretraining(LlamaConfig(VOCABULARY, **TINY_MODEL))
    count = [sum(weight.numel() for weight in m.parameters()) for m in (apart, model)]
    assert count[0] - count[1] == VOCABULARY * TINY_MODEL["hidden_size"]


# ---- attention -----------------------------------------------------------------------------------

@torch.no_grad()
def test_changing_a_token_leaves_earlier_logits_unchanged():
    model, before = tiny_model(), token_ids(1, 48)
    expected = model(before)
    for t in range(48):
        after = before.clone()
        after[0, t] = (after[0, t] + 1) % VOCABULARY
        logits = model(after)
        assert torch.equal(logits[:, :t], expected[:, :t])
        assert not torch.isclose(logits[:, t:], expected[:, t:]).all(dim=-1).any()


def test_rotated_scores_depend_on_the_distance_only():
    length, half, base = 300, 8, 500.0
    rotate = RotaryEmbedding(LlamaConfig(
        VOCABULARY, max_position_embeddings=length, rope_theta=base,
        hidden_size=2 * 2 * half, num_attention_heads=2))
    q, k = torch.randn(2, 2 * half, dtype=torch.float64)
    q_everywhere, k_everywhere = (rotate(x.expand(1, 1, length, -1))[0, 0] for x in (q, k))
    scores = q_everywhere @ k_everywhere.T

    # Features i and i + D/2 are one complex number; a product with a conjugate turns by the
    # difference of the two angles.
    pairs = torch.complex(q[:half], q[half:]) * torch.complex(k[:half], k[half:]).conj()
    positions = torch.arange(length, dtype=torch.float64)
    angles = (positions[:, None, None] - positions[:, None]) * base ** (-torch.arange(half) / half)
    expected = (pairs * torch.polar(torch.ones_like(angles), angles)).sum(-1).real
    assert (scores - expected).abs().max() < 1e-4  # the tables are float32
    for distance in range(-length + 1, length):
        same = scores.diagonal(distance)
        assert same.max() - same.min() < 2e-4


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_attention_is_softmax_of_scaled_scores_over_the_past(kv_heads):
    heads, size, length = 4, 8, 20
    attention = LlamaAttention(LlamaConfig(VOCABULARY, hidden_size=heads * size,
                                           num_attention_heads=heads,
                                           num_key_value_heads=kv_heads)).double()
    x = torch.randn(3, length, heads * size, dtype=torch.float64)
    q, k, v = (x @ project.weight.T
               for project in (attention.q_proj, attention.k_proj, attention.v_proj))
    parts = []
    for head in range(heads):
        own = slice(head * size, (head + 1) * size)
        shared = head * kv_heads // heads  # neighbouring query heads share keys and values
        theirs = slice(shared * size, (shared + 1) * size)
        scores = q[..., own] @ k[..., theirs].transpose(1, 2) / math.sqrt(size)
        future = torch.ones(length, length).triu(1).bool()
        weights = torch.softmax(scores.masked_fill(future, -math.inf), dim=-1)
        parts.append(weights @ v[..., theirs])
    expected = torch.cat(parts, dim=-1) @ attention.o_proj.weight.T
    output = attention(x, lambda heads: heads)  # without rotation
    assert torch.allclose(output, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("capability, dtype, kv_heads", [
    ((7, 5), torch.float16, 4), ((7, 5), torch.float32, 4),  # no flash attention: as many as q
    ((9, 0), torch.float32, 4), ((8, 0), torch.bfloat16, 2), ((9, 0), torch.float16, 2)])
def test_keys_are_expanded_where_no_kernel_shares_them_with_the_same_result(
        capability, dtype, kv_heads, monkeypatch):
    attention = tiny_model().model.layers[0].self_attn.to(dtype)
    rotate = RotaryEmbedding(LlamaConfig(VOCABULARY, **TINY_MODEL))
    x, real, seen = torch.randn(2, 40, 32).to(dtype), F.scaled_dot_product_attention, []

    def look(q, k, v, **options):
        seen.append((q.size(1), k.size(1), v.size(1), options.get("is_causal")))
        return real(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", look)
    shared = attention(x, rotate)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: capability)
    assert torch.allclose(attention(x, rotate), shared, rtol=0, atol=1e-6 if kv_heads == 4 else 0)
    assert seen == [(4, 2, 2, True), (4, kv_heads, kv_heads, True)]


def test_attention_that_sees_the_future_is_found_before_training(monkeypatch):
    model, device = LlamaForPretraining(LlamaConfig(VOCABULARY, **TINY_MODEL)), torch.device("cpu")
    check_causality(model, device)
    real = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention",
                        lambda q, k, v, is_causal, **options: real(q, k, v, **options))
    with pytest.raises(UserError) as stop:
        check_causality(model, device)
    assert "--device cpu" in stop.value.code and "\n" not in stop.value.code


def test_weights_that_are_not_finite_are_no_fault_of_the_attention():
    model = LlamaForPretraining(LlamaConfig(VOCABULARY, **TINY_MODEL))
    model.model.norm.weight.data[0] = float("nan")
    check_causality(model, torch.device("cpu"))  # the norm of the gradient will tell


# ---- first weights, loss and cost ----------------------------------------------------------------

@pytest.mark.parametrize("layers", [1, 8])
def test_first_weights_are_normal_and_smaller_where_layers_add_up(layers):
    model = LlamaForPretraining(LlamaConfig(
        1000, hidden_size=128, intermediate_size=256, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2))
    for name, weight in model.named_parameters():
        if "norm" in name:
            assert torch.equal(weight, torch.ones(128))
            continue
        adds_up = "o_proj" in name or "down_proj" in name
        std = 0.02 / math.sqrt(2 * layers) if adds_up else 0.02
        assert weight.std().item() == pytest.approx(std, rel=0.04), name
        assert abs(weight.mean().item()) < 0.05 * std, name
        share = (weight.abs() < std).float().mean().item()  # within one deviation: 68.3 %
        assert share == pytest.approx(0.683, abs=0.03), name


@pytest.mark.parametrize("tied", [False, True])
def test_the_first_loss_is_that_of_guessing(tied):
    model = LlamaForPretraining(LlamaConfig(8192, num_hidden_layers=2, tie_word_embeddings=tied))
    input_ids, labels = torch.randint(8192, (2, 2, 128))
    with torch.no_grad():
        loss = model(input_ids, labels).item() / labels.numel()
    assert abs(loss - math.log(8192)) < 0.3


def test_the_loss_is_the_sum_over_labels_that_are_not_ignored():
    model, input_ids, labels = tiny_model(), token_ids(3, 20), token_ids(3, 20)
    labels[0, 15:] = labels[1] = labels[2, ::2] = -100
    logits = model(input_ids).double()
    expected = sum(-torch.log_softmax(logits[row, t], dim=-1)[labels[row, t]]  # already shifted
                   for row in range(3) for t in range(20) if labels[row, t] != -100)
    loss = model(input_ids, labels)
    assert loss.shape == () and loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert model(input_ids, torch.full_like(labels, -100)).item() == 0


def test_the_loss_is_summed_in_float32_under_autocast():
    model, input_ids, labels = tiny_model(), token_ids(2, 64), token_ids(2, 64)
    with torch.autocast("cpu", torch.bfloat16):
        loss, logits = model(input_ids, labels), model(input_ids)
    assert (loss.dtype, logits.dtype) == (torch.float32, torch.bfloat16)
    expected = F.cross_entropy(logits.double().flatten(0, 1), labels.flatten(), reduction="sum")
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("changes", [
    {}, dict(tie_word_embeddings=True), dict(num_key_value_heads=4), dict(num_hidden_layers=3)
], ids=str)
def test_flops_per_token_are_those_that_pytorch_counts(changes):
    model, length = tiny_model(**changes), 48
    input_ids = token_ids(2, length)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(input_ids, input_ids).backward()
    # The counter takes each score for two products forward and four backward, those of the
    # future too; the function leaves out the half that no token looks at.
    attention = model.config.num_hidden_layers * 6 * 2 * model.config.hidden_size * length
    expected = input_ids.numel() * (flops_per_token(model, length) + attention // 2)
    assert counter.get_total_flops() == expected
