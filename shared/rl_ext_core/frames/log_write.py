"""Kernel that writes one transition of each environment: finds the new frames, and encodes them as entries of the log.

An entry is one frame: ``[kind: 3 bits][narrow: 1 bit][distance: 14 bits][bytes: 14 bits]`` and its contents. The
distance leads to the previous entry of the same stream, in words. If a number needs more bits, ``bytes`` is ``0x3FFF``,
and two words with both numbers follow. Entries begin at whole words. By kind, the contents are

- RAW: the frame
- KEY_FRAME: the same; later chains may start from it
- START: words back to a key frame, and the patch from it
- DELTA: the patch from the previous entry's frame
- OPAQUE: bytes of a codec
- RESIDUAL_START, RESIDUAL_DELTA: as START and DELTA, with residuals instead of a patch
- QUANTIZED: the frame, with an error

A chain is an entry that needs no previous one, and the DELTA entries after it. No entry refers to another segment.
"""

from __future__ import annotations

from numba import int64, uint32, uint64

from rl_ext_core.frames.interleave import extract_frame, is_interleaved_shift, is_stack_of_four
from rl_ext_core.frames.kernel_primitives import (
    SUM_START,
    add_bytes,
    are_equal,
    atomic_kernel,
    copy_frame,
    fold_sum,
    inner,
    int64s,
    mix_word,
    publish_u32,
    specialize,
    uint32s,
    zero_bytes,
)
from rl_ext_core.frames.layout import INTERLEAVED, PLANAR
from rl_ext_core.frames.log_patch import (
    NARROW,
    SIZE_MASK,
    WORK_FRAMES,
    apply_patch,
    encode_codes,
    encode_patch,
)
from rl_ext_core.frames.log_quantize import quantize_frame
from rl_ext_core.frames.log_state import (
    ABOVE,
    BACKOFF,
    BLOBS,
    BOUND,
    BUDGET,
    CAPACITY,
    CHAIN,
    CHAIN_BYTES,
    CHAIN_LENGTH,
    CHANNEL,
    CHANNELS,
    DATA_INPUT,
    DECODED,
    DELTA,
    DEPTH,
    DIED,
    END,
    ENTRIES,
    FRAME_BYTES,
    FRAMED,
    FRAMES,
    FULL,
    HAS_STACK,
    ITEMSIZE,
    KEY,
    KEY_BYTES,
    KEY_FRAME,
    LIVE,
    MASK,
    MAX_CHAIN,
    N_COLUMNS,
    N_ENVS,
    N_SLOTS,
    N_STACK,
    N_STREAM,
    NEW_FRAMES,
    NEWEST,
    NEXT,
    OBS_INPUT,
    OBS_ORDER,
    OPAQUE,
    PADDED_BYTES,
    PAIRS,
    PIXELS,
    POSITION,
    QUANTIZED,
    RAW,
    RECORD_HEADER,
    RECORDS,
    RESIDUAL_DELTA,
    RESIDUAL_START,
    RESTART_WORDS,
    ROW_BYTES,
    ROW_INPUT,
    ROWS,
    SCRATCH,
    SEGMENT_SHIFT,
    SEQUENCE,
    SHARED_KEY,
    SIZE_BITS,
    SLOT,
    SLOTS,
    START,
    STORED,
    USED,
    USED_WORDS,
    address_at,
    column_start,
    read_header,
    shape_of,
    stream_of,
    write_header,
)

# Results of ``push``.
WRITTEN, NEEDS_SEGMENT, SEGMENT_DIED = range(3)

_KEY_RENT = 16  # a key is replaced once the patches that start from it have taken as much as so many frames
_MAX_BACKOFF = 7
# Work memory of a column, in pitches of a padded frame and ``PITCH_SLACK`` bytes; and the parts of it.
PITCH_SLACK = 64
SCRATCH_FRAMES, SCRATCH_FRAMES_BOUNDED = 4 + WORK_FRAMES, 12 + WORK_FRAMES
_BASE, _PATCH, _WORK = range(2, 5)  # after two frames
_RESIDUAL_FRAME, _RESIDUALS = 5 + WORK_FRAMES, 6 + WORK_FRAMES
_QUANTIZED_FRAME, _QUANTIZED, _LEVELS = range(8 + WORK_FRAMES, 11 + WORK_FRAMES)


