"""`inspect` from end to end, on files with a right target and with targets that follow another convention."""

import json
import sys
import textwrap
import types

import pytest

from flashproof.__main__ import run
from flashproof.fuzz import inspecting
from flashproof.fuzz.commands import Exit
from flashproof.fuzz.compiling import XLA_CACHED, XLA_COMPILED, Compiled, Watch
from flashproof.fuzz.learn import declaration
from flashproof.fuzz.region import Region

TARGETS = """
    import math
    import torch
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    def attend(q, k, v, causal, scale, align=0):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1).double() for x in (k, v))
        s = q.double() @ k.mT * scale
        if causal:
            s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1 + align), -torch.inf)
        lse = torch.logsumexp(s, -1)
        p = torch.where(lse.isfinite()[..., None], (s - torch.where(lse.isfinite(), lse, 0.0)[..., None]).exp(), 0.0)
        return (p @ v).to(q.dtype), lse.float()

    def right(query, key, value, is_causal=False, scale=None):
        return attend(query, key, value, is_causal, query.shape[-1] ** -0.5 if scale is None else scale)[0]

    def swapped(query, key, value, is_causal=False, scale=None):
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        align = k.shape[2] - q.shape[2]
        if q.shape[1] % k.shape[1]:
            raise RuntimeError("heads do not divide")
        return attend(q, k, v, is_causal, q.shape[-1] ** -0.5 if scale is None else scale, align)[0].transpose(1, 2)

    def deaf(query, key, value, is_causal=False, scale=None):
        return right(query, key, value, is_causal)

    def picky(query, key, value, is_causal=False):
        if query.shape[-1] != 1 or query.dtype != torch.bfloat16 or query.shape != key.shape:
            raise NotImplementedError("only bfloat16 with head dim 1")
        return right(query, key, value, is_causal)

    def base2(query, key, value, is_causal=False, return_lse=False):
        o, lse = attend(query, key, value, is_causal, query.shape[-1] ** -0.5)
        return (o, lse / math.log(2)) if return_lse else o

    def bottom(query, key, value, is_causal=False):
        return attend(query, key, value, is_causal, query.shape[-1] ** -0.5, key.shape[2] - query.shape[2])[0]

    def narrow(query, key, value, is_causal=False):
        if query.shape[2] != key.shape[2]:
            raise RuntimeError(f"no broadcast of {query.shape[2]} to {key.shape[2]}")
        return right(query, key, value, is_causal)

    def unscaled(query, key, value, is_causal=False):
        return attend(query, key, value, is_causal, 1.0)[0]

    def inverted(query, key, value, attn_mask=None):
        if attn_mask is None or attn_mask.dtype != torch.bool:
            raise NotImplementedError("boolean masks only")
        s = query.double() @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).double().mT * query.shape[-1] ** -0.5
        s = s.masked_fill(attn_mask, -1e300)
        return (s.softmax(-1) @ value.repeat_interleave(query.shape[1] // value.shape[1], 1).double()).to(query.dtype)

    def causal_only(query, key, value, is_causal=False, scale=None):
        if not is_causal:
            raise NotImplementedError("causal only")
        return right(query, key, value, True, scale)

    def named(query, key, value, is_causal=False):
        return {"out": right(query, key, value, is_causal)}

    def heads(query, key, value, is_causal=False, enable_gqa=False):
        G = query.shape[1] // key.shape[1]
        return attend(query, key.repeat(1, G, 1, 1), value.repeat(1, G, 1, 1), is_causal, query.shape[-1] ** -0.5)[0]
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "t.py").write_text(textwrap.dedent(TARGETS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(inspecting, "PROBES", 16)
    return tmp_path


def inspected(name, capsys, *options):
    code = run(
        [
            "inspect",
            f"t.py:{name}",
            "--in-process",
            "--dtype",
            "float32",
            "--contract",
            "may_leak",
            "--json",
            "out.json",
            *options,
        ]
    )
    with open("out.json") as f:
        return code, " ".join(capsys.readouterr().out.split()), json.load(f)


def test_a_right_target_is_told_what_to_run_next(here, capsys):
    code, shown, document = inspected("right", capsys)
    assert code == Exit.RIGHT and shown.count(" pass ") == 5
    assert "from 16 small cases: 16 right" in shown and "lacks attn_mask" in shown
    assert (
        "flashproof fuzz t.py:right --contract may_leak --dtype float32 --seconds 60" in shown
        and "--characterise" in shown
    )
    assert document["binding"]["dialect"] == "sdpa" and document["probe"]["run"] == 16 and document["keywords"]
    assert document["compiled"]["variants"] == 0 and len(document["smoke"]) == 5 and document["next"]


def test_a_layout_with_the_heads_inside_is_recognised(here, capsys):
    code, shown, document = inspected("swapped", capsys)
    assert code == Exit.WRONG and "right if the layout were (B, L, H, D): use --dialect flash_attn" in shown
    assert document["causes"]


def test_an_ignored_keyword_is_told(here, capsys):
    code, shown, document = inspected("deaf", capsys)
    assert code == Exit.WRONG and "scale IGNORED" in shown and document["ignored"] == ["scale"]
    assert "1 keyword ignored" in shown
    assert "FAIL scale: is accepted and ignored" in shown


def test_a_target_that_refuses_nearly_everything_is_told_what_to_declare(here, capsys):
    code, shown, document = inspected("picky", capsys)
    assert code == Exit.BLIND and "Nearly everything was refused. Declare what the target serves" in shown
    assert "says 16 times: NotImplementedError: only bfloat16 with head dim 1" in shown and "supports=Region(" in shown
    assert document["probe"]["statuses"]["refused"] == 16


def test_a_causal_only_target_is_probed_and_smoked_where_it_serves(here, capsys):
    code, shown, document = inspected("causal_only", capsys)
    assert code == Exit.RIGHT and "scale changes the answer" in shown
    assert [row["status"] for row in document["smoke"]] == ["pass"] * 5


def test_a_result_of_the_wrong_form_is_told_where_keywords_are_probed(here, capsys):
    _, shown, document = inspected("named", capsys)
    assert "not probed: the result has the wrong form" in document["keywords"]["is_causal"] and "KeyError" not in shown


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("base2", "right if lse were a binary logarithm: multiply lse by ln 2"),
        ("bottom", "right if causal were aligned at the bottom-right corner"),
        ("unscaled", "right if scores were not scaled"),
        ("heads", "right if query head h read key head h % Hkv"),
        ("inverted", "right if True in a boolean mask meant masked out"),
    ],
)
def test_the_convention_that_a_wrong_target_follows_is_named(here, capsys, name, said):
    code, shown, _ = inspected(name, capsys)
    assert code == Exit.WRONG and said in shown


def test_an_error_that_one_kind_of_case_meets_is_told_with_the_region_that_leaves_it_out(here, capsys):
    code, said, _ = inspected("narrow", capsys)
    assert code == Exit.WRONG
    assert "raises RuntimeError in each case with Lq other than Lk" in said
    assert "refuse them, and declare Region(lq_differs=False)" in said


def test_the_probe_stops_when_its_time_is_up(here, capsys, monkeypatch):
    monkeypatch.setattr(inspecting, "PROBE_SECONDS", 0.0)
    _, shown, document = inspected("right", capsys)
    assert document["probe"]["run"] == 0 and "from 0 of 16 (time is up) small cases" in shown


def test_the_probe_of_a_slow_target_ends_soon(here, capsys, monkeypatch):
    monkeypatch.setattr(inspecting, "SOON", 0.0)
    monkeypatch.setattr(inspecting, "LEAST", 0.01)
    _, shown, document = inspected("right", capsys)
    assert document["probe"]["run"] < 16 and "(time is up)" in shown


def test_what_was_compiled_is_one_line():
    some = Compiled()
    some.add({"variants": ["fwd 1", "fwd 2", "bwd 1"], "built": 2, "seconds": 2.5})
    assert str(some) == "3 variants (1 from a cache), 2 built in 2.5 s, apart from every deadline"
    assert not str(Compiled())


def test_a_region_is_declared_by_what_differs_from_the_default():
    assert declaration(Region(dtypes=("bfloat16",), gqa=False)) == "Region(dtypes=('bfloat16',), gqa=False)"


def test_what_xla_compiles_is_counted(monkeypatch):
    heard = {}
    monitoring = types.SimpleNamespace(
        register_event_listener=lambda f: heard.update(event=f),
        register_event_duration_secs_listener=lambda f: heard.update(duration=f),
    )
    monkeypatch.setitem(sys.modules, "jax", types.SimpleNamespace(monitoring=monitoring))
    watch = Watch()
    watch.install()
    heard["duration"](XLA_COMPILED, 0.5, fun_name="f")
    heard["event"](XLA_CACHED)
    heard["duration"](XLA_COMPILED, 0.25)
    heard["duration"]("/jax/core/compile/jaxpr_trace_duration", 9.0)
    told = watch.taken()
    assert len(set(told["variants"])) == 2 and told["built"] == 1 and told["seconds"] == 0.75
