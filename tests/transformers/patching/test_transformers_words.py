# SPDX-License-Identifier: BSD-3-Clause
"""What people read: the line of patch, the table of the report, errors of options; the functions of model
types."""

import logging

import pytest

import liger

transformers = pytest.importorskip("transformers")

from tiny_models import assert_same_step, batch, make, step, twin  # noqa: E402

import liger.transformers as lt  # noqa: E402


@pytest.fixture(autouse=True)
def no_later_models():
    yield
    lt.unpatch_future()


def test_the_report_is_a_table():
    model = liger.patch(make("Mixtral", num_local_experts=2), layer_norm=False)
    model.model.norm.forward = lambda x: x
    lines = str(lt.patch_report(model)).splitlines()
    assert lines[0].split() == ["part", "count"]
    rows = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines[1:]]
    assert ["RMS norm", "4", "replaced (rms_norm)"] in rows
    assert ["lm_head and loss", "1", "replaced (fused_linear_cross_entropy)"] in rows
    assert ["MixtralRMSNorm", "1", "left as before", "its forward was replaced on the instance"] in rows
    if any(type(m).__name__.endswith("Experts") for m in model.modules()):
        assert ["MoE experts", "2", "replaced (experts)"] in rows
    assert lt.patch_report(model).rows[0][:2] == ("lm_head and loss", 1)


def test_patch_says_what_it_did(capfd, monkeypatch):
    def said(**options):
        liger.patch(make("llama"), **options)
        return capfd.readouterr().err

    for name in ("liger.transformers", "liger"):
        monkeypatch.setattr(logging.getLogger(name), "level", logging.WARNING)
    (line,) = said().splitlines()
    assert line.startswith("liger.patch: LlamaForCausalLM: 1 x fused_linear_cross_entropy; ")
    assert said(verbose=False) == ""
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert said() == ""


def test_patch_logs_one_line(caplog):
    with caplog.at_level(logging.INFO, logger="liger.transformers"):
        liger.patch(make("llama"))
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    message = record.getMessage()
    assert (
        message.startswith("liger: LlamaForCausalLM: 1 x fused_linear_cross_entropy; ")
        and "\n" not in message
    )


def test_an_unknown_option_lists_the_right_ones():
    model = make("llama")
    expected = (
        r"there is no option 'rmsnorm'\. Did you mean rms_norm\? The options are rope, rms_norm, rms_norm_"
    )
    with pytest.raises(TypeError, match=rf"^liger\.patch: {expected}"):
        liger.patch(model, rmsnorm=True)
    with pytest.raises(TypeError, match=rf"^liger\.transformers\.patch_future: {expected}"):
        lt.patch_future("llama", rmsnorm=True)
    assert str(lt.patch_report(model)) == "not patched: call liger.patch(model)"


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("rms_norm", "no", "True or False"),
        ("recompute", 1, "True or False"),
        ("fused_linear_cross_entropy", None, "True or False"),
        ("mlp", "swiglu", "True or False, or None"),
        ("tiled_mlp_num_shards", 2.0, "an integer, or None"),
        ("tiled_mlp_num_shards", True, "an integer, or None"),
    ],
)
def test_a_value_of_another_type(option, value, expected):
    model = make("llama")
    message = rf"liger: the option {option} is {value!r}, expected {expected}$"
    for function, given in ((liger.patch, model), (lt.patch_future, "llama")):
        with pytest.raises(TypeError, match=message):
            function(given, **{option: value})
    assert str(lt.patch_report(model)) == "not patched: call liger.patch(model)"


def test_both_losses_give_the_fused_one(caplog):
    plain = make("llama")
    with caplog.at_level(logging.WARNING, logger="liger.transformers"):
        lt.patch_future("llama", cross_entropy=True, fused_linear_cross_entropy=True, mlp=True)
    assert [record.getMessage() for record in caplog.records] == [
        "liger: cross_entropy and fused_linear_cross_entropy are both True: the fused loss is used, because it has no "
        "logits to compute a cross entropy from"
    ]
    model = make("llama")
    kinds = set(lt.patch_report(model).replaced.values())
    assert {"fused_linear_cross_entropy", "swiglu", "rope"} <= kinds and "cross_entropy" not in kinds
    assert_same_step(step(model, **batch()), step(plain, **batch()))


@pytest.mark.parametrize("mlp", [True, False, None])
def test_mlp_together_with_tiled_mlp(mlp):
    """tiled_mlp decides how a gated MLP is replaced, so mlp has nothing to add."""
    plain = make("llama")
    model = liger.patch(twin(plain), mlp=mlp, tiled_mlp=True, tiled_mlp_num_shards=3)
    assert list(lt.patch_report(model).replaced.values()).count("tiled_mlp") == 2
    assert_same_step(step(model, **batch()), step(plain, **batch()))


def test_an_unknown_model_type():
    with pytest.raises(
        ValueError, match=r"patch_future: the installed transformers has no model type 'lama'"
    ):
        lt.patch_future("lama")
    lt.unpatch_future("lama")


def test_two_types_with_one_base_class():
    pytest.importorskip("transformers.models.gemma3.modeling_gemma3")
    settings = transformers.Gemma3TextConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16,
    )  # fmt: skip

    def kinds():
        return set(lt.patch_report(transformers.Gemma3ForCausalLM(settings)).replaced.values())

    lt.patch_future("gemma3_text", rope=False)
    lt.patch_future("gemma3")
    assert "qk_norm_rope" in kinds() and "geglu" in kinds()
    lt.unpatch_future("gemma3")
    assert not {"rope", "qk_norm_rope"} & kinds() and "geglu" in kinds()
    lt.unpatch_future("gemma3_text")
    assert not kinds()
