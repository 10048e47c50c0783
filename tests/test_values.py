import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashproof.fuzz import values
from flashproof.fuzz.case import DATA, DTYPES, GRADS, Case
from flashproof.fuzz.hashing import number, uniform_bits
from flashproof.fuzz.masks import Causal, Padding
from flashproof.fuzz.region import MASKS
from flashproof.fuzz.strategies import cases
from flashproof.fuzz.tensors import build

SIZES = dict(B=2, Hq=4, Hkv=2, Lq=9, Lk=12, D=8, Dv=6)


def scores(data, **changes):
    inputs = build(Case(**{**SIZES, **changes}, data=data))
    k = inputs.k.double().repeat_interleave(inputs.case.G, 1)
    return inputs.q.double() @ k.mT * inputs.case.resolved_scale


def test_numpy_and_torch_hash_alike():
    index = [np.arange(6).reshape(-1, 1), np.arange(4)]
    tensors = [torch.from_numpy(x) for x in index]
    assert torch.equal(torch.from_numpy(uniform_bits(7, "q", *index)), uniform_bits(7, "q", *tensors))


def test_hashes_are_even_in_every_bit():
    bits = uniform_bits(1, "k", np.arange(256).reshape(-1, 1), np.arange(256))
    shares = [(bits >> n & 1).mean() for n in range(31)]
    assert bits.min() >= 0 and bits.max() < 1 << 31
    assert max(abs(share - 0.5) for share in shares) < 6 * 0.5 / 256


def test_hashes_of_different_places_are_all_different():
    index = np.meshgrid(*(np.arange(n) for n in (3, 4, 64, 64)), indexing="ij")
    full = uniform_bits(0, "v", *index) * (1 << 31) + uniform_bits(1, "v", *index)
    assert np.unique(full).size == full.size


def test_a_number_depends_on_seed_and_stream():
    assert len({number(seed, stream) for seed in range(50) for stream in range(20)}) == 1000


def test_no_quantile_is_so_near_a_rounding_tie_that_libm_could_move_it():
    exact = [values.NormalDist().inv_cdf(n / 1024) * 2.0**20 for n in range(1, 512)]
    assert min(abs(x - np.floor(x) - 0.5) for x in exact) > 1e-5


def test_normal_numbers_have_the_moments_of_a_normal_distribution():
    x = values.normal(uniform_bits(0, "q", np.arange(1000).reshape(-1, 1), np.arange(1000)))
    assert abs(x.mean()) < 0.005 and abs(x.std() - 1) < 0.005 and abs((x**4).mean() - 3) < 0.1


def test_trailing_zeros_halve_in_frequency():
    n = values.trailing_zeros(uniform_bits(0, "q", np.arange(100_000)))
    assert max(abs((n == k).mean() - 0.5 ** (k + 1)) for k in range(6)) < 6 * 0.5 / 100_000**0.5


def test_trailing_zeros_of_known_numbers():
    assert values.trailing_zeros(np.array([0, 8, 1 << 30])).tolist() == [31, 3, 30]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("data", [name for name in DATA if not name.startswith("nonfinite")])
def test_every_regime_is_finite_in_every_dtype(data, dtype):
    for seed in range(4):
        inputs = build(Case(**SIZES, data=data, dtype=dtype, seed=seed))
        assert all(x.isfinite().all() for x in (inputs.q, inputs.k, inputs.v, inputs.do))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("grad", GRADS)
def test_every_gradient_is_finite_in_every_dtype(grad, dtype):
    assert build(Case(**SIZES, grad=grad, dtype=dtype)).do.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("data", DATA)
@given(
    case=cases(max_len=20, masks=[m for m in MASKS if m != "packed"], without=["layouts"]),
    sizes=st.tuples(*[st.integers(1, 12)] * 6),
)
def test_a_smaller_case_keeps_the_values_of_what_remains(data, case, sizes):
    if data.startswith("nonfinite"):
        data = "normal"  # their places move into the smaller tensor, by design
    big = case.but(data=data, mask_form="flags", mask_fill="-inf")
    B, Hkv, Lq, Lk, D, Dv = (
        min(a, b) for a, b in zip(sizes, (big.B, big.Hkv, big.Lq, big.Lk, big.D, big.Dv), strict=True)
    )
    small = big.but(B=B, Hkv=Hkv, Hq=Hkv * big.G, Lq=Lq, Lk=Lk, D=D, Dv=Dv)
    whole, part = build(big), build(small)
    for name in ("q", "k", "v", "do"):
        x = getattr(part, name)
        b, h, n, d = x.shape
        assert torch.equal(x, getattr(whole, name)[:b, :h, :n, :d])


