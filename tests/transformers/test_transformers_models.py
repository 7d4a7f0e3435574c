# SPDX-License-Identifier: BSD-3-Clause
"""Model types of the installed transformers, tiny and random, beside their patched copies.

docs/reference/models.md has the results for all types; the fifth that runs in make test must agree with it.
"""

import re
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")

from model_scan import checks, inputs, models, runner, table  # noqa: E402
from model_scan.report import run  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "models.md"
# One model of every way in which the fused loss is found: scaled, capped and cut logits, heads in submodules,
# unshifted labels, a model within a model, tied embeddings, auxiliary losses, stateful mixers.
CHOSEN = (
    "bert", "blip-2", "cohere", "deepseek_v3", "falcon_h1", "gemma2", "gemma3", "gpt2", "gpt_oss", "granite",
    "inkling2", "inkling_text", "jamba", "kosmos-2.5", "llama", "llama4", "mamba2", "minicpm3", "mixtral",
    "modernbert-decoder", "opt", "qwen2_vl", "qwen3", "qwen4_exp_text", "roberta", "t5gemma2",
)  # fmt: skip
CLASSES = models.model_classes()
SOME = [pair for index, pair in enumerate(CLASSES) if index % 11 == 0 or pair[0] in CHOSEN]
QUICK = ("training", "generate", "unpatch")


