# SPDX-License-Identifier: BSD-3-Clause
"""Trains a mixture whose experts are distributed over the ranks: each rank has its own tokens and a part of
the experts of every layer.

    torchrun --nproc-per-node 2 examples/expert_parallel.py

A token goes once to each rank that has experts of its choice, with all its choices: experts of other ranks
are sentinels there. The rank returns the weighted sum over its experts. The other parameters are replicated
(DDP). The model is small and random, and learns to count, so nothing is downloaded; ``expert_parallel`` takes
any patched model of transformers.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn.parallel import DistributedDataParallel

import liger


class ExpertParallel(torch.nn.Module):
    """The experts of a layer, of which this rank keeps its part.

    Args:
        experts: a patched module, called with hidden states (T, H), indices (T, K) and routing weights
            (T, K); the first dimension of its parameters is the number of experts.
        group: the ranks.

    Raises:
        ValueError: the number of experts is no multiple of the number of ranks.
    """

    def __init__(self, experts, group):
        super().__init__()
        self.experts, self.group = experts, group
        ranks, count = group.size(), len(experts.down_proj)
        if count % ranks:
            raise ValueError(
                f"ExpertParallel: got {count} experts, expected a multiple of the group's {ranks} ranks"
            )
        for name, parameter in list(experts.named_parameters(recurse=False)):
            part = parameter.detach().chunk(ranks)[group.rank()].clone()
            part = torch.nn.Parameter(part, requires_grad=parameter.requires_grad)
            if part.requires_grad:
                # The loss is the mean over ranks, and tokens of all ranks add to this gradient.
                part.register_hook(lambda grad: grad / ranks)
            setattr(experts, name, part)
        self.local = count // ranks

    def forward(self, x, top_k_index, top_k_weights):
        group, local, ranks = self.group, self.local, self.group.size()
        # (ranks, T): whether the token has a choice there. Sentinels are a choice of no rank.
        owner = top_k_index.div(local, rounding_mode="floor")
        chosen = (owner == torch.arange(ranks, device=x.device).view(-1, 1, 1)).any(-1)
        token = chosen.nonzero()[:, 1]
        counts = chosen.sum(1)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=group)
        send, receive = torch.stack((counts, received)).tolist()

        def to_experts(rows):
            return all_to_all_single_autograd(rows[token], receive, send, group)

        index = to_experts(top_k_index) - group.rank() * local
        index = index.where((index >= 0) & (index < local), local)
        y = self.experts(to_experts(x), index, to_experts(top_k_weights))
        y = all_to_all_single_autograd(y, send, receive, group)
        # The sum over ranks has a fixed order; tokens without a choice there add the zeros of a last row.
        row = (chosen.flatten().cumsum(0) - 1).view_as(chosen).where(chosen, len(y))
        y = torch.cat((y, y.new_zeros(1, y.shape[1])))
        return sum(y[of_rank].float() for of_rank in row).to(x.dtype)


def expert_parallel(model, group):
    """Distributes the experts of a patched model over the ranks of a group, as DDP on that model expects."""
    experts = [n for n, kind in liger.transformers.patch_report(model).replaced.items() if kind == "experts"]
    for name in experts:
        model.set_submodule(name, ExpertParallel(model.get_submodule(name), group))
    ignored = [n for n, _ in model.named_parameters() if any(n.startswith(f"{e}.") for e in experts)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    return model


def parts_of(model):
    """The parameters that are a part of all experts."""
    return [p for m in model.modules() if isinstance(m, ExpertParallel) for p in m.parameters()]


def clip_grad_norm_(model, max_norm, group):
    """torch.nn.utils.clip_grad_norm_ with the norm over the experts of all ranks."""
    parts = {id(p) for p in parts_of(model)}
    of_parts, of_others = (
        torch.nn.utils.get_total_norm(
            [p.grad for p in model.parameters() if p.grad is not None and (id(p) in parts) == are_parts]
        )
        for are_parts in (True, False)
    )
    total = of_parts.to(of_others) ** 2
    dist.all_reduce(total, group=group)
    total = (total + of_others**2).sqrt()
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, total)
    return total


def state_dict(model, group):
    """The state dict of the model with all experts, on each rank."""
    found, owners = {}, [n for n, m in model.named_modules() if isinstance(m, ExpertParallel)]
    for name, tensor in model.state_dict().items():
        owner = next((owner for owner in owners if name.startswith(f"{owner}.")), None)
        if owner is not None:
            parts = [torch.empty_like(tensor) for _ in range(group.size())]
            dist.all_gather(parts, tensor, group=group)
            name, tensor = f"{owner}.{name.removeprefix(f'{owner}.experts.')}", torch.cat(parts)
        found[name] = tensor
    return found


def build(device):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=256, hidden_size=64, moe_intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    torch.manual_seed(0)
    return liger.patch(Qwen3MoeForCausalLM(config).to(device).train())


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group()
    model = DistributedDataParallel(expert_parallel(build(device), dist.group.WORLD))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(steps):
        start = torch.randint(256, (4, 1), generator=generator)
        ids = ((start + torch.arange(32)) % 256).to(device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        clip_grad_norm_(model, 1.0, dist.group.WORLD)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
