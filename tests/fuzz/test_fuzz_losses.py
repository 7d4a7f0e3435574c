"""Every loss of liger.losses on random batches: padded or packed, masked, with references and divisors of any kind."""

import itertools

import formulas
import torch
import torch.nn.functional as F
from engine import Numbers, compare, dtypes, fuzz, maybe, one_of
from hypothesis import strategies as st
from test_fuzz_classes import budget, differentiable

from liger import losses
from liger.losses.policy import GRPO_LOSS_TYPES
from liger.losses.preference import DPO_LOSS_TYPES

HIDDEN = st.sampled_from([1, 3, 8])
VOCAB = st.sampled_from([2, 3, 5, 17, 33])


class Sequences:
    """A batch: hidden states, a projection and targets.

    Attributes:
        hidden, weight, bias, target: tensors; ``where`` has mask, cu_seqlens and max_length as they apply.
        rows: for each sequence the rows of its tokens that count, of hidden states seen as (rows, H).
        lengths: of the sequences, all tokens counted.
    """

    def __init__(self, draw, numbers, count, every=False):
        self.draw, self.numbers, self.count = draw, numbers, count
        self.vocab, self.width = draw(VOCAB), draw(HIDDEN)
        self.packed = draw(st.booleans())
        self.ignore_index = one_of(draw, -100, -1)
        if self.packed:
            self.lengths = [draw(st.integers(1 if every else 0, 5)) for _ in range(count)]
            begin, spare = one_of(draw, 0, 2), one_of(draw, 0, 3)
            ends = torch.tensor([begin, *self.lengths]).cumsum(0)
            tokens = int(ends[-1]) + spare
            self.shape = (1, tokens) if draw(st.booleans()) else (tokens,)
            self.places = [list(range(int(a), int(b))) for a, b in itertools.pairwise(ends)]
            self.where = {"cu_seqlens": ends.to(numbers.device, one_of(draw, torch.int32, torch.int64))}
            if draw(st.booleans()):
                self.where["max_length"] = max([*self.lengths, 1])
        else:
            length = draw(st.integers(1, 5))
            self.lengths, self.shape, self.where = [length] * count, (count, length), {}
            self.places = [list(range(i * length, (i + 1) * length)) for i in range(count)]
        self.target = numbers.classes(self.vocab, *self.shape, ignored=(self.ignore_index,), share=0.2)
        if every:
            target = self.target.clone(memory_format=torch.contiguous_format)
            for rows in self.places:
                target.view(-1)[rows[0]] = numbers.classes(self.vocab, 1)[0]
            self.target = target
        live = self.target != self.ignore_index
        if not every and draw(st.booleans()):
            self.mask = numbers.flags(*self.shape)
            live = live & self.mask
            self.mask = self.mask.to(one_of(draw, torch.bool, torch.int64, torch.float32))
        else:
            self.mask = None
        self.live = live
        flat = live.reshape(-1).tolist()
        self.rows = [[row for row in rows if flat[row]] for rows in self.places]
        self.hidden = numbers.normal(*self.shape, self.width)
        self.weight = numbers.normal(
            self.vocab, self.width, scale=one_of(draw, 0.3, 1.5) * self.width**-0.5, alike=False
        )
        self.bias = numbers.normal(self.vocab) if draw(st.booleans()) else None

    def head(self, temperatures=(1.0,)):
        """Options of the projection."""
        return {
            "ignore_index": self.ignore_index,
            "softcap": maybe(self.draw, 2.0, 30.0),
            "temperature": one_of(self.draw, *temperatures),
            "memory_budget": budget(self.draw, self.vocab, self.numbers.dtype),
        }

    def per_token(self, low, high):
        """Numbers per token in the order of the targets; where nothing counts they may be anything."""
        values = self.numbers.uniform(*self.shape, low=low, high=high, dtype=torch.float32)
        return torch.where(self.live, values, one_of(self.draw, 0.0, torch.nan, torch.inf))

    def reference(self, sums):
        """Arguments of a reference: a model, or what it says of tokens or, if ``sums``, of sequences."""
        kind = one_of(self.draw, "model", "tokens", *(("sums",) if sums else ()))
        if kind == "model":
            width = self.draw(HIDDEN)
            made = {
                "ref_input": self.numbers.normal(*self.shape, width),
                "ref_weight": self.numbers.normal(self.vocab, width, scale=width**-0.5, alike=False),
            }
            if self.draw(st.booleans()):
                made["ref_bias"] = self.numbers.normal(self.vocab)
            return made
        if kind == "tokens":
            return {"ref_logps": self.per_token(-4.0, -0.1)}
        return {"ref_logps": self.numbers.uniform(self.count, low=-9.0, high=-0.1, dtype=torch.float32)}

    def tensors(self, **names):
        """What a comparison is given: the projection by the names that the loss has for its parts."""
        made = {names["hidden"]: self.hidden, names["weight"]: self.weight}
        if self.bias is not None:
            made[names.get("bias", "bias")] = self.bias
        return made


