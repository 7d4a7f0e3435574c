# SPDX-License-Identifier: BSD-3-Clause
"""``graph_step`` with a stand-in of CUDA graphs on the CPU; test_cuda_graphs.py has the graphs."""

import pytest
import tiny_models
import torch

import liger
from liger.transformers import graph_step, step_graphs
from liger.transformers.checkpointing import methods


class Replays:
    """In place of CUDA graphs: a capture runs nothing, a replay calls the function on its inputs again."""

    def __init__(self, device):
        self.captures = 0

    def run(self, function):
        return function()

    def capture(self, function):
        self.captures += 1
        return lambda: function().clone()


class Captures(Replays):
    """Graphs of steps without an optimizer, as far as gradients go: a capture writes none, and a replay adds
    to those that were there at the capture, and writes those that the capture made."""

    model = None

    def capture(self, function):
        super().capture(function)
        parameters = list(self.model.parameters())
        values = [None if p.grad is None else p.grad.clone() for p in parameters]
        function()
        captured = [p.grad for p in parameters]
        for grad, value in zip(captured, values, strict=True):
            if grad is not None:
                grad.fill_(torch.nan) if value is None else grad.copy_(value)

        def replay():
            outside = [p.grad for p in parameters]
            for parameter, grad, value in zip(parameters, captured, values, strict=True):
                parameter.grad = None if value is None else grad
            loss = function().clone()
            for parameter, grad, value, other in zip(parameters, captured, values, outside, strict=True):
                if grad is not None and value is None:
                    grad.copy_(parameter.grad)
                parameter.grad = other
            return loss

        return replay


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    monkeypatch.setattr(step_graphs, "_DEVICE", "cpu")
    monkeypatch.setattr(step_graphs, "_Graphs", Replays)


def a_model(seed=0, **config):
    torch.manual_seed(seed)
    return liger.patch(tiny_models.make("llama", **config).train())


def capturable_sgd(parameters, lr=0.1):
    """Of torch's optimizers, those with the setting need it on CUDA devices alone."""
    optimizer = torch.optim.SGD(parameters, lr=lr, momentum=0.9)
    for group in optimizer.param_groups:
        group["capturable"] = False
    return optimizer


def batches(count, *shape, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, tiny_models.VOCAB, shape, generator=generator) for _ in range(count)]


def given(tokens):
    return {"input_ids": tokens, "labels": tokens}


@pytest.mark.parametrize("max_grad_norm", [None, 0.1])
def test_steps_with_an_optimizer(max_grad_norm):
    """Of two shapes, with a learning rate that a scheduler changes, before and after the captures."""
    tokens = [b for pair in zip(batches(7, 2, 8), batches(7, 1, 6), strict=True) for b in pair]
    after = []
    for graphed in (False, True):
        model = a_model()
        optimizer = capturable_sgd(model.parameters())
        step = graph_step(model, optimizer, max_grad_norm=max_grad_norm) if graphed else None
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
        losses = []
        for batch in tokens:
            if graphed:
                losses.append(step(**given(batch)))
            else:
                loss = model(**given(batch), use_cache=False).loss
                loss.backward()
                if max_grad_norm is not None:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
            scheduler.step()
        assert all(p.grad is None for p in model.parameters())
        after.append((torch.stack(losses), [p.detach() for p in model.parameters()]))
    assert step.graphs.captures == 2
    assert optimizer.param_groups[0]["capturable"] is True
    torch.testing.assert_close(after[1], after[0])


def test_an_optimizer_that_is_changed_from_outside():
    """The graphs read a tensor, which an assigned learning rate fills, and no state that was replaced."""
    model = a_model()
    optimizer = capturable_sgd(model.parameters())
    saved = optimizer.state_dict()
    step = graph_step(model, optimizer)
    (rate,) = (group["lr"] for group in optimizer.param_groups)
    for batch in batches(4, 1, 6):
        step(**given(batch))
    assert step.graphs.captures == 1
    optimizer.param_groups[0]["lr"] = 0.05
    step(**given(batch))
    assert optimizer.param_groups[0]["lr"] is rate and rate.item() == pytest.approx(0.05)
    optimizer.load_state_dict(saved)
    for count, batch in enumerate(batches(4, 1, 6)):
        assert step.graphs.captures == (count == 0)
        step(**given(batch))
    assert step.graphs.captures == 1
    (group,) = optimizer.param_groups
    assert group["capturable"] is True and isinstance(group["lr"], torch.Tensor) and group["lr"] is not rate


