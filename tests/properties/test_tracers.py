# SPDX-License-Identifier: BSD-3-Clause
"""Every public callable with every option under every tracer: results and gradients of the eager call, or a
refusal.

The settings come from the signatures (tests/support/api/public_options.py). Hidden states are computed in the
traced code, and require grad there; weights are parameters of the traced module.
"""

import io
from pathlib import Path

import pytest
import torch
from forked_python import python
from public_options import EFFECTS, problem, settings
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves
from traced_calls import assert_same, copies, parameters_of, results, skip_if_graph_breaks_lose_fields

from liger._core.runtime.environment import triton_interpreted

if triton_interpreted():
    pytest.skip("what is traced are the ops, not their kernels", allow_module_level=True)

# (option, tracer): where a program could not do what the option asks for.
REFUSED = {
    *(("accumulate_grad_weight", tracer) for tracer in ("export", "export no_grad", "export strict", "make_fx")),
}  # fmt: skip


class _Traced(torch.nn.Module):
    """A module of tensors that are computed."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *inputs):
        return self.module(*(t * 1.0 if t.is_floating_point() else t for t in inputs))


class _Tensors(_Traced):
    """The same, returning the tensors alone: torch.jit.trace takes neither None nor NamedTuples of it."""

    def forward(self, *inputs):
        return tuple(t for t in tree_leaves(super().forward(*inputs)) if isinstance(t, torch.Tensor))


# --- tracers: (module, inputs) -> (a callable, its parameters by name) --------------------------------------


def _exported(module, inputs, **how):
    return torch.export.export(_Traced(module), copies(inputs), **how)


def _loaded(module, inputs, **how):
    file = io.BytesIO()
    torch.export.save(_exported(module, inputs, **how), file)
    file.seek(0)
    program = torch.export.load(file).module()
    return program, parameters_of(program)


def _export(module, inputs):
    return _loaded(module, inputs, strict=False)


def _export_strict(module, inputs):
    return _loaded(module, inputs, strict=True)


def _export_without_grad(module, inputs):
    with torch.no_grad():
        return _loaded(module, inputs, strict=False)


def _make_fx(module, inputs):
    return make_fx(_Tensors(module))(*copies(inputs)), parameters_of(module)


def _jit_trace(module, inputs):
    return torch.jit.trace(_Tensors(module), copies(inputs), check_trace=False), parameters_of(module)


def _compiled(backend, fullgraph):
    def compile(module, inputs):
        torch._dynamo.reset()
        return torch.compile(_Traced(module), backend=backend, fullgraph=fullgraph), parameters_of(module)

    return compile


def tracer_of(name, option):
    # The gradient of the weight is added by code that breaks the graph.
    fullgraph = option != "accumulate_grad_weight"
    return {
        "export": _export,
        "export no_grad": _export_without_grad,
        "export strict": _export_strict,
        "make_fx": _make_fx,
        "jit.trace": _jit_trace,
        "aot_eager": _compiled("aot_eager", fullgraph),
        "inductor": _compiled("inductor", fullgraph),
    }[name]


COMPILERS = ("aot_eager", "inductor")
QUICK = ("export", "export no_grad", "make_fx", "jit.trace")
SETTINGS = list(settings())
DEFAULTS = [setting for setting in SETTINGS if setting.option is None]
# A loss and a function of each kind of result, and every function with an effect.
SELECTED = {
    "losses.FusedLinearORPOLoss",
    "losses.FusedLinearGRPOLoss",
    "fused_linear_logprobs",
    "fused_linear_ce",
}


def _is_selected(setting):
    return setting.option in EFFECTS and (setting.public in SELECTED or "." not in setting.public)


FAST_COMPILED = {"fused_linear_ce", "swiglu"}


def _table():
    """(tracer, setting), slow where it takes long or another one stands for it."""
    for setting in SETTINGS:
        default, effect = setting.option is None, setting.option in EFFECTS
        for tracer in (*QUICK, "export strict", "aot_eager", "inductor"):
            if tracer == "inductor" and not (default or effect):
                continue  # Options are arguments of ops, which inductor passes on as aot_eager does.
            if (
                tracer not in QUICK
                and isinstance(setting.value, float)
                and not isinstance(setting.value, bool)
            ):
                continue
            fast = _is_selected(setting) and (tracer in QUICK or setting.public in FAST_COMPILED)
            fast |= default and tracer in ("export no_grad", "jit.trace")
            fast &= tracer != "inductor"
            yield pytest.param(
                tracer, setting, id=f"{tracer}-{setting}", marks=[] if fast else [pytest.mark.slow]
            )


def _expected(setting):
    """The results of the eager call."""
    made = problem(setting)
    module = _Traced(made.module)
    return results(module, parameters_of(module), made.inputs)


@pytest.mark.parametrize(("tracer", "setting"), _table())
def test_as_the_eager_call(tracer, setting):
    made = problem(setting)
    trace = tracer_of(tracer, setting.option)
    if (setting.option, tracer) in REFUSED:
        # Strict export of these versions fails earlier, in dynamo, with a message of its own.
        own_words = tracer == "export strict" and torch.__version__.startswith(("2.10.", "2.11."))
        with pytest.raises(Exception, match="" if own_words else rf"\b{setting.option}\b"):
            trace(made.module, made.inputs)
        return
    if setting.option == "accumulate_grad_weight" and tracer in COMPILERS:
        skip_if_graph_breaks_lose_fields()
    expected = _expected(setting)
    call, parameters = trace(made.module, made.inputs)
    assert_same(results(call, parameters, made.inputs), expected)


def test_every_refusal_is_tested():
    tried = {(setting.option, tracer) for tracer, setting in (p.values for p in _table())}
    assert tried >= REFUSED


# --- programs that outlive their process --------------------------------------------------------------------


def _saved(setting, path):
    """Saves a program, its inputs and the results of the eager call."""
    made = problem(setting)
    expected = _expected(setting)
    torch.export.save(_exported(made.module, made.inputs), f"{path}.pt2")
    torch.save((copies(made.inputs), expected), f"{path}.pt")
    return path


# One with each form of state of a loss, and of each result with names.
REPRESENTATIVE = {
    "losses.FusedLinearORPOLoss", "losses.FusedLinearGRPOLoss loss_type=vespo", "losses.FusedLinearKTOLoss beta=0.25",
    "losses.FusedLinearTopKLoss accum_dtype=torch.float32", "fused_linear_ce metrics=entropy",
    "fused_linear_logprobs metrics=argmax", "fused_linear_logprobs metrics=mean_logits", "rms_norm",
}  # fmt: skip


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param([s for s in SETTINGS if str(s) in REPRESENTATIVE], id="representative"),
        pytest.param(
            [s for s in SETTINGS if s.option != "accumulate_grad_weight"], id="all", marks=pytest.mark.slow
        ),
    ],
)
def test_programs_in_another_process(chosen, tmp_path):
    assert len(chosen) >= len(REPRESENTATIVE)
    paths = [_saved(setting, str(tmp_path / str(i))) for i, setting in enumerate(chosen)]
    script = Path(__file__).parents[1] / "support/api/traced_calls.py"
    child = python(script, *paths)
    assert child.returncode == 0, child.stderr[-3000:]
    assert child.stdout.strip() == f"{len(chosen)} programs"


@pytest.mark.parametrize("name", ["fused_linear_ce", "losses.FusedLinearORPOLoss", "tiled"])
def test_saved_torchscript(name):
    for setting in (s for s in SETTINGS if s.public == name and s.option in (None, "accumulate_grad_weight")):
        made, file = problem(setting), io.BytesIO()
        call, _ = _jit_trace(made.module, made.inputs)
        if setting.option is not None:
            with pytest.raises(RuntimeError, match="Python function call '_accumulate_grad_weight'"):
                torch.jit.save(call, file)
            continue
        torch.jit.save(call, file)
        file.seek(0)
        loaded = torch.jit.load(file)
        assert_same(results(loaded, parameters_of(loaded), made.inputs), _expected(setting))


@pytest.mark.slow
@pytest.mark.parametrize("setting", DEFAULTS, ids=str)
def test_ahead_of_time_inductor(setting, tmp_path):
    """Values, with inputs that require grad: the compiled program has no backward."""
    made = problem(setting)
    expected = _expected(setting)
    program = _exported(made.module, made.inputs)
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "program.pt2"))
    outputs = torch._inductor.aoti_load_package(path)(*copies(made.inputs))
    found = [t for t in tree_leaves(outputs) if isinstance(t, torch.Tensor)]
    for a, b in zip(found, expected[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
