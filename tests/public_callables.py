"""Every public callable as data, for the property tests: one case per function, loss and module, and its variants.

A callable without a case fails tests/properties/test_registry.py, so whatever is exported comes under every property.
Sizes are small, and odd where they may be. ``cases()`` lists all names; ``arguments`` makes the tensors of one.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from losses_cases import packed

import liger
from liger import losses, nn

ROWS, LENGTH, HIDDEN, VOCAB = 4, 5, 16, 29
IGNORED = -100


@dataclass(frozen=True)
class Case:
    """One way to call a public callable.

    Attributes:
        public: the dotted public name, without ``liger.``.
        call: takes the arguments by name; returns a tensor or a tuple of tensors.
        make: (device, dtype) -> arguments by name: tensors, and options that are not tensors.
        differentiable: names of the tensors that get a gradient.
        ignored: arguments by name -> {name: boolean mask}: elements that have no influence on anything.
        loss: whether the result is a loss of rows, computed in at least float32.
    """

    public: str
    call: Callable
    make: Callable
    differentiable: tuple = ()
    ignored: Callable | None = None
    loss: bool = False


CASES: dict[str, Case] = {}


def _add(name, call, make, differentiable, *, public=None, **more):
    CASES[name] = Case(public or name, call, make, tuple(differentiable.split()), **more)


def cases(**conditions):
    """Names of the cases whose attributes are true (or false) as asked: ``cases(loss=True, ignored=True)``."""
    return [
        name
        for name, case in CASES.items()
        if all(bool(getattr(case, attribute)) == wanted for attribute, wanted in conditions.items())
    ]


def arguments(name, device="cpu", dtype=torch.float32, requires_grad=True):
    """The arguments of a case; its differentiable tensors are leaves that require grad."""
    case = CASES[name]
    made = case.make(torch.device(device), dtype)
    if requires_grad:
        for key in case.differentiable:
            made[key].requires_grad_()
    return made


def outputs(name, given):
    """The results of a case that float, as a tuple."""
    result = CASES[name].call(**given)
    result = result if isinstance(result, tuple) else (result,)
    return tuple(r for r in result if r is not None and r.is_floating_point())


def differentiable_outputs(name, given):
    return tuple(r for r in outputs(name, given) if r.requires_grad)


def weighted_sum(results):
    """A scalar whose gradient differs from element to element."""
    return sum(
        (r.to(torch.promote_types(r.dtype, torch.float32)) * torch.linspace(
            1, 2, r.numel(), device=r.device, dtype=torch.promote_types(r.dtype, torch.float32)
        ).view(r.shape)).sum()
        for r in results
    )  # fmt: skip


# --- tensors ------------------------------------------------------------------------------------------------------


def _normal(device, dtype, *shape, scale=1.0):
    return (scale * torch.randn(shape, dtype=torch.float64)).to(device, dtype)


def _target(device, *shape):
    """Class indices, of which the first and the last are ignored."""
    target = torch.randint(VOCAB, shape)
    target.view(-1)[0] = target.view(-1)[-1] = IGNORED
    return target.to(device)


def _tensors(**shapes):
    """``make`` of tensors of given shapes, normally distributed."""

    def make(device, dtype):
        return {name: _normal(device, dtype, *shape) for name, shape in shapes.items()}

    return make


def _with(make, **options):
    return lambda device, dtype: make(device, dtype) | options


# --- one tensor, or elementwise ------------------------------------------------------------------------------------

X = (2, 3, HIDDEN)
_add("rms_norm", liger.rms_norm, _tensors(x=X, weight=(HIDDEN,)), "x weight")
_add(
    "fused_add_rms_norm",
    liger.fused_add_rms_norm,
    _tensors(x=X, residual=X, weight=(HIDDEN,)),
    "x residual weight",
)
_add("layer_norm", liger.layer_norm, _tensors(x=X, weight=(HIDDEN,), bias=(HIDDEN,)), "x weight bias")
_add(
    "group_norm",
    liger.group_norm,
    _with(_tensors(x=(2, HIDDEN, 5), weight=(HIDDEN,), bias=(HIDDEN,)), num_groups=4),
    "x weight bias",
)
_add("softmax", liger.softmax, _tensors(x=X), "x")
_add("relu_squared", liger.relu_squared, _tensors(x=X), "x")
_add("swiglu", liger.swiglu, _tensors(gate=X, up=X), "gate up")
_add(
    "swiglu inplace",
    lambda gate, up: liger.swiglu(gate * 1, up * 1, inplace=True),
    _tensors(gate=X, up=X),
    "gate up",
    public="swiglu",
)
_add(
    "swiglu_packed inplace",
    lambda gate_up: liger.swiglu_packed(gate_up * 1, inplace=True),
    _tensors(gate_up=X),
    "gate_up",
    public="swiglu_packed",
)
_add("swiglu_packed", liger.swiglu_packed, _tensors(gate_up=X), "gate_up")
_add("geglu", liger.geglu, _tensors(gate=X, up=X), "gate up")
_add("geglu tanh", liger.geglu, _with(_tensors(gate=X, up=X), approximate="tanh"), "gate up", public="geglu")
_add("geglu_packed", liger.geglu_packed, _tensors(gate_up=X), "gate_up")


def _rotary(device, dtype):
    q, k = _normal(device, dtype, 2, 4, 3, HIDDEN), _normal(device, dtype, 2, 2, 3, HIDDEN)
    angle = torch.rand(2, 3, HIDDEN // 2, dtype=torch.float64).repeat(1, 1, 2)
    return {"q": q, "k": k, "cos": angle.cos().to(device, dtype), "sin": angle.sin().to(device, dtype)}


def _mrope(device, dtype):
    made = _rotary(device, dtype)
    tables = {name: made[name].unsqueeze(0).repeat(3, 1, 1, 1) for name in ("cos", "sin")}
    return made | tables | {"mrope_section": [2, 3, 3]}


def _complex_rope(device, dtype):
    angle = torch.rand(3, HIDDEN // 2, dtype=torch.float64)
    table = torch.polar(torch.ones_like(angle), angle)
    wide = torch.complex128 if dtype == torch.float64 else torch.complex64
    q, k = _normal(device, dtype, 2, 3, 4, HIDDEN), _normal(device, dtype, 2, 3, 2, HIDDEN)
    return {"q": q, "k": k, "freqs_cis": table.to(device, wide)}


_add("rope", liger.rope, _rotary, "q k")
# In place, what is given up may not be a leaf.
_add(
    "rope inplace",
    lambda q, k, cos, sin: liger.rope(q * 1, k * 1, cos, sin, inplace=True),
    _rotary,
    "q k",
    public="rope",
)
_add("mrope", liger.mrope, _mrope, "q k")
_add("complex_rope", liger.complex_rope, _complex_rope, "q k")

MLP = {"x": X, "gate_weight": (24, HIDDEN), "up_weight": (24, HIDDEN), "down_weight": (HIDDEN, 24)}
_add("tiled_mlp", liger.tiled_mlp, _with(_tensors(**MLP), num_shards=2), " ".join(MLP))


def _tiled(x, weight, num_shards):
    return liger.tiled(lambda part: torch.nn.functional.silu(part @ weight.t()), x,
                       num_shards=num_shards, parameters=(weight,))  # fmt: skip


_add("tiled", _tiled, _with(_tensors(x=X, weight=(7, HIDDEN)), num_shards=2), "x weight")


# --- losses of rows -----------------------------------------------------------------------------------------------


def _rows(*names):
    """``ignored`` of cases with a target: these tensors where the target is ignored."""
    return lambda given: {
        name: given["target"] == IGNORED for name in names if isinstance(given.get(name), torch.Tensor)
    }


def _logits(device, dtype):
    return {
        "logits": _normal(device, dtype, 7, VOCAB),
        "target": _target(device, 7),
        "token_weight": torch.rand(7).to(device),
    }


_CE_OPTIONS = {"label_smoothing": 0.1, "lse_square_scale": 1e-2, "softcap": 5.0}
for _name, _options in {
    "": {},
    " options": _CE_OPTIONS,
    " none": {"reduction": "none"},
    " inplace": {"inplace": True},
    " none inplace": {"reduction": "none", "inplace": True},
}.items():
    _add(
        f"cross_entropy{_name}",
        # In place, the gradient is written over the logits, which may not be a leaf.
        (lambda logits, **rest: liger.cross_entropy(logits * 1, **rest))
        if "inplace" in _options
        else liger.cross_entropy,
        _with(_logits, **_options),
        "logits",
        public="cross_entropy",
        ignored=_rows("logits", "token_weight"),
        loss=True,
    )


def _head(device, dtype):
    return {
        "input": _normal(device, dtype, 7, HIDDEN),
        "weight": _normal(device, dtype, VOCAB, HIDDEN, scale=0.3),
        "target": _target(device, 7),
    }


def _bias(device, dtype):
    return _head(device, dtype) | {"bias": _normal(device, dtype, VOCAB)}


def _weighted(make):
    """The same with a weight for every token."""

    def make_weighted(device, dtype):
        made = make(device, dtype)
        return made | {"token_weight": torch.rand(made["target"].shape).to(device)}

    return make_weighted


_CHUNKS = {"memory_budget": 2 * VOCAB * 4}
for _name, _make, _options in (
    ("", _head, {}),
    (" options", _bias, _CE_OPTIONS),
    (" chunks", _bias, _CHUNKS),
    (" none", _head, {"reduction": "none"}),
    (" weighted", _weighted(_head), _CHUNKS),
):
    _add(
        f"fused_linear_ce{_name}",
        liger.fused_linear_ce,
        _with(_make, **_options),
        "input weight bias" if _make is _bias else "input weight",
        public="fused_linear_ce",
        ignored=_rows("input", "token_weight"),
        loss=True,
    )


def _logprobs(device, dtype):
    made = _bias(device, dtype)
    return {
        "hidden": made["input"],
        "weight": made["weight"],
        "targets": made["target"],
        "bias": made["bias"],
    }


for _name, _options in {
    "": {},
    " temperature": {"temperature": 0.7, **_CHUNKS},
    " entropy": {"return_entropy": True},
}.items():
    _add(
        f"fused_linear_logprobs{_name}",
        lambda **given: (
            tuple(liger.fused_linear_logprobs(**given))[:2]
            if given.get("return_entropy")
            else liger.fused_linear_logprobs(**given)
        ),
        _with(_logprobs, **_options),
        "hidden weight bias",
        public="fused_linear_logprobs",
        ignored=lambda given: {"hidden": given["targets"] == IGNORED},
        loss=True,
    )


def _pair(device, dtype):
    return {
        "student": _normal(device, dtype, 7, VOCAB),
        "teacher": _normal(device, dtype, 7, VOCAB),
        "target": _target(device, 7),
    }


for _name, _function, _make, _options in (
    ("kl_div", liger.kl_div, _pair, {}),
    ("kl_div reverse", liger.kl_div, _pair, {"reverse": True, "temperature": 1.7}),
    ("kl_div none", liger.kl_div, _pair, {"reduction": "none"}),
    ("kl_div weighted", liger.kl_div, _weighted(_pair), {}),
    ("jsd", liger.jsd, _pair, {"beta": 0.1}),
    ("tvd", liger.tvd, _pair, {}),
):
    _add(
        _name, _function, _with(_make, **_options), "student", public=_name.split()[0],
        ignored=_rows("student", "teacher", "token_weight"), loss=True,
    )  # fmt: skip


def _head_pair(device, dtype):
    return _bias(device, dtype) | {
        "teacher": _normal(device, dtype, 7, 24),
        "teacher_weight": _normal(device, dtype, VOCAB, 24, scale=0.2),
    }


for _name, _function, _make, _options in (
    ("fused_linear_kl_div", liger.fused_linear_kl_div, _head_pair, {}),
    ("fused_linear_kl_div chunks", liger.fused_linear_kl_div, _head_pair, {"reverse": True, **_CHUNKS}),
    ("fused_linear_kl_div none", liger.fused_linear_kl_div, _head_pair, {"reduction": "none"}),
    ("fused_linear_kl_div weighted", liger.fused_linear_kl_div, _weighted(_head_pair), _CHUNKS),
    ("fused_linear_jsd", liger.fused_linear_jsd, _head_pair, {"beta": 0.1}),
):
    _add(
        _name, _function, _with(_make, **_options), "input weight bias", public=_name.split()[0],
        ignored=_rows("input", "teacher", "token_weight"), loss=True,
    )  # fmt: skip


# --- liger.losses -------------------------------------------------------------------------------------------------


def _sequences(device, dtype, sequences=ROWS):
    """Hidden states, a projection and targets of sequences: one shorter, one with a hole, one without a token."""
    target = torch.randint(VOCAB, (sequences, LENGTH))
    target[0, 3:] = target[1, 2] = IGNORED
    target[-1] = IGNORED
    return (
        _normal(device, dtype, sequences, LENGTH, HIDDEN),
        _normal(device, dtype, VOCAB, HIDDEN, scale=0.3),
        target.to(device),
        _normal(device, dtype, VOCAB, scale=0.3),
    )


def _of_module(module):
    """``call`` of a loss: the loss, and the metrics that there are."""

    def call(**given):
        result = module(**given)
        if not isinstance(result, tuple):
            return result
        loss, metrics = result
        return loss, *(metric for metric in metrics if metric is not None)

    return call


def _preference(reference):
    def make(device, dtype):
        hidden, weight, target, bias = _sequences(device, dtype)
        made = {"lin_weight": weight, "_input": hidden, "target": target, "bias": bias}
        if reference:
            made |= {
                "ref_input": _normal(device, dtype, *hidden.shape),
                "ref_weight": _normal(device, dtype, *weight.shape, scale=0.3),
                "ref_bias": _normal(device, dtype, VOCAB, scale=0.3),
            }
        return made

    return make


def _packed_preference(device, dtype):
    made = _preference(False)(device, dtype)
    (hidden, target), ends = packed([made["_input"], made["target"]], made["target"])
    return made | {"_input": hidden, "target": target, "cu_seqlens": ends, "max_length": LENGTH}


def _ref_logps(per_token):
    """Log-probabilities of the reference, per token or sequence; a mask takes the place of ignored targets."""

    def make(device, dtype):
        made = _preference(False)(device, dtype)
        mask = made["target"] != IGNORED
        scores = -1.0 - 2 * torch.rand(ROWS, LENGTH).to(device)
        ref_logps = scores if per_token else (scores * mask).sum(-1)
        return made | {"target": made["target"].clamp_min(0), "mask": mask, "ref_logps": ref_logps}

    return make


def _likelihood(device, dtype):
    """Tokens of the likelihood term that are others than those of the pair."""
    made = _preference(False)(device, dtype)
    nll_target = torch.randint(VOCAB, (ROWS, LENGTH))
    nll_target[0, 4] = nll_target[1, 2] = nll_target[3] = IGNORED
    return made | {"nll_target": nll_target.to(device)}


def _outside(cu_seqlens, rows):
    """Rows of a packed batch that are in no sequence."""
    row = torch.arange(rows, device=cu_seqlens.device)
    return (row < cu_seqlens[0]) | (row >= cu_seqlens[-1])


def _ignored_sequences(*names, target="target"):
    def ignored(given):
        mask = given[target] == IGNORED
        if "nll_target" in given:
            mask = mask & (given["nll_target"] == IGNORED)
        if "mask" in given:
            mask = mask | ~given["mask"]
        if "cu_seqlens" in given:
            mask = mask | _outside(given["cu_seqlens"], mask.shape[-1])
        found = {name: mask for name in names if name in given}
        if "ref_logps" in given:
            found["ref_logps"] = mask if given["ref_logps"].shape == mask.shape else mask.all(-1)
        return found

    return ignored


for _name, _loss, _make in (
    *(
        (f"DPO {kind}", losses.FusedLinearDPOLoss(loss_type=kind, label_smoothing=0.1), _preference(True))
        for kind in losses.preference.DPO_LOSS_TYPES
    ),
    ("DPO chunks", losses.FusedLinearDPOLoss(memory_budget=2 * VOCAB * 4), _preference(True)),
    ("DPO packed", losses.FusedLinearDPOLoss(use_ref_model=False), _packed_preference),
    ("DPO nll", losses.FusedLinearDPOLoss(use_ref_model=False, compute_nll_loss=True), _preference(False)),
    ("DPO ref_logps", losses.FusedLinearDPOLoss(), _ref_logps(per_token=True)),
    ("DPO ref_logps of sequences", losses.FusedLinearDPOLoss(), _ref_logps(per_token=False)),
    ("ORPO", losses.FusedLinearORPOLoss(), _preference(False)),
    ("ORPO nll_target", losses.FusedLinearORPOLoss(), _likelihood),
    ("CPO", losses.FusedLinearCPOLoss(label_smoothing=0.1), _preference(False)),
    ("SimPO", losses.FusedLinearSimPOLoss(), _preference(False)),
):
    _add(
        f"losses.{_name}", _of_module(_loss), _make, "lin_weight _input bias",
        public=f"losses.{type(_loss).__name__}", ignored=_ignored_sequences("_input", "ref_input"), loss=True,
    )  # fmt: skip


def _kto(device, dtype):
    hidden, weight, target, bias = _sequences(device, dtype)
    labels = torch.tensor([True, False, True, False]).to(device)
    return {
        "_input": hidden, "lin_weight": weight, "target": target, "bias": bias, "preference_labels": labels,
        "ref_input": _normal(device, dtype, *hidden.shape),
        "ref_weight": _normal(device, dtype, *weight.shape, scale=0.3), "kl": torch.tensor(0.1).to(device),
    }  # fmt: skip


for _kind in losses.unpaired.KTO_LOSS_TYPES:
    _add(
        f"losses.KTO {_kind}", _of_module(losses.FusedLinearKTOLoss(loss_type=_kind, undesirable_weight=0.7)), _kto,
        "_input lin_weight bias", public="losses.FusedLinearKTOLoss",
        ignored=_ignored_sequences("_input", "ref_input"), loss=True,
    )  # fmt: skip


def _policy(per_token=False):
    def make(device, dtype):
        hidden, weight, ids, bias = _sequences(device, dtype)
        mask = (ids != IGNORED).long()
        shape = (ROWS, LENGTH) if per_token else (ROWS,)
        logprobs = -1.0 - 2 * torch.rand(2, ROWS, LENGTH).to(device)
        return {
            "_input": hidden, "lin_weight": weight, "selected_token_ids": ids.clamp_min(0), "attention_mask": mask,
            "advantages": torch.randn(shape).to(device), "bias": bias, "ref_per_token_logps": logprobs[0],
            "old_per_token_logps": logprobs[1],
        }  # fmt: skip

    return make


def _packed_policy(device, dtype):
    made = _policy()(device, dtype)
    made["vllm_is_ratio"] = 0.5 + torch.rand(ROWS, LENGTH).to(device)
    of_tokens = [
        name for name, t in made.items() if isinstance(t, torch.Tensor) and t.shape[:2] == (ROWS, LENGTH)
    ]
    counted = made["attention_mask"].masked_fill(made["attention_mask"] == 0, IGNORED)
    tensors, ends = packed([made[name] for name in of_tokens], counted)
    return made | dict(zip(of_tokens, tensors, strict=True)) | {"cu_seqlens": ends, "max_length": LENGTH}


def _ignored_policy(given):
    names = ("_input", "ref_per_token_logps", "old_per_token_logps", "advantages", "vllm_is_ratio")
    mask = given["attention_mask"] == 0
    if "cu_seqlens" in given:
        mask = mask | _outside(given["cu_seqlens"], mask.shape[-1])
    found = {name: mask for name in names if name in given and given[name].shape[:2] == mask.shape}
    if "advantages" not in found and "cu_seqlens" not in given:
        found["advantages"] = mask.all(-1)
    return found


for _name, _loss, _make in (
    *(
        (f"GRPO {kind}", losses.FusedLinearGRPOLoss(loss_type=kind), _policy())
        for kind in losses.policy.GRPO_LOSS_TYPES
    ),
    ("GRPO chunks", losses.FusedLinearGRPOLoss(memory_budget=2 * VOCAB * 4, temperature=0.8), _policy()),
    ("GSPO", losses.FusedLinearGRPOLoss(importance_sampling_level="sequence"), _policy()),
    ("GRPO entropy", losses.FusedLinearGRPOLoss(entropy_coef=0.01, delta=1.5), _policy()),
    ("GRPO packed", losses.FusedLinearGRPOLoss(), _packed_policy),
    ("GSPO packed", losses.FusedLinearGRPOLoss(importance_sampling_level="sequence"), _packed_policy),
    ("PPO", losses.FusedLinearPPOLoss(), _policy(per_token=True)),
):
    _add(
        f"losses.{_name}", _of_module(_loss), _make, "_input lin_weight bias",
        public=f"losses.{type(_loss).__name__}", ignored=_ignored_policy, loss=True,
    )  # fmt: skip


def _distillation(logits=False):
    def make(device, dtype):
        hidden, weight, labels, bias = _sequences(device, dtype)
        made = {
            "student_input": hidden,
            "student_weight": weight,
            "true_labels": labels,
            "student_bias": bias,
        }
        if logits:
            return made | {"teacher_input": _normal(device, dtype, ROWS, LENGTH, VOCAB)}
        return made | {
            "teacher_input": _normal(device, dtype, ROWS, LENGTH, 24),
            "teacher_weight": _normal(device, dtype, VOCAB, 24, scale=0.2),
            "teacher_bias": _normal(device, dtype, VOCAB, scale=0.3),
        }

    return make


def _top_k(device, dtype):
    made = _distillation(logits=True)(device, dtype)
    found = made.pop("teacher_input").float().log_softmax(-1).topk(5, -1)
    return made | {"teacher_logprobs": found.values, "teacher_indices": found.indices}


for _name, _loss, _make in (
    ("JSD", losses.FusedLinearJSDLoss(beta=0.1), _distillation()),
    ("JSD logits", losses.FusedLinearJSDLoss(temperature=1.7), _distillation(logits=True)),
    ("JSD chunks", losses.FusedLinearJSDLoss(memory_budget=4 * VOCAB * 4), _distillation()),
    ("KL", losses.FusedLinearKLDivLoss(), _distillation()),
    ("reverse KL", losses.FusedLinearKLDivLoss(reverse=True), _distillation()),
    ("cosine", losses.FusedLinearCosineSimilarityLoss(), _distillation()),
    ("cosine logits", losses.FusedLinearCosineSimilarityLoss(), _distillation(logits=True)),
    ("top k", losses.FusedLinearTopKLoss(), _top_k),
    ("top k renormalised", losses.FusedLinearTopKLoss(rest="renormalize"), _top_k),
):
    _add(
        f"losses.{_name}", _of_module(_loss), _make, "student_input student_weight student_bias",
        public=f"losses.{type(_loss).__name__}", loss=True,
        ignored=_ignored_sequences("student_input", "teacher_input", "teacher_logprobs", target="true_labels"),
    )  # fmt: skip


# --- liger.nn -----------------------------------------------------------------------------------------------------


def _module(build, inputs, parameters):
    """(call, make) of a module: ``inputs`` makes its arguments, ``parameters`` are theirs by name."""
    module = build(device="meta")
    shapes = {name: p.shape for name, p in module.named_parameters()}
    assert set(shapes) == set(parameters.split()), shapes

    def call(**given):
        own = {name: given[name.replace(".", "_")] for name in shapes}
        rest = {k: v for k, v in given.items() if k not in {name.replace(".", "_") for name in shapes}}
        return torch.func.functional_call(module, own, tuple(rest.values()))

    def make(device, dtype):
        own = {
            name.replace(".", "_"): _normal(device, dtype, *shape, scale=0.5)
            for name, shape in shapes.items()
        }
        return inputs(device, dtype) | own

    return call, make


@dataclass
class _Config:
    hidden_size: int = HIDDEN
    intermediate_size: int = 24
    hidden_act: str = "silu"


def _nn(name, build, inputs, parameters, differentiable, **more):
    call, make = _module(build, inputs, parameters)
    names = " ".join([differentiable, *(p.replace(".", "_") for p in parameters.split())])
    _add(f"nn.{name}", call, make, names, **more)


_x = _tensors(x=X)
_PROJECTIONS = "gate_proj.weight up_proj.weight down_proj.weight"
_nn("RMSNorm", lambda **kw: nn.RMSNorm(HIDDEN, **kw), _x, "weight", "x")
_nn("LayerNorm", lambda **kw: nn.LayerNorm(HIDDEN, **kw), _x, "weight bias", "x")
_nn("SwiGLUMLP", lambda **kw: nn.SwiGLUMLP(HIDDEN, 24, **kw), _x, _PROJECTIONS, "x")
_nn("GEGLUMLP", lambda **kw: nn.GEGLUMLP(HIDDEN, 24, **kw), _x, _PROJECTIONS, "x")
_nn("TiledSwiGLUMLP", lambda **kw: nn.TiledSwiGLUMLP(_Config(), num_shards=2, **kw), _x, _PROJECTIONS, "x")
_nn(
    "TiledGEGLUMLP",
    lambda **kw: nn.TiledGEGLUMLP(_Config(hidden_act="gelu_pytorch_tanh"), num_shards=2, **kw),
    _x,
    _PROJECTIONS,
    "x",
)
_nn(
    "LMHeadLoss",
    lambda **kw: nn.LMHeadLoss(HIDDEN, VOCAB, **kw),
    lambda device, dtype: {"hidden": _normal(device, dtype, 7, HIDDEN), "target": _target(device, 7)},
    "weight",
    "hidden",
    ignored=lambda given: {"hidden": given["target"] == IGNORED},
    loss=True,
)
_add("nn.ApplyRotaryEmb", lambda q, k, cos, sin: nn.ApplyRotaryEmb()(q, k, cos, sin), _rotary, "q k")
_add(
    "nn.CrossEntropyLoss", lambda **given: nn.CrossEntropyLoss()(**given), _logits, "logits",
    ignored=_rows("logits", "token_weight"), loss=True,
)  # fmt: skip
_add(
    "nn.FusedLinearCrossEntropyLoss", lambda **given: nn.FusedLinearCrossEntropyLoss()(**given), _bias,
    "input weight bias", ignored=_rows("input"), loss=True,
)  # fmt: skip


# What is public and no op, loss or module of tensors, or cannot run in one process.
EXEMPT = {
    "BackendUnavailable": "an exception",
    "CrossEntropyOutput": "a result",
    "LogProbs": "a result",
    "backend_report": "no tensors",
    "distributed": "a package",
    "losses": "a package",
    "nn": "a package",
    "transformers": "a package",
    "patch": "models: tests/test_transformers*.py",
    "unpatch": "models: tests/test_transformers*.py",
    "set_backend": "no tensors",
    "use_backend": "no tensors",
    "vocab_parallel_cross_entropy": "several processes: tests/test_vocab_parallel.py",
    "vocab_parallel_fused_linear_ce": "several processes: tests/test_vocab_parallel.py",
    "nn.VocabParallelFusedLinearCrossEntropyLoss": "several processes: tests/test_vocab_parallel.py",
    "losses.FusedLinearLoss": "a base class",
    "losses.PreferenceLoss": "a base class",
    "losses.DistillationLoss": "a base class",
    "losses.KTOMetrics": "a result",
    "losses.PolicyMetrics": "a result",
    "losses.PreferenceMetrics": "a result",
    "losses.TokenStatistics": "a result",
}


def public_names():
    return [
        *liger.__all__,
        *(f"losses.{name}" for name in losses.__all__),
        *(f"nn.{name}" for name in nn.__all__),
    ]