def test_gradients_without_an_optimizer():
    """They accumulate, and follow zero_grad of either kind."""
    model, expected = a_model(), a_model()
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    expected.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    step = graph_step(model)
    memory = set()
    for index, batch in enumerate(batches(10, 2, 8)):
        loss = expected(**given(batch), use_cache=False).loss
        loss.backward()
        torch.testing.assert_close(step(**given(batch)), loss.detach())
        for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
            assert (mine.grad is None) == (other.grad is None)
            if mine.grad is not None:
                torch.testing.assert_close(mine.grad, other.grad)
        if index >= 3:
            memory.add(model.lm_head.weight.grad.data_ptr())
        if index % 3 == 2 or index == 6:
            for m in (model, expected):
                m.zero_grad(set_to_none=index != 5)
    assert len(memory) == 1 and step.graphs.captures == 1


def a_model_with_a_bias(used):
    """``used``: whether the model adds its bias to embedded tokens."""
    model = a_model()
    model.bias = torch.nn.Parameter(torch.zeros(model.config.hidden_size))
    model.model.embed_tokens.register_forward_hook(
        lambda module, args, output: output + model.bias if used(output) else output
    )
    return model


def compare_gradients(monkeypatch, used, tokens, zero_after, begin=lambda index: None):
    """Of each step, without a graph and with graphs."""
    monkeypatch.setattr(step_graphs, "_Graphs", Captures)
    # This capture reads its inputs.
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)
    model, expected = (a_model_with_a_bias(used) for _ in range(2))
    monkeypatch.setattr(Captures, "model", model)
    step = graph_step(model)
    for index, batch in enumerate(tokens):
        begin(index)
        expected(**given(batch), use_cache=False).loss.backward()
        step(**given(batch))
        for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
            assert (mine.grad is None) == (other.grad is None), index
            if mine.grad is not None:
                torch.testing.assert_close(mine.grad, other.grad)
        if index in zero_after:
            for m in (model, expected):
                m.zero_grad(set_to_none=True)
    return step


@pytest.mark.parametrize("zero_after", [{3, 8, 10, 11}, {8}], ids=["at captures", "between"])
def test_gradients_of_one_shape_alone(monkeypatch, zero_after):
    """A parameter has no gradient, not a gradient of zeros, where only the other shape trains it."""
    tokens = [b for pair in zip(batches(7, 2, 8), batches(7, 1, 6), strict=True) for b in pair]
    step = compare_gradients(monkeypatch, lambda output: output.shape[1] == 8, tokens, zero_after)
    assert step.graphs.captures == 2


def test_a_first_gradient_in_a_capture(monkeypatch):
    """A graph adds to it, as to the others, since the step is captured again with memory for it."""
    trains = []
    step = compare_gradients(
        monkeypatch, lambda output: bool(trains), batches(9, 2, 8), {6},
        begin=lambda index: trains.append(index) if index >= step_graphs.WARM_UP else None,
    )  # fmt: skip
    assert step.graphs.captures == 2


def test_a_learning_rate_of_several_groups():
    """A tensor that groups share is the rate of all, until one of them gets a rate of its own."""
    after = []
    for graphed in (False, True):
        model, rate = a_model(), torch.tensor(0.1)
        head = model.lm_head.weight
        others = [p for p in model.parameters() if p is not head]
        optimizer = capturable_sgd([{"params": others}, {"params": [head]}], lr=rate)
        step = graph_step(model, optimizer) if graphed else None
        for index, batch in enumerate(batches(10, 1, 6)):
            if index == 4:
                rate.fill_(0.2)
            if index == 5:
                optimizer.param_groups[1]["lr"] = torch.tensor(0.05) if graphed else 0.05
            if graphed:
                step(**given(batch))
            else:
                model(**given(batch), use_cache=False).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.2, 0.05])
        after.append([p.detach() for p in model.parameters()])
    assert step.graphs.captures == 1 and step.shapes  # after the rate of its own
    torch.testing.assert_close(after[1], after[0])


def test_the_loss_is_of_its_step():
    model = a_model()
    step = graph_step(model)
    tokens = batches(6, 2, 8)
    losses = [step(**given(batch)) for batch in tokens]
    assert not any(loss.requires_grad for loss in losses)
    assert len({loss.item() for loss in losses}) == 6


def test_a_rare_shape_has_no_graph():
    model = a_model()
    step = graph_step(model)
    for batch in [*batches(5, 2, 8), *batches(2, 1, 8)]:
        step(**given(batch))
    assert step.graphs.captures == 1


