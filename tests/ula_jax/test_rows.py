"""Row formats against ml_dtypes: bits of what is packed, numbers of what is read back."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ula_jax.rows import RowFormat

E4M3 = ml_dtypes.float8_e4m3fn
DEEPSEEK = (512, 64)


def numbers(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def packed(fmt, rows):
    return [np.asarray(lane) for lane in jax.jit(fmt.pack)(jnp.asarray(rows))]


def unpacked(fmt, lanes):
    return np.asarray(jax.jit(fmt.unpack)(tuple(jnp.asarray(lane) for lane in lanes)))


def groups_of(latent, group):
    return latent.reshape(*latent.shape[:-1], -1, group)


def test_fp32_keeps_every_bit():
    rows = numbers((3, 2, 12))
    rows[0, 0, :4] = [0.0, -0.0, np.inf, np.float32(1e-42)]
    fmt = RowFormat("fp32", 8, 4)
    (lane,) = packed(fmt, rows)
    np.testing.assert_array_equal(lane, rows.view(np.uint32))
    np.testing.assert_array_equal(unpacked(fmt, [lane]).view(np.uint32), rows.view(np.uint32))


def test_bf16_rounds_to_nearest_even_two_numbers_a_word():
    rows = numbers((5, 12))
    rows[0, :4] = [1.00390625, 1.01171875, -1.00390625, 3e38]  # two ties, down and up
    fmt = RowFormat("bf16", 8, 4)
    (lane,) = packed(fmt, rows)
    rounded = rows.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(lane, rounded.view(np.uint32))
    np.testing.assert_array_equal(unpacked(fmt, [lane]), rounded.astype(np.float32))
    assert lane[0, 0] == 0x3F823F80  # the first number is the low half


@pytest.mark.parametrize(("latent", "rope", "group"), [(512, 64, 128), (128, 0, 128), (8, 4, 8)])
def test_fp8_equals_an_independent_quantiser(latent, rope, group):
    rows = numbers((7, latent + rope)) * np.logspace(-3, 3, 7, dtype=np.float32)[:, None]
    rows[2, :group] = 0.0
    rows[3, :latent] = -np.abs(rows[3, :latent])
    fmt = RowFormat("fp8", latent, rope)
    lanes = packed(fmt, rows)
    grouped, scale = groups_of(rows[:, :latent], group), lanes[1].view(np.float32)
    amax = np.abs(grouped).max(-1)
    # XLA may divide by 448 as it multiplies by 1 / 448: an ulp. The codes are exact for the scale that is stored.
    np.testing.assert_allclose(scale, np.where(amax > 0, amax.astype(np.float64) / 448, 1.0), rtol=2**-22)
    codes = np.clip(grouped / scale[..., None], -448, 448).astype(E4M3).reshape(7, latent)
    tail = rows[:, latent:].astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(lanes[0].view(np.uint8)[:, :latent], codes.view(np.uint8))
    np.testing.assert_array_equal(lanes[0].view(np.uint16)[:, latent // 2 :], tail.view(np.uint16))
    read = unpacked(fmt, lanes)
    expected = groups_of(codes.astype(np.float32), group) * scale[..., None]
    np.testing.assert_array_equal(read[:, :latent], expected.reshape(7, latent))
    np.testing.assert_array_equal(read[:, latent:], tail.astype(np.float32))


def test_fp8_edges():
    """A group of zeros stays zero with scale 1, amax is read back as it was, signs survive, dust does not."""
    fmt = RowFormat("fp8", 256, 0)
    rows = np.zeros((2, 256), np.float32)
    rows[0, 128:] = np.linspace(-3.5, 3.5, 128)
    rows[1, 5], rows[1, 6] = -100.0, 1e-9
    lanes = packed(fmt, rows)
    np.testing.assert_allclose(lanes[1].view(np.float32), [[1.0, 3.5 / 448], [100 / 448, 1.0]], rtol=2**-22)
    read = unpacked(fmt, lanes)
    assert not read[0, :128].any()
    np.testing.assert_allclose(read[0, [128, 255]], [-3.5, 3.5], rtol=1e-6)
    np.testing.assert_allclose(read[1, 5], -100.0, rtol=1e-6)
    assert read[1, 6] == 0.0
    assert np.abs(read[0, 128:] - rows[0, 128:]).max() <= 3.5 / 448 * 16  # half a step of e4m3 from 256 to 448


def test_sizes_of_deepseek_rows():
    """FlashMLA's 656 bytes, with the 16 bytes of scales in a lane of their own so that words stay 128-byte aligned."""
    formats = {name: RowFormat(name, *DEEPSEEK) for name in ("fp32", "bf16", "fp8")}
    sizes = {name: (fmt.lanes, fmt.nbytes) for name, fmt in formats.items()}
    assert sizes == {"fp32": ((576,), 2304), "bf16": ((288,), 1152), "fp8": ((160, 4), 656)}
    assert 160 * 4 % 128 == 0
    lanes = packed(formats["fp8"], numbers((2, 576)))
    assert [lane.shape for lane in lanes] == [(2, 160), (2, 4)]
    assert formats["fp8"].width == 576


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp8"])
def test_packing_is_one_function_of_each_row(name):
    """The same row gives the same words in any batch, so that a chunked prefill stores what a whole one does."""
    fmt, rows = RowFormat(name, 8, 4), numbers((6, 12))
    whole = packed(fmt, rows)
    for at in range(6):
        for lane, one in zip(whole, packed(fmt, rows[at : at + 1]), strict=True):
            np.testing.assert_array_equal(lane[at], one[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fp16", 8, 4), "expected fp32, bf16 or fp8, found 'fp16'"),
        (("bf16", 7, 4), "bf16 rows: expected latent a positive multiple of 2 and rope a multiple of 2"),
        (("fp8", 8, 3), "fp8 rows: expected latent a positive multiple of 4 and rope a multiple of 2"),
        (("fp8", 10, 4), "found latent 10, rope 4; use fp32 rows"),
        (("fp32", 0, 4), "fp32 rows: expected latent a positive multiple of 1"),
        (("fp8", 192, 0), "expected latent below or a multiple of 128, found 192; use bf16 rows"),
    ],
)
def test_errors_say_what_to_do(arguments, message, unchecked):
    with pytest.raises(ValueError, match=message):
        RowFormat(*arguments)
