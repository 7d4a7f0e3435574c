# SPDX-License-Identifier: BSD-3-Clause
"""The overrides of torchtitan: what they build, and the loss vs. torch, also of a sharded lm_head."""

import importlib
import sys
from dataclasses import dataclass, field, fields

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

FRAMEWORK = "torchtitan"


def stand_in():
    """torchtitan 0.3.0."""

    class Configurable:
        def __init_subclass__(cls):
            cls.Config.build = lambda self, **keywords: cls(self, **keywords)

        @dataclass(kw_only=True)
        class Config:
            pass

    class Linear(nn.Linear, Configurable):
        @dataclass(kw_only=True)
        class Config(Configurable.Config):
            in_features: int
            out_features: int
            bias: bool = False

        def __init__(self, config):
            super().__init__(config.in_features, config.out_features, config.bias)

    class RMSNorm(nn.RMSNorm, Configurable):
        @dataclass(kw_only=True)
        class Config(Configurable.Config):
            normalized_shape: int
            eps: float = 1e-5
            elementwise_affine: bool = True

        def __init__(self, config):
            super().__init__(
                config.normalized_shape, eps=config.eps, elementwise_affine=config.elementwise_affine
            )

    class FeedForward(nn.Module, Configurable):
        @dataclass(kw_only=True)
        class Config(Configurable.Config):
            w1: Linear.Config
            w2: Linear.Config
            w3: Linear.Config

        def __init__(self, config):
            super().__init__()
            self.w1, self.w2, self.w3 = config.w1.build(), config.w2.build(), config.w3.build()

        def forward(self, x):
            return self.w2(F.silu(self.w1(x)) * self.w3(x))

    class CrossEntropyLoss(Configurable):
        @dataclass(kw_only=True)
        class Config(Configurable.Config):
            global_vocab_size: int | None = None

        def __init__(self, config, *, compile_config=None): ...

    class MSELoss(CrossEntropyLoss):
        @dataclass(kw_only=True)
        class Config(Configurable.Config):
            pass

    class ChunkedLossWrapper(Configurable):
        @dataclass(kw_only=True)
        class Config(Configurable.Config):
            num_chunks: int = 8
            loss_fn: object = field(default_factory=CrossEntropyLoss.Config)

        def __init__(self, config, *, compile_config=None):
            self.loss_fn, self.lm_head = config.loss_fn.build(compile_config=compile_config), None

        def set_lm_head(self, lm_head):
            self.lm_head = lm_head

    def override(*, target, fqns=None, description="", exact=False):
        assert issubclass(target, Configurable.Config) and exact
        return lambda factory: factory

    def derive(source, target_cls, **deltas):
        names = {f.name for f in fields(target_cls)} & {f.name for f in fields(source)}
        return target_cls(**{name: getattr(source, name) for name in names} | deltas)

    losses = {"ChunkedLossWrapper": ChunkedLossWrapper, "CrossEntropyLoss": CrossEntropyLoss}
    return {
        "torchtitan.components.loss": losses | {"MSELoss": MSELoss},
        "torchtitan.config.override": {"derive": derive, "override": override},
        "torchtitan.distributed.spmd_types": {"spmd_mesh_size": lambda axis: 1},
        "torchtitan.models.common": {"FeedForward": FeedForward, "RMSNorm": RMSNorm, "Linear": Linear},
    }


@pytest.fixture
def torchtitan(integration):
    yield integration
    override = sys.modules["torchtitan.config.override"]
    # The next import of the module registers its overrides again.
    getattr(override, "clear_overrides", lambda: None)()


def common():
    return sys.modules["torchtitan.models.common"]


def build(config):
    """A module with parameters of random values: what torchtitan builds has none before init_states."""
    module = config.build()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def assert_same(ours, theirs):
    """Equal outputs and gradients of two modules, with the parameters of the second one."""
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 5, 8, requires_grad=True)
    results = []
    for module in (ours, theirs):
        y = module(x)
        results.append((y, *torch.autograd.grad(y.cos().sum(), (x, *module.parameters()))))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_norm(torchtitan):
    config = common().RMSNorm.Config(normalized_shape=8, eps=1e-3)
    ours = build(torchtitan.rms_norm(config))
    assert type(ours) is torchtitan.LigerRMSNorm
    assert_same(ours, build(config))


def test_feed_forward(torchtitan):
    linear = common().Linear.Config
    wide = linear(in_features=8, out_features=12)
    config = common().FeedForward.Config(w1=wide, w2=linear(in_features=12, out_features=8), w3=wide)
    ours = build(torchtitan.swiglu(config))
    assert type(ours) is torchtitan.LigerFeedForward
    assert_same(ours, build(config))


def head_of(classes=11):
    return build(common().Linear.Config(in_features=8, out_features=classes))


