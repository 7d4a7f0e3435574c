# SPDX-License-Identifier: BSD-3-Clause
"""liger.trl under DeepSpeed's ZeRO-3, policy and reference: the heads' weights are there in the heads' calls
alone."""

import pytest
import ranks
import torch

pytest.importorskip("trl")
pytest.importorskip("datasets")

from test_deepspeed import deepspeed, full_gradients, start
from test_trl_adapters import CASES, PER_RANK

import liger.trl


@pytest.mark.parametrize("case", ["dpo", "sft"])
def test_matches_one_process(tmp_path, case):
    make, loss_of = CASES[case]
    plain = make(tmp_path)
    expected = loss_of(plain, plain.model, list(range(ranks.WORLD * PER_RANK)), 1.0)
    expected.backward()
    trainer, engines = make(tmp_path), []
    if getattr(trainer, "ref_model", None) is not None:
        # As the constructor of the trainer prepares it where ZeRO-3 is configured.
        config = {
            "train_micro_batch_size_per_gpu": PER_RANK,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        }
        reference = deepspeed.initialize(model=trainer.ref_model, config=config, dist_init_required=False)[0]
        reference.eval()
        trainer.ref_model = reference
        engines.append(reference)
    liger.trl.patch(trainer)
    engine = start(trainer.model, 3)
    engines.append(engine)
    mine = list(range(ranks.RANK * PER_RANK, (ranks.RANK + 1) * PER_RANK))
    try:
        for _ in range(3):
            loss = loss_of(trainer, engine, mine, 1.0 / ranks.WORLD)
            engine.backward(loss)
            torch.testing.assert_close(
                ranks.total(loss) / ranks.WORLD, expected.detach(), rtol=1e-5, atol=1e-6
            )
            grads = full_gradients(engine)
            engine.step()
            for name, parameter in plain.model.named_parameters():
                scale = parameter.grad.abs().max().item()
                torch.testing.assert_close(
                    grads[name],
                    parameter.grad,
                    rtol=1e-4,
                    atol=1e-5 * scale,
                    msg=lambda m, n=name: f"{n}: {m}",
                )
    finally:
        for engine in engines:
            engine.destroy()