@inner
def _kept_frame(state, c, env, slot):  # type: ignore[no-untyped-def]
    """Return the address of a slot of the newest frames of a stream."""
    return state[c + FRAMES] + (env * state[c + SLOTS] + slot % state[c + SLOTS]) * state[c + PADDED_BYTES]


@inner
def _is_gray_of_four(state, c):  # type: ignore[no-untyped-def]
    """Return whether stacks have four frames with one byte per pixel, the usual case."""
    return state[c + N_STACK] == 4 and state[c + FRAME_BYTES] == state[c + PIXELS]


@inner
def _is_shift(state, c, before, after, order, shift):  # type: ignore[no-untyped-def]
    """Return whether a stack is another one of the same memory order, moved on by ``shift`` frames."""
    n_bytes, offset = state[c + N_STACK] * state[c + FRAME_BYTES], shift * state[c + FRAME_BYTES]
    if shift and order != PLANAR:
        unit = state[c + CHANNELS] * state[c + ITEMSIZE]
        return is_interleaved_shift(uint64(before), uint64(after), n_bytes, unit, uint64(state[c + MASK]))
    return are_equal(uint64(before + offset), uint64(after), n_bytes - offset)


@inner
def continues(state, c, env, stack, order, shift):  # type: ignore[no-untyped-def]
    """Return whether a stack is the newest one of its stream, moved on by ``shift`` frames."""
    stream, n_stack, n_bytes = int64s(stream_of(state, c, env), N_STREAM), state[c + N_STACK], state[c + FRAME_BYTES]
    shape, has_stack = shape_of(state, c), stream[HAS_STACK] != 0
    slot = stream[SLOT] + state[c + SLOTS] - n_stack + 1 + shift  # of the first frame that is compared
    new, other = state[c + SCRATCH], state[c + SCRATCH] + state[c + PADDED_BYTES] + PITCH_SLACK
    whole = state[c + FRAMES] + env * state[c + SLOTS] * state[c + PADDED_BYTES]
    if has_stack and order != PLANAR:
        return _is_shift(state, c, whole, stack, order, shift)
    if shift == 0 and order != PLANAR and _is_gray_of_four(state, c):
        first, second = uint64(_kept_frame(state, c, env, slot)), uint64(_kept_frame(state, c, env, slot + 1))
        third, fourth = uint64(_kept_frame(state, c, env, slot + 2)), uint64(_kept_frame(state, c, env, slot + 3))
        return is_stack_of_four(uint64(stack), first, second, third, fourth, shape.pixels)
    for i in range(n_stack - shift):
        known, part = _kept_frame(state, c, env, slot + i), stack + i * n_bytes
        if has_stack:  # the newest stack was given in another memory order
            known = other
            extract_frame(uint64(whole), int64(INTERLEAVED), i + shift, shape, uint64(other))
        if order != PLANAR:
            part = new
            extract_frame(uint64(stack), order, i, shape, uint64(new))
        if not are_equal(uint64(part), uint64(known), n_bytes):
            return False
    return True


@inner
def _find_shift(state, c, env, stack, side):  # type: ignore[no-untyped-def]
    """Return by how many frames a stack moves the newest one of its stream on: 0 or 1; -1 if it does not continue it.

    :param side: 0 for an observation, which usually is the newest stack; 1 for a next observation, which moves it on.
    """
    if int64s(stream_of(state, c, env), N_STREAM)[NEWEST] < 0:
        return -1
    order, obs_order = state[c + OBS_ORDER + 2 * side], state[c + OBS_ORDER]
    obs = state[c + OBS_INPUT] + env * state[c + N_STACK] * state[c + FRAME_BYTES]
    for i in range(2):
        shift = side ^ i
        if shift and state[c + N_STACK] == 1:
            continue
        if side and order == obs_order:  # the observation is the newest stack, and in the caches
            found = _is_shift(state, c, obs, stack, order, shift)
        else:
            found = continues(state, c, env, stack, order, shift)
        if found:
            return shift
    return -1


@inner
def _load_key(state, c, key):  # type: ignore[no-untyped-def]
    """Copy a key frame to work memory, whose padding is zero, and return its address."""
    base = state[c + SCRATCH] + _BASE * (state[c + PADDED_BYTES] + PITCH_SLACK)
    _, _, _, _, frame = read_header(address_at(state, key))
    copy_frame(uint64(base), uint64(frame), state[c + FRAME_BYTES])
    return base


