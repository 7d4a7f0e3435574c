# SPDX-License-Identifier: BSD-3-Clause
"""Policy losses on random batches: padded or packed, masked, with references and divisors of any kind."""

import formulas
import torch
from batches import Scores, Sequences, of_layers, total_of
from engine import MAGNITUDE, Numbers, compare, dtypes, fuzz, maybe, one_of
from hypothesis import strategies as st
from lm_head import differentiable, items

from liger import losses
from liger.losses.policy import GRPO_LOSS_TYPES


@fuzz(8)
def test_policies(device, data):
    draw = data.draw
    numbers = Numbers(draw, device, draw(dtypes))
    batch = Sequences(draw, numbers, one_of(draw, 1, 2, 3))
    ppo = draw(st.integers(0, 5)) == 0
    kind = "bnpo" if ppo else one_of(draw, *GRPO_LOSS_TYPES)
    level, beta = one_of(draw, "token", "sequence"), one_of(draw, 0.0, 0.04, 0.5)
    level = "token" if kind == "vespo" else level
    low, high = (
        (one_of(draw, 0.1, 0.2, 0.5),) * 2 if ppo else (one_of(draw, 0.1, 0.3), one_of(draw, 0.2, 0.9))
    )
    delta, taus = maybe(draw, 1.2, 2.0), (one_of(draw, 1.0, 2.0), one_of(draw, 1.05, 0.5))
    corrected, coefficient = draw(st.booleans()), one_of(draw, 0.0, 0.0, 0.01, 0.5)
    longest = one_of(draw, 7, 20) if batch.packed or draw(st.booleans()) else None
    head, count = batch.head((1.0, 0.7, 1.6)), items(draw)
    options = {
        "beta": beta, "importance_sampling_level": level, "delta": delta, "use_bias_correction_kl": corrected,
        "entropy_coef": coefficient, "max_completion_length": longest, **head,
    }  # fmt: skip
    if ppo:
        module = losses.FusedLinearPPOLoss(epsilon=low, **options)
    else:
        module = losses.FusedLinearGRPOLoss(
            loss_type=kind, epsilon_low=low, epsilon_high=high, sapo_temperature_pos=taus[0],
            sapo_temperature_neg=taus[1], **options,
        )  # fmt: skip

    def of_tokens_or_sequences(low, high, dtype=torch.float32):
        if draw(st.booleans()):
            return batch.per_token(low, high)
        return numbers.uniform(batch.count, low=low, high=high, dtype=dtype)

    def at(tensor, sequence, rows):
        """The numbers of the tokens of a sequence."""
        if tensor.shape == batch.target.shape:
            return tensor.reshape(-1)[rows]
        return tensor.reshape(-1)[sequence].expand(len(rows))

    advantages = of_tokens_or_sequences(-2.0, 2.0)
    old = batch.per_token(-4.0, -0.2) if draw(st.booleans()) else None
    sampler = of_tokens_or_sequences(0.3, 1.5) if draw(st.booleans()) else None
    extra = {}
    if beta:
        extra = batch.reference(sums=False)
        if "ref_logps" in extra:
            extra = {"ref_per_token_logps": extra["ref_logps"]}
    given = {**batch.tensors(), **extra}

    def ours(**given):
        loss, metrics = module(
            target=batch.target, mask=batch.mask, advantages=advantages, old_per_token_logps=old,
            vllm_is_ratio=sampler, denominator=count, **given, **batch.where,
        )  # fmt: skip
        found = {"kl": metrics.kl, "mean_entropy": metrics.mean_entropy}
        return {"loss": loss, **{n: v for n, v in found.items() if v is not None}}

    def formula(input, weight, bias=None, ref_per_token_logps=None, **reference):
        if ref_per_token_logps is not None:
            reference = {"ref_logps": ref_per_token_logps}
        scores = Scores(batch, head, input, weight, bias, reference)
        terms, sizes, kls, entropies = [], [], [], []
        for sequence, rows in enumerate(batch.rows):
            if not rows:
                continue
            logp = scores.tokens[rows]
            wide = logp.dtype
            before = logp.detach() if old is None else old.reshape(-1)[rows].to(wide)
            ratio = torch.exp(logp - before)
            if level == "sequence":
                ratio = torch.exp((logp - before).mean()).expand(len(rows))
            advantage = at(advantages, sequence, rows).to(wide)
            if kind == "vespo":
                factors = torch.ones_like(logp) if sampler is None else at(sampler, sequence, rows).to(wide)
                # A factor of the whole sequence counts once.
                whole = sampler is not None and sampler.shape != batch.target.shape
                loss = formulas.vespo(logp, before, advantage, factors[:1] if whole else factors)
            else:
                loss = torch.stack(
                    [
                        formulas.policy_token(kind, r, a, p, low, high, delta, taus)
                        for r, a, p in zip(ratio, advantage, logp, strict=True)
                    ]
                )
            if sampler is not None and kind != "vespo":
                loss = loss * at(sampler, sequence, rows).to(wide)
            size = loss.detach().abs()
            if beta:
                gap = scores.reference_tokens[rows] - logp
                divergence = (torch.exp(gap) - gap - 1) * (ratio if corrected else 1.0)
                kls.append(divergence.detach().sum())
                divergence = beta * divergence
                loss, size = loss + divergence, size + divergence.detach()
            entropies.append(scores.entropies[rows].sum())
            length = len(rows) if kind in ("grpo", "sapo") else 1
            terms.append(loss.sum() / length)
            sizes.append(size.sum() / length)
        tokens = max(sum(map(len, batch.rows)), 1)
        if kind in ("grpo", "sapo", "luspo"):
            divisor = batch.count if count is None else float(count)
        elif kind == "dr_grpo":
            divisor = batch.count * (longest or batch.shape[-1])
        else:
            divisor = tokens if count is None else max(float(count), 1.0)
        results = {"loss": total_of(terms, scores) / divisor}
        results[f"{MAGNITUDE}loss"] = total_of(sizes, scores).detach() / divisor
        if coefficient:
            entropy = total_of(entropies, scores) / tokens
            results["loss"] = results["loss"] - coefficient * entropy
            results["mean_entropy"] = entropy.detach()
        if beta:
            results["kl"] = sum(kls, start=scores.tokens.new_zeros(())) / tokens
        return results

    names = [n for n in ("input", "weight", "bias") if n in given]
    compare(ours, formula, given, differentiable(draw, *names), vary=of_layers(given))