def items(draw):
    return maybe(draw, 3, 2.5, torch.tensor(4), torch.tensor([7.0]))


class Scores:
    """Log-probabilities and entropies of a batch and of its reference, as a formula has them."""

    def __init__(self, batch, head, hidden, weight, bias, reference=None, average=False):
        self.batch, self.average = batch, average
        target = batch.target.reshape(-1)
        options = head["temperature"], head["softcap"]
        self.tokens, self.entropies = formulas.token_scores(
            hidden.flatten(0, -2), weight, bias, target, *options
        )
        self.sequences = formulas.sequence_scores(self.tokens, batch.rows, average)
        reference = reference or {}
        self.of_reference = [torch.zeros_like(s) for s in self.sequences]
        self.reference_tokens = None
        if "ref_input" in reference:
            model = reference["ref_input"].flatten(0, -2), reference["ref_weight"], reference.get("ref_bias")
            self.reference_tokens = formulas.token_scores(*model, target, *options)[0].detach()
        elif "ref_logps" in reference and reference["ref_logps"].shape == batch.target.shape:
            self.reference_tokens = reference["ref_logps"].reshape(-1).to(self.tokens.dtype)
        elif reference:
            self.of_reference = [
                s / (len(rows) if average else 1) if rows else torch.zeros_like(s)
                for s, rows in zip(reference["ref_logps"].to(self.tokens.dtype), batch.rows, strict=True)
            ]
        if self.reference_tokens is not None:
            self.of_reference = formulas.sequence_scores(self.reference_tokens, batch.rows, average)

    def ratios(self):
        return [s - r for s, r in zip(self.sequences, self.of_reference, strict=True)]


def stacked(values, like):
    return torch.stack(values).detach() if values else like.new_zeros(0)


def total_of(values, like):
    """Their sum, of nothing a zero that belongs to the graph."""
    return sum(values, start=like.tokens.sum() * 0.0 if like.tokens.isfinite().all() else 0.0)


# --- preferences --------------------------------------------------------------------------------------------------


def preference_metrics(output):
    loss, metrics = output
    found = {n: v for n, v in metrics._asdict().items() if v is not None}
    return {"loss": loss, **found}


def preference(draw, device, cls, options, pair_loss, average=False, nll=False, reference=False, every=False):
    """Compares a loss of pairs. ``pair_loss`` takes the log-ratios of both and the log-probabilities of both."""
    numbers = Numbers(draw, device, draw(dtypes))
    pairs = one_of(draw, 1, 2, 3)
    batch = Sequences(draw, numbers, 2 * pairs, every)
    head, count, alpha = batch.head(), items(draw), options.get("alpha", 1.0)
    module = cls(**options, **head)
    extra = batch.reference(sums=True) if reference else {}
    given = {**batch.tensors(hidden="_input", weight="lin_weight"), **extra}

    def ours(**given):
        rest = {"mask": batch.mask, "num_items_in_batch": count, **batch.where}
        return preference_metrics(module(target=batch.target, **given, **rest))

    def formula(_input, lin_weight, bias=None, **reference):
        scores = Scores(batch, head, _input, lin_weight, bias, reference, average)
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

    names = [n for n in ("_input", "lin_weight", "bias") if n in given]
    compare(ours, formula, given, differentiable(draw, *names), vary=names)


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
    given = {**batch.tensors(hidden="_input", weight="lin_weight"), **extra}

    def ours(**given):
        rest = {"mask": batch.mask, "num_items_in_batch": count, **batch.where}
        labels_given = labels.to(one_of(draw, torch.bool)) if labels.dtype == torch.bool else labels
        loss, metrics = module(target=batch.target, preference_labels=labels_given, kl=kl, **given, **rest)
        return {"loss": loss, **metrics._asdict()}

    def formula(_input, lin_weight, bias=None, **reference):
        scores = Scores(batch, head, _input, lin_weight, bias, reference, average)
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

    names = [n for n in ("_input", "lin_weight", "bias") if n in given]
    compare(ours, formula, given, differentiable(draw, *names), vary=names)


