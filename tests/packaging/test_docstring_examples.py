# SPDX-License-Identifier: BSD-3-Clause
"""The examples in docstrings of public functions and classes, as doctest reads them.

An example may use the tensors below: they have the names of the arguments.
"""

import doctest
import importlib
import inspect
import sys

import pytest
import torch

import liger

PACKAGES = ("liger", "liger.nn", "liger.losses", "liger.transformers", "liger.distributed", "liger.trl")
# Packages that this environment may lack.
NEEDS = {"liger.transformers": "transformers", "liger.trl": "trl"}
TOKENS, HIDDEN, VOCAB = 4, 16, 32


def has_example(value):
    """False for types that nobody calls: exceptions, and the types of keywords for type checkers."""
    if inspect.isclass(value):
        return not (issubclass(value, BaseException) or (issubclass(value, dict) and value is not dict))
    return inspect.isfunction(value)


def public():
    for package in PACKAGES:
        needed = NEEDS.get(package)
        if needed is not None and importlib.util.find_spec(needed) is None:
            continue
        module = importlib.import_module(package)
        for name in module.__all__:
            if has_example(getattr(module, name)):
                yield f"{package}.{name}", getattr(module, name)


OBJECTS = dict(public())


class Likelihood(liger.losses.FusedLinearLoss):
    def compute(self, logprobs, entropy):
        return -logprobs


def tiny_llama():
    """{name: a model, its configuration, the package}; empty without transformers."""
    try:
        import transformers
    except ImportError:
        return {}
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=HIDDEN, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=TOKENS,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    return {"transformers": transformers, "config": config, "model": model}


def names():
    """Tensors and modules with the names of arguments."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    def classes(*shape):
        return torch.randint(VOCAB, shape, generator=generator)

    # Two sequences, or a pair of an accepted and a rejected one.
    rows = (2, TOKENS)
    return {
        "torch": torch,
        "liger": liger,
        "input": random(*rows, HIDDEN).requires_grad_(),
        "weight": random(VOCAB, HIDDEN).requires_grad_(),
        "bias": random(VOCAB).requires_grad_(),
        "target": classes(*rows),
        "logits": random(*rows, VOCAB).requires_grad_(),
        "mask": torch.ones(rows, dtype=torch.int64),
        "student": random(*rows, VOCAB).requires_grad_(),
        "teacher": random(*rows, VOCAB),
        "teacher_input": random(*rows, HIDDEN),
        "teacher_weight": random(VOCAB, HIDDEN),
        "teacher_logits": random(*rows, VOCAB),
        "ref_input": random(*rows, HIDDEN),
        "ref_weight": random(VOCAB, HIDDEN),
        "advantages": random(2),
        "logps": random(*rows).sub(3.0),
        "logprobs": random(*rows, VOCAB).log_softmax(-1).topk(3).values,
        "indices": torch.arange(3).expand(*rows, 3),
        "labels": torch.tensor([True, False]),
        "Likelihood": Likelihood,
        **tiny_llama(),
    }


@pytest.mark.parametrize("name", OBJECTS)
def test_public_functions_and_classes_have_an_example(name):
    """At most three statements, with the name of the object in one of them."""
    examples = doctest.DocTestParser().get_examples(inspect.getdoc(OBJECTS[name]))
    source = "".join(example.source for example in examples)
    assert 1 <= len(examples) <= 3
    assert name.rpartition(".")[2] in source


@pytest.mark.parametrize("name", OBJECTS)
def test_the_example_runs(name):
    """An example of liger.trl, which needs a trainer, is skipped."""
    if name.startswith("liger.transformers.") or name in ("liger.patch", "liger.unpatch"):
        pytest.importorskip("transformers")
    test = doctest.DocTestParser().get_doctest(inspect.getdoc(OBJECTS[name]), names(), name, None, 0)
    output = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    try:
        result = runner.run(test, out=output.append)
    finally:
        liger.set_backend()
        if "liger.transformers" in sys.modules:
            liger.transformers.unpatch_future()
    assert result.attempted or name.startswith("liger.trl.")
    assert not result.failed, "".join(output)
