"""Triton kernels of `gdn`, which says what they compute and checks what they are given.

EXACT multiplies matrices in float32; otherwise queries, keys and values are bfloat16, and a float32 factor is the sum
of two of bfloat16: 16 bits of it count, twice what an output keeps.
"""

# Triton's functions have no types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import triton
import triton.language as tl

SOFTPLUS_LINEAR = tl.constexpr(20.0)
EPSILON = tl.constexpr(1e-6)
"""Both as in SGLang's kernels of these layers."""


@triton.jit
def _halves(x):
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _product(x, y, EXACT: tl.constexpr):
    """Return the product of float32 matrices."""
    if EXACT:
        return tl.dot(x, y, input_precision="ieee")
    x_high, x_low = _halves(x)
    y_high, y_low = _halves(y)
    return tl.dot(x_high, y_high, tl.dot(x_high, y_low, tl.dot(x_low, y_high)))


@triton.jit
def _product_of_inputs(x, y, EXACT: tl.constexpr):
    """Return the product of inputs, each of which is bfloat16 unless EXACT."""
    if EXACT:
        return tl.dot(x, y, input_precision="ieee")
    return tl.dot(x, y)


@triton.jit
def _product_with_state(x, high, low, EXACT: tl.constexpr):
    """Return the product of inputs and a state in halves; high is all of it where EXACT."""
    if EXACT:
        return tl.dot(x, high, input_precision="ieee")
    return tl.dot(x, high, tl.dot(x, low))


@triton.jit
def _tap(inputs, window, parents, at, channels, here, TAPS: tl.constexpr, node_stride, channel_stride, tap_stride):
    """Return inputs at nodes or, below zero, in the window before the root, and the places one step up."""
    inside = at >= 0
    place = tl.where(inside, at, 0)
    value = tl.load(inputs + place.to(tl.int64) * node_stride + channels, here & inside, other=0.0).to(tl.float32)
    back = tl.where(inside, 0, TAPS - 1 + at)
    value += tl.load(window + channels * channel_stride + back * tap_stride, here & (at < 0), other=0.0).to(tl.float32)
    return value, tl.where(inside, tl.load(parents + place), at - 1)


@triton.jit
def _activate(x, HAS_SILU: tl.constexpr):
    if HAS_SILU:
        x = x / (1.0 + tl.exp(-x))
    return x


