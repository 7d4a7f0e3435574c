# SPDX-License-Identifier: BSD-3-Clause
"""Preference losses on random batches: padded or packed, masked, with references and divisors of any kind."""

import formulas
import torch
from batches import Scores, Sequences, of_layers, stacked, total_of
from engine import Numbers, compare, dtypes, fuzz, maybe, one_of
from hypothesis import strategies as st
from lm_head import differentiable, items

from liger import losses
from liger.losses.preference import DPO_LOSS_TYPES


def preference_metrics(output):
    loss, metrics = output
    found = {n: v for n, v in metrics._asdict().items() if v is not None}
    return {"loss": loss, **found}


def preference(draw, device, cls, options, pair_loss, average=False, nll=False, reference=False, every=False):
    """Compares a loss of pairs. ``pair_loss`` takes the log-ratios of both and the log-probabilities of
    both."""
    numbers = Numbers(draw, device, draw(dtypes))
    pairs = one_of(draw, 1, 2, 3)
    batch = Sequences(draw, numbers, 2 * pairs, every)
    head, count, alpha = batch.head(), items(draw), options.get("alpha", 1.0)
    module = cls(**options, **head)
    extra = batch.reference(sums=True) if reference else {}
    given = {**batch.tensors(), **extra}

    def ours(**given):
        rest = {"mask": batch.mask, "denominator": count, **batch.where}
        return preference_metrics(module(target=batch.target, **given, **rest))

    def formula(input, weight, bias=None, **reference):
        scores = Scores(batch, head, input, weight, bias, reference, average)
        ratios = scores.ratios()
        terms = [
            pair_loss(ratios[i], ratios[i + pairs], scores.sequences[i], scores.sequences[i + pairs])
            for i in range(pairs)
            if batch.rows[i] or batch.rows[i + pairs]
        ]
        loss = total_of(terms, scores) / (pairs if count is None else float(count))
        beta, likelihood = options.get("beta", 0.1), {}
        if nll:
            chosen = [row for rows in batch.rows[:pairs] for row in rows]
            value = -scores.tokens[chosen].sum() / max(len(chosen), 1)
            loss, likelihood = loss + alpha * value, {"nll_loss": value.detach()}
        rewards = [beta * r for r in ratios]
        return {
            "loss": loss,
            **likelihood,
            "chosen_logps": stacked(scores.sequences[:pairs], scores.tokens),
            "rejected_logps": stacked(scores.sequences[pairs:], scores.tokens),
            "chosen_rewards": stacked(rewards[:pairs], scores.tokens),
            "rejected_rewards": stacked(rewards[pairs:], scores.tokens),
        }

    names = [n for n in ("input", "weight", "bias") if n in given]
    compare(ours, formula, given, differentiable(draw, *names), vary=of_layers(given))


@fuzz(6)
def test_dpo(device, data):
    draw = data.draw
    kind, beta = one_of(draw, *DPO_LOSS_TYPES), one_of(draw, 0.05, 0.1, 0.7)
    reference, nll = draw(st.booleans()), draw(st.booleans())
    smoothing = one_of(draw, 0.0, 0.1, 0.3)
    # Of sums of random log-probabilities its exponential means nothing.
    average = kind in ("ipo", "discopop") or draw(st.booleans())
    tau = one_of(draw, 0.05, 0.5)
    options = {
        "loss_type": kind, "beta": beta, "label_smoothing": smoothing, "discopop_tau": tau, "use_ref_model": reference,
        "compute_nll_loss": nll, "alpha": one_of(draw, 1.0, 0.3), "average_log_prob": average,
    }  # fmt: skip
    preference(
        draw, device, losses.FusedLinearDPOLoss, options,
        lambda a, b, _c, _r: formulas.dpo(kind, a, b, beta, smoothing, tau), average, nll, reference,
        # Without a rejected token it is sigmoid(a) + sigmoid(-a): its gradient is rounding.
        every=kind == "apo_down",
    )  # fmt: skip


