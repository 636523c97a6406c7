"""Optimiser and schedule: the published formulas, written out once more, at every step."""
import math

import numpy as np
import pytest
import torch

from conftest import TINY_MODEL
from train_llama import (LlamaConfig, LlamaForPretraining, TrainConfig, learning_rate_at,
                         make_optimizers)

STEPS, PEAK = 40, 3e-3


@pytest.fixture(autouse=True)
def same_numbers_every_time():
    torch.manual_seed(0)


def tiny_model(**changes) -> LlamaForPretraining:
    return LlamaForPretraining(LlamaConfig(300, **TINY_MODEL | changes))


def random_gradients(model) -> None:
    for weight in model.parameters():
        weight.grad = torch.randn_like(weight)


# ---- learning rate -------------------------------------------------------------------------------

def rates(steps: int = STEPS, **settings) -> list[float]:
    config = TrainConfig(learning_rate=PEAK, **settings)
    return [learning_rate_at(step, steps, config) for step in range(steps)]


@pytest.mark.parametrize("lowest", [0.0, 3e-4, PEAK])
@pytest.mark.parametrize("warmup", [0, 1, 2, 10, STEPS - 1])
def test_cosine_rises_in_a_line_and_falls_in_half_a_cosine(warmup, lowest):
    falling = STEPS - warmup
    expected = [PEAK * step / warmup for step in range(1, warmup + 1)] + [
        lowest + (PEAK - lowest) * math.cos(math.pi / 2 * step / falling) ** 2
        for step in range(1, falling + 1)]  # (1 + cos 2x) / 2 = cos^2 x
    assert rates(schedule="cosine", warmup_steps=warmup, min_learning_rate=lowest) == pytest.approx(
        expected, rel=1e-12, abs=1e-18)


@pytest.mark.parametrize("lowest", [0.0, 3e-4])
@pytest.mark.parametrize("warmup", [0, 1, 2, 10, STEPS - 3, STEPS - 1])
def test_wsd_rises_in_a_line_stays_and_falls_in_a_line_over_the_last_fifth(warmup, lowest):
    fall = min(STEPS // 5, STEPS - warmup)
    points = {-1: 0.0} if warmup else {}
    points |= {warmup - 1: PEAK, STEPS - 1 - fall: PEAK, STEPS - 1: lowest}
    expected = np.interp(range(STEPS), list(points), list(points.values()))
    assert rates(schedule="wsd", warmup_steps=warmup, min_learning_rate=lowest) == pytest.approx(
        expected.tolist(), rel=1e-12, abs=1e-18)


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 9, 10, 1000])
def test_the_last_step_has_exactly_the_minimum_and_no_step_more_than_the_peak(schedule, steps):
    for warmup in {0, 1, steps // 2, steps - 1} - {steps}:
        for lowest in (0.0, 1e-4, 0.1 * PEAK):
            found = rates(steps, schedule=schedule, warmup_steps=warmup, min_learning_rate=lowest)
            assert found[-1] == lowest
            assert all(lowest <= rate <= PEAK for rate in found[warmup:])
            assert all(later <= rate for rate, later in zip(found[warmup:], found[warmup + 1 :]))
            assert found[:warmup] == [PEAK * (step + 1) / warmup for step in range(warmup)]


# ---- AdamW ---------------------------------------------------------------------------------------

def test_adamw_follows_the_papers_formula_and_decays_matrices_only():
    model = tiny_model()
    config = TrainConfig(learning_rate=2e-3, weight_decay=0.1)
    (optimizer,) = make_optimizers(model, config)
    expected = {name: weight.detach().double() for name, weight in model.named_parameters()}
    first = {name: torch.zeros_like(weight) for name, weight in expected.items()}
    second = {name: torch.zeros_like(weight) for name, weight in expected.items()}
    for t in (1, 2, 3):
        random_gradients(model)
        optimizer.step()
        for name, weight in model.named_parameters():  # Algorithm 2 of arXiv:1711.05101
            g, theta = weight.grad.double(), expected[name]
            first[name] = 0.9 * first[name] + 0.1 * g
            second[name] = 0.95 * second[name] + 0.05 * g * g
            m, v = first[name] / (1 - 0.9**t), second[name] / (1 - 0.95**t)
            decay = 0.1 if weight.dim() == 2 else 0.0
            expected[name] = theta - 2e-3 * (m / (v.sqrt() + 1e-8) + decay * theta)
            assert torch.allclose(weight.double(), expected[name], rtol=1e-6, atol=1e-8), name


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_without_gradients_only_matrices_shrink(kind):
    model = tiny_model()
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    for optimizer in make_optimizers(model, TrainConfig(
            optimizer=kind, learning_rate=0.5, weight_decay=0.1)):
        optimizer.step()
    for name, weight in model.named_parameters():
        factor = 1 - 0.5 * 0.1 if weight.dim() == 2 else 1
        assert torch.allclose(weight, factor * before[name], rtol=1e-6, atol=0), name


# ---- Muon ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_every_weight_has_one_optimiser_and_muon_has_the_matrices_of_the_layers(kind, tied):
    model = tiny_model(tie_word_embeddings=tied)
    names = {id(weight): name for name, weight in model.named_parameters()}
    owned = {type(optimizer): [names[id(weight)] for group in optimizer.param_groups
                               for weight in group["params"]]
             for optimizer in make_optimizers(model, TrainConfig(optimizer=kind))}
    assert sorted(sum(owned.values(), [])) == sorted(names.values())
    assert sorted(owned.get(torch.optim.Muon, [])) == ([] if kind == "adamw" else sorted(
        f"model.layers.{layer}.{matrix}.weight" for layer in range(model.config.num_hidden_layers)
        for matrix in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
                       "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_beside_muon_the_embedding_has_12_times_the_rate_unless_it_is_the_head(kind, tied):
    model = tiny_model(tie_word_embeddings=tied)
    names = {id(weight): name for name, weight in model.named_parameters()}
    scales = {names[id(weight)]: group.get("scale", 1)
              for optimizer in make_optimizers(model, TrainConfig(optimizer=kind))
              for group in optimizer.param_groups for weight in group["params"]}
    assert {name for name, scale in scales.items() if scale != 1} == (
        {"model.embed_tokens.weight"} if kind == "muon" and not tied else set())
    assert scales["model.embed_tokens.weight"] == (12 if kind == "muon" and not tied else 1)


def test_muon_updates_are_orthogonal_with_an_rms_of_a_fifth_of_the_rate():
    model = tiny_model(hidden_size=64, intermediate_size=192)
    config = TrainConfig(optimizer="muon", learning_rate=0.01, weight_decay=0.0)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    random_gradients(model)
    muon = next(o for o in make_optimizers(model, config) if isinstance(o, torch.optim.Muon))
    muon.step()
    for name, weight in model.named_parameters():
        update = (weight.detach() - before[name]) / 0.01
        if ".layers." not in name or weight.dim() < 2:
            assert not update.any()  # not Muon's
            continue
        assert update.square().mean().sqrt().item() == pytest.approx(0.2, rel=0.25), name
        sizes = torch.linalg.svdvals(update) / (0.2 * math.sqrt(max(weight.shape)))
        # Newton-Schulz leaves them at about 1, but for a few that were next to nothing.
        assert sizes.quantile(0.05) > 0.6 and sizes.max() < 1.3, name
        assert (update * weight.grad).sum() < 0, name  # downhill
