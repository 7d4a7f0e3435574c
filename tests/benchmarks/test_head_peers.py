"""The heads of packages that are loaded without what the packages need, and results of several runs as
one."""

import importlib.util
import json
import sys

import pytest
import torch
import torch.nn.functional as F

from liger_bench import cli, harness, head_peers, measure, merge, report

# Of a made-up TRL: the backward of the head takes a function from a module that needs more than the head.
HEAD = """
import torch

class ChunkedLogProbFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, chunk_size, softcap, logit_scale, outputs):
        assert (bias, chunk_size, logit_scale, outputs) == (None, 8192, 1.0, ())
        return hidden.sum(-1) / temperature, None

    @staticmethod
    def backward(ctx, grad, _):
        from ..trainer.utils import maybe_gather_lm_head_ctx
        with maybe_gather_lm_head_ctx(None, None) as found:
            return torch.full((2, 3), 1.0 if found is None else found), *[None] * 8
"""
GATHER = "import contextlib\n\ndef maybe_gather_lm_head_ctx(*p):\n    return contextlib.nullcontext(7.0)\n"


def write(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def modules(monkeypatch, tmp_path):
    """A folder on the path, and what it has of the names of the peers is forgotten."""

    def forget():
        head_peers._trl_head.cache_clear()
        head_peers.peer.cache_clear()
        names = [n for n in sys.modules if n.partition(".")[0] in ("made_up", "trl", "unsloth_zoo")]
        return {name: sys.modules.pop(name) for name in names}

    before = forget()
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    forget()
    sys.modules.update(before)


def test_a_module_of_packages_that_cannot_be_imported(modules):
    broken = "raise ImportError('needs more')\n"
    write(
        modules,
        {
            "made_up/__init__.py": broken,
            "made_up/a/__init__.py": broken,
            "made_up/a/b.py": "from ..c import x\n",
        },
    )
    write(modules, {"made_up/c.py": "x = 3\n"})
    head_peers.bare_packages("made_up", "made_up.a")
    assert importlib.import_module("made_up.a.b").x == 3
    with pytest.raises(ModuleNotFoundError, match=r"made_up\.d"):
        head_peers.bare_packages("made_up.d")


@pytest.mark.parametrize(("utils", "gradient"), [("import no_such_module_1\n", 1.0), (GATHER, 7.0)])
def test_head_of_trl_alone_and_of_a_full_installation(modules, utils, gradient):
    write(
        modules,
        {"trl/__init__.py": "", "trl/kernels/chunked_logprob.py": HEAD, "trl/trainer/utils.py": utils},
    )
    write(modules, {"trl/kernels/__init__.py": "", "trl/trainer/__init__.py": ""})
    x = torch.ones(2, 3, requires_grad=True)
    t = {"input": x, "weight": torch.zeros(1, 3), "target": torch.zeros(2)}
    logprobs = head_peers.trl_logprobs(t, temperature=2.0)
    assert logprobs.tolist() == [1.5, 1.5]
    assert (torch.autograd.grad(logprobs.sum(), x)[0] == gradient).all()


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"label_smoothing": 0.1}])
@pytest.mark.parametrize("peer", ["trl", "unsloth_zoo"])
def test_heads_of_the_wheels(modules, peer, options):
    needs = (peer, "transformers", "triton", "filelock", "packaging")
    if not all(importlib.util.find_spec(name) for name in needs):
        pytest.skip(f"needs {', '.join(needs)}")
    if peer == "trl" and "label_smoothing" in options:
        pytest.skip("TRL's head has no label smoothing")
    torch.manual_seed(0)
    leaves = [torch.randn(*s, requires_grad=True) for s in ((14, 16), (50, 16), (50,))]
    t = dict(zip(("input", "weight", "bias"), leaves, strict=True), target=torch.randint(50, (14,)))
    ce = (
        head_peers.unsloth_ce
        if peer == "unsloth_zoo"
        else lambda *a, **o: -head_peers.trl_logprobs(*a, **o).mean()
    )
    loss = ce(t, **options)
    logits = F.linear(*leaves)
    if "softcap" in options:
        logits = 5.0 * torch.tanh(logits / 5.0)
    want = F.cross_entropy(logits, t["target"], label_smoothing=options.get("label_smoothing", 0.0))
    torch.testing.assert_close(loss, want)
    for got, expected in zip(
        torch.autograd.grad(loss, leaves), torch.autograd.grad(want, leaves), strict=True
    ):
        torch.testing.assert_close(got, expected)
    if peer == "unsloth_zoo" and not options:
        del t["bias"]
        logp = F.linear(*leaves[:2]).div(0.7).log_softmax(-1).gather(1, t["target"][:, None])[:, 0]
        torch.testing.assert_close(head_peers.unsloth_logprobs(t, 0.7), logp)