@fuzz(2)
def test_orpo(device, data):
    draw = data.draw
    beta, nll = one_of(draw, 0.1, 0.7), draw(st.booleans())

    def pair_loss(_a, _b, chosen, rejected):
        return -beta * formulas.log_sigmoid(formulas.log_odds(chosen) - formulas.log_odds(rejected))

    options = {"beta": beta, "compute_nll_loss": nll}
    preference(draw, device, losses.FusedLinearORPOLoss, options, pair_loss, True, nll, every=True)


@fuzz(2)
def test_cpo_and_simpo(device, data):
    draw = data.draw
    beta, nll, smoothing = one_of(draw, 0.1, 2.0), draw(st.booleans()), one_of(draw, 0.0, 0.2)
    options = {
        "beta": beta,
        "compute_nll_loss": nll,
        "alpha": one_of(draw, 1.0, 0.3),
        "label_smoothing": smoothing,
    }
    if draw(st.booleans()):
        gamma = one_of(draw, 0.0, 0.5)
        preference(
            draw, device, losses.FusedLinearSimPOLoss, {**options, "gamma": gamma},
            lambda a, b, _c, _r: formulas.dpo("sigmoid", a - gamma / beta, b, beta, smoothing, None), True, nll,
        )  # fmt: skip
        return
    kind = one_of(draw, "sigmoid", "hinge", "ipo")
    average = draw(st.booleans())
    preference(
        draw, device, losses.FusedLinearCPOLoss, {**options, "loss_type": kind, "average_log_prob": average},
        lambda a, b, _c, _r: formulas.dpo(kind, a, b, beta, smoothing, None), average, nll,
    )  # fmt: skip


@fuzz(3)
def test_kto(device, data):
    draw = data.draw
    numbers = Numbers(draw, device, draw(dtypes))
    batch = Sequences(draw, numbers, one_of(draw, 1, 2, 3))
    kind, beta, average = (
        one_of(draw, "kto", "apo_zero_unpaired"),
        one_of(draw, 0.1, 0.8),
        draw(st.booleans()),
    )
    weights, reference = (one_of(draw, 1.0, 0.4), one_of(draw, 1.0, 1.7)), draw(st.booleans())
    head, count = batch.head(), items(draw)
    module = losses.FusedLinearKTOLoss(
        beta=beta, use_ref_model=reference, average_log_prob=average, loss_type=kind, desirable_weight=weights[0],
        undesirable_weight=weights[1], **head,
    )  # fmt: skip
    labels = numbers.flags(batch.count, share=0.5)
    kl = maybe(draw, 0.3, torch.tensor([0.6]))
    used_kl = float(kl) if kl is not None and kind == "kto" else 0.0
    extra = batch.reference(sums=True) if reference else {}
    given = {**batch.tensors(), **extra}

    def ours(**given):
        rest = {"mask": batch.mask, "denominator": count, **batch.where}
        labels_given = labels.to(one_of(draw, torch.bool)) if labels.dtype == torch.bool else labels
        loss, metrics = module(target=batch.target, preference_labels=labels_given, kl=kl, **given, **rest)
        return preference_metrics((loss, metrics))

    def formula(input, weight, bias=None, **reference):
        scores = Scores(batch, head, input, weight, bias, reference, average)
        terms, kinds = [], {True: [], False: []}
        for ratio, score, good, rows in zip(
            scores.ratios(), scores.sequences, labels.tolist(), batch.rows, strict=True
        ):
            gain = beta * (ratio - used_kl)
            kinds[good].append((score.detach(), beta * ratio.detach()))
            if rows:
                terms.append(weights[0] * torch.sigmoid(-gain) if good else weights[1] * torch.sigmoid(gain))

        def sums(good, part):
            return sum((pair[part] for pair in kinds[good]), start=scores.tokens.new_zeros(()))

        return {
            "loss": total_of(terms, scores) / (batch.count if count is None else float(count)),
            "chosen_logps_sum": sums(True, 0),
            "rejected_logps_sum": sums(False, 0),
            "chosen_rewards_sum": sums(True, 1),
            "rejected_rewards_sum": sums(False, 1),
        }

    names = [n for n in ("input", "weight", "bias") if n in given]
    compare(ours, formula, given, differentiable(draw, *names), vary=of_layers(given))
