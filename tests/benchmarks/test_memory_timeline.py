# SPDX-License-Identifier: BSD-3-Clause
"""Memory over time, as experiment E6 draws it: categories of allocations, from records of torch."""

import pytest
import torch

from experiments import memory_timeline as memory

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize(
    "device, fused",
    [
        ("cpu", False),
        pytest.param("cuda", False, marks=pytest.mark.gpu),
        pytest.param("cuda", True, marks=pytest.mark.gpu),
    ],
)
def test_steps_of_a_model(device, fused):
    """Gradients reach the size of the weights; the patched loss needs less memory than the logits did.

    On a GPU a fused optimizer allocates nothing, so the first event of its phase is the release of a
    gradient.
    """
    import liger

    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    peaks = {}
    for kind in ("plain", "patched"):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=4096, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, use_cache=False, tie_word_embeddings=True,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config).to(device)
        if kind == "patched":
            liger.patch(model)
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
        ids = torch.randint(4096, (4, 64), device=device)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with pytest.MonkeyPatch.context() as patches:
            patches.setenv("LIGER_MEMORY_BUDGET", "256K")
            line = memory.record_steps(model, model, optimizer, [ids, ids], device)
        weights = sum(p.nbytes for p in model.parameters())
        # The allocator of a GPU rounds sizes up to 512 bytes.
        tensors = 512 * len(list(model.parameters())) if device == "cuda" else 0
        assert weights <= max(line["bytes"]["gradients"]) <= weights + tensors
        assert line["bytes"]["optimizer states"][0] >= 2 * weights
        # A release that waits for another stream may not be recorded any more.
        assert line["bytes"]["gradients"][-1] <= tensors
        # A GPU library may keep a workspace.
        assert line["bytes"]["activations"][-1] <= (0 if device == "cpu" else 64 << 20)
        assert [name for name, _ in line["phases"]] == ["forward", "loss", "backward", "optimizer"] * 2
        assert all(p.grad is None for p in model.parameters())
        peaks[kind] = max(line["bytes"]["lm_head and loss"])
    logits = 4 * 64 * 4096 * 4
    assert peaks["patched"] < logits / 2 < 2 * logits <= peaks["plain"]