# --- a few rows at a time -----------------------------------------------------------------------------------


def test_a_peer_that_fails_in_any_way_does_not_end_the_run():
    class LibraryError(Exception):
        pass

    def fail(t):
        raise LibraryError("no such kernel")

    work = harness.training_work(fail, (), ("x",))
    row = harness.Row("op", "a row", lambda: {"x": torch.ones(2)}, [harness.Provider("peer", work)])
    (record,) = measure.measure_all([row], measure.Cpu())
    assert record["providers"]["peer"]["reason"] == "LibraryError: no such kernel"


def test_no_row_starts_after_the_time_is_up():
    assert measure.measure_all([None], measure.Cpu(), minutes=0) == []


def provider(ratio, mib=100.0, group="other", **more):
    found = {
        "group": group,
        "status": "ok",
        "ms": {"median": ratio},
        "ratios": {"GEMMs": ratio},
        "peak_mib": mib,
    }
    return {**found, **more}


def result(rows, device="a GPU", **facts):
    facts = {
        "device": device,
        "size": "full",
        "dtype": "bfloat16",
        "date": "now",
        "commit": "a" * 40,
        **facts,
    }
    records = [
        {
            "name": name,
            "op": "op",
            "ceilings": ["GEMMs"],
            "providers": {**p, "GEMMs": provider(1.0, 0, "ceiling")},
        }
        for name, p in rows.items()
    ]
    return {"schema": 2, "environment": facts, "rows": records}


MISSING = {"group": "other", "status": "missing", "reason": "not installed: quack"}


def test_runs_are_merged():
    first = result({"a": {"liger": provider(1.1, group="ours"), "quack": MISSING}}, quack=None)
    second = result(
        {"a": {"liger": provider(1.2, group="ours"), "quack": provider(1.4)}, "b": {}}, quack="0.6.5"
    )
    both = merge.merged([first, second])
    assert [row["name"] for row in both["rows"]] == ["a", "b"]
    providers = both["rows"][0]["providers"]
    assert {n: p["ratios"]["GEMMs"] for n, p in providers.items()} == {
        "liger": 1.1,
        "quack": 1.4,
        "GEMMs": 1.0,
    }
    assert list(providers)[-1] == "GEMMs"
    assert both["environment"]["quack"] == "0.6.5" and len(both["environment"]["runs"]) == 2
    assert merge.merged([first]) == first
    with pytest.raises(ValueError, match="different device: a GPU and another"):
        merge.merged([first, result({}, device="another")])


def test_one_column_per_peer():
    failed = {"group": "other", "status": "failed", "reason": "TypeError: a | b\nmore"}
    wrong = provider(1.5, status="wrong", reason="relative error: dinput 0.04")
    rows = {
        "a": {"x": provider(1.2, group="ours"), "y": provider(1.1, 64.0, "ours"), "p": failed, "r": MISSING},
        "b": {"x": provider(1.2, group="ours"), "p": provider(2.0), "q": wrong},
    }
    lines = report._compared_table(result(rows)["rows"], "GEMMs").splitlines()
    assert lines[0].endswith("peak MiB beyond the inputs. Not installed: r.")
    assert lines[2] == "| row | GEMMs, ms | liger | p | q |"
    assert lines[4] == "| a | 1 | 1.10, 64 | did not run: TypeError: a \\| b |  |"
    assert lines[5] == "| b | 1 | 1.20, 100 | 2.00, 100 | relative error: dinput 0.04 |"


def test_a_few_rows_at_a_time(tmp_path, capsys):
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, words in zip(files, ("softcap", "smoothing"), strict=True):
        arguments = [
            "--heads",
            "--self-test",
            "--peers",
            "none",
            "--rows",
            words,
            "--json",
            str(file),
            "--no-plots",
        ]
        assert cli.main([*arguments]) == 0
    both = tmp_path / "both.json"
    sources = [str(file) for file in files]
    assert cli.main(["--from", *sources]) == 2
    assert cli.main(["--from", *sources, "--json", str(both), "--no-plots"]) == 0
    names = [row["name"] for row in json.loads(both.read_text())["rows"]]
    assert len(names) == 2 and "softcap" in names[0] and "smoothing" in names[1]
    assert "Times relative to three GEMMs" in both.with_suffix(".md").read_text()
    assert cli.main(["--heads", "--self-test", "--rows", "no such row"]) == 2
    assert "no row has no such row in its name" in capsys.readouterr().err