def test_too_many_shapes():
    step = graph_step(a_model())
    for length in range(4, 8):
        step(**given(torch.full((1, length), 5)))
    with pytest.raises(
        ValueError, match=r"input_ids \(1, 9\), labels \(1, 9\) is shape 5 of the inputs, at most 4"
    ):
        step(**given(torch.full((1, 9), 5)))
    step(**given(torch.full((1, 4), 5)))


def test_an_input_that_is_none_is_left_out():
    step, tokens = graph_step(a_model()), batches(1, 2, 8)[0]
    for _ in range(5):
        found = step(**given(tokens), num_items_in_batch=None, attention_mask=None)
    assert step.graphs.captures == 1
    torch.testing.assert_close(found, a_model()(**given(tokens)).loss.detach())


def test_inputs_that_are_not_tensors():
    step = graph_step(a_model())
    with pytest.raises(TypeError, match="num_items_in_batch must be a Tensor, not int"):
        step(**given(torch.full((1, 4), 5)), num_items_in_batch=4)


def test_gradients_from_elsewhere():
    model = a_model()
    step = graph_step(model, capturable_sgd(model.parameters()))
    tokens = torch.full((1, 4), 5)
    model(**given(tokens)).loss.backward()
    with pytest.raises(ValueError, match="the model has gradients from elsewhere"):
        step(**given(tokens))
    model.zero_grad()
    step(**given(tokens))


def test_casts_of_autocast_are_not_kept():
    model = a_model()
    step, seen = graph_step(model), []
    model.register_forward_pre_hook(lambda *_: seen.append(torch.is_autocast_cache_enabled()))
    with torch.autocast("cpu", torch.bfloat16):
        step(**given(torch.full((1, 4), 5)))
    assert seen == [False] and torch.is_autocast_cache_enabled()


def test_a_step_that_cannot_be_captured(monkeypatch):
    model = a_model()

    def capture(self, function):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    step = graph_step(model, capturable_sgd(model.parameters()))
    for batch in batches(3, 1, 4):
        step(**given(batch))
    with monkeypatch.context() as patched:
        patched.setattr(Replays, "capture", capture)
        with pytest.raises(
            RuntimeError, match=r"cannot be captured: operation .* is capturing \(Does it wait"
        ):
            step(**given(batch))
    assert all(p.grad is None for p in model.parameters())
    step(**given(batch))
    assert step.graphs.captures == 1


@pytest.mark.parametrize("where", ["attention", "module"])
def test_dropout_in_layers_that_are_recomputed(where):
    model = a_model(attention_dropout=0.5) if where == "attention" else a_model()
    if where == "module":
        model.model.layers[0].mlp.append = torch.nn.Dropout(0.5)
    methods.enable(model, preserve_rng_state=False)
    step = graph_step(model)
    for batch in batches(3, 1, 4):
        step(**given(batch))
    with pytest.raises(ValueError, match="layers with dropout are recomputed"):
        step(**given(batch))
    methods.disable(model)
    step(**given(batch))
    assert step.graphs.captures == 1


def test_models_and_optimizers_that_are_refused(monkeypatch):
    model = a_model()
    optimizer = capturable_sgd(model.parameters())
    for arguments, error, message in [
        ((1,), TypeError, "model must be a torch.nn.Module, not int"),
        ((model, 1), TypeError, "optimizer must be a torch.optim.Optimizer, not int"),
        (
            (model, capturable_sgd([model.lm_head.weight])),
            ValueError,
            "the optimizer lacks .* trained parameters",
        ),
        ((model, torch.optim.SGD(model.parameters())), ValueError, "SGD has no setting capturable"),
    ]:
        with pytest.raises(error, match=message):
            graph_step(*arguments)
    for how in ({"max_grad_norm": 1.0}, {"optimizer": optimizer, "max_grad_norm": -1.0}):
        with pytest.raises(ValueError, match="max_grad_norm is"):
            graph_step(model, **how)
    with pytest.raises(ValueError, match="no parameter of the model requires a gradient"):
        graph_step(a_model().requires_grad_(False))
    with pytest.raises(ValueError, match=r"liger\.transformers\.checkpoint plans the layers"):
        graph_step(liger.transformers.checkpoint(a_model(), 10**9))
    for name in ("DataParallel", "DistributedDataParallel"):
        wrapper = type(name, (torch.nn.Sequential,), {})
        with pytest.raises(ValueError, match="sharded or wrapped for several devices"):
            graph_step(wrapper(model))
    monkeypatch.undo()
    with pytest.raises(ValueError, match="the model is on cpu, expected one CUDA device"):
        graph_step(model)
