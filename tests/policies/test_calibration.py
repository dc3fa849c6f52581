"""The synthetic trace at full size against the published replay of GLM-5.1 (arXiv 2608.07009).

The reference figures are the paper's: one request of 100,384 positions, 2048 selected, 1,799 steps.
"""

import pytest

from ula_jax.policies import make_policy
from ula_jax.replay import replay
from ula_jax.traces import TraceConfig, generate
from ula_jax.traces.statistics import working_set

K = 2048
PUBLISHED = {"lru": (0.30, 0.134, 0.067), "fifo": (None, 0.172, None), "random": (None, 0.161, None)}
# Of the generator that these miss rates were fitted with, in another implementation.
WORKING_SET = (1.0, 1.31, 1.72, 2.30, 3.15, 4.33, 5.89)


@pytest.mark.slow
def test_miss_rates_and_working_sets_are_the_published_ones():
    trace = generate(TraceConfig(1, 100_384, 1799, K, None, churn=0.0, shortest=1.0))
    assert working_set(trace)[0] == pytest.approx(WORKING_SET, rel=0.02)
    found = {}
    for policy, published in PUBLISHED.items():
        sizes = [m * K for m, ratio in zip((1, 2, 4), published, strict=True) if ratio]
        table = replay(make_policy(policy), trace, sizes, warmup=1)
        ratios = [miss / (1798 * K) for miss in table["misses"].to_pylist()]
        assert ratios == pytest.approx([ratio for ratio in published if ratio], rel=0.1)
        found[policy] = ratios[len(ratios) // 2]
    assert found["lru"] < found["random"] < found["fifo"]
