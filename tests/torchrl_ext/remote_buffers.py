"""A user's script: a buffer that lives in a process of its own, which two others fill, and which this one samples.

    python tests/torchrl_ext/remote_buffers.py FOLDER KIND

KIND is ``ray``, ``distributed`` (Ray with torch's transport) or ``rpc``; Ray puts its files into FOLDER. Prints how
many elements there are in the end, and ends with an error where one of them is not what was added.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from functools import partial
from typing import Any

import torch
from torch.distributed import rpc
from torchrl.data import LazyTensorStorage, RemoteTensorDictReplayBuffer, TensorDictReplayBuffer

from tests.torchrl_ext.collecting import free_port, have_warnings_be_errors, ray_here
from tests.torchrl_ext.frame_data import Videos
from tests.torchrl_ext.frame_workers import contents
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


def rank(number: int, port: int, done: list[int]) -> None:
    """One process of three: this one samples, the second holds the buffer, the third adds to it."""
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    rpc.init_rpc(f"rank{number}", rank=number, world_size=3, rpc_backend_options=rpc.TensorPipeRpcBackendOptions())
    if number == 0:
        options = {"storage": FrameStorage(SIZE), "batch_size": BATCH}
        buffer = rpc.remote("rank1", RemoteTensorDictReplayBuffer, kwargs=options)
        for batch in batches(1):
            buffer.rpc_sync().extend(batch)
        rpc.rpc_sync("rank2", fill_by_rpc, args=(buffer,))
        for _ in range(5):
            check(buffer.rpc_sync().sample(), whole=False)
        done.append(check(buffer.rpc_sync().__getitem__(slice(None)), whole=True))
    rpc.shutdown()


def fill_by_rpc(buffer: Any) -> None:
    """Add what the second collector gives."""
    for batch in batches(2):
        buffer.rpc_sync().extend(batch)


def with_rpc() -> int:
    """``RemoteTensorDictReplayBuffer``, as an RRef of torch's RPC."""
    port, done = free_port(), list[int]()
    context = multiprocessing.get_context("spawn")
    others = [context.Process(target=rank, args=(number, port, [])) for number in (1, 2)]
    for other in others:
        other.start()
    rank(0, port, done)
    for other in others:
        other.join()
    return done[0]


def main() -> None:
    folder, kind = sys.argv[1:]
    torch.set_num_threads(1)
    held = with_rpc() if kind == "rpc" else with_ray(folder, kind)
    sys.stdout.write(json.dumps(held) + "\n")


if __name__ == "__main__":
    have_warnings_be_errors()
    main()