# --- policies -----------------------------------------------------------------------------------------------------


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
    given = {**batch.tensors(hidden="_input", weight="lin_weight"), **extra}

    def ours(**given):
        loss, metrics = module(
            selected_token_ids=batch.target, attention_mask=batch.mask, advantages=advantages,
            old_per_token_logps=old, vllm_is_ratio=sampler, num_items_in_batch=count, **given, **batch.where,
        )  # fmt: skip
        found = {"kl": metrics.kl, "entropy": metrics.entropy}
        return {"loss": loss, **{n: v for n, v in found.items() if v is not None}}

    def formula(_input, lin_weight, bias=None, ref_per_token_logps=None, **reference):
        if ref_per_token_logps is not None:
            reference = {"ref_logps": ref_per_token_logps}
        scores = Scores(batch, head, _input, lin_weight, bias, reference)
        terms, kls, entropies = [], [], []
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
            if beta:
                gap = scores.reference_tokens[rows] - logp
                divergence = torch.exp(gap) - gap - 1
                kls.append(divergence.detach().sum())
                loss = loss + beta * divergence * (ratio if corrected else 1.0)
            entropies.append(scores.entropies[rows].sum())
            terms.append(loss.sum() / (len(rows) if kind in ("grpo", "sapo") else 1))
        tokens = max(sum(map(len, batch.rows)), 1)
        if kind in ("grpo", "sapo", "luspo"):
            divisor = batch.count if count is None else float(count)
        elif kind == "dr_grpo":
            divisor = batch.count * (longest or batch.shape[-1])
        else:
            divisor = tokens if count is None else max(float(count), 1.0)
        results = {"loss": total_of(terms, scores) / divisor}
        if coefficient:
            entropy = total_of(entropies, scores) / tokens
            results["loss"] = results["loss"] - coefficient * entropy
            results["entropy"] = entropy.detach()
        if beta:
            results["kl"] = sum(kls, start=scores.tokens.new_zeros(())) / tokens
        return results

    names = [n for n in ("_input", "lin_weight", "bias") if n in given]
    compare(ours, formula, given, differentiable(draw, *names), vary=names)


# --- distillation -------------------------------------------------------------------------------------------------


def with_tail(log_p, indices):
    named = torch.zeros_like(log_p, dtype=torch.bool).scatter(-1, indices, True)
    rest = torch.where(named, -torch.inf, log_p).logsumexp(-1, keepdim=True)
    return torch.cat([log_p.gather(-1, indices), rest], -1)


def soft_loss(kind, student, teacher, beta, temperature, indices=None):
    """Of rows of logits; for a top k ``teacher`` are log-probabilities."""
    if kind == "cosine":
        return beta * (1 - F.cosine_similarity(student, teacher, -1))
    log_q = (student / temperature).log_softmax(-1)
    if kind == "tail":
        inside = teacher.exp().sum(-1, keepdim=True)
        log_p = torch.cat([teacher, torch.log1p(-inside)], -1)
        return formulas.kl(log_p, with_tail(log_q, indices))
    if kind == "renormalize":
        return formulas.kl(teacher.log_softmax(-1), log_q.gather(-1, indices))
    return formulas.divergence(kind, (teacher / temperature).log_softmax(-1), log_q, beta)


