"""Which worker hangs, told from the stacks that faulthandler writes."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["is_idle", "main_stack", "without_our_frames"]

_MAIN = "Current thread"
# Where Python code waits for other processes. What matters is who called these.
_WAITING = (
    "/selectors.py",
    "/socket.py",
    "/threading.py",
    "/multiprocessing/connection.py",
    "/multiprocessing/queues.py",
    "/multiprocessing/synchronize.py",
)


# The last frame of ours before those of the user.
_OURS = '/rl_ext_core/processes/_child.py", line '


def without_our_frames(text: str) -> str:
    """Leave out the frames that are the same in all workers, from the function that they run outwards.

    :param text: of faulthandler
    :return: the rest
    """
    lines: list[str] = []
    skipping = False
    for line in text.splitlines():
        skipping = line.startswith("  ") and (skipping or _OURS in line)
        if skipping and lines and "/multiprocessing/process.py" in lines[-1]:
            lines.pop()
        if not skipping:
            lines.append(line)
    return "\n".join(lines)


def main_stack(text: str) -> list[str]:
    """List the frames of the thread that got the signal, innermost first: the kernel picks the main thread.

    :param text: of faulthandler
    :return: lines of the form ``File "...", line 1 in name``
    """
    after = text.partition(_MAIN)[2].splitlines()[1:]
    frames = []
    for line in after:
        if not line.startswith("  "):
            break
        frames.append(line.strip())
    return frames


def is_idle(frames: Sequence[str], idle_in: Sequence[str]) -> bool:
    """Tell whether a worker waits for its next command.

    An environment may wait for a process of its own with the same calls. So the frame counts that waits: the innermost
    one that is not the standard library's.

    :param frames: from :func:`main_stack`
    :param idle_in: parts of lines that stand for waiting
    :return: whether the line of that frame, or of one that it has called, contains one of them
    """
    for frame in frames:
        if any(part in frame for part in idle_in):
            return True
        if not any(f'{file}"' in frame for file in _WAITING):
            return False
    return False
