# SPDX-License-Identifier: BSD-3-Clause
"""liger.trl under DDP and FSDP2: losses and gradients of two ranks agree with TRL's own trainer in one
process."""

import pytest
import ranks
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

pytest.importorskip("trl")
pytest.importorskip("datasets")

import trl_trainers as made

import liger.trl

PER_RANK = 2
OPTIONS = {"use_cpu": not ranks.ON_GPU, "per_device_train_batch_size": PER_RANK}


def grpo(folder):
    options = OPTIONS | {"per_device_train_batch_size": ranks.WORLD * PER_RANK, "beta": 0.0}
    trainer = made.sampling(folder, policy=made.model(), **options)
    # The training loop sets it.
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def of(make):
    return lambda folder: make(folder, **OPTIONS)


def collated(trainer, rows):
    examples = [trainer.train_dataset[i] for i in rows]
    return {k: v.to(ranks.DEVICE) for k, v in trainer.data_collator(examples).items()}


def loss_of_pairs(trainer, wrapped, rows, share):
    return trainer._compute_loss(wrapped, collated(trainer, rows), False)


def loss_of_samples(trainer, wrapped, rows, share):
    generator = torch.Generator().manual_seed(2)
    shape = ranks.WORLD * PER_RANK, 6
    lengths = torch.tensor([3, 6, 1, 5]).repeat(ranks.WORLD // 2).unsqueeze(1)
    inputs = {
        "prompt_ids": torch.randint(3, 200, (shape[0], 4), generator=generator),
        "prompt_mask": torch.ones(shape[0], 4, dtype=torch.int64),
        "completion_ids": torch.randint(3, 200, shape, generator=generator),
        "completion_mask": (torch.arange(6) < lengths).long(),
        "advantages": torch.randn(shape[0], generator=generator),
        "old_per_token_logps": torch.randn(shape, generator=generator) / 10 - 5.7,
    }
    mine = {name: value[rows].to(ranks.DEVICE) for name, value in inputs.items()}
    # The trainer divides the number of all tokens by the number of ranks, also where one has all of them.
    mine["num_items_in_batch"] = lengths.sum().to(ranks.DEVICE) * share * ranks.WORLD
    return trainer._compute_loss(wrapped, mine)


def loss_of_texts(trainer, wrapped, rows, share):
    count = (collated(trainer, range(ranks.WORLD * PER_RANK))["labels"][:, 1:] != -100).sum()
    # The trainer multiplies by the number of ranks, also where one has all of the tokens.
    return trainer.compute_loss(
        wrapped, collated(trainer, rows), num_items_in_batch=count * ranks.WORLD * share
    )


def loss_of_conversations(trainer, wrapped, rows, share):
    count = (collated(trainer, range(ranks.WORLD * PER_RANK))["labels"][:, 1:] != -100).sum()
    return trainer.compute_loss(wrapped, collated(trainer, rows), num_items_in_batch=count * share)


CASES = {
    "dpo": (of(made.dpo), loss_of_pairs),
    "kto": (of(made.kto), loss_of_pairs),
    "grpo": (grpo, loss_of_samples),
    "sft": (of(made.sft), loss_of_texts),
    "gkd": (of(made.gkd), loss_of_conversations),
}


# --- ways of being distributed ------------------------------------------------------------------------------


def ddp(model):
    return DistributedDataParallel(model)


def fsdp2(model, head=False, reshard=True):
    for layer in model.model.layers:
        fully_shard(layer, mesh=ranks.mesh(), reshard_after_forward=reshard)
    if head:
        fully_shard(model.lm_head, mesh=ranks.mesh(), reshard_after_forward=reshard)
    return fully_shard(model, mesh=ranks.mesh(), reshard_after_forward=reshard)


WAYS = {"ddp": ddp, "fsdp2": fsdp2, "fsdp2 head": lambda model: fsdp2(model, head=True)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_matches_one_process(tmp_path, case, way):
    make, loss_of = CASES[case]
    plain = make(tmp_path)
    expected = loss_of(plain, plain.model, list(range(ranks.WORLD * PER_RANK)), 1.0)
    expected.backward()
    trainer = make(tmp_path)
    for frozen in ("ref_model", "teacher_model"):
        if getattr(trainer, frozen, None) is not None and way != "ddp":
            # As in the constructor of the trainer: before the adapter.
            setattr(trainer, frozen, WAYS[way](getattr(trainer, frozen)))
    liger.trl.patch(trainer)
    wrapped = WAYS[way](trainer.model)
    mine = list(range(ranks.RANK * PER_RANK, (ranks.RANK + 1) * PER_RANK))
    for _ in range(2):
        wrapped.zero_grad()
        loss = loss_of(trainer, wrapped, mine, 1.0 / ranks.WORLD)
        loss.backward()
        torch.testing.assert_close(ranks.total(loss) / ranks.WORLD, expected.detach(), rtol=1e-5, atol=1e-6)
        grads = {name: ranks.whole(p.grad) for name, p in trainer.model.named_parameters()}
        for name, parameter in plain.model.named_parameters():
            scale = parameter.grad.abs().max().item()
            torch.testing.assert_close(
                grads[name], parameter.grad, rtol=1e-4, atol=1e-5 * scale, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("case", ["dpo", "sft"])
def test_training(tmp_path, case):
    """The trainer's own loop under DDP, with what accelerate does to the models."""
    make, _ = CASES[case]
    plain, patched = make(tmp_path), liger.trl.patch(make(tmp_path))
    for trainer in (plain, patched):
        torch.manual_seed(0)
        trainer.train()
        assert isinstance(trainer.model_wrapped, DistributedDataParallel)
    ours, theirs = made.logged(patched), made.logged(plain)
    assert len(ours) == len(theirs) >= made.OPTIONS["max_steps"]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(other, rel=1e-4, abs=1e-5)
    for (name, a), b in zip(patched.model.named_parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