@specialize
def _append_entry(state, c, env, frame, last, at, bounded):  # type: ignore[no-untyped-def]
    """Write the entry of a new frame of a stream; return the position behind it.

    :param frame, last: Addresses of the frame and of the one before, padded with zeros.
    :param at: Position to write to.
    :param bounded: None to compile only what exact frames need, else True.
    """
    stream, n_bytes, bound = int64s(stream_of(state, c, env), N_STREAM), state[c + PADDED_BYTES], int64(0)
    if bounded is not None:
        bound = state[c + BOUND]
    if state[c + NEW_FRAMES]:
        copy_frame(uint64(state[c + NEW_FRAMES]), uint64(frame), state[c + FRAME_BYTES])
        state[c + NEW_FRAMES] += state[c + FRAME_BYTES]
        stream[NEWEST] = at
        return at
    if bound:
        last = state[c + DECODED] + env * n_bytes
    key = stream[KEY] if stream[KEY] >= 0 else state[c + SHARED_KEY]
    work, pitch = state[c + SCRATCH], n_bytes + PITCH_SLACK
    decoded, patch = work + _RESIDUAL_FRAME * pitch, work + _PATCH * pitch
    kind, found, contents = RAW, -1, frame
    opaque = state[c + BLOBS] != 0
    skipped = stream[BACKOFF] & 15 < stream[BACKOFF] >> 4 or state[c + CHAIN] == 0
    in_chain = stream[NEWEST] >= 0 and stream[CHAIN_LENGTH] < state[c + CHAIN]
    in_chain = in_chain and stream[CHAIN_BYTES] <= state[c + BUDGET]
    if opaque:
        blobs = int64s(state[c + BLOBS], 1)
        blob = int64s(state[c + BLOBS] + 8 + 16 * blobs[0], 2)
        blobs[0] += 1
        if blob[1] > 0:  # otherwise the frame itself is smaller
            kind, found, contents = OPAQUE, blob[1], blob[0]
    elif skipped:
        stream[BACKOFF] += 1
    for attempt in range(3):  # one call of encode_patch, because each one is inlined
        out = patch
        if attempt == 0:
            if opaque or skipped or not in_chain:
                continue
            base = last
        elif attempt == 1:
            if opaque or skipped or found >= 0 or key < 0 or stream[KEY_BYTES] >= _KEY_RENT * n_bytes:
                continue
            base = _load_key(state, c, key)
        else:
            # No patch at all is a large number here.
            if opaque or skipped or bound == 0 or found & SIZE_MASK <= n_bytes // 3 or not (in_chain or key >= 0):
                continue
            base, codes = decoded, work + _RESIDUALS * pitch
            out = codes + n_bytes // 4
            if bounded is not None:
                previous = last if in_chain else _load_key(state, c, key)
                encode_codes(previous, frame, codes, decoded, n_bytes, bound)
        size = encode_patch(base, frame, n_bytes, out, work + _WORK * pitch, bound)
        if attempt == 1:
            stream[KEY_BYTES] += n_bytes // 8 if size < 0 else size & SIZE_MASK
        if attempt == 2 and size >= 0:
            size += n_bytes // 4
            if found < 0 or size & SIZE_MASK < found & SIZE_MASK:
                kind, found, contents = RESIDUAL_DELTA if in_chain else RESIDUAL_START, size, codes
        elif size >= 0:
            kind, found, contents = DELTA if attempt == 0 else START, size, out
    most = n_bytes
    if bound:
        most = 3 * n_bytes // 8 if kind >= RESIDUAL_START else n_bytes // 4
    failed = found & SIZE_MASK > most
    if bounded is not None:  # noqa: SIM102
        if bound and failed and stream[BACKOFF] and not opaque:  # a single frame is not worth the errors
            out = work + _QUANTIZED * pitch
            made, levels = work + _QUANTIZED_FRAME * pitch, work + _LEVELS * pitch
            above, channel = state[c + ABOVE], state[c + CHANNEL]
            size = quantize_frame(frame, state[c + FRAME_BYTES], above, channel, bound, made, levels, out)
            if 0 <= size < found & SIZE_MASK:
                kind, found, contents = QUANTIZED, size, out
    if not opaque and not skipped:
        # After failures in a row, frames are stored whole without a look: 1, 3, 7, 7, ...
        failed = failed and in_chain
        stream[BACKOFF] = min(2 * (stream[BACKOFF] >> 4) + 1, _MAX_BACKOFF) << 4 if failed else 0
    size, narrow = found & SIZE_MASK, int64(found >= NARROW)
    if found < 0:
        size, narrow = state[c + FRAME_BYTES], 0
        rents = 0 < stream[KEY_BYTES] < _KEY_RENT * n_bytes
        if not opaque and not rents and stream[BACKOFF] & 15 == 0:
            kind = KEY_FRAME
    distance = at - stream[NEWEST] if stream[NEWEST] >= 0 else 0
    end = at + write_header(address_at(state, at), kind, narrow, size, distance)
    if kind == START or kind == RESIDUAL_START:  # noqa: SIM109
        uint32s(address_at(state, end), 1)[0] = uint32(at - key)
        end += 1
    copy_frame(uint64(address_at(state, end)), uint64(contents), size)
    end += (size + 3) // 4
    if bounded is not None:  # noqa: SIM102
        if bound and not opaque:
            _decode_newest(state, c, kind, size, narrow, contents, last, frame)
    if kind == KEY_FRAME:
        stream[KEY], stream[KEY_BYTES] = at, 0
        if state[c + SHARED_KEY] < 0:
            state[c + SHARED_KEY] = at
    if kind == DELTA or kind == RESIDUAL_DELTA:  # noqa: SIM109
        stream[CHAIN_LENGTH] += 1
        stream[CHAIN_BYTES] += size
    else:
        stream[CHAIN_LENGTH], stream[CHAIN_BYTES] = 1, 0
    stream[NEWEST] = at
    stream[ENTRIES] += 1
    return end