@fuzz(8)
def test_distillation(device, data):
    draw = data.draw
    numbers = Numbers(draw, device, draw(dtypes))
    front = draw(st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=2))
    vocab, width = draw(VOCAB), draw(HIDDEN)
    kind = one_of(draw, "jsd", "forward_kl", "reverse_kl", "cosine", "tail", "renormalize")
    hard, soft = one_of(draw, (0.5, 0.5), (0.0, 1.0), (0.3, 0.9), (1.0, 0.0))
    beta, temperature = (
        one_of(draw, 0.1, 0.5, 1.0) if kind in ("jsd", "cosine") else 0.5,
        one_of(draw, 1.0, 0.6, 2.0),
    )
    ignore_index, count = one_of(draw, -100, 0), items(draw)
    options = {
        "weight_hard_loss": hard, "weight_soft_loss": soft, "ignore_index": ignore_index, "temperature": temperature,
        "memory_budget": budget(draw, vocab, numbers.dtype), "return_soft_hard_loss": draw(st.booleans()),
    }  # fmt: skip
    given = {
        "student_input": numbers.normal(*front, width),
        "student_weight": numbers.normal(
            vocab, width, scale=one_of(draw, 0.5, 2.0) * width**-0.5, alike=False
        ),
    }
    if draw(st.booleans()):
        given["student_bias"] = numbers.normal(vocab)
    names = list(given)
    labels = numbers.classes(vocab, *front, ignored=(ignore_index,)) if hard or draw(st.booleans()) else None
    mask = numbers.flags(*front) if draw(st.booleans()) else None
    live = torch.ones(front, dtype=torch.bool, device=device)
    live = live if labels is None else live & (labels != ignore_index)
    live = live if mask is None else live & mask
    indices = None
    if kind in ("tail", "renormalize"):
        top = draw(st.integers(1, vocab - 1))
        best = numbers.normal(*front, vocab, dtype=torch.float32).log_softmax(-1).topk(top, -1)
        given["teacher_logprobs"], indices = best.values, best.indices
        module = losses.FusedLinearTopKLoss(rest=kind, **options)
    else:
        if draw(st.booleans()):
            theirs = draw(HIDDEN)
            given["teacher_input"] = numbers.normal(*front, theirs)
            given["teacher_weight"] = numbers.normal(vocab, theirs, scale=theirs**-0.5, alike=False)
            if draw(st.booleans()):
                given["teacher_bias"] = numbers.normal(vocab)
        else:
            given["teacher_input"] = numbers.normal(*front, vocab, scale=2.0)
        cls, more = {
            "jsd": (losses.FusedLinearJSDLoss, {"beta": beta}),
            "cosine": (losses.FusedLinearCosineSimilarityLoss, {"beta": beta}),
            "forward_kl": (losses.FusedLinearKLDivLoss, {}),
            "reverse_kl": (losses.FusedLinearKLDivLoss, {"reverse": True}),
        }[kind]
        module = cls(**more, **options)
    more = {} if indices is None else {"teacher_indices": indices}

    def ours(**given):
        result = module(**given, **more, true_labels=labels, mask=mask, num_items_in_batch=count)
        if not options["return_soft_hard_loss"]:
            return {"loss": result}
        found = zip(("loss", "soft", "hard"), result, strict=True)
        return {n: v for n, v in found if n == "loss" or {"soft": soft, "hard": hard}[n]}

    def formula(student_input, student_weight, student_bias=None, teacher_logprobs=None, teacher_input=None,
                teacher_weight=None, teacher_bias=None):  # fmt: skip
        student = formulas.up(F.linear(student_input, student_weight, student_bias))[live]
        if teacher_logprobs is not None:
            teacher = teacher_logprobs.to(student.dtype)
        elif teacher_weight is not None:
            teacher = formulas.up(F.linear(teacher_input, teacher_weight, teacher_bias))
        else:
            teacher = formulas.up(teacher_input)
        divisor = max(int(live.sum()), 1) if count is None else float(count)
        loss, parts = student.sum() * 0.0, {}
        if soft:
            of_classes = None if indices is None else indices[live]
            value = soft_loss(kind, student, teacher[live], beta, temperature, of_classes).sum() / divisor
            loss, parts["soft"] = loss + soft * value, value.detach()
        if hard:
            value = F.cross_entropy(student, labels[live].long(), reduction="sum") / divisor
            loss, parts["hard"] = loss + hard * value, value.detach()
        return {"loss": loss, **parts}

    compare(ours, formula, given, differentiable(draw, *names), vary=names)