def test_another_seed_gives_other_values():
    assert not torch.equal(build(Case(**SIZES)).q, build(Case(**SIZES, seed=1)).q)


def test_the_tensors_of_a_case_are_independent():
    inputs = build(Case(B=1, Lq=64, Lk=64, D=64, Dv=64))
    flat = torch.stack([x.flatten() for x in (inputs.q, inputs.k, inputs.v, inputs.do)])
    assert (torch.corrcoef(flat) - torch.eye(4)).abs().max() < 0.1


def test_large_shifts_every_row_of_scores_by_a_hundred_or_more():
    inputs = build(Case(**SIZES, data="large"))
    assert (inputs.q[..., 0].abs() >= 100).all() and (inputs.k[..., 0] == 1).all()
    assert build(Case(Lq=300, data="large")).q.abs().max() == 1e6


def test_large_stays_in_the_range_of_float16():
    assert build(Case(Lq=300, data="large", dtype="float16")).q.abs().max() == 6e4


@pytest.mark.parametrize("D", [1, 8, 64, 256])
def test_negative_scores_all_lie_far_below_zero(D):
    assert scores("negative", D=D).max() < -30


@pytest.mark.parametrize("D", [1, 16, 256])
def test_ascending_scores_raise_the_maximum_in_every_tile_of_sixteen(D):
    s = scores("ascending", D=D, Lk=128)
    highest = s.unflatten(3, (8, 16)).amax(4)
    assert (highest.diff(dim=3) > 0).all()


@pytest.mark.parametrize("D", [1, 16, 256])
def test_needle_gives_one_key_most_of_the_weight_in_most_rows(D):
    p = scores("needle", D=D, Lk=100).softmax(3)
    assert (p.amax(3) > 0.9).double().mean() > 0.3


def test_constant_rows_of_q_and_k_are_equal():
    inputs = build(Case(**SIZES, data="constant"))
    assert torch.equal(inputs.k, inputs.k[:, :, :1].expand_as(inputs.k))
    assert torch.equal(inputs.q, inputs.q[:, :, :1].expand_as(inputs.q))


def test_ties_gives_exactly_equal_scores():
    s = scores("ties", D=2, Lk=64)
    assert all(row.unique().numel() < row.numel() / 4 for row in s.flatten(0, 2))


def test_onehot_rows_have_at_most_one_channel():
    inputs = build(Case(**SIZES, data="onehot"))
    assert ((inputs.k != 0).sum(3) <= 1).all() and (inputs.k != 0).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_subnormal_v_holds_subnormal_numbers(dtype):
    v = build(Case(Lk=64, Dv=8, data="subnormal", dtype=dtype)).v
    assert (v.abs() < torch.finfo(v.dtype).tiny).double().mean() > 0.3 and (v != 0).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_tiny_numbers_are_normal_ones(dtype):
    for seed in range(4):
        q = build(Case(Lq=64, D=8, data="tiny", dtype=dtype, seed=seed)).q
        assert q.abs().max() < 0.05 and (q.abs() >= torch.finfo(q.dtype).tiny).double().mean() > 0.9


def test_cancel_leaves_a_small_mean_of_large_numbers():
    v = build(Case(Lk=64, Dv=8, data="cancel")).v
    assert v.abs().min() > 900 and v.mean(2).abs().max() < 1


def test_gradient_ones_and_zero_are_what_they_say():
    assert (build(Case(**SIZES, grad="ones")).do == 1).all() and (build(Case(**SIZES, grad="zero")).do == 0).all()


def test_the_gradient_follows_the_data_regime_unless_it_names_its_own():
    assert build(Case(**SIZES, data="tiny")).do.abs().max() < 0.05
    assert build(Case(**SIZES, data="tiny", grad="cancel")).do.abs().min() > 9


def nonfinite(inputs):
    return {name: (~getattr(inputs, name).isfinite()).sum().item() for name in ("q", "k", "v", "do")}


def test_nonfinite_puts_one_number_into_some_tensors_and_into_each_for_some_seed():
    counts = [nonfinite(build(Case(**SIZES, data="nonfinite", seed=seed))) for seed in range(40)]
    assert all(max(c.values()) == 1 for c in counts)
    assert {name for c in counts for name, n in c.items() if n} == {"q", "k", "v", "do"}


def test_nonfinite_keys_are_live():
    for seed in range(40):
        inputs = build(Case(**SIZES, data="nonfinite", seed=seed, mask=Padding((3, 5))))
        assert inputs.k[0, :, 3:].isfinite().all() and inputs.v[1, :, 5:].isfinite().all()


def test_nonfinite_finds_a_place_in_the_smallest_case():
    assert any(sum(nonfinite(build(Case(data="nonfinite", seed=seed))).values()) for seed in range(10))


