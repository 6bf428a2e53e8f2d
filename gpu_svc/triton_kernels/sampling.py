"""Triton kernels that draw tokens from logits [n, vocab_size], fp32, without sorting them.

What is drawn is defined in gpu_svc/sampling.py. A logit's distance is how far it lies below its row's largest one,
divided by the temperature. The bits of distances, as whole numbers, are in the order of the distances, so that the
filters' threshold is found by cutting the range of these numbers, exactly. Columns of `parameters` [n, 5], float64:
temperature, top_k, top_p, logarithm of min_p, and the point in [0, 1) of the draw.
"""

import triton
import triton.language as tl


@triton.jit
def _distances(logits, row, places, here, maximum, temperature, vocab_size):
    """fp32; infinite where a logit is -inf or not there."""
    found = tl.load(logits + row * vocab_size + places, mask=here, other=float("-inf"))
    return tl.abs(tl.div_rn(found - maximum, temperature))


@triton.jit
def _within(
    logits,
    row,
    maximum,
    temperature,
    least_count,
    least_mass,
    high,  # bits of a distance that are enough
    high_count,
    high_mass,
    vocab_size,
    TILE: tl.constexpr,
):
    """The least distance, in bits, within which lie `least_count` tokens and `least_mass` of weight, all float64.

    With the tokens and the weight within it, and those nearer than it. It may be larger as long as it has the same
    tokens. Each turn reads the row once and cuts the range in four.
    """
    low = tl.full([], -1, tl.int32)
    low_count, low_mass = tl.zeros([], tl.float64), tl.zeros([], tl.float64)
    while (high - low > 1) & (high_count - low_count > 1):
        step = (high - low + 3) // 4
        first, second = low + step, tl.minimum(low + 2 * step, high)
        third = tl.minimum(second + step, high)
        counts1, counts2, counts3 = (
            tl.zeros([TILE], tl.float32),
            tl.zeros([TILE], tl.float32),
            tl.zeros([TILE], tl.float32),
        )
        masses1, masses2, masses3 = (
            tl.zeros([TILE], tl.float32),
            tl.zeros([TILE], tl.float32),
            tl.zeros([TILE], tl.float32),
        )
        for start in range(0, vocab_size, TILE):
            places = start + tl.arange(0, TILE)
            here = places < vocab_size
            distances = _distances(logits, row, places, here, maximum, temperature, vocab_size)
            bits, weights = distances.to(tl.int32, bitcast=True), tl.exp(-distances)
            counts1 += tl.where(here & (bits <= first), 1.0, 0.0)
            counts2 += tl.where(here & (bits <= second), 1.0, 0.0)
            counts3 += tl.where(here & (bits <= third), 1.0, 0.0)
            masses1 += tl.where(bits <= first, weights, 0.0)
            masses2 += tl.where(bits <= second, weights, 0.0)
            masses3 += tl.where(bits <= third, weights, 0.0)
        count1, mass1 = tl.sum(counts1.to(tl.float64), 0), tl.sum(masses1.to(tl.float64), 0)
        count2, mass2 = tl.sum(counts2.to(tl.float64), 0), tl.sum(masses2.to(tl.float64), 0)
        count3, mass3 = tl.sum(counts3.to(tl.float64), 0), tl.sum(masses3.to(tl.float64), 0)
        is1 = (count1 >= least_count) & (mass1 >= least_mass)
        is2 = (count2 >= least_count) & (mass2 >= least_mass)
        is3 = (count3 >= least_count) & (mass3 >= least_mass)
        low, low_count, low_mass = (
            tl.where(is1, low, tl.where(is2, first, tl.where(is3, second, third))),
            tl.where(is1, low_count, tl.where(is2, count1, tl.where(is3, count2, count3))),
            tl.where(is1, low_mass, tl.where(is2, mass1, tl.where(is3, mass2, mass3))),
        )
        high, high_count, high_mass = (
            tl.where(is1, first, tl.where(is2, second, tl.where(is3, third, high))),
            tl.where(is1, count1, tl.where(is2, count2, tl.where(is3, count3, high_count))),
            tl.where(is1, mass1, tl.where(is2, mass2, tl.where(is3, mass3, high_mass))),
        )
    return high, high_count, high_mass, low_count, low_mass