def loss_of(torchtitan, head, **options):
    config = torchtitan.ChunkedLossWrapper.Config(num_chunks=5)
    loss = torchtitan.loss(config, **options).build(compile_config=None)
    assert isinstance(loss, torchtitan.ChunkedLossWrapper)  # or the trainer gives it logits
    loss.set_lm_head(head)
    return loss


@pytest.mark.parametrize("tokens", [None, 40.0])
def test_loss(torchtitan, tokens):
    head, hidden, labels = head_of(), torch.randn(2, 5, 8, requires_grad=True), torch.randint(11, (2, 5))
    labels[0, :2] = -100
    valid = None if tokens is None else torch.tensor(tokens)
    loss, metrics = loss_of(torchtitan, head, memory_budget=4096)(hidden, labels, valid, positions=None)
    assert metrics == {} and "forward" not in head.__dict__
    logits = head(hidden).flatten(0, 1)
    expected = F.cross_entropy(logits, labels.flatten(), reduction="sum") / (tokens or 1.0)
    torch.testing.assert_close(loss, expected)
    for a, b in zip(*(torch.autograd.grad(x, (hidden, head.weight)) for x in (loss, expected)), strict=True):
        torch.testing.assert_close(a, b)
    with torch.no_grad():
        torch.testing.assert_close(loss_of(torchtitan, head)(hidden, labels, valid)[0], expected)


def test_loss_of_a_sharded_head(torchtitan, process_group):
    """FSDP gathers the weight in the call of the head, and leaves the denominator as it is: 257 is no
    bfloat16."""
    norm, head = nn.RMSNorm(8), head_of()
    weight = head.weight.detach().clone().requires_grad_()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = nn.Sequential(norm, head)
    fully_shard([norm, head], mesh=process_group, mp_policy=policy)
    fully_shard(model, mesh=process_group, mp_policy=policy)
    model.forward = norm.__call__  # as with torchtitan's _skip_lm_head
    hidden, labels = torch.randn(2, 5, 8), torch.randint(11, (2, 5))
    loss, _ = loss_of(torchtitan, head)(model(hidden), labels, torch.tensor(257.0))
    loss.backward()
    plain = F.rms_norm(hidden.bfloat16(), (8,)) @ weight.bfloat16().T
    expected = F.cross_entropy(plain.float().flatten(0, 1), labels.flatten(), reduction="sum") / 257
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=0)
    torch.testing.assert_close(head.weight.grad.full_tensor(), weight.grad, rtol=0.02, atol=1e-5)


def test_what_the_loss_cannot_replace(torchtitan, process_group):
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    with pytest.raises(TypeError, match="Scaled, expected a linear layer"):
        loss_of(torchtitan, Scaled(8, 11))
    other = importlib.import_module("torchtitan.components.loss").MSELoss.Config()
    with pytest.raises(TypeError, match=r"MSELoss.Config, expected CrossEntropyLoss.Config"):
        torchtitan.loss(torchtitan.ChunkedLossWrapper.Config(loss_fn=other))
    from torch.distributed.tensor import Shard, distribute_tensor

    head = head_of()
    head.weight = nn.Parameter(distribute_tensor(head.weight.detach(), process_group, [Shard(0)]))
    with pytest.raises(RuntimeError, match="tensor parallel"):
        loss_of(torchtitan, head)(torch.randn(2, 5, 8), torch.zeros(2, 5, dtype=torch.int64))
    assert "forward" not in head.__dict__


@pytest.mark.parametrize("integration", ["installed"], indirect=True)
def test_torchtitan_applies_the_overrides(torchtitan):
    """What only torchtitan itself does: it finds the factories by name, and the nodes in a model's
    configuration."""
    override = sys.modules["torchtitan.config.override"]
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    names = [f"{torchtitan.__name__}.{name}" for name in ("rms_norm", "swiglu")]
    loss = f"{torchtitan.__name__}.loss", {"memory_budget": 1 << 20}
    config, plain = llama3_debugmodel(), llama3_debugmodel()
    override.apply_overrides(override.OverrideConfig(imports=[*names, loss]), config)
    layers = len(config.model_spec.model.layers)
    assert len(list(config.traverse(torchtitan.LigerRMSNorm.Config))) == 2 * layers + 1
    assert len(list(config.traverse(torchtitan.LigerFeedForward.Config))) == layers
    assert config.loss.options == {"memory_budget": 1 << 20}

    head, hidden, labels = head_of(), torch.randn(2, 8, 8), torch.randint(11, (2, 8))
    results = []
    for chosen in (config, plain):
        criterion, x = chosen.loss.build(compile_config=None), hidden.clone().requires_grad_()
        criterion.set_lm_head(head)
        value, _ = criterion(x, labels, torch.tensor(16.0))
        value.backward()
        results.append((value, x.grad, head.weight.grad))
        head.weight.grad = None
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
