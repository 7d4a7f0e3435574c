# SPDX-License-Identifier: BSD-3-Clause
"""liger.patch(recompute=True): what is saved, the same bits, and what other hooks, compilers and transforms
see."""

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import liger

transformers = pytest.importorskip("transformers")

from called_ops import CalledOps  # noqa: E402
from saved_bytes import assert_same_bits, build, forward, ids, saved_per_token, step, twins  # noqa: E402

from liger.transformers import patch_report  # noqa: E402
from liger.transformers.checkpointing import methods  # noqa: E402
from liger.transformers.checkpointing.saved_bytes import saved_in_layers  # noqa: E402
from liger.transformers.recipe import recomputed  # noqa: E402

PLAIN, RECOMPUTE = {}, {"recompute": True}
TYPES = ("llama", "qwen3", "gemma3_text", "mixtral", "qwen3_moe", "phi3")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def quick(values, *chosen):
    """Parameters of which all but the chosen ones are slow."""
    return [pytest.param(value, marks=() if value in chosen else pytest.mark.slow) for value in values]


def pair(model_type, **settings):
    """Patched twins, with and without recomputation."""
    return twins(build(model_type, **settings), RECOMPUTE, PLAIN)


# --- what is saved ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", quick(TYPES, "gemma3_text", "qwen3_moe"))
def test_saved_bytes_are_those_of_the_plan(model_type):
    rows = saved_in_layers(liger.patch(build(model_type, layers=1)), torch.bfloat16)
    plain, recompute = (sum(getattr(row, name) for row in rows) for name in ("plain", "recompute"))
    # The routers of mixtures save a few numbers per token in their own ways.
    tolerance = 0.015 if any(row.part == "experts" for row in rows) else 0
    assert saved_per_token(liger.patch, model_type) == pytest.approx(plain, rel=tolerance, abs=0)
    ours = saved_per_token(lambda model: liger.patch(model, recompute=True), model_type)
    assert ours == pytest.approx(recompute, rel=tolerance, abs=0)
    assert recompute < 0.9 * plain


@pytest.mark.parametrize(
    "config, most",
    [
        (
            dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32),
            0.88e6,
        ),
        (
            dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32),
            3.1e6,
        ),
    ],
    ids=["Llama-3.2-1B", "Llama-3-8B"],
)
def test_plan_of_llama(config, most):
    settings = transformers.LlamaConfig(**config, num_key_value_heads=8, vocab_size=128)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(settings)
    assert sum(row.recompute for row in saved_in_layers(liger.patch(model), torch.bfloat16)) <= most


@pytest.mark.parametrize("model_type", quick(["olmo2", "cohere"], "olmo2"))
def test_layers_of_other_forms(model_type):
    """The layers of OLMo 2 have no norm before attention, and the layers of Cohere one norm for both
    parts."""
    ours = saved_per_token(lambda model: liger.patch(model, recompute=True), model_type)
    assert ours < 0.8 * saved_per_token(liger.patch, model_type)


# --- the same bits ------------------------------------------------------------------------------------------


@pytest.mark.covering(1)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("model_type", [*TYPES, "olmo2", "cohere"])
def test_same_bits(model_type, dtype, device):
    ours, theirs = pair(model_type, dtype=dtype, device=device)
    assert_same_bits(step(ours, ids(device)), step(theirs, ids(device)))


@pytest.mark.parametrize(
    "settings", [{"attention_bias": True, "mlp_bias": True}, {"hidden_act": "gelu_pytorch_tanh"}]
)
@pytest.mark.parametrize("inplace", [True, False])
def test_same_bits_of_variants(settings, inplace):
    options = ({"recompute": True, "inplace": inplace}, {"inplace": inplace})
    ours, theirs = twins(build("llama", **settings), *options)
    assert_same_bits(step(ours, ids()), step(theirs, ids()))


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_adapters(model_type, dropout):
    peft = pytest.importorskip("peft")
    models = []
    for model in pair(model_type):
        config = peft.LoraConfig(
            target_modules=["q_proj", "k_proj", "up_proj", "down_proj"],
            lora_dropout=dropout,
            init_lora_weights=False,
        )
        torch.manual_seed(5)
        models.append(peft.get_peft_model(model, config, autocast_adapter_dtype=False).train())
    results = []
    for model in models:
        torch.manual_seed(6)
        results.append(step(model, ids()))
    assert results[0][1]
    assert_same_bits(*results)