@triton.jit
def cut_kernel(logits, maxima, parameters, cuts, vocab_size, TILE: tl.constexpr):
    """Programs: (rows). Into `cuts` [n], int32: bits of the largest distance that top-k, and then top-p, keep."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(parameters + row * 5).to(tl.float32)
    top_k, top_p = tl.load(parameters + row * 5 + 1), tl.load(parameters + row * 5 + 2)
    maximum = tl.load(maxima + row)
    cut = tl.full([], 0x7F800000, tl.int32)  # Infinity: all.
    if (temperature > 0) & ((top_k > 0) | (top_p < 1)):
        sums = tl.zeros([TILE], tl.float32)
        for start in range(0, vocab_size, TILE):
            places = start + tl.arange(0, TILE)
            here = places < vocab_size
            sums += tl.exp(-_distances(logits, row, places, here, maximum, temperature, vocab_size))
        mass = tl.sum(sums.to(tl.float64), 0)
        count = vocab_size.to(tl.float64)
        nothing = tl.zeros([], tl.float64)
        if (top_k > 0) & (top_k < count):
            cut, count, mass, nearer_count, nearer_mass = _within(
                logits, row, maximum, temperature, top_k, nothing, cut, count, mass, vocab_size, TILE
            )
            # Of the last ones, equally far, as many count as make up k; all are kept.
            kept_mass = nearer_mass + (mass - nearer_mass) / (count - nearer_count) * (top_k - nearer_count)
        else:
            kept_mass = mass
        if top_p < 1:
            cut, _, _, _, _ = _within(
                logits, row, maximum, temperature, nothing, top_p * kept_mass, cut, count, mass, vocab_size, TILE
            )
    tl.store(cuts + row, cut)


@triton.jit
def mass_kernel(
    logits,
    maxima,
    parameters,
    cuts,
    masses,  # [n, num_runs] fp32: weight kept of each run of RUN tokens
    vocab_size,
    num_runs,
    RUN: tl.constexpr,
    RUNS: tl.constexpr,
    HAS_CUTS: tl.constexpr,
):
    """Programs: (rows, RUNS runs each)."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(parameters + row * 5).to(tl.float32)
    if temperature > 0:
        runs = tl.program_id(1) * RUNS + tl.arange(0, RUNS)
        places = runs[:, None] * RUN + tl.arange(0, RUN)[None, :]
        weights = _kept(logits, row, places, tl.load(maxima + row), temperature, parameters, cuts, vocab_size, HAS_CUTS)
        tl.store(masses + row * num_runs + runs, tl.sum(weights, 1), mask=runs < num_runs)


@triton.jit
def _kept(logits, row, places, maximum, temperature, parameters, cuts, vocab_size, HAS_CUTS: tl.constexpr):
    """Weights, fp32: 0 of what the filters leave out."""
    distances = _distances(logits, row, places, places < vocab_size, maximum, temperature, vocab_size)
    farthest = tl.abs(tl.load(parameters + row * 5 + 3).to(tl.float32))
    weights = tl.where(distances <= farthest, tl.exp(-distances), 0.0)
    if HAS_CUTS:
        weights = tl.where(distances.to(tl.int32, bitcast=True) <= tl.load(cuts + row), weights, 0.0)
    return weights


@triton.jit
def _first_above(cumulative, total, point):
    """The first place where running sums exceed a point, in float64."""
    # Rounding may lift a point to the total itself, which nothing exceeds.
    point = tl.minimum(point, total * (1 - 2.0**-53))
    return tl.sum((cumulative <= point).to(tl.int32), 0)


@triton.jit
def pick_kernel(
    logits,
    raw_maxima,  # before changes: not finite where the model computed no numbers
    maxima,
    best,  # [n] int64: token of the largest logit
    parameters,
    cuts,
    masses,
    tokens,  # [n] int64; -1 where there are no numbers
    vocab_size,
    num_runs,
    RUN: tl.constexpr,
    RUNS_PAD: tl.constexpr,
    HAS_CUTS: tl.constexpr,
):
    """Programs: (rows). The inverse of the distribution: first the run of tokens, then the token in it."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(parameters + row * 5).to(tl.float32)
    token = tl.load(best + row)
    if temperature > 0:
        runs = tl.arange(0, RUNS_PAD)
        run_masses = tl.load(masses + row * num_runs + runs, mask=runs < num_runs, other=0.0).to(tl.float64)
        cumulative = tl.cumsum(run_masses, 0)
        total = tl.sum(run_masses, 0)
        point = tl.load(parameters + row * 5 + 4) * total
        run = _first_above(cumulative, tl.max(cumulative, 0), point)
        before = tl.sum(tl.where(runs < run, run_masses, 0.0), 0)
        places = run * RUN + tl.arange(0, RUN)
        weights = _kept(logits, row, places, tl.load(maxima + row), temperature, parameters, cuts, vocab_size, HAS_CUTS)
        inner = tl.cumsum(weights.to(tl.float64), 0)
        within = _first_above(inner, tl.max(inner, 0), tl.maximum(point - before, 0.0))
        token = (run * RUN + within).to(tl.int64)
    raw_maximum = tl.load(raw_maxima + row)
    token = tl.where(raw_maximum - raw_maximum == 0, token, -1)
    tl.store(tokens + row, token)
