"""Every update rule steps as torch.optim does, bit for bit, with every option, size and instruction set.

The torch side takes an exactly rounded square root (tests.kernels.parity.exact_square_root); torch's own is its
math library's, differs between machines and is not always rounded correctly. docs/update_rules.md.
"""

from __future__ import annotations

import platform
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from bench.rule_case import Case, state_names
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from psstore import _core, errors
from psstore.hyper import HYPER_DEFAULTS
from tests.kernels.parity import (
    Array,
    CoreOptimizer,
    all_cases,
    distances,
    exact_square_root,
    gradients,
    torch_optimizer,
)

CASES = all_cases()

torch_fuses = pytest.mark.skipif(
    platform.machine() in ("x86_64", "AMD64") and torch.backends.cpu.get_cpu_capability() == "DEFAULT",
    reason="on x86-64 without AVX2 torch has no fused multiply-add, and rounds otherwise than anywhere else",
)

SIZES = (0, 1, 3, 7, 8, 15, 16, 17, 31, 33, 1000, 2047, 2048, 2049, 4099)
"""Around the widths of vector registers (8 and 16 floats) and of the kernels' blocks (2048)."""

REPRESENTATIVE = [
    Case("sgd", {"momentum": 0.9, "weight_decay": 0.03, "nesterov": 1.0}),
    Case("sgd", {"momentum": 0.9, "dampening": 0.3, "maximize": 1.0}),
    Case("adam", {"amsgrad": 1.0, "weight_decay": 0.03}),
    Case("adamw", {"beta1": 0.3}),
    Case("adagrad", {"lr_decay": 0.01, "initial_accumulator_value": 0.1}),
    Case("rmsprop", {"momentum": 0.9, "centered": 1.0, "weight_decay": 0.03}),
    Case("delayed_nesterov", {"every": 2.0, "activation": 0.1}),
]
"""One per rule, with the options that touch the most memory."""


def start(num_elems: int, dtype: str = "float32") -> Array:
    return np.random.default_rng(1).standard_normal(num_elems).astype(dtype)


def assert_equal(found: dict[str, int]) -> None:
    assert found == dict.fromkeys(found, 0), "largest distance from torch in ulp"


@torch_fuses
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rule_equals_torch_after_1000_steps_in_float32(case: Case) -> None:
    with exact_square_root():
        assert_equal(distances(case, start(2051), gradients(2051, 1000, "float32")))


@torch_fuses
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rule_equals_torch_after_300_steps_in_float64(case: Case) -> None:
    if case.options.get("beta1") == 0.3 and torch.__version__ < "2.5":
        pytest.skip("torch 2.4 rounds lerp otherwise, for weights of 0.5 and more of float64")
    with exact_square_root():
        assert_equal(distances(case, start(515, "float64"), gradients(515, 300, "float64")))


@torch_fuses
@pytest.mark.parametrize("case", [case for case in CASES if case.rule == "sgd"], ids=str)
def test_sgd_needs_no_square_root_and_equals_torch_as_it_is(case: Case) -> None:
    assert_equal(distances(case, start(4099), gradients(4099, 100, "float32")))


@torch_fuses
@pytest.mark.parametrize("instruction_set", _core.instruction_sets())
@pytest.mark.parametrize("num_elems", SIZES)
def test_every_instruction_set_equals_torch_at_every_size(num_elems: int, instruction_set: str) -> None:
    for case in REPRESENTATIVE:
        for dtype in ("float32", "float64"):
            grads = gradients(num_elems, 4, dtype)
            with exact_square_root():
                assert_equal(distances(case, start(num_elems, dtype), grads, instruction_set=instruction_set))


@torch_fuses
def test_a_tensor_that_torch_splits_over_threads_equals_torch() -> None:
    num_elems = 3 * 32768 + 5  # torch's grain is 32768 elements per thread
    for case in REPRESENTATIVE:
        with exact_square_root():
            assert_equal(distances(case, start(num_elems), gradients(num_elems, 2, "float32")))


any_float32 = st.one_of(
    st.floats(width=32),
    st.floats(width=32, min_value=-(2.0**-120), max_value=2.0**-120),  # subnormals and what squares to zero
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0**127, -(2.0**127), float("inf"), float("nan")]),
)
adversarial = hnp.arrays(np.float32, 19, elements=any_float32)


@torch_fuses
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's square root of what must not have one
@settings(deadline=None, max_examples=60)
@given(value=adversarial, grads=st.lists(adversarial, min_size=1, max_size=3), case=st.sampled_from(CASES))
def test_adversarial_numbers_step_as_torch_does_on_every_instruction_set(
    value: Array, grads: list[Array], case: Case
) -> None:
    for instruction_set in _core.instruction_sets():
        with exact_square_root():
            assert_equal(distances(case, value, grads, instruction_set=instruction_set))


def test_momentum_that_a_schedule_turns_on_starts_from_the_gradient() -> None:
    value, grad = start(33), start(33)[::-1].copy()
    plain = CoreOptimizer(Case("sgd", {}), value)
    plain.step(grad)
    later = CoreOptimizer(Case("sgd", {"momentum": 0.9}), value)
    later.step(grad)
    assert np.array_equal(later.state["momentum_buffer"], grad)


def buffers_of_torch(case: Case) -> set[str]:
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    optimizer = torch_optimizer(case, parameter)
    optimizer.step()
    return {name for name, buffer in optimizer.state[parameter].items() if isinstance(buffer, torch.Tensor)} - {"step"}


def test_states_name_every_buffer_that_torch_keeps_under_some_options() -> None:
    kept: dict[str, set[str]] = {rule: set() for rule in _core.RULES}
    for case in CASES:
        kept[case.rule] |= buffers_of_torch(case)
    assert {rule: set(names) for rule, names in _core.STATES.items()} == kept


