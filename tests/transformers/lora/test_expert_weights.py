# SPDX-License-Identifier: BSD-3-Clause
"""PEFT's adapters on the weights of experts in a patched model: the same training without a dense copy, and
what runs PEFT's code."""

import copy
import pickle
import statistics
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import liger

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytest.importorskip("transformers.integrations.moe")

from test_lora_layers import draw_adapters  # noqa: E402
from tiny_models import assert_same_step, batch, enable_checkpointing, make, step  # noqa: E402

import liger.transformers as lt  # noqa: E402
from liger.transformers.lora import expert_weights  # noqa: E402
from liger.transformers.lora.layer import HOOKED  # noqa: E402

NAMES = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
MODELS = {
    "Mixtral": {"num_local_experts": 4},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 40, "num_experts_per_tok": 2},
}


def adapted(model, **settings):
    settings = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj"], "target_parameters": NAMES, **settings}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        config = peft.LoraConfig(init_lora_weights=False, **settings)
        return peft.get_peft_model(model, config).train()


def pair(device="cpu", family="Mixtral", dtype=torch.float32, **settings):
    """(patched, unpatched) twins."""
    plain = adapted(make(family, device, dtype, **MODELS[family]), **settings)
    return patched(copy.deepcopy(plain)), plain


def patched(model):
    return liger.patch(model, verbose=False)


def assert_same(ours, theirs):
    device = next(ours.parameters()).device
    assert_same_step(step(ours, **batch(device)), step(theirs, **batch(device)))


def assert_same_loss(ours, theirs):
    with torch.no_grad():
        losses = [model(**batch(next(model.parameters()).device)).loss for model in (ours, theirs)]
    torch.testing.assert_close(*losses, rtol=2e-6, atol=0)


def experts_of(model):
    return [m for m in model.modules() if type(m).__name__.endswith("Experts")]


def wrappers_of(model):
    return [m for m in model.modules() if type(m).__name__ == "ParamWrapper"]


def test_experts_that_are_compiled_alone():
    """With the adapters of their wrappers, also after a call without them."""
    ours, theirs = pair()
    for experts in experts_of(ours):
        experts.compile(backend="eager")
    with ours.disable_adapter(), theirs.disable_adapter():
        assert_same_loss(ours, theirs)
    assert_same_loss(ours, theirs)


class Dense(TorchDispatchMode):
    """Counts the results with the size of the weights of all experts."""

    def __init__(self, model):
        super().__init__()
        experts = experts_of(model)[0]
        self.sizes = {p.numel() for n, p in experts.named_parameters() if n in expert_weights.WEIGHTS}
        self.count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        is_new = isinstance(result, torch.Tensor) and not op.is_view
        self.count += is_new and result.dim() == 3 and result.numel() in self.sizes
        return result


def dense_copies(model):
    with Dense(model) as counter:
        step(model, **batch(next(model.parameters()).device))
    return counter.count


