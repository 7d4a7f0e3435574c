# SPDX-License-Identifier: BSD-3-Clause
"""The losses against TRL's own trainers, called with the same tiny model and batch."""

import collections
import inspect
import os
import types

import pytest
import torch

trl = pytest.importorskip("trl")
pytest.importorskip("datasets")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from accelerate import Accelerator  # noqa: E402
from trl.experimental.cpo import CPOTrainer  # noqa: E402
from trl.experimental.orpo import ORPOTrainer  # noqa: E402

import liger.losses as losses  # noqa: E402

HIDDEN, VOCAB, LENGTH, PAIRS = 8, 23, 9, 3
TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-5}
both_dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


class Scorer(torch.nn.Module):
    """An embedding and a head: what a trainer of TRL calls, with everything from full logits."""

    is_gradient_checkpointing = False

    def __init__(self, dtype, seed, temperature=1.0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.nn.Parameter(torch.randn(VOCAB, HIDDEN, generator=generator, dtype=dtype))
        self.weight = torch.nn.Parameter(torch.randn(VOCAB, HIDDEN, generator=generator, dtype=dtype) / 2)
        self.temperature = temperature

    def forward(self, input_ids, labels=None, fused_lm_head=False, **_):
        logits = self.table[input_ids] @ self.weight.T / self.temperature
        if not fused_lm_head:
            return types.SimpleNamespace(logits=logits)
        logits, labels = logits[:, :-1], labels[:, 1:]
        logp, kept = logits.log_softmax(-1), labels != -100
        picked = logp.gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1)
        return types.SimpleNamespace(
            log_probs=torch.where(kept, picked, 0.0),
            entropy=torch.where(kept, -(logp.exp() * logp).sum(-1), 0.0),
            mean_logits=logits.mean(-1),
            is_top1=(logits.argmax(-1) == labels) & kept,
        )

    def gradients(self, loss):
        return torch.autograd.grad(loss, [self.table, self.weight])


def trainer_of(cls, model, args=None, **attributes):
    """A trainer without its constructor, which would want a tokenizer, a dataset and a model of
    transformers."""
    trainer = object.__new__(cls)
    common = {
        "model": model,
        "accelerator": Accelerator(cpu=True),
        "args": types.SimpleNamespace(gradient_checkpointing_kwargs=None, **(args or {})),
        "aux_loss_enabled": False,
        "precompute_ref_logps": False,
        "_metrics": {"train": collections.defaultdict(list)},
        "_total_train_tokens": 0,
        "_tp_size": 1,
    }
    trainer.__dict__.update(common | attributes)
    return trainer


