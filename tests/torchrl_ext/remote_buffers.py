"""A user's script: a buffer that lives in a process of its own, which two others fill, and which this one samples.

    python tests/torchrl_ext/remote_buffers.py FOLDER KIND

KIND is ``ray`` or ``distributed`` (Ray with torch's transport); Ray puts its files into FOLDER. Prints how
many elements there are in the end, and ends with an error where one of them is not what was added.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any

import torch
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from tests.torchrl_ext.collecting import have_warnings_be_errors, ray_here
from tests.torchrl_ext.frame_data import Videos, contents
from torchrl_ext import FrameStorage

KEYS = ["pixels", ("next", "pixels"), "action", ("next", "reward"), ("next", "done")]
ROWS, BATCHES, SIZE, BATCH = 20, 3, 200, 16


def batches(seed: int) -> list[Any]:
    """What a collector gives."""
    videos = Videos(2, seed=seed)
    return [videos.collect(ROWS // 2).reshape(-1) for _ in range(BATCHES)]


def check(rows: Any, *, whole: bool) -> int:
    """Compare rows with what both collectors gave; return how many there are.

    :param whole: whether all of it has to be there.
    """
    plain = TensorDictReplayBuffer(storage=LazyTensorStorage(SIZE), batch_size=BATCH)
    for seed in (1, 2):
        for batch in batches(seed):
            plain.extend(batch)
    known, found = contents(plain[:], KEYS), contents(rows, KEYS)
    assert found == known if whole else set(found) <= set(known), "there is something else than was added"
    return len(rows)


def with_ray(folder: str, transport: str) -> int:
    """``RayReplayBuffer``: two tasks add to its actor at a time."""
    import ray
    from torchrl.data import RayReplayBuffer

    with ray_here(folder):
        buffer = RayReplayBuffer(
            replay_buffer_cls=TensorDictReplayBuffer,
            storage=partial(FrameStorage, SIZE),
            batch_size=BATCH,
            remote_config={"num_cpus": 0},
            transport=transport,
        )
        try:
            for batch in batches(1):
                buffer.extend(batch)

            @ray.remote(num_cpus=0)
            def fill(client: Any) -> None:
                for batch in batches(2):
                    client.extend(batch)

            ray.get(fill.remote(buffer.client()))
            for _ in range(5):
                check(buffer.sample(), whole=False)
            return check(buffer[:], whole=True) if transport == "ray" else len(buffer)
        finally:
            buffer.close()


def main() -> None:
    folder, kind = sys.argv[1:]
    torch.set_num_threads(1)
    sys.stdout.write(json.dumps(with_ray(folder, kind)) + "\n")


if __name__ == "__main__":
    have_warnings_be_errors()
    main()
