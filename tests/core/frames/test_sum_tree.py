from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.frames.sum_tree import SumTree

weights = st.one_of(st.just(0.0), st.floats(1e-6, 1e6))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), initial=st.lists(weights, min_size=1, max_size=300))
def test_sum_tree_matches_numpy(data: st.DataObject, initial: list[float]) -> None:
    model = np.tile(np.array(initial), data.draw(st.sampled_from([1, 1, 40])))
    tree = SumTree(model)
    for _ in range(data.draw(st.integers(0, 4))):
        items = np.array(data.draw(st.lists(st.integers(0, len(model) - 1), max_size=20)), dtype=np.int64)
        values = np.array(data.draw(st.lists(weights, min_size=len(items), max_size=len(items))))
        tree.set(items, values)
        model[items] = values
    assert np.array_equal(tree.weights, model)
    assert tree.total == pytest.approx(model.sum(), rel=1e-12)
    positions = np.append(np.linspace(0, 1, 5000, endpoint=False), 1.0) * tree.total
    found = tree.find(positions)
    if model.any():
        assert (model[found] > 0).all()
        ends = np.cumsum(model)
        slack = 1e-9 * model.sum()
        assert (ends[found] - model[found] <= positions + slack).all()
        assert (ends[found] >= positions - slack).all()
        assert found[-1] == np.flatnonzero(model)[-1]


@pytest.mark.parametrize("value", [-1.0, np.nan, np.inf])
def test_invalid_weights_are_refused(value: float) -> None:
    tree = SumTree(np.ones(40))
    with pytest.raises(InvalidArgumentError, match="expected finite values of at least 0"):
        tree.set(np.array([3, 4]), np.array([2.0, value]))
    assert tree.total == 40
    with pytest.raises(InvalidArgumentError, match="expected finite values of at least 0"):
        SumTree(np.array([value]))