def batch(sequences, seed=0):
    """Prompts of 3 tokens, completions of different lengths, padding behind them."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (sequences, LENGTH), generator=generator)
    lengths = torch.randint(1, LENGTH - 2, (sequences, 1), generator=generator)
    place = torch.arange(LENGTH)
    attention = (place < 3 + lengths).long()
    return {"input_ids": ids, "attention_mask": attention, "completion_mask": attention * (place >= 3)}


def targets(inputs, mask="completion_mask"):
    """What the hidden states of all but the last token are to predict."""
    return inputs["input_ids"].masked_fill(inputs[mask] == 0, -100)[:, 1:]


def hidden_states(model, inputs):
    return model.table[inputs["input_ids"]][:, :-1]


def assert_same(ours, theirs, model, dtype):
    """Two losses of one model and their gradients."""
    assert theirs.requires_grad
    pairs = zip((ours, *model.gradients(ours)), (theirs, *model.gradients(theirs)), strict=True)
    for mine, other in pairs:
        torch.testing.assert_close(
            mine, other, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] / 10, check_dtype=False
        )


# --- DPO ----------------------------------------------------------------------------------------------------


@both_dtypes
@pytest.mark.parametrize(
    "loss_type, smoothing",
    [(kind, 0.0) for kind in losses.preference.DPO_LOSS_TYPES if kind != "exo_pair"]
    + [("exo_pair", 1e-3), ("exo_pair", 0.1), ("robust", 0.2)],
)
def test_dpo(loss_type, smoothing, dtype):
    model, reference, inputs = Scorer(dtype, 1), Scorer(dtype, 2), batch(2 * PAIRS)
    trainer = trainer_of(
        trl.DPOTrainer, model, {"discopop_tau": 0.05}, ref_model=reference, ld_alpha=None,
        f_divergence_type="reverse_kl", loss_types=[loss_type], loss_weights=[1.0], beta=0.3,
        label_smoothing=smoothing, use_weighting=False,
    )  # fmt: skip
    theirs = trainer._compute_loss(model, inputs, False)
    mine = losses.FusedLinearDPOLoss(
        loss_type=loss_type, beta=0.3, label_smoothing=smoothing, discopop_tau=0.05
    )
    loss, metrics = mine(
        hidden_states(model, inputs), model.weight, targets(inputs),
        ref_input=hidden_states(reference, inputs).detach(), ref_weight=reference.weight,
    )  # fmt: skip
    assert_same(loss, theirs, model, dtype)
    if loss_type != "ipo":  # TRL logs sums also where its loss takes means
        logged = trainer._metrics["train"]
        found = {
            "rewards/chosen": metrics.chosen_rewards, "rewards/rejected": metrics.rejected_rewards,
            "rewards/margins": metrics.chosen_rewards - metrics.rejected_rewards,
            "rewards/accuracies": (metrics.chosen_rewards > metrics.rejected_rewards).float(),
            "logps/chosen": metrics.chosen_logps, "logps/rejected": metrics.rejected_logps,
        }  # fmt: skip
        for name, value in found.items():
            assert value.mean().item() == pytest.approx(logged[name][0], rel=1e-5, abs=1e-6), name


def test_every_loss_type_of_dpo_is_one_of_trl():
    source = inspect.getsource(trl.DPOTrainer._compute_loss)
    assert all(f'loss_type == "{kind}"' in source for kind in losses.preference.DPO_LOSS_TYPES)


# --- KTO ----------------------------------------------------------------------------------------------------


@both_dtypes
@pytest.mark.parametrize("labels", [(1, 0, 0, 1, 1), (1, 1, 1, 1, 1), (0, 0, 0, 0, 0)])
@pytest.mark.parametrize("loss_type", losses.unpaired.KTO_LOSS_TYPES)
def test_kto(loss_type, labels, dtype):
    model, reference = Scorer(dtype, 1), Scorer(dtype, 2)
    inputs, mismatched = batch(5), batch(5, seed=4)
    labels = torch.tensor(labels, dtype=torch.bool)
    trainer = trainer_of(
        trl.KTOTrainer, model, ref_model=reference, loss_type=loss_type, beta=0.3, desirable_weight=1.2,
        undesirable_weight=0.7, calculate_KL=loss_type == "kto",
    )  # fmt: skip
    kl_inputs = {f"KL_{name}": value for name, value in mismatched.items()}
    theirs = trainer._compute_loss(model, {**inputs, **kl_inputs, "label": labels}, False)
    mine = losses.FusedLinearKTOLoss(
        loss_type=loss_type, beta=0.3, desirable_weight=1.2, undesirable_weight=0.7
    )
    kl = mine.estimate_kl(
        hidden_states(model, mismatched), model.weight, targets(mismatched),
        ref_input=hidden_states(reference, mismatched).detach(), ref_weight=reference.weight,
    )  # fmt: skip
    if loss_type == "kto":
        assert kl.item() == pytest.approx(trainer._metrics["train"]["kl"][0], rel=1e-5, abs=1e-6)
    loss, metrics = mine(
        hidden_states(model, inputs), model.weight, targets(inputs), preference_labels=labels, kl=kl,
        ref_input=hidden_states(reference, inputs).detach(), ref_weight=reference.weight,
    )  # fmt: skip
    assert_same(loss, theirs, model, dtype)
    logged = trainer._metrics["train"]
    for name, count in (("chosen", labels.sum()), ("rejected", (~labels).sum())):
        if count:
            rewards = getattr(metrics, f"{name}_rewards_sum") / count
            assert rewards.item() == pytest.approx(logged[f"rewards/{name}"][0], rel=1e-5, abs=1e-6)
            logps = getattr(metrics, f"{name}_logps_sum") / count
            assert logps.item() == pytest.approx(logged[f"logps/{name}"][0], rel=1e-5)


# --- GRPO ---------------------------------------------------------------------------------------------------

GRPO_OPTIONS = {
    "plain": {},
    "no reference": {"beta": 0.0},
    "old policy": {"old": True},
    "two-sided": {"old": True, "delta": 1.1},
    "corrected divergence": {"old": True, "use_bias_correction_kl": True},
    "sampler": {"old": True, "sampler": True},
    "sequence": {"old": True, "importance_sampling_level": "sequence"},
    "temperature": {"old": True, "temperature": 0.7},
    "entropy": {"entropy_coef": 0.05},
}


@both_dtypes
@pytest.mark.parametrize("options", GRPO_OPTIONS.values(), ids=GRPO_OPTIONS)
@pytest.mark.parametrize("loss_type", losses.policy.GRPO_LOSS_TYPES)
def test_grpo(loss_type, options, dtype):
    options = {
        "old": False, "sampler": False, "beta": 0.05, "delta": None, "use_bias_correction_kl": False,
        "temperature": 1.0, "importance_sampling_level": "token", "entropy_coef": 0.0, **options,
    }  # fmt: skip
    if loss_type == "vespo" and options["importance_sampling_level"] == "sequence":
        with pytest.raises(ValueError, match="importance_sampling_level is 'sequence', expected 'token'"):
            losses.FusedLinearGRPOLoss(loss_type="vespo", importance_sampling_level="sequence")
        return
    model, whole, sequences = Scorer(dtype, 1, options["temperature"]), batch(6), 6
    completion = {"ids": whole["input_ids"][:, 3:], "mask": whole["completion_mask"][:, 3:]}
    shape, generator = completion["ids"].shape, torch.Generator().manual_seed(5)
    with torch.no_grad():
        own = model(whole["input_ids"], labels=whole["input_ids"], fused_lm_head=True).log_probs[:, 2:]
    near = [own + 0.3 * torch.randn(shape, generator=generator, dtype=dtype) for _ in range(2)]
    advantages = torch.randn(sequences, generator=generator, dtype=dtype)
    inputs = {
        "prompt_ids": whole["input_ids"][:, :3], "prompt_mask": whole["attention_mask"][:, :3],
        "completion_ids": completion["ids"], "completion_mask": completion["mask"], "advantages": advantages,
        "ref_per_token_logps": near[0], "num_items_in_batch": torch.tensor(17.0),
    }  # fmt: skip
    ratio = None
    if options["old"]:
        inputs["old_per_token_logps"] = near[1]
    if options["sampler"]:
        inputs["importance_sampling_ratio"] = ratio = (
            torch.rand(shape, generator=generator, dtype=dtype) + 0.5
        )
        # TRL's ratio is 1 at padding.
        inputs["importance_sampling_ratio"] = ratio = torch.where(completion["mask"] != 0, ratio, 1.0)
    high = 1.05 if loss_type == "cispo" else 0.15
    same = {
        "loss_type": loss_type, "epsilon_low": 0.1, "epsilon_high": high, "beta": options["beta"],
        "importance_sampling_level": options["importance_sampling_level"], "max_completion_length": 11,
    }  # fmt: skip
    of_args = {
        "delta": options["delta"], "use_bias_correction_kl": options["use_bias_correction_kl"],
        "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05, "vespo_k_pos": 1.5, "vespo_lambda_pos": 2.5,
        "vespo_k_neg": 2.0, "vespo_lambda_neg": 1.5,
    }  # fmt: skip
    trainer = trainer_of(
        trl.GRPOTrainer, model, of_args | {"steps_per_generation": 1, "report_to": []}, **same,
        temperature=options["temperature"], top_entropy_quantile=1.0, off_policy_mask_threshold=None,
        use_vllm=options["sampler"], vllm_importance_sampling_correction=True, current_gradient_accumulation_steps=1,
        entropy_coef=options["entropy_coef"], _entropy_bonus_enabled=options["entropy_coef"] != 0,
        use_adaptive_entropy=False,
    )  # fmt: skip
    theirs = trainer._compute_loss(model, inputs)
    mine = losses.FusedLinearGRPOLoss(
        **same, **of_args, temperature=options["temperature"], entropy_coef=options["entropy_coef"]
    )
    divisor = dict.fromkeys(("cispo", "dapo", "vespo"), inputs["num_items_in_batch"])
    loss, metrics = mine(
        model.table[whole["input_ids"]][:, 2:-1], model.weight, completion["ids"], advantages=advantages,
        mask=completion["mask"], ref_per_token_logps=near[0], old_per_token_logps=inputs.get("old_per_token_logps"),
        vllm_is_ratio=ratio, denominator=divisor.get(loss_type),
    )  # fmt: skip
    assert_same(loss, theirs, model, dtype)
    logged = trainer._metrics["train"]
    if options["beta"]:
        assert metrics.kl.item() == pytest.approx(logged["kl"][0], rel=1e-4)
    if (
        loss_type not in ("cispo", "sapo", "vespo")
        and same["importance_sampling_level"] == "token"
        and not options["delta"]
    ):
        assert metrics.clip_ratio.item() == pytest.approx(logged["clip_ratio/region_mean"][0], abs=1e-6)


# --- ORPO, CPO, SimPO ---------------------------------------------------------------------------------------


def paired(chosen, rejected):
    """The batch of ORPO and CPO, where prompts count as labels of nothing."""
    result = {}
    for name, inputs in (("chosen", chosen), ("rejected", rejected)):
        result[f"{name}_input_ids"], result[f"{name}_attention_mask"] = (
            inputs["input_ids"],
            inputs["attention_mask"],
        )
        result[f"{name}_labels"] = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100)
    return result


def pairs():
    chosen, rejected = batch(PAIRS), batch(PAIRS, seed=7)
    return paired(chosen, rejected), {name: torch.cat([chosen[name], rejected[name]]) for name in chosen}


@both_dtypes
def test_orpo(dtype):
    model, (theirs_batch, inputs) = Scorer(dtype, 1), pairs()
    trainer = trainer_of(ORPOTrainer, model, beta=0.3, is_encoder_decoder=False, padding_value=0)
    theirs, logged = trainer.get_batch_loss_metrics(model, theirs_batch)
    loss, metrics = losses.FusedLinearORPOLoss(beta=0.3)(
        hidden_states(model, inputs),
        model.weight,
        targets(inputs),
        nll_target=targets(inputs, "attention_mask"),
    )
    assert_same(loss, theirs, model, dtype)
    assert metrics.nll_loss.item() == pytest.approx(logged["nll_loss"], rel=1e-5)
    assert metrics.chosen_rewards.mean().item() == pytest.approx(logged["rewards/chosen"], rel=1e-5)


@both_dtypes
@pytest.mark.parametrize("cpo_alpha", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("loss_type", ["sigmoid", "hinge", "ipo", "simpo"])
def test_cpo_and_simpo(loss_type, smoothing, cpo_alpha, dtype):
    model, (theirs_batch, inputs) = Scorer(dtype, 1), pairs()
    trainer = trainer_of(
        CPOTrainer, model, beta=0.3, is_encoder_decoder=False, pad_token_id=0, cpo_alpha=cpo_alpha, alpha=0.0,
        loss_type=loss_type, simpo_gamma=0.4, label_smoothing=smoothing,
    )  # fmt: skip
    theirs, logged = trainer.get_batch_loss_metrics(model, theirs_batch)
    options = {"beta": 0.3, "label_smoothing": smoothing, "alpha": cpo_alpha}
    if loss_type == "simpo":
        mine = losses.FusedLinearSimPOLoss(gamma=0.4, **options)
    else:
        mine = losses.FusedLinearCPOLoss(loss_type=loss_type, average_log_prob=loss_type == "ipo", **options)
    loss, metrics = mine(hidden_states(model, inputs), model.weight, targets(inputs))
    assert_same(loss, theirs, model, dtype)
    if cpo_alpha:
        assert metrics.nll_loss.item() == pytest.approx(logged["nll_loss"], rel=1e-5)