def rows():
    """{(model type, class): cells} of the models that are built."""
    lines = PAGE.read_text().split("\n## Reasons")[0].splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| `")]
    return {(c[0].strip("`"), c[1].strip("`")): c for c in cells}


ROWS = rows()


def differing(report):
    """The checks in which the patched model gives other numbers."""
    return {name: why for name, why in report.get("checks", {}).items() if why.startswith("differs")}


@pytest.mark.parametrize("pair", SOME, ids=lambda pair: f"{pair[0]}-{pair[1]}")
def test_a_patched_model_is_equal(pair):
    report = run(*pair, QUICK)
    assert not differing(report), report
    if f"transformers {transformers.__version__}:" not in PAGE.read_text():
        return
    if "not built" in report:
        assert pair not in ROWS
        pytest.skip(report["not built"])
    cells = ROWS[pair]
    assert (report["loss"] == "fused") == (cells[2] == "fused")
    replaced = {k: n for k, n in report["replaced"].items() if k != "fused_linear_cross_entropy"}
    assert ", ".join(f"{n} {kind}" for kind, n in replaced.items()) == cells[3].replace("-", "").strip()


# A scan starts a process that imports transformers: once for several models.
BATCHES = [CLASSES[first : first + 12] for first in range(0, len(CLASSES), 12)]


@pytest.mark.slow
@pytest.mark.parametrize("pairs", BATCHES, ids=lambda pairs: f"{pairs[0][0]} to {pairs[-1][0]}")
def test_every_check(pairs):
    found = {(report["type"], report["class"]): differing(report) for report in runner.scan(pairs)}
    assert not any(found.values()), found


def test_the_fused_loss_reaches_the_models():
    built = {model_type for model_type, _ in ROWS}
    fused = {model_type for (model_type, _), cells in ROWS.items() if cells[2] == "fused"}
    assert len(built) >= 240 and len(fused) >= 220
    assert not any("differs" in cells[5] for cells in ROWS.values())


def test_the_page_is_what_the_command_writes():
    """The text around the rows, their order, the reasons that they refer to, and the counts of the
    introduction."""
    page = PAGE.read_text()
    head, _, rest = page.partition("\n## Reasons\n\n")
    reasons, _, unbuilt = rest.partition("\n## Not built\n\n")
    counts = re.search(
        r"transformers (\S+): (\d+) language.*?of which (\d+) were.*?;\s(\d+) of", head, re.DOTALL
    )
    missing = re.findall(r"^\| `(\S+)` \| `(\S+)` \| (.+) \|$", unbuilt, re.MULTILINE)
    fused = sum(cells[2] == "fused" for cells in ROWS.values())
    version, *numbers = counts.groups()
    assert list(map(int, numbers)) == [len(ROWS) + len(missing), len(ROWS), fused]
    introduction = table.introduction(version, *map(int, numbers))
    assert head.startswith(introduction) and len(head[len(introduction) :].strip().splitlines()) == len(ROWS)
    assert list(ROWS) == sorted(ROWS) and [m[:2] for m in missing] == sorted(m[:2] for m in missing)
    assert all(len(cells) == table.COLUMNS for cells in ROWS.values())
    listed = re.findall(r"^(\d+)\. (.+)$", reasons, re.MULTILINE)
    assert [int(number) for number, _ in listed] == list(range(1, len(listed) + 1))
    assert [text for _, text in listed] == sorted(text for _, text in listed)
    cited = {int(n) for cells in ROWS.values() for n in re.findall(r"\[(\d+)\]", " ".join(cells))}
    assert cited == {int(number) for number, _ in listed}


# --- the scan itself ----------------------------------------------------------------------------------------


def run_broken(monkeypatch, breaking):
    """The report of a Llama whose patched copy was changed by a function."""
    original = checks.patched_copy

    def patched_copy(model):
        patched = original(model)
        breaking(patched)
        return patched

    for module in ("checks", "report"):
        monkeypatch.setattr(f"model_scan.{module}.patched_copy", patched_copy)
    return run("llama", "LlamaForCausalLM")


def test_a_wrong_gradient_is_found(monkeypatch):
    def breaking(model):
        model.model.norm.weight.register_hook(lambda grad: grad * 1.001)

    report = run_broken(monkeypatch, breaking)
    assert report["checks"]["training"].startswith(
        "differs: the gradient of model.norm.weight differs by 0.001"
    )
    assert report["checks"]["evaluation"] == "equal"


def test_a_wrong_result_is_found_by_every_check(monkeypatch):
    def breaking(model):
        model.lm_head.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
        model.lm_head.register_forward_hook(lambda module, args, out: -out if out.dim() else out)

    found = run_broken(monkeypatch, breaking)["checks"]
    assert {name for name, result in found.items() if not result.startswith("differs")} == {"images"}


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(transformers.PreTrainedModel, "activation_checkpointing_enable"), reason="before 5.24"
)
def test_a_scan_has_the_memory_for_every_model():
    """Two models, their gradients, and copies of both: MEMORY holds eight times the parameters."""
    largest = runner.MEMORY // (8 * 4 * 8)
    sizes = {}
    for pair in CLASSES:
        try:
            with torch.device("meta"):
                model = models._construct(*pair, dropout=0.0)
        except (ImportError, *inputs.ERRORS):
            continue  # Not built, or not on the meta device.
        sizes[pair] = sum(parameter.numel() for parameter in model.parameters())
    assert len(sizes) > 100 and not {pair: size for pair, size in sizes.items() if size > largest}


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_processes_have_limits(monkeypatch, jobs):
    monkeypatch.setenv("LIGER_BACKEND", "cuda")  # of the models on the CPU it is not asked
    # A backward starts the threads of autograd for GPUs, and a fork of this process has none of them.
    torch.ones(1, requires_grad=True).sum().backward()
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    pairs = [("llama", "LlamaForCausalLM"), ("no such type", "X"), ("qwen3", "Qwen3ForCausalLM")]
    seen = []
    reports = runner.scan(pairs, jobs=jobs, checks=("training",), progress=seen.append)
    assert [report["type"] for report in reports] == ["llama", "no such type", "qwen3"] and len(seen) == 3
    assert reports[0]["checks"] == {"training": "equal"} and "not built" in reports[1]
    [late] = runner.scan(pairs[:1], limit_s=0.0)
    assert late["not built"] == "it took longer than 0 s"
    assert torch.get_num_threads() == before + 1
    torch.set_num_threads(before)