@triton.jit
def convolve(
    inputs,
    kept,
    out,
    windows,
    slots,
    weights,
    bias,
    parents,
    width,
    channel_count,
    input_request_stride,
    input_node_stride,
    kept_request_stride,
    window_slot_stride,
    window_channel_stride,
    window_tap_stride,
    TAPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SILU: tl.constexpr,
    NODES: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Convolve each node's input with its ancestors' and the window before the root, and keep the inputs."""
    request = tl.program_id(2).to(tl.int64)
    slot = tl.load(slots + request).to(tl.int64)
    nodes = tl.program_id(1) * NODES + tl.arange(0, NODES)
    channels = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    here = (nodes < width)[:, None] & (channels < channel_count)[None, :]
    inputs += request * input_request_stride
    windows += slot * window_slot_stride
    parents += request * width
    at = tl.where(nodes < width, nodes, 0)[:, None]
    own = tl.load(inputs + at.to(tl.int64) * input_node_stride + channels[None, :], here, other=0.0)
    place = at.to(tl.int64) * channel_count + channels[None, :]
    tl.store(kept + request * kept_request_stride + place, own, here)
    total = tl.zeros([NODES, CHANNELS], tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + channels, channels < channel_count, other=0.0).to(tl.float32)[None, :]
    live = here & (nodes < tl.where(slot >= 0, width, 0))[:, None]
    for tap in tl.static_range(TAPS):
        weight = tl.load(weights + channels * TAPS + (TAPS - 1 - tap), channels < channel_count, other=0.0)
        value, at = _tap(
            inputs,
            windows,
            parents,
            at,
            channels[None, :],
            live,
            TAPS,
            input_node_stride,
            window_channel_stride,
            window_tap_stride,
        )
        total += value * weight.to(tl.float32)[None, :]
    total = _activate(total, HAS_SILU)
    tl.store(out + request * width * channel_count + place, total.to(out.dtype.element_ty), here)


@triton.jit
def verify(
    mixed,
    gates,
    betas,
    decay_logs,
    decay_biases,
    states,
    slots,
    rows,
    firsts,
    ends,
    depths,
    out,
    decays,
    rates,
    width,
    scale,
    gate_stride,
    beta_stride,
    state_slot_stride,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    ROWS: tl.constexpr,
    PATH: tl.constexpr,
    LEVELS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Compute the outputs of a block of rows for some columns of a head's values, and keep g and beta."""
    slices: tl.constexpr = VALUE // COLUMNS
    head = tl.program_id(0) // slices
    part = tl.program_id(0) % slices
    block = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    slot = tl.load(slots + request).to(tl.int64)
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    channels: tl.constexpr = 2 * KEY_HEADS * KEY + VALUE_HEADS * VALUE

    row = tl.arange(0, ROWS)
    node = tl.load(rows + (request * tl.num_programs(1) + block) * ROWS + row)
    real = node >= 0
    at = request * width + tl.where(real, node, 0)
    first = tl.load(firsts + at, real, other=-1)
    end = tl.load(ends + at, real, other=-1)
    depth = tl.load(depths + at, real, other=0)
    on_path = (first[None, :] <= first[:, None]) & (first[:, None] < end[None, :])
    above = on_path & (first[None, :] < first[:, None])

    x = tl.load(gates + at * gate_stride + head, real, other=0.0).to(tl.float32)
    x += tl.load(decay_biases + head).to(tl.float32)
    softplus = tl.where(x <= SOFTPLUS_LINEAR, tl.log(1.0 + tl.exp(tl.minimum(x, SOFTPLUS_LINEAR))), x)
    decay = tl.where(real, -tl.exp(tl.load(decay_logs + head).to(tl.float32)) * softplus, 0.0)
    rate = tl.load(betas + at * beta_stride + head, real, other=0.0).to(tl.float32)
    rate = tl.where(real, 1.0 / (1.0 + tl.exp(-rate)), 0.0)
    own = real & (row >= PATH)
    if part == 0:
        kept = (request * VALUE_HEADS + head) * width + tl.where(real, node, 0)
        tl.store(decays + kept, decay, own)
        tl.store(rates + kept, rate, own)
    total = tl.sum(tl.where(on_path, decay[None, :], 0.0), 1)
    fading = tl.exp(tl.where(on_path, total[:, None] - total[None, :], 0.0))

    dims = tl.arange(0, KEY)
    columns = part * COLUMNS + tl.arange(0, COLUMNS)
    start = at * channels
    places = start[:, None] + key_head * KEY + dims[None, :]
    q = tl.load(mixed + places, real[:, None], other=0.0)
    k = tl.load(mixed + places + KEY_HEADS * KEY, real[:, None], other=0.0)
    wide = k.to(tl.float32)
    k_norm = 1.0 / tl.sqrt(tl.sum(wide * wide, 1) + EPSILON)
    wide = q.to(tl.float32)
    q_norm = scale / tl.sqrt(tl.sum(wide * wide, 1) + EPSILON)

    pairs = _product_of_inputs(k, tl.trans(k), EXACT) * k_norm[:, None] * k_norm[None, :] * rate[:, None]
    system = tl.where(above, pairs * fading, 0.0)
    inverse = tl.where(row[:, None] == row[None, :], 1.0, 0.0)
    if LEVELS > 0:
        inverse -= tl.where((depth >> 1)[:, None] == (depth >> 1)[None, :], system, 0.0)
    for level in tl.static_range(1, LEVELS):
        half, whole = depth >> level, depth >> (level + 1)
        across = (whole[:, None] == whole[None, :]) & (half[:, None] != half[None, :])
        between = _product(tl.where(across, system, 0.0), inverse, EXACT)
        inverse -= _product(inverse, between, EXACT)

    tile = slot * state_slot_stride + (head * VALUE + columns[None, :]) * KEY + dims[:, None]
    state = tl.load(states + tile, (dims < tl.where(slot >= 0, KEY, 0))[:, None], other=0.0).to(tl.float32)
    if EXACT:
        high, low = state, state
    else:
        high, low = _halves(state)
    v = tl.load(
        mixed + start[:, None] + 2 * KEY_HEADS * KEY + head * VALUE + columns[None, :], real[:, None], other=0.0
    )
    known = _product_with_state(k, high, low, EXACT) * (tl.exp(total) * k_norm)[:, None]
    updates = _product(inverse, rate[:, None] * (v.to(tl.float32) - known), EXACT)
    scores = _product_of_inputs(q, tl.trans(k), EXACT) * q_norm[:, None] * k_norm[None, :]
    output = _product_with_state(q, high, low, EXACT) * (tl.exp(total) * q_norm)[:, None]
    output += _product(tl.where(on_path, scores * fading, 0.0), updates, EXACT)
    places = (at * VALUE_HEADS + head)[:, None] * VALUE + columns[None, :]
    tl.store(out + places, output.to(out.dtype.element_ty), own[:, None])


@triton.jit
def _convolved(
    inputs,
    window,
    path,
    step,
    channels,
    weights,
    bias,
    TAPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SILU: tl.constexpr,
    node_stride,
    channel_stride,
    tap_stride,
):
    """Return the convolution's outputs of some channels at a step of a path, rounded as `convolve` rounds them."""
    total = tl.zeros(channels.shape, tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + channels).to(tl.float32)
    for tap in tl.static_range(TAPS):
        at = step - tap
        inside = at >= 0
        node = tl.load(path + tl.where(inside, at, 0)).to(tl.int64)
        back = tl.where(inside, 0, TAPS - 1 + at)
        old = tl.load(window + channels * channel_stride + back * tap_stride)
        value = tl.load(inputs + node * node_stride + channels)
        value = tl.where(inside, value.to(tl.float32), old.to(tl.float32))
        total += value * tl.load(weights + channels * TAPS + (TAPS - 1 - tap)).to(tl.float32)
    return _activate(total, HAS_SILU).to(inputs.dtype.element_ty).to(tl.float32)


@triton.jit
def commit_states(
    inputs,
    decays,
    rates,
    states,
    windows,
    slots,
    weights,
    bias,
    paths,
    lengths,
    track_slots,
    track_lengths,
    width,
    path_stride,
    input_layer_stride,
    gate_layer_stride,
    state_layer_stride,
    state_slot_stride,
    window_layer_stride,
    window_slot_stride,
    window_channel_stride,
    window_tap_stride,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    TAPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SILU: tl.constexpr,
    HAS_TRACK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Run the recurrence over a path for some columns of a head's values, in place."""
    slices: tl.constexpr = VALUE // COLUMNS
    head = tl.program_id(0) // slices
    request = tl.program_id(1).to(tl.int64)
    layer = tl.program_id(2).to(tl.int64)
    slot = tl.load(slots + request).to(tl.int64)
    length = tl.load(lengths + request)
    if (slot < 0) | (length < 1):
        return
    channels: tl.constexpr = 2 * KEY_HEADS * KEY + VALUE_HEADS * VALUE
    dims = tl.arange(0, KEY)
    columns = (tl.program_id(0) % slices) * COLUMNS + tl.arange(0, COLUMNS)
    key_channels = (KEY_HEADS + head // (VALUE_HEADS // KEY_HEADS)) * KEY + dims
    value_channels = 2 * KEY_HEADS * KEY + head * VALUE + columns
    inputs += layer * input_layer_stride + request * width * channels
    gate = layer * gate_layer_stride + (request * VALUE_HEADS + head) * width
    windows += layer * window_layer_stride + slot * window_slot_stride
    weights += layer * channels * TAPS
    bias += layer * channels
    paths += request * path_stride
    states += layer * state_layer_stride
    tile = (head * VALUE + columns[:, None]) * KEY + dims[None, :]
    track_length = -1
    if HAS_TRACK:
        track_length = tl.load(track_lengths + request)
    state = tl.load(states + slot * state_slot_stride + tile).to(tl.float32)
    for step in range(length):
        node = tl.load(paths + step).to(tl.int64)
        k = _convolved(
            inputs,
            windows,
            paths,
            step,
            key_channels,
            weights,
            bias,
            TAPS,
            HAS_BIAS,
            HAS_SILU,
            channels,
            window_channel_stride,
            window_tap_stride,
        )
        v = _convolved(
            inputs,
            windows,
            paths,
            step,
            value_channels,
            weights,
            bias,
            TAPS,
            HAS_BIAS,
            HAS_SILU,
            channels,
            window_channel_stride,
            window_tap_stride,
        )
        k = k / tl.sqrt(tl.sum(k * k, 0) + EPSILON)
        state *= tl.exp(tl.load(decays + gate + node))
        u = (v - tl.sum(state * k[None, :], 1)) * tl.load(rates + gate + node)
        state += u[:, None] * k[None, :]
        if HAS_TRACK:  # noqa: SIM102  (a constant: without it, the branch is not compiled)
            if step + 1 == track_length:
                kept = states + tl.load(track_slots + request).to(tl.int64) * state_slot_stride
                tl.store(kept + tile, state.to(states.dtype.element_ty))
    tl.store(states + slot * state_slot_stride + tile, state.to(states.dtype.element_ty))


@triton.jit
def commit_windows(
    inputs,
    windows,
    slots,
    paths,
    lengths,
    track_slots,
    track_lengths,
    width,
    channel_count,
    path_stride,
    input_layer_stride,
    window_layer_stride,
    window_slot_stride,
    window_channel_stride,
    window_tap_stride,
    TAPS: tl.constexpr,
    TAPS_UP: tl.constexpr,
    HAS_TRACK: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Move windows to the end of a path, in place, and to where it is tracked."""
    channels = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)[:, None]
    request = tl.program_id(1).to(tl.int64)
    layer = tl.program_id(2).to(tl.int64)
    slot = tl.load(slots + request).to(tl.int64)
    length = tl.load(lengths + request)
    if (slot < 0) | (length < 1):
        return
    inputs += layer * input_layer_stride + request * width * channel_count
    windows += layer * window_layer_stride
    paths += request * path_stride
    column = tl.arange(0, TAPS_UP)[None, :]
    here = (channels < channel_count) & (column < TAPS - 1)
    source = windows + slot * window_slot_stride
    places = channels * window_channel_stride + column * window_tap_stride
    if HAS_TRACK:
        track_length = tl.load(track_lengths + request)
        if track_length > 0:
            target = windows + tl.load(track_slots + request).to(tl.int64) * window_slot_stride
            tl.store(
                target + places,
                _window(
                    inputs,
                    source,
                    paths,
                    track_length,
                    channels,
                    column,
                    here,
                    channel_count,
                    window_channel_stride,
                    window_tap_stride,
                    TAPS,
                ),
                here,
            )
    moved = _window(
        inputs,
        source,
        paths,
        length,
        channels,
        column,
        here,
        channel_count,
        window_channel_stride,
        window_tap_stride,
        TAPS,
    )
    tl.debug_barrier()
    tl.store(source + places, moved, here)


@triton.jit
def _window(
    inputs, window, path, length, channels, column, here, node_stride, channel_stride, tap_stride, TAPS: tl.constexpr
):
    """Return the last inputs of a path and of the window before it."""
    at = length - (TAPS - 1) + column
    inside = at >= 0
    node = tl.load(path + tl.where(inside, at, 0), here & inside, other=0).to(tl.int64)
    value = tl.load(inputs + node * node_stride + channels, here & inside, other=0.0)
    back = tl.where(inside, 0, TAPS - 1 + at)
    old = tl.load(window + channels * channel_stride + back * tap_stride, here & (at < 0), other=0.0)
    return tl.where(inside, value, old.to(value.dtype))