@inner
def _decode_newest(state, c, kind, size, narrow, contents, last, frame):  # type: ignore[no-untyped-def]
    """Update the newest frame of a stream as it will be decoded.

    :param kind, size, narrow, contents: Its entry. Residuals without their patch are decoded in work memory.
    :param last: Address of the previous frame as it will be decoded, which is replaced.
    :param frame: Address of the exact frame.
    """
    n_bytes, work = state[c + PADDED_BYTES], state[c + SCRATCH]
    if kind <= KEY_FRAME:
        copy_frame(uint64(last), uint64(frame), n_bytes)
        return
    if kind == QUANTIZED:
        made = work + _QUANTIZED_FRAME * (n_bytes + PITCH_SLACK)
        copy_frame(uint64(last), uint64(made), state[c + FRAME_BYTES])
        return
    if kind >= RESIDUAL_START:
        copy_frame(uint64(last), uint64(work + _RESIDUAL_FRAME * (n_bytes + PITCH_SLACK)), n_bytes)
        contents += n_bytes // 4
        size -= n_bytes // 4
    elif kind == START:
        copy_frame(uint64(last), uint64(work + _BASE * (n_bytes + PITCH_SLACK)), n_bytes)
    if size:
        apply_patch(last, contents, narrow, n_bytes, int64(0))