def test_adapters_save_less():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"])

    def saved(**options):
        def prepare(model):
            return peft.get_peft_model(liger.patch(model, **options), config, autocast_adapter_dtype=False)

        return saved_per_token(prepare, "llama")

    # The output of a norm, and the product of gate and up, which layers with adapters never save.
    layers_of_peft = {"lora_linear": False}
    assert saved(**layers_of_peft) - saved(**layers_of_peft, recompute=True) == 2 * (64 + 160)
    assert saved() - saved(recompute=True) == 2 * 64


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("model_type", quick(["llama", "qwen3", "mixtral"], "qwen3"))
def test_checkpointing(model_type, use_reentrant):
    ours, theirs = pair(model_type)
    for model in (ours, theirs):
        methods.enable(model, use_reentrant=use_reentrant)
    assert_same_bits(step(ours, ids()), step(theirs, ids()))


def test_checkpointing_repeats_no_more_gemms():
    """The second forward stops at the last saved tensor, before the down projection of the MLP."""
    counts = []
    for model in pair("llama", layers=1):
        methods.enable(model)
        loss = forward(model, ids())
        with CalledOps() as calls:
            loss.backward()
        counts.append([calls.names.count(name) for name in ("mm", "swiglu")])
    (gemms, products), (gemms_before, _) = counts
    assert gemms == gemms_before
    assert products == 0


def test_checkpointed_layers_save_their_input_only():
    def prepare(model):
        methods.enable(model)
        return liger.patch(model, recompute=True)

    assert saved_per_token(prepare, "llama") == 2 * 64


@pytest.mark.gpu
def test_cuda_graph():
    ours, theirs = pair("qwen3", device="cuda")
    expected = step(theirs, ids("cuda"))
    given, stream = ids("cuda"), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(ours, given)
    torch.cuda.current_stream().wait_stream(stream)
    ours.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = forward(ours, given)
        loss.backward()
    graph.replay()
    assert_same_bits((loss.detach(), {n: p.grad for n, p in ours.named_parameters()}), expected)


# --- each output is recomputed once -------------------------------------------------------------------------


def test_each_output_is_recomputed_once():
    (model,) = twins(build("llama", layers=1), RECOMPUTE)
    loss = forward(model, ids())
    with CalledOps() as calls:
        loss.backward()
    # Both norms of the layer; the product comes with the gradients of gate and up.
    assert calls.names.count("rms_norm") == 2
    assert calls.names.count("swiglu") == 0
    assert calls.names.count("rope") == 0


@pytest.mark.parametrize("fused", [True, False])
def test_normalised_queries_and_keys_are_rotated_again_once(fused):
    (model,) = twins(build("qwen3", layers=1), {**RECOMPUTE, "qk_norm_rope": fused})
    loss = forward(model, ids())
    with CalledOps() as calls:
        loss.backward()
    assert calls.names.count("rms_norm") == (2 if fused else 2 + 2)
    assert calls.names.count("rope") == (0 if fused else 1)
    assert calls.names.count("qk_norm_rope") == (1 if fused else 0)


@pytest.mark.parametrize("recompute", quick([False, True], True))
def test_norms_and_rotation_in_one_op_save_no_more(recompute):
    """One op recomputes rstd, too: a float32 for each head of q and k."""
    fused = saved_per_token(lambda model: liger.patch(model, recompute=recompute), "qwen3")
    single = saved_per_token(
        lambda model: liger.patch(model, qk_norm_rope=False, recompute=recompute), "qwen3"
    )
    assert single - fused == 4 * (4 + 2)


def test_saved_bytes_without_the_fused_op_are_those_of_the_plan():
    for model_type in ("qwen3", "gemma3_text"):
        model = liger.patch(build(model_type, layers=1), qk_norm_rope=False)
        planned = sum(row.plain for row in saved_in_layers(model, torch.bfloat16))
        assert saved_per_token(lambda model: liger.patch(model, qk_norm_rope=False), model_type) == planned


# --- hazards ------------------------------------------------------------------------------------------------


def norm_and_linear(x, weight, matrix, between=None):
    """``rms_norm(x) @ matrix`` inside a layer, as the norm of a patched model registers it."""

    @recomputed.recomputing
    def layer(x):
        y = liger.rms_norm(x, weight)
        recomputed.register(lambda x, w: (liger.rms_norm(x, w),), (x, weight), (y,))
        if between is not None:
            y = between(y)
        return y @ matrix

    return layer(x)


def operands():
    torch.manual_seed(0)
    return [torch.randn(*shape).requires_grad_() for shape in ((6, 8), (8,), (8, 4))]