SETTINGS = {
    "both": {},
    "rank 1": {"r": 1},
    "rsLoRA": {"use_rslora": True},
    "gate_up_proj": {"target_parameters": NAMES[:1]},
    "down_proj": {"target_parameters": NAMES[1:]},
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("family", MODELS)
@pytest.mark.covering(1)
def test_same_training_without_a_dense_copy(family, name, device):
    ours, theirs = pair(device, family, **SETTINGS[name])
    assert_same(ours, theirs)
    assert lt.patch_report(ours).left == {}
    # torch's own GEMMs of a CPU make none either; the unpatched model shows that they would be counted.
    assert dense_copies(ours) == 0 < dense_copies(theirs)


@pytest.mark.parametrize("family", ["Mixtral", "GptOss"])
def test_bfloat16_is_as_exact_as_peft(family, device):
    """Against float64: the mean error of all gradients, over models with other adapters."""
    errors = [[], []]
    for seed in range(3):
        ours, theirs = pair(device, family, torch.bfloat16)
        exact = copy.deepcopy(theirs)
        exact.set_experts_implementation("eager")
        torch.manual_seed(seed)
        draw_adapters(exact, ours, theirs)
        x = torch.randn(40, 64, device=device).bfloat16()
        index = torch.rand(40, 4, device=device).topk(2).indices
        weights = torch.rand(40, 2, device=device).softmax(-1).bfloat16()
        upstream = torch.randn_like(x)
        expected = gradients(exact.double(), x.double(), index, weights.double(), upstream.double())
        for model, found in zip((ours, theirs), errors, strict=True):
            for our, their in zip(gradients(model, x, index, weights, upstream), expected, strict=True):
                found.append(((our.double() - their).norm() / their.norm()).item())
    assert statistics.median(errors[0]) <= 2 * statistics.median(errors[1])
    assert statistics.mean(errors[0]) <= 2 * statistics.mean(errors[1])


def gradients(model, x, index, weights, upstream):
    """The result of the first wrapper, and the gradients of its inputs and its adapters."""
    wrapper = wrappers_of(model)[0]
    inputs = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
    y = wrapper(inputs[0], index, inputs[1])
    factors = [p for p in wrapper.parameters() if p.requires_grad]
    return [y.detach(), *torch.autograd.grad(y, [*inputs, *factors], upstream)]


# --- adapters that change -----------------------------------------------------------------------------------


def test_switched_off_and_merged_adapters(device):
    ours, theirs = pair(device)
    with ours.disable_adapter(), theirs.disable_adapter():
        assert_same_loss(ours, theirs)
    for name in ("merge_adapter", "unmerge_adapter"):
        for model in (ours, theirs):
            getattr(model, name)()
        assert_same_loss(ours, theirs)
    assert_same(ours, theirs)
    ours, theirs = (model.merge_and_unload() for model in (ours, theirs))
    assert not wrappers_of(ours) and len(experts_of(ours)) == 2
    assert_same_loss(ours, theirs)


def test_merged_adapters_that_are_switched_off(device):
    ours, theirs = pair(device)
    for model in (ours, theirs):
        model.merge_adapter()
    with ours.disable_adapter(), theirs.disable_adapter():
        assert_same_loss(ours, theirs)
    assert not any(wrapper.merged for wrapper in wrappers_of(ours))


def test_several_adapters_run_as_peft_computes_them(device):
    ours, theirs = pair(device)
    for model in (ours, theirs):
        torch.manual_seed(3)
        config = peft.LoraConfig(
            r=2, target_modules=["q_proj"], target_parameters=NAMES, init_lora_weights=False
        )
        model.add_adapter("other", config)
        model.base_model.set_adapter(["default", "other"])
    assert_same(ours, theirs)
    assert dense_copies(ours) > 0
    assert expert_weights.SEVERAL in lt.patch_report(ours).summary
    for model in (ours, theirs):
        model.base_model.set_adapter("other")
    assert_same(ours, theirs)
    assert dense_copies(ours) == 0


def test_what_peft_computes(device):
    """Experts that train, hooks on an inner wrapper, experts that are not patched."""
    reasons = {"train": expert_weights.TRAINS, "hook": HOOKED, "unpatched": expert_weights.UNPATCHED}
    for change, reason in reasons.items():
        ours, theirs = pair(device)
        for model in (ours, theirs):
            if change == "train":
                for name, parameter in model.named_parameters():
                    if name.endswith(("gate_up_proj", "down_proj")):
                        parameter.requires_grad_(True)
            elif change == "hook":
                for outer in wrappers_of(model)[::2]:
                    outer.base_layer.register_forward_hook(lambda module, given, y: 2 * y)
        if change == "unpatched":
            ours = liger.patch(copy.deepcopy(theirs), mlp=False, verbose=False)
        assert_same(ours, theirs)
        assert dense_copies(ours) > 0
        assert reason in lt.patch_report(ours).left.values()


def test_adapters_that_follow_the_patch(device):
    """The report names them; a second patch reaches them."""
    plain = make("Mixtral", device, **MODELS["Mixtral"])
    ours = adapted(patched(copy.deepcopy(plain)))
    assert list(lt.patch_report(ours).left.values()) == [expert_weights.LATE] * 4
    assert dense_copies(ours) > 0
    report = lt.patch_report(liger.patch(copy.deepcopy(ours), lora_linear=False, verbose=False))
    assert report.left == {} and list(report.not_asked_for.values()).count("lora_linear") > 0
    assert lt.patch_report(patched(ours)).left == {} and dense_copies(ours) == 0
    assert_same(ours, adapted(plain))


def test_an_error_leaves_nothing_behind(device):
    ours, theirs = pair(device)
    with pytest.raises(RuntimeError):
        wrappers_of(ours)[0](torch.randn(3, 7, device=device), torch.zeros(3, 2).long(), torch.ones(3, 2))
    assert_same(ours, theirs)


def test_calls_in_two_threads(device):
    """Both calls reach the experts before either runs; one has no adapters."""
    ours, theirs = pair(device)
    wrapper, experts = wrappers_of(ours)[0], experts_of(ours)[0]
    given = torch.randn(5, 64, device=device), torch.tensor([[0, 1]] * 5, device=device)
    given = (*given, torch.rand(5, 2, device=device))
    expected = [module(*given).detach() for module in (wrappers_of(theirs)[0], experts_of(theirs)[0])]
    meet = threading.Barrier(2, timeout=60)

    def wait(*_):
        meet.wait()

    hooks = [experts.register_forward_pre_hook(wait), experts.register_forward_hook(wait)]
    with ThreadPoolExecutor(2) as pool:
        found = [call.result().detach() for call in [pool.submit(m, *given) for m in (wrapper, experts)]]
    for hook in hooks:
        hook.remove()
    torch.testing.assert_close(found, expected)


# --- with other features ------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant, device):
    ours, theirs = pair(device)
    for model in (ours, theirs):
        model.enable_input_require_grads()
        enable_checkpointing(model.base_model.model, reentrant=reentrant)
    assert_same(ours, theirs)
    assert dense_copies(ours) == 0


def test_autocast(device):
    ours, theirs = pair(device)
    given, losses = batch(device), []
    for model in (ours, theirs):
        with torch.autocast(device.type, torch.bfloat16):
            losses.append(model(**given).loss)
        losses[-1].backward()
    torch.testing.assert_close(*losses, rtol=2e-2, atol=0)
    for (name, our), their in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if their.grad is not None:
            assert our.grad.dtype == their.grad.dtype, name
            assert (our.grad - their.grad).norm() <= 0.05 * their.grad.norm(), name


def test_unpatch_copy_and_pickle():
    ours, theirs = pair()
    for again in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert_same(again, theirs)
        assert dense_copies(again) == 0
    restored = liger.unpatch(ours)
    assert [type(m) for m in wrappers_of(restored)] == [type(m) for m in wrappers_of(theirs)]
    assert dense_copies(restored) > 0


def test_second_derivatives_raise():
    ours, _ = pair()
    wrapper = wrappers_of(ours)[0]
    x = torch.randn(5, 64, requires_grad=True)
    y = wrapper(x, torch.tensor([[0, 1]] * 5), torch.rand(5, 2))
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="grouped experts with LoRA"):
        grad.sum().backward()
