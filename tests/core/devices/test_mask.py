from __future__ import annotations

import os
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rl_ext_core.devices import cuda
from tests.core.devices import machines

FASTEST_FIRST = (5, 2, 7, 0, 1, 6, 3, 4)


def shown_by_torch(mask: str | None, by_pci: tuple[str, ...], in_order: tuple[str, ...]) -> tuple[str, ...]:
    """Return which of the UUIDs, in NVML's order and in the order of indices, torch's parser shows."""
    with mock.patch.dict("os.environ", {} if mask is None else {cuda.MASK: mask}, clear=mask is None):
        entries = torch.cuda._parse_visible_devices()
    if entries and isinstance(entries[0], str):
        ordinals = torch.cuda._transform_uuid_to_ordinals([str(entry) for entry in entries], list(by_pci))
        return tuple(by_pci[ordinal] for ordinal in ordinals)
    shown = []
    for entry in entries:
        if int(entry) >= len(in_order):
            break
        shown.append(in_order[int(entry)])
    return tuple(shown)


indices = st.integers(-2, 9).map(str)
padded = st.tuples(st.sampled_from([*list(" \t+-0x"), ""]), indices, st.sampled_from(["", " ", "gpu", "."]))
uuids = st.tuples(st.integers(0, 7), st.integers(0, 40)).map(lambda drawn: machines.uuid(drawn[0])[: drawn[1]])
junk = st.text("0123456789,+- \tGPUMIabcf.x²٣_", max_size=12)
masks = st.one_of(
    st.none(),
    junk,
    st.lists(indices, max_size=9).map(",".join),
    st.lists(uuids, max_size=5).map(",".join),
    st.lists(st.one_of(indices, padded.map("".join), uuids, junk), max_size=6).map(",".join),
)


@settings(max_examples=1000 if "CI" in os.environ else 300)
@given(mask=masks, count=st.integers(0, 8), order=st.sampled_from([None, "PCI_BUS_ID", "FASTEST_FIRST"]))
@example(mask="0 1", count=4, order=None)
@example(mask="0,0", count=4, order=None)
@example(mask="1gpu2,2ampere", count=4, order=None)
@example(mask="GPU-aaaa", count=4, order="PCI_BUS_ID")
@example(mask="-0", count=4, order=None)
@example(mask="٣", count=8, order=None)
@example(mask="²", count=4, order=None)
def test_visible_gpus_match_torch_for_any_mask(mask: str | None, count: int, order: str | None) -> None:
    fastest_first = [number for number in FASTEST_FIRST if number < count]
    machine = machines.machine(count, fastest_first=fastest_first)
    environ = {name: text for name, text in ((cuda.MASK, mask), (cuda.ORDER, order)) if text is not None}
    visible = cuda.visible(machine, environ)
    by_pci = tuple(gpu.uuid for gpu in machine.gpus)
    counted = by_pci if order == "PCI_BUS_ID" else tuple(by_pci[number] for number in fastest_first)
    try:
        expected = shown_by_torch(mask, by_pci, counted)
    except ValueError:
        return  # torch raises an error on such a mask
    assert visible.uuids == expected


@pytest.mark.parametrize(
    ("mask", "shown", "ends"), [("+", 0, True), ("1,+,2", 1, True), ("2,1²", 2, False), ("1," + "9" * 5000, 1, True)]
)
def test_mask_that_torch_rejects_is_read_up_to_the_invalid_entry(mask: str, shown: int, ends: bool) -> None:
    machine = machines.machine()
    by_pci = tuple(gpu.uuid for gpu in machine.gpus)
    with pytest.raises(ValueError, match="int"):
        shown_by_torch(mask, by_pci, by_pci)
    visible = cuda.visible(machine, {cuda.MASK: mask})
    assert len(visible.uuids) == shown
    assert (visible.stop_reason is not None) == ends


FIRST, SECOND = "MIG-11111111-aaaa-5000-8000-000000000001", "MIG-22222222-aaaa-5000-8000-000000000002"


@pytest.mark.parametrize(
    ("mask", "gpu", "mig", "complete"),
    [
        (SECOND, 1, SECOND, True),
        (f"{SECOND},{FIRST}", 1, SECOND, False),
        (f"MIG-{machines.uuid(1)}/7/0", 1, f"MIG-{machines.uuid(1)}/7/0", True),
        (f"MIG-{machines.uuid(0)}/7/0", None, None, False),
        (f"0,{FIRST}", 0, None, False),
        # A GPU with MIG slices shows only its first slice, which hides all other devices.
        (machines.uuid(1), 1, FIRST, False),
        ("0,1,2", 1, FIRST, False),
        (None, 1, FIRST, False),
        ("0", 0, None, True),
    ],
)
@pytest.mark.parametrize("order", ["PCI_BUS_ID", "FASTEST_FIRST"])
def test_mask_shows_at_most_one_mig_slice(
    mask: str | None, gpu: int | None, mig: str | None, complete: bool, order: str
) -> None:
    machine = machines.machine(mig={1: [FIRST, SECOND]})
    environ = {cuda.ORDER: order} if mask is None else {cuda.MASK: mask, cuda.ORDER: order}
    visible = cuda.visible(machine, environ)
    assert visible.uuids == (() if gpu is None else (machines.uuid(gpu),))
    assert visible.mig == mig
    assert (visible.stop_reason is None) == complete