@pytest.mark.parametrize("index", [0, 1, 2], ids=["input of the norm", "weight of the norm", "matrix"])
def test_tensors_changed_in_place_are_refused(index):
    tensors = operands()
    out = norm_and_linear(*tensors)
    with torch.no_grad():
        tensors[index].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_outputs_changed_before_they_are_saved():
    def change(y):
        return y.mul_(2)

    results = []
    for layer in (norm_and_linear, lambda x, w, m, change: change(liger.rms_norm(x, w)) @ m):
        tensors = operands()
        layer(*tensors, change).sum().backward()
        results.append([t.grad for t in tensors])
    assert all(map(torch.equal, *results))


def test_memory_that_is_used_again_is_not_mistaken():
    """A tensor at the address of a freed output is not that output."""
    x, weight, matrix = operands()

    @recomputed.recomputing
    def layer(x):
        y = liger.rms_norm(x, weight)
        recomputed.register(lambda x, w: (liger.rms_norm(x, w),), (x, weight), (y,))
        (address, output), size = next(iter(recomputed._outputs.value.items())), y.numel()
        del y
        other = torch.randn(6, 8)
        # The allocator may or may not return the same address, so the test puts the entry there.
        output.numel, output.version = size, other._version
        recomputed._outputs.value = {other.data_ptr(): output}
        assert address
        return other, other @ matrix

    other, out = layer(x)
    out.sum().backward()
    torch.testing.assert_close(matrix.grad, other.sum(0)[:, None].expand(8, 4))


def test_norms_with_hooks_are_saved():
    """A hook may gather the weight for the call of the norm only."""
    ours, theirs = pair("llama", layers=1)
    for model in (ours, theirs):
        model.model.layers[0].input_layernorm.register_forward_pre_hook(lambda module, args: None)
    loss = forward(ours, ids())
    with CalledOps() as calls:
        loss.backward()
    assert calls.names.count("rms_norm") == 1
    assert_same_bits(step(ours, ids()), step(theirs, ids()))


def test_hooks_around_the_model_decide():
    ours, theirs = pair("qwen3")
    counts = []
    for model in (ours, theirs):
        seen = []
        with saved_tensors_hooks(lambda t, seen=seen: seen.append(t.shape) or t, lambda t: t):
            forward(model, ids())
        counts.append(len([shape for shape in seen if shape == (128, 64)]))
    assert counts[0] == counts[1] > 0
    with save_on_cpu():
        ours_step = step(ours, ids())
    assert_same_bits(ours_step, step(theirs, ids()))


def test_second_derivatives_are_refused():
    (model,) = twins(build("llama", layers=1, dtype=torch.float32), RECOMPUTE)
    weight = model.model.layers[0].mlp.gate_proj.weight
    (grad,) = torch.autograd.grad(forward(model, ids()), weight, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        grad.square().sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("part", ["mlp", "self_attn", "input_layernorm"])
def test_graph_breaks(part):
    """The rest of a layer that the compiler leaves to eager code has no hooks around compiled parts of it."""
    torch.compiler.reset()
    results = []
    for model in pair("llama", layers=1, dtype=torch.float32):
        module = getattr(model.model.layers[0], part)

        def broken(*args, forward=module.forward, **kwargs):
            torch._dynamo.graph_break()
            return forward(*args, **kwargs)

        module.forward = broken
        results.append(step(torch.compile(model, backend="aot_eager"), ids()))
    torch.compiler.reset()
    assert_same_bits(*results)


def test_compiled_part_of_a_layer():
    torch.compiler.reset()
    ours, theirs = pair("llama", layers=1, dtype=torch.float32)
    for model in (ours, theirs):
        model.model.layers[0].self_attn.compile(backend="aot_eager")
    results = [step(model, ids()) for model in (ours, theirs)]
    torch.compiler.reset()
    assert_same_bits(*results)


def test_errors_leave_no_hooks():
    model = liger.patch(build("llama"), recompute=True)

    def fail(module, args):
        raise KeyError("stop")

    handle = model.model.layers[1].mlp.register_forward_pre_hook(fail)
    with pytest.raises(KeyError, match="stop"):
        forward(model, ids())
    handle.remove()
    assert recomputed._outputs.value is None
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


# --- the report and copies ----------------------------------------------------------------------------------


def test_report():
    model = liger.patch(build("olmo2"), recompute=True)
    report = patch_report(model)
    assert report.recomputed == ["model.layers.0", "model.layers.1"]
    assert "2 x recompute" in report.summary
    assert "recomputes cheap outputs" in str(report)
    assert not patch_report(liger.patch(model)).recomputed
    liger.patch(model, recompute=True)
    assert not patch_report(liger.unpatch(model)).recomputed
    assert type(model.model.layers[0]).forward.__qualname__.startswith("Olmo2DecoderLayer")
