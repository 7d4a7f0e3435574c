# SPDX-License-Identifier: BSD-3-Clause
"""The compiled steps of fused_linear_logprobs on the engine of compute capability 9.0, in torch.

They have the arguments and the rules of csrc/lm_head/sm90/shards/logprobs.cu and of its kernels, with the
roundings of shard_steps.py. Kept exponentials are dense rows at the start of their memory.
"""

import math

import torch
from shard_steps import MAX_DISTANCE, ReferenceSteps


class LogProbSteps(ReferenceSteps):
    def logprobs_begin(
        self, input, weight, target, ignore_index, temperature, vocab_start, vocab_size, state, target_logit, rows,
        logprobs, stats, entropy, argmax,
    ):  # fmt: skip
        valid = target != ignore_index
        of_ignored = ((logprobs, 0.0), (entropy, 0.0), (argmax, -1))
        for values, ignored in (*of_ignored, *zip(stats, (0.0, 1.0), strict=False)):
            if values.numel():
                values[~valid] = ignored
        self._gather(input, weight, target, valid, None, temperature, vocab_start, target_logit, rows)

    def logprobs(
        self, target, ignore_index, vocab_size, sums, input, weight, plan, index, state, target_logit, rows,
        grad_weight, panel_workspace, workspace, logprobs, stats, entropy, argmax, kept_rows,
    ):  # fmt: skip
        chunk, valid = self._chunk(plan, index)
        source = self.index[valid]
        count = source.numel()
        numbers = 5 if entropy.numel() or argmax.numel() else 2
        assert sums.shape[1:] == (numbers, chunk.stop - chunk.start)
        references, totals = sums[:, 0, :count], sums[:, 1, :count]
        largest, total = self._merged(references, totals)
        log = total.log()
        known = self._known(target[source], vocab_size)
        logprobs[source] = torch.where(known, (target_logit[valid] - largest) - log, torch.nan)
        stats[:, source] = torch.stack((largest, total))
        if entropy.numel():
            distance = references - largest
            of_ranks = (sums[:, 2, :count] + distance * totals) * distance.exp()
            entropy[source] = log - torch.where(totals != 0, of_ranks, 0.0).sum(0) / total
        if argmax.numel():
            best, column = sums[:, 3, :count], sums[:, 4, :count].contiguous().view(torch.int32).long()
            argmax[source] = torch.where(best == best.amax(0), column, 1 << 40).amin(0)
        if kept_rows.numel():
            self._keep_rows(target, vocab_size, target_logit[valid], stats, entropy, kept_rows[valid], source)
            panel_workspace[: self.exp.numel()] = self.exp.flatten()

    @staticmethod
    def _known(target, vocab_size):
        return (target >= 0) & (target < vocab_size)

    def _keep_rows(self, target, vocab_size, z_target, stats, entropy, out, source):
        """keep_shard_rows()"""
        whole, total = stats[:, source]
        distance = (whole - self.reference) + total.log()
        far = distance > MAX_DISTANCE
        type(self).moved += int(far.sum())
        moved = self.reference + distance
        factor = torch.exp(self.reference - moved)
        self.exp[far] = (self.exp[far].float() * factor[far, None]).to(self.exp.dtype)
        self.reference = torch.where(far, moved, self.reference)
        sum = total * torch.exp(whole - self.reference)
        out[:, 0] = torch.where(self._known(target[source], vocab_size), sum, torch.nan)
        out[:, 1] = (z_target - whole) - total.log()
        out[:, 2] = entropy[source] if entropy.numel() else torch.nan
        out[:, 3] = 0.0
        seen = set()
        for row, column in enumerate(self.local[source].tolist()):
            if column in seen:
                out[row, 3] = 1.0
                self.exp[row, column] = torch.exp(z_target[row] - self.reference[row]) - sum[row]
            elif column >= 0:
                seen.add(column)
        assert not self.exp.isinf().any()

    def logprob_gradients(
        self, grad_logprobs, grad_entropy, target, vocab_size, temperature, stats, entropy, kept, kept_rows, input,
        weight, need_grad_input, plan, index, state, target_logit, rows, grad_weight, panel_workspace, workspace,
        grad_input_sum,
    ):  # fmt: skip
        chunk, valid = self._chunk(plan, index)
        source = self.index[valid]
        count, classes = source.numel(), weight.shape[0]
        if kept_rows.numel():
            memory = kept if grad_entropy is not None else panel_workspace
            self.exp = memory[valid.start * classes :][: count * classes].view(count, classes).clone()
            of_rows = kept_rows[valid]
        else:
            self.reference = target_logit[valid].clone()
            distance = (stats[0, source] - self.reference) + stats[1, source].log()
            self.reference += torch.where(distance > MAX_DISTANCE, distance, 0.0)
            self._exponentials(rows[valid], weight, None, temperature, self.reference)
            self.exp = self.exp.to(weight.dtype)
            of_rows = stats.new_empty(count, 4)
            self._keep_rows(target, vocab_size, target_logit[valid], stats, entropy, of_rows, source)
        sum, logprob, entropies, included = of_rows.unbind(1)
        u = -grad_logprobs[source] / temperature
        scale = u / sum
        owned = self.local[source] >= 0
        columns = self.local[source].clamp(min=0)
        if grad_entropy is not None:
            w = -grad_entropy[source] / temperature
            constant = w * (entropies - sum.log()) + u
            at_target = logprob.exp() * (w * (entropies + logprob) + u)
            scale = 1 / sum
            e = self.exp.float()
            changed = torch.where(e < 2.0**-126, 0.0, e * (w[:, None] * e.log() + constant[:, None]))
            changed[owned, columns[owned]] = (sum * (at_target - included * u))[owned]
            self.exp = changed.to(weight.dtype)
        one_hot = owned & (included == 0) & (u != 0) & self._known(target[source], vocab_size)
        self.first = {columns[i].item(): (source[i].item(), u[i]) for i in one_hot.nonzero().squeeze(1)}
        if need_grad_input:
            assert grad_input_sum.shape == (chunk.stop - chunk.start, input.shape[1])
            grad_input_sum.fill_(math.nan)  # rows beyond the valid ones are not written
            grad_input_sum[:count] = scale[:, None] * (self.exp.float() @ weight.float())
            grad_input_sum[:count][one_hot] -= (u[:, None] * weight[columns].float())[one_hot]
        rows[valid] = (input[source].float() * scale[:, None]).to(rows.dtype)
