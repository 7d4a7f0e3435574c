# SPDX-License-Identifier: BSD-3-Clause
"""The compiled steps of fused_linear_ce on the engine of compute capability 9.0, in torch.

They have the arguments and the rules of csrc/lm_head/sm90/shards/fused_linear_ce.cu: references of rows,
tiles that overflow, first rows of classes, and exponentials that are moved to another reference. Exponentials
and scaled rows are rounded to the dtype of the operands.
"""

import contextlib
import math

import torch

from liger.distributed.vocab import sm90

TILE_ROWS, TILE_COLUMNS, PANEL = 128, 256, 128
MAX_ROW_SUM = 2.0**60
# kMaxDistance of csrc/lm_head/sm90/shards/rows.cuh.
MAX_DISTANCE = 40.0


class ReferenceSteps:
    """One instance for one call, as :class:`liger.distributed.vocab.sm90.CompiledSteps`.

    ``overflows`` and ``moved`` count the tiles that were computed again, and the rows whose exponentials were
    rescaled, of all instances.
    """

    overflows = moved = 0
    cluster_count = 66

    @staticmethod
    def are_built():
        return True

    @staticmethod
    def take(input):
        return True

    @classmethod
    def clusters(cls, input):
        return cls.cluster_count

    def dense(self, matrix):
        return matrix.contiguous()

    def memory(self, input, weight, plan, need_grad_input, need_grad_weight, with_metrics):
        return 1, 1

    def begin(
        self, input, weight, target, ce_weight, denominator, ignore_index, softcap, mean, vocab_start, vocab_size,
        state, target_logit, rows, used_denominator, loss, z_loss, logprobs,
    ):  # fmt: skip
        valid = target != ignore_index
        in_range = valid & (target >= 0) & (target < vocab_size)
        weights = torch.ones_like(target, dtype=torch.float32)
        if ce_weight is not None:
            weights = ce_weight[torch.where(in_range, target, 0)]
        found = torch.where(in_range, weights, 0.0).sum() if mean else torch.ones(())
        used_denominator.copy_(found if denominator is None else denominator)
        for values in (loss, z_loss, logprobs):
            if values.numel():
                values[~valid] = 0.0
        self._gather(input, weight, target, valid, softcap, 1.0, vocab_start, target_logit, rows)

    def _gather(self, input, weight, target, valid, softcap, temperature, vocab_start, target_logit, rows):
        self.index = valid.nonzero().squeeze(1)
        column = target - vocab_start
        self.local = torch.where(valid & (column >= 0) & (column < weight.shape[0]), column, -1)
        count = self.index.numel()
        rows.zero_()
        rows[:count] = input[self.index]
        owned, columns = self.local[self.index] >= 0, self.local[self.index].clamp(min=0)
        z = (rows[:count].float() * weight[columns].float()).sum(1)
        target_logit.zero_()
        target_logit[:count] = torch.where(owned, self._capped(z, softcap) / temperature, 0.0)
        self.grad_sum = None

    @staticmethod
    def _capped(z, softcap):
        return z if softcap is None else softcap * torch.tanh(z / softcap)

    def _chunk(self, plan, index):
        """(slice of the gathered rows, slice of the valid ones among them)"""
        first, rows, _ = plan[4 + 3 * index : 7 + 3 * index]
        end = min(first + rows, max(self.index.numel(), first))
        return slice(first, first + rows), slice(first, end)

    def _exponentials(self, x, weight, softcap, temperature, reference):
        """The logits of rows; ``reference`` becomes the reference of each row, and ``self.exp`` its
        exponentials."""
        z = self._capped(x.float() @ weight.float().t(), softcap) / temperature
        for at in range(0, z.shape[0], TILE_ROWS):
            part = slice(at, at + TILE_ROWS)
            tiles = torch.exp(z[part] - reference[part, None]).split(TILE_COLUMNS, 1)
            if not all((tile.sum(1) < MAX_ROW_SUM).all() for tile in tiles):
                type(self).overflows += 1
                largest = z[part].amax(1)
                reference[part] = torch.where(largest == -torch.inf, 0.0, largest)
        self.exp = torch.exp(z - reference[:, None])
        self.derivative = torch.ones_like(z) if softcap is None else 1 - (z / softcap) ** 2
        return z

    def exponentials(
        self, input, weight, softcap, temperature, vocab_start, keep, need_grad_input, plan, index, state,
        target_logit, rows, grad_weight, panel_workspace, workspace, sums,
    ):  # fmt: skip
        _, valid = self._chunk(plan, index)
        self.reference = target_logit[valid].clone()
        z = self._exponentials(rows[valid], weight, softcap, temperature, self.reference)
        sums.zero_()
        count = z.shape[0]
        sums[0, :count], sums[1, :count] = self.reference, self.exp.sum(1)
        if sums.shape[0] > 2:
            distances = (z - self.reference[:, None]).nan_to_num(0.0)
            sums[2, :count] = (self.exp * distances).sum(1)
            best = z.amax(1)
            column = torch.where(z == best[:, None], torch.arange(z.shape[1]), z.shape[1]).amin(1)
            sums[3, :count] = best
            sums[4, :count] = (column + vocab_start).to(torch.int32).view(torch.float32)
        self.exp = (self.exp * self.derivative).to(weight.dtype)

    @staticmethod
    def _merged(references, totals):
        """(largest reference, sum relative to it) of rows over all ranks."""
        largest = torch.where(totals != 0, references, -torch.inf).amax(0)
        largest = torch.where(largest == -torch.inf, 0.0, largest)
        return largest, torch.where(totals != 0, totals * torch.exp(references - largest), 0.0).sum(0)

    def rule(
        self, target, ce_weight, token_weight, used_denominator, ignore_index, lse_square_scale, vocab_size, sums,
        rank, input, weight, softcap, need_grad_input, plan, index, state, target_logit, rows, grad_weight,
        panel_workspace, workspace, grad_input_sum, loss, z_loss, logprobs,
    ):  # fmt: skip
        chunk, valid = self._chunk(plan, index)
        source = self.index[valid]
        count = source.numel()
        assert sums.shape[1:] == (2, chunk.stop - chunk.start)
        references, totals = sums[:, 0, :count], sums[:, 1, :count]
        largest, total = self._merged(references, totals)
        lse, logprob = largest + total.log(), (target_logit[valid] - largest) - total.log()
        y = target[source]
        known = (y >= 0) & (y < vocab_size)
        weight_of = torch.ones(count) if ce_weight is None else ce_weight[torch.where(known, y, 0)]
        weight_of = torch.where(known, weight_of, torch.nan)
        of_token = torch.ones(count) if token_weight is None else token_weight[source]
        square = of_token * lse_square_scale * weight_of * lse**2 if lse_square_scale else torch.zeros(count)
        loss[source] = of_token * torch.where(known, -weight_of * logprob, torch.nan) + square
        if z_loss.numel():
            z_loss[source] = square
        if logprobs.numel():
            logprobs[source] = torch.where(known, logprob, torch.nan)
        if not (need_grad_input or grad_weight.numel()):
            return
        upstream = of_token / used_denominator
        coef_target = upstream * weight_of
        coef_exp = (coef_target + upstream * 2 * lse_square_scale * weight_of * lse) / total
        own, own_total = references[rank], totals[rank]
        factor = torch.exp(own - largest)
        moved = (own_total != 0) & (largest - own > MAX_DISTANCE)
        type(self).moved += int(moved.sum())
        self.exp[moved] = (self.exp[moved].float() * factor[moved, None]).to(weight.dtype)
        stays = (own_total != 0) & ~moved
        coef_exp = torch.where(stays, coef_exp * factor, coef_exp)
        reference = torch.where(stays, own, largest)
        # One-hot terms: of the first row of a class apart, of others as elements.
        self.first, self.amount, seen = {}, torch.zeros(count), set()
        for row, column in enumerate(self.local[source].tolist()):
            if column < 0 or not known[row] or coef_target[row] == 0:
                continue
            derivative = self.derivative[row, column]
            if column not in seen:
                seen.add(column)
                self.amount[row] = coef_target[row] * derivative
                self.first[column] = source[row].item(), self.amount[row]
            else:
                exact = torch.exp(target_logit[valid][row] - reference[row])
                self.exp[row, column] = (exact - coef_target[row] / coef_exp[row]) * derivative
        assert not self.exp.isinf().any()
        if need_grad_input:
            assert grad_input_sum.shape == (chunk.stop - chunk.start, input.shape[1])
            columns = self.local[source].clamp(min=0)
            grad_input_sum.fill_(math.nan)  # rows beyond the valid ones are not written
            grad_input_sum[:count] = coef_exp[:, None] * (self.exp.float() @ weight.float())
            one_hot = self.amount != 0
            grad_input_sum[:count][one_hot] -= (self.amount[:, None] * weight[columns].float())[one_hot]
        rows[valid] = (rows[valid].float() * coef_exp[:, None]).to(rows.dtype)

    def grad_weight(
        self, input, weight, softcap, need_grad_input, plan, index, state, target_logit, rows, grad_weight,
        panel_workspace, workspace,
    ):  # fmt: skip
        _, valid = self._chunk(plan, index)
        if self.grad_sum is None:
            self.grad_sum = torch.zeros(weight.shape, dtype=torch.float32)
        self.grad_sum += self.exp.float().t() @ rows[valid].float()
        for column, (row, amount) in self.first.items():
            self.grad_sum[column] -= amount * input[row].float()
        assert grad_weight.shape[0] >= weight.shape[0] and grad_weight.shape[0] % PANEL == 0
        grad_weight[: weight.shape[0]] = self.grad_sum

    def finish(self, state, grad_input):
        compact = grad_input[: self.index.numel()].clone()
        grad_input.zero_()
        grad_input[self.index] = compact


@contextlib.contextmanager
def replaced_steps(kind):
    """Calls take these steps, on devices about which their groups have not agreed yet."""
    before, sm90.steps = sm90.steps, kind
    sm90._agreed.clear()
    try:
        yield
    finally:
        sm90.steps = before
        sm90._agreed.clear()