def test_states_have_a_slot_of_their_own_whatever_the_options() -> None:
    assert _core.STATES["rmsprop"] == ("square_avg", "momentum_buffer", "grad_avg")
    for case in CASES:
        used = state_names(case)
        assert used == [name for name in _core.STATES[case.rule] if name in used]


# ---- a rule that torch has not ----------------------------------------------------------------------


def test_delayed_nesterov_with_every_gradient_is_sgd_with_nesterov_momentum_bit_for_bit() -> None:
    delayed = CoreOptimizer(Case("delayed_nesterov", {"lr": 0.1, "momentum": 0.9, "every": 1.0}), start(515))
    plain = CoreOptimizer(Case("sgd", {"lr": 0.1, "momentum": 0.9, "nesterov": 1.0}), start(515))
    for grad in gradients(515, 20, "float32"):
        delayed.step(grad)
        plain.step(grad)
        assert np.array_equal(delayed.value, plain.value)
        assert np.array_equal(delayed.state["momentum_buffer"], plain.state["momentum_buffer"])


@pytest.mark.parametrize("activation", [0.0, 0.1, 0.25])
def test_delayed_nesterov_is_the_papers_algorithm(activation: float) -> None:
    """arXiv:2401.09135, algorithm 3, with its letters."""
    theta, m, delta = start(31, "float64"), np.zeros(31), np.zeros(31)
    epsilon, beta, c, n = 0.1, 0.9, activation, 4
    ours = CoreOptimizer(Case("delayed_nesterov", {"lr": epsilon, "activation": c}), theta.copy())
    for t, g in enumerate(gradients(31, 25, "float64")):
        delta = delta + g
        if (t + 1) % n == 0:
            m = beta * m + delta / n
            theta = theta - epsilon * ((1 - c * n + c) * beta * m + g / n)
            delta = np.zeros(31)
        else:
            theta = theta - epsilon * (c * beta * m + g / n)
        ours.step(g)
        np.testing.assert_allclose(ours.value, theta, rtol=1e-13, atol=1e-12)
        np.testing.assert_allclose(ours.state["momentum_buffer"], m, rtol=1e-13, atol=1e-12)


# ---- hyper-parameters -------------------------------------------------------------------------------


def step_with(rule: str, hyper: dict[str, float]) -> None:
    _core.reduce_update(
        _core.RULES[rule],
        hyper,
        step=1,
        value=bytearray(16),
        state={},
        contributions=[],
        divisor=1.0,
        dtype=_core.DTYPES["float32"],
    )


@pytest.mark.parametrize("rule", HYPER_DEFAULTS)
def test_a_hyper_parameter_that_is_missing_or_unknown_is_refused(rule: str) -> None:
    hyper = dict(HYPER_DEFAULTS[rule])
    with pytest.raises(errors.BadHyper, match="'temperature' is unknown"):
        step_with(rule, {**hyper, "temperature": 1.0})
    for name in hyper:
        with pytest.raises(errors.BadHyper, match=f"'{name}' is missing"):
            step_with(rule, {other: value for other, value in hyper.items() if other != name})


@pytest.mark.parametrize(
    ("rule", "name", "value"),
    [
        ("sgd", "lr", -0.1),
        ("sgd", "momentum", -0.1),
        ("sgd", "weight_decay", float("nan")),
        ("sgd", "nesterov", 1.0),  # without momentum
        ("sgd", "maximize", 0.5),
        ("adam", "beta1", 1.0),
        ("adamw", "beta2", 1.0),
        ("adam", "eps", -1e-8),
        ("adagrad", "lr_decay", -1.0),
        ("adagrad", "initial_accumulator_value", -1.0),
        ("rmsprop", "alpha", -0.1),
        ("rmsprop", "lr", float("inf")),
        ("delayed_nesterov", "momentum", 0.0),
        ("delayed_nesterov", "momentum", 1.0),
        ("delayed_nesterov", "every", 0.0),
        ("delayed_nesterov", "every", 2.5),
        ("delayed_nesterov", "activation", 0.26),  # every is 4
        ("delayed_nesterov", "activation", -0.1),
    ],
)
def test_a_hyper_parameter_out_of_range_is_refused_by_name(rule: str, name: str, value: float) -> None:
    with pytest.raises(errors.BadHyper, match=f"'{name}'"):
        step_with(rule, {**HYPER_DEFAULTS[rule], name: value})


@pytest.mark.parametrize(("dtype", "fits"), [("float32", False), ("float64", True)])
@pytest.mark.parametrize(
    ("rule", "name"), [("sgd", "lr"), ("sgd", "dampening"), ("adamw", "eps"), ("rmsprop", "momentum")]
)
def test_a_hyper_parameter_that_is_infinite_in_the_arithmetic_is_refused_by_name(
    rule: str, name: str, dtype: str, fits: bool
) -> None:
    hyper = {**HYPER_DEFAULTS[rule], name: 1e39}
    refused = pytest.raises(errors.BadHyper, match=rf"'{name}' is 1e\+39, which is infinite in float32")
    with nullcontext() if fits else refused:
        _core.check_hyper(_core.RULES[rule], hyper, _core.DTYPES[dtype])
    _core.check_hyper(_core.RULES[rule], {**hyper, name: 3.4e38}, _core.DTYPES[dtype])


def test_a_state_that_the_rule_needs_and_lacks_is_refused_by_name() -> None:
    with pytest.raises(errors.BadArgument, match="'exp_avg'"):
        step_with("adam", dict(HYPER_DEFAULTS["adam"]))


def test_rules_of_core_and_client_are_the_same() -> None:
    assert set(HYPER_DEFAULTS) == set(_core.RULES)