@inner
def is_padding(frame, n_bytes):  # type: ignore[no-untyped-def]
    """Return whether all bytes of a frame in work memory are zero."""
    any_bit = uint32(0)
    words = uint32s(frame, n_bytes // 4)
    for i in range(n_bytes // 4):
        any_bit |= words[i]
    return any_bit == 0


@inner
def _write_stack(state, c, env, stack, order, moved, at, bounded):  # type: ignore[no-untyped-def]
    """Write the new frames of a stack; return the position behind them.

    :param moved: Whether the stack is the newest one, moved on by one frame.
    :param bounded: As for ``_append_entry``.
    """
    stream, n_stack, shape = int64s(stream_of(state, c, env), N_STREAM), state[c + N_STACK], shape_of(state, c)
    depth, n_bytes, pitch = stream[DEPTH] if moved else 0, state[c + FRAME_BYTES], state[c + PADDED_BYTES] + PITCH_SLACK
    whole = state[c + FRAMES] + env * state[c + SLOTS] * state[c + PADDED_BYTES]
    keeps_stack = order != PLANAR and not _is_gray_of_four(state, c)
    last = _kept_frame(state, c, env, n_stack if stream[HAS_STACK] else stream[SLOT])
    if stream[HAS_STACK] and not keeps_stack:  # frames are padded with zeros, stacks are not
        copy_frame(uint64(state[c + SCRATCH] + pitch), uint64(last), n_bytes)
        last = state[c + SCRATCH] + pitch
        zero_bytes(uint64(whole), state[c + SLOTS] * state[c + PADDED_BYTES])
        for i in range(n_stack - 1):
            known = _kept_frame(state, c, env, stream[SLOT] + 2 - n_stack + i + state[c + SLOTS])
            extract_frame(uint64(stack), order, i, shape, uint64(known))
    for i in range(n_stack - 1 if moved else 0, n_stack):
        frame = _kept_frame(state, c, env, stream[SLOT] + 1)
        if keeps_stack:
            frame = state[c + SCRATCH] + i % 2 * pitch
        extract_frame(uint64(stack), order, i, shape, uint64(frame))
        if depth or i == n_stack - 1 or not is_padding(frame, state[c + PADDED_BYTES]):
            depth += 1
            at = _append_entry(state, c, env, frame, last, at, bounded)
        else:  # zeros before the first frame of an episode
            stream[CHAIN_LENGTH] = MAX_CHAIN  # the newest frame is not that of the newest entry any more
        stream[SLOT] = (stream[SLOT] + 1) % state[c + SLOTS]
        last = frame
    stream[DEPTH], stream[HAS_STACK] = min(depth, n_stack), keeps_stack
    if keeps_stack:
        copy_frame(uint64(whole), uint64(stack), n_stack * n_bytes)
        copy_frame(uint64(_kept_frame(state, c, env, n_stack)), uint64(last), n_bytes)
    return at


@inner
def header_words(state):  # type: ignore[no-untyped-def]
    """Return the number of words of a record before its entries."""
    if not state[FRAMED]:
        return 0
    return RECORD_HEADER + 2 * state[N_ENVS] * state[N_COLUMNS] + (state[ROW_BYTES] + 3) // 4


@inner
def record_checksum(state, start, size):  # type: ignore[no-untyped-def]
    """Return the checksum of a record, which also depends on the number of its segment.

    :param start: Position of the record.
    :param size: First word of the record.
    """
    total = mix_word(uint64(SUM_START) ^ uint64(state[SEQUENCE]), uint64(size))
    n_words = int64(size) & SIZE_BITS
    return fold_sum(add_bytes(total, uint64(address_at(state, start)) + uint64(8), 4 * (n_words - 2)))


@inner
def finish_record(state, start, end, row, is_transition):  # type: ignore[no-untyped-def]
    """Write the header of a record. Its size is written last, because it makes the record valid."""
    address = address_at(state, start)
    words = uint32s(address, RECORD_HEADER)
    uint32s(address_at(state, end), 1)[0] = uint32(0)  # so that the end of the log is found
    words[2], words[3], words[4] = uint32(state[RECORDS]), uint32(row), uint32(state[STORED])
    size = uint32(int64(end - start) | int64(is_transition) << 31)
    words[1] = record_checksum(state, start, size)
    publish_u32(uint64(address), size)
    state[RECORDS] += 1


@inner
def set_pair(state, at, pair):  # type: ignore[no-untyped-def]
    """Set one entry of the pairs, and update the numbers of live pairs of both segments."""
    shift, live = state[SEGMENT_SHIFT], int64s(state[LIVE], state[N_SLOTS])
    place = int64s(state[PAIRS] + 8 * at, 1)
    old = place[0]
    place[0] = pair
    if pair:
        live[pair >> 23 >> shift] += 1
    if old:
        slot = old >> 23 >> shift
        live[slot] -= 1
        words = int64s(state[USED], state[N_SLOTS])[slot]
        if live[slot] == 0 and words:  # the open segment has 0 words here
            state[USED_WORDS] -= words
            state[DIED] += 1


@inner
def _advance(state, row):  # type: ignore[no-untyped-def]
    """Count the transition in a row, if it is the next one."""
    if row != state[POSITION]:
        return
    state[STORED] = min(state[STORED] + 1, state[CAPACITY])
    state[POSITION] += 1
    if state[POSITION] == state[CAPACITY]:
        state[POSITION], state[FULL] = 0, 1


def _define_push(bounded):  # type: ignore[no-untyped-def]
    """Define ``push``.

    :param bounded: None for a log of exact frames, else True. The rest takes half as long again to compile.
    """

    def push(state):  # type: ignore[no-untyped-def]
        """Write one transition of each environment, whose addresses are in the state.

        It holds the GIL, so neither a signal nor another thread finds a part of it. If ``NEW_FRAMES`` of a column is
        set, nothing is written. Instead, its new frames are copied to that address, behind space for a stream's newest
        frames.

        :return: ``NEEDS_SEGMENT`` if nothing was written, because another segment must be opened first;
            ``SEGMENT_DIED`` if a segment can be freed; else ``WRITTEN``.
        """
        n_envs, n_columns, start = state[N_ENVS], state[N_COLUMNS], state[NEXT]
        if state[END] == 0 or start >= state[END]:
            return NEEDS_SEGMENT
        row, at = state[ROW_INPUT] if state[ROW_INPUT] >= 0 else state[POSITION], start + header_words(state)
        heads = uint32s(address_at(state, start) + 4 * RECORD_HEADER, 2 * n_envs * n_columns)
        collects = False
        for number in range(n_columns):
            collects = collects or state[column_start(number) + NEW_FRAMES] != 0
        for number in range(n_columns):
            c = column_start(number)
            saved, n_bytes = state[c + NEW_FRAMES], state[c + SLOTS] * state[c + PADDED_BYTES]
            if collects and not saved:
                continue
            if saved:
                state[c + NEW_FRAMES] += n_bytes + 8 * N_STREAM
            for env in range(n_envs):
                stream, frames = int64s(stream_of(state, c, env), N_STREAM), state[c + FRAMES] + env * n_bytes
                if saved:
                    copy_frame(uint64(saved), uint64(frames), n_bytes)
                    copy_frame(uint64(saved + n_bytes), uint64(stream_of(state, c, env)), 8 * N_STREAM)
                depth, entries = stream[DEPTH], stream[ENTRIES]
                for side in range(2):
                    order, size = state[c + OBS_ORDER + 2 * side], state[c + N_STACK] * state[c + FRAME_BYTES]
                    stack = state[c + OBS_INPUT + 2 * side] + env * size
                    shift = _find_shift(state, c, env, stack, side)
                    if shift != 0:
                        at = _write_stack(state, c, env, stack, order, shift == 1, at, bounded)
                    if side == 0:
                        depth, entries = stream[DEPTH], stream[ENTRIES]
                if saved:
                    copy_frame(uint64(frames), uint64(saved), n_bytes)
                    copy_frame(uint64(stream_of(state, c, env)), uint64(saved + n_bytes), 8 * N_STREAM)
                    continue
                back, chain = stream[ENTRIES] - entries, min(stream[CHAIN_LENGTH] - 1, MAX_CHAIN)
                pair = stream[NEWEST] << 23 | chain << 18 | back << 12 | depth << 6 | stream[DEPTH]
                if state[FRAMED]:
                    k = 2 * (env * n_columns + number)
                    heads[k], heads[k + 1] = uint32(pair & 0xFFFFFFFF), uint32(pair >> 32)
                set_pair(state, (row * n_envs + env) * n_columns + number, pair)
        if collects:
            return WRITTEN
        if state[ROW_BYTES]:
            copy_frame(uint64(state[ROWS] + row * state[ROW_BYTES]), uint64(state[DATA_INPUT]), state[ROW_BYTES])
        _advance(state, row)
        if state[FRAMED]:
            if state[ROW_BYTES]:
                data = address_at(state, start) + 4 * (RECORD_HEADER + 2 * n_envs * n_columns)
                copy_frame(uint64(data), uint64(state[DATA_INPUT]), state[ROW_BYTES])
            finish_record(state, start, at, row, True)
        if state[RESTART_WORDS] == 0:
            state[RESTART_WORDS] = at - start
        state[NEXT] = at
        return SEGMENT_DIED if state[DIED] else WRITTEN

    return atomic_kernel(push)


push, push_bounded = map(_define_push, (None, True))
