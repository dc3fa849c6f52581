"""Parts of Triton kernels: lanes of a program, and bits of words by shifts and adds, which the interpreter has too."""

import triton.language as tl

from pallas_kernels import triton_call


@triton_call.kernel
def lanes(start, SIZE: tl.constexpr):
    """`start` and on. Named as not contiguous, so that a thread holds every 32nd and the layout is that of a scatter:
    with neighbours to a thread, all that is scattered would cross shared memory first."""
    return start + tl.max_contiguous(tl.arange(0, SIZE), 1)


@triton_call.kernel
def dropped(word, BITS: tl.constexpr):
    """[words, BITS]: the words without their lowest bit, without their lowest two, and so on from none."""
    lane = tl.arange(0, BITS)[None, :]
    word = word[:, None] + tl.zeros_like(lane).to(tl.uint32)
    for dropped in tl.static_range(BITS - 1):  # pyright: ignore
        word = tl.where(lane > dropped, word & (word - 1), word)
    return word


@triton_call.kernel
def lowest(word, number):
    """The lowest `number` of the bits set."""
    below = tl.zeros_like(number)
    for step in tl.static_range(5):  # pyright: ignore
        further = below + (16 >> step)
        below = tl.where(ones(word & (bit(further) - 1)) <= number, further, below)
    return tl.where(number == ones(word), word, word & (bit(below) - 1))


@triton_call.kernel
def length(word):
    """The number of the highest bit set, and one."""
    for step in tl.static_range(5):  # pyright: ignore
        word = word | (word >> (1 << step))
    return ones(word)


@triton_call.kernel
def bit(at):
    return tl.zeros_like(at).to(tl.uint32) + 1 << at.to(tl.uint32)


@triton_call.kernel
def ones(word):
    """Bits set."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).to(tl.int32)
