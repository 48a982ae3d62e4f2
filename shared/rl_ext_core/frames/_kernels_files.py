"""Reading what a batch needs of a file, without Python between one region and the next."""

from __future__ import annotations

from numba import uint64

from rl_ext_core.frames._compile import kernel
from rl_ext_core.frames._memory import call_pread


@kernel
def read_regions(pread, descriptor, places, sizes, target):  # type: ignore[no-untyped-def]
    """Reads regions of a file, one behind the other into memory.

    :param pread: address of the C function.
    :param places: (n,) where the regions begin in the file.
    :param sizes: (n,) how long they are.
    :param target: address.
    :return: how many could not be read in one go.
    """
    failed = 0
    address = uint64(target)
    for i in range(places.shape[0]):
        if call_pread(uint64(pread), descriptor, address, sizes[i], places[i]) != sizes[i]:
            failed += 1
        address += uint64(sizes[i])
    return failed