def test_nonfinite_holds_nan_and_both_infinities():
    found = [build(Case(data="nonfinite", seed=seed)).q for seed in range(60)]
    assert any(x.isnan() for x in found) and any(x == np.inf for x in found) and any(x == -np.inf for x in found)


def test_nonfinite_masked_lies_exactly_in_the_rows_that_no_query_of_the_head_sees():
    for seed in range(12):
        inputs = build(Case(**SIZES, data="nonfinite_masked", seed=seed, mask=Causal()))
        bad_k, bad_v = ~inputs.k.isfinite(), ~inputs.v.isfinite()
        assert not bad_k[:, :, :9].any() and not bad_v[:, :, :9].any()
        assert bad_k[:, :, 9:].all() or bad_v[:, :, 9:].all()
        assert inputs.q.isfinite().all() and inputs.do.isfinite().all()


def test_nonfinite_masked_is_normal_where_nothing_is_masked_exactly():
    soft = Case(**SIZES, data="nonfinite_masked", mask=Causal(), mask_form="additive", mask_fill="-1e4")
    for case in (soft, Case(**SIZES, data="nonfinite_masked")):
        assert torch.equal(build(case).k, build(Case(**SIZES)).k)


def test_expanded_keys_are_poisoned_only_where_every_head_masks_them():
    for seed in range(6):
        case = Case(
            **SIZES, data="nonfinite_masked", seed=seed, mask=Padding((3, 5)), layout_k="expand", layout_v="expand"
        )
        inputs = build(case)
        assert inputs.k[:, :, :5].isfinite().all() and inputs.v[:, :, :5].isfinite().all()


def pinned_cases():
    """Twenty cases over the finite regimes, the gradients and the dtypes."""
    finite = [name for name in DATA if not name.startswith("nonfinite")] + ["normal"]
    return [
        Case(
            **SIZES,
            data=data,
            grad=GRADS[n % 5],
            dtype=DTYPES[n % 4],
            seed=n,
            bias="normal",
            mask=Causal(),
            lse_grad=True,
        )
        for n, data in enumerate(finite)
    ]


def digest(case):
    inputs = build(case)
    tensors = (inputs.q, inputs.k, inputs.v, inputs.do, inputs.bias, inputs.dlse, inputs.keep)
    sha = hashlib.sha256()
    for x in tensors:
        sha.update(x.contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


PINNED = """
c504e8cde6e1eb1f2aaebc1a971ef8fd3de497292c808525899b8f2e9b7d0698
a00e3da2507179cf0ca9a4180c271fd280f741685640ebb86f7b61612bb062f5
ad8e313fee0e0aeedeb7af3a04652095770226fb85c4e2462993d66e4a5ff550
53eded202481236b05e53414d88fc9e5319f2eeb333024feacb818e927c0f9a3
0057c02c13047a2b4ffb8b5f73692370fb4b07d6e6660fb2eeba716b6c5f0de6
22ca998784a07cad7d269e4a3af0bf16ccdde387b2a7b9f355a475478f5f3a56
fdbf07597b77a067d456a0902879bec8d4fcc3d15e3fbd77dc4cf69731b0d368
fccf85b70c36e878d4d0c463aacde0d89d5a490ea9401960e6c400248f2fa874
0968c5fef674049c37a63cd5b1a83ac3d7c84701ef9442c90bdf5e039f753819
6dbb0637cd044a5a092267400e415385eaca795a1b2783d105d76d6dea037bc9
8a512bd418220e7a11307bea0cb11bb874faab9a01d3a2a03c710c33c43249bc
3b688d212f4a04a338aab0ec08f0efc061e01a6ed196e0587e74fee0ca263f0f
9f208f5bcb6822ea40d0a7f07424300e5ced7f7a6f993812ea3938e8028394eb
ca85dc6d782192cf40b62b7f425df4e106da888a0eb9da35be42b9854e87a86c
a30ebfc808ddef5b23fb5b75d6c28728922a3e5e9046e299e62033862fa91d0b
0b7b73edf7ce1f8fbace45c21ecd6dfc7e59c924391f255b35edfc2be62acee2
b6e636c85d6b0bec59ed8b9c8cfa2d997f9950d65244427d5e28b0b4d7244947
baf56d65c35dd157d0c0766edc4853dcdc29174b5cd5b1ffe952a52202e1757c
e135aad1f4a865b15c8c7e6bf3069cbc61d8bc80cd054a3ed64d220db7e586fb
e8345cf20a319eae3063a4b8eac0485238f1998bded3eed195ccf5d91f4e92c7
"""


def test_the_bits_of_twenty_inputs_are_pinned():
    assert "\n".join(digest(case) for case in pinned_cases()) == PINNED.strip()
