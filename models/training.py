"""What training adds to the served model: a differentiable history and the losses of DeepSeek's DSA recipe.

The forward is `Decoder` itself. Its history here keeps whole sequences and attends densely or over each query's top-k;
its indexers read detached inputs, so that the language-model loss never reaches them and their loss nothing else.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt32
from numpy.typing import DTypeLike

from models.config import ModelConfig
from models.decoder import Decoder
from models.decoder_layer import DecoderLayer
from models.layers import contract
from models.moe import Moe
from pallas_kernels.index_scores import index_scores

Kernel = Literal["cudnn", "chunked"]


@dataclass(frozen=True)
class Attention:
    """How a sequence is attended to while training."""

    sparse: bool = False
    """Over each query's top-k alone; False: over all earlier positions."""
    imitate: bool = False
    """Compute the indexers' loss."""
    dense_kernel: Kernel = "chunked"
    sparse_kernel: Kernel = "chunked"
    """cuDNN runs on GPUs and in bf16 alone."""
    chunk: int = 512
    """Queries of one sequence whose scores over all positions exist at once; divides the sequence or exceeds it."""
    segments: int = 4
    """Parts of a sequence whose queries read only the positions up to their part's end. More: less work, more code."""
    imitate_every: int = 8
    """One query in so many enters the indexers' loss; which ones changes from step to step."""


class TrainingHistory:
    """Whole sequences from position 0 (or any: only the order counts), with gradients. Same interface as `History`.

    After the forward `selected[group]` holds the masks [B, S, S] of a sparse one, and `indexer_losses()` the KL of
    every group.

    Args:
      phase: which of the `imitate_every` interleaved sets of queries the indexers learn from.
      dtype: of the products of attention; that of the model's parameters.
    """

    def __init__(
        self,
        config: ModelConfig,
        attention: Attention,
        phase: Int32[Array, ""] | int = 0,
        dtype: DTypeLike = jnp.float32,
    ):
        self.config, self.attention, self.phase, self.dtype = config, attention, phase, jnp.dtype(dtype)
        self.selected: dict[int, Bool[Array, "B S T"]] = {}
        self._index: dict[int, tuple[Array, Array, Array]] = {}
        self._targets: dict[int, Array] = {}
        self._group = 0

    def select(
        self,
        group: int,
        query: Float32[Array, "B S h d"],
        weights: Float32[Array, "B S h"],
        key: Float32[Array, "B S d"],
    ) -> None:
        self._group, self._index[group] = group, (query, weights, key)
        if not self.attention.sparse:
            return
        query, weights, key = jax.lax.stop_gradient((query, weights, key))

        def choose(seen, keys, query, weights):
            scores = index_scores(query[None], weights[None], keys[None])[0]
            mask = top_k_mask(jnp.where(seen, scores, -jnp.inf), self.config.index_topk)
            return jnp.pad(mask, ((0, 0), (0, key.shape[1] - mask.shape[1])))

        self.selected[group] = self._by_chunks(choose, (key,), (query, weights))

    def select_all(self, group: int) -> None:
        self._group = group

    def attend(
        self, layer: int, query: Float32[Array, "B S H R"], row: Float32[Array, "B S R"], scale: float
    ) -> Float[Array, "B S H C"]:
        if self.attention.imitate and self._group in self._index:
            self._imitate(query, row, scale)
        kernel = self.attention.sparse_kernel if self.attention.sparse else self.attention.dense_kernel
        if kernel == "cudnn":
            return self._cudnn(query, row, scale)
        latent, masks = self.config.kv_lora_rank, (self.selected[self._group],) if self.attention.sparse else ()

        def mix(seen, rows, query, *mask):
            seen = mask[0][:, : rows.shape[0]] if mask else seen
            weights = _attention(query, rows, seen, scale)
            return contract("sht,tc->shc", weights.astype(rows.dtype), rows[:, :latent])

        return self._by_chunks(mix, (self._narrow(row),), (self._narrow(query), *masks))

    def indexer_losses(self) -> dict[int, Float32[Array, ""]]:
        """KL(p || softmax of index scores) of each group in nats, the mean over the chosen queries.

        p is the attention of all heads of the group's layers, summed and normalised.
        """
        return {group: self._indexer_loss(group) for group in self._targets}

    def _indexer_loss(self, group: int) -> Float32[Array, ""]:
        query, weights, key = self._index[group]
        mask = self._chosen_mask(group)

        @jax.checkpoint
        def loss(item):
            query, weights, key, target, mask = item
            return kl_divergence(target, index_scores(query[None], weights[None], key[None])[0], mask)

        items = (self._chosen(query), self._chosen(weights), key, self._targets[group], mask)
        return jnp.mean(jax.lax.map(loss, items))

    def _imitate(self, query: Float32[Array, "B S H R"], row: Float32[Array, "B S R"], scale: float) -> None:
        """Add this layer's attention, summed over heads, to its group's target [B, chosen, S]."""
        group = self._group
        query, row = jax.lax.stop_gradient((self._narrow(self._chosen(query)), self._narrow(row)))
        masks = self._chosen_mask(group)
        summed = jax.lax.map(lambda item: _attention(item[0], item[1], item[2], scale).sum(1), (query, row, masks))
        self._targets[group] = self._targets.get(group, jnp.float32(0)) + summed

    def _chosen(self, x: Array) -> Array:
        """[B, S, ...] -> the queries [B, S / every, ...] of this step's indexer loss."""
        every = self.attention.imitate_every
        if x.shape[1] % every:
            raise ValueError(
                f"imitate_every: expected a divisor of the {x.shape[1]} queries, found {every}; change one of them"
            )
        split = x.reshape(x.shape[0], -1, every, *x.shape[2:])
        return jax.lax.dynamic_index_in_dim(split, self.phase, 2, keepdims=False)

    def _chosen_mask(self, group: int) -> Bool[Array, "B chosen T"]:
        if self.attention.sparse:
            return self._chosen(self.selected[group])
        query, _, key = self._index[group]
        positions = self._chosen(jnp.broadcast_to(jnp.arange(query.shape[1]), query.shape[:2]))
        return positions[..., None] >= jnp.arange(key.shape[1])

    def _narrow(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        return x.astype(self.dtype)

    def _cudnn(self, query: Float32[Array, "B S H R"], row: Float32[Array, "B S R"], scale: float) -> Array:
        """One shared row is key and value; the value's last columns (the roped key) are dropped."""
        rows = self._narrow(row)[:, :, None]
        mask = self.selected[self._group][:, None] if self.attention.sparse else None
        mixed = jax.nn.dot_product_attention(
            self._narrow(query), rows, rows,
            mask=mask, scale=scale, is_causal=mask is None, implementation="cudnn",
        )  # fmt: skip
        return mixed[..., : self.config.kv_lora_rank].astype(jnp.float32)

    def _by_chunks(self, body: Callable[..., Array], keys: tuple[Array, ...], queries: tuple[Array, ...]) -> Array:
        """`body(seen, *keys, *queries)` over chunks of each sequence's queries, recomputed for the gradient.

        Args:
          body: gets the causal mask [chunk, t], keys [t, ...] and queries [chunk, ...] of one sequence; `t` is the end
            of the chunk's segment.
          keys, queries: [B, S, ...].

        Returns:
          [B, S, ...].
        """
        length = queries[0].shape[1]
        segments = self.attention.segments if length % self.attention.segments == 0 else 1
        part = length // segments
        chunk = min(self.attention.chunk, part)
        if part % chunk:
            raise ValueError(
                f"chunk: expected a divisor of a segment's {part} queries, found {chunk}; use a power of two"
            )

        def sequence(item):
            keys, queries = item
            found = []
            for start in range(0, length, part):
                prefix = tuple(key[: start + part] for key in keys)
                positions = jnp.arange(start, start + part)
                pieces = jax.tree.map(
                    lambda x, start=start: x[start : start + part].reshape(-1, chunk, *x.shape[1:]), queries
                )

                @jax.checkpoint
                def piece(item, prefix=prefix, end=start + part):
                    positions, *own = item
                    return body(positions[:, None] >= jnp.arange(end), *prefix, *own)

                mapped = jax.lax.map(piece, (positions.reshape(-1, chunk), *pieces))
                found.append(mapped.reshape(part, *mapped.shape[2:]))
            return jnp.concatenate(found)

        return jax.lax.map(sequence, (keys, queries))


def _attention(
    query: Float[Array, "S H R"], rows: Float[Array, "T R"], seen: Bool[Array, "S T"], scale: float
) -> Float32[Array, "S H T"]:
    """Attention weights; the softmax is in float32."""
    scores = contract("shr,tr->sht", query, rows) * scale
    return jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf), -1)


def kl_divergence(
    target: Float32[Array, "*B T"], scores: Float32[Array, "*B T"], mask: Bool[Array, "*B T"]
) -> Float32[Array, ""]:
    """KL(p || softmax(scores)) over the mask in nats, the mean over rows; p is `target` made to sum to 1 there.

    No gradient flows into the target. Every row needs a position in the mask.
    """
    target = jax.lax.stop_gradient(jnp.where(mask, target, 0.0))
    p = target / jnp.maximum(target.sum(-1, keepdims=True), 1e-20)
    log_q = jax.nn.log_softmax(jnp.where(mask, scores, -jnp.inf), -1)
    used = p > 0
    terms = p * (jnp.log(jnp.where(used, p, 1.0)) - jnp.where(used, log_q, 0.0))
    return jnp.mean(terms.sum(-1))


def top_k_mask(scores: Float32[Array, "S T"], k: int) -> Bool[Array, "S T"]:
    """True at the k largest of each row, ties to the lowest position as `lax.top_k` has them; never at -inf.

    A sort of 8192 scores a query would cost more than the attention that it saves. The k-th largest is found instead
    by bisection on the scores' integer images, two bits a pass.
    """
    visible = scores > -jnp.inf
    if scores.shape[-1] <= k:
        return visible
    image = ordered_image(scores)
    threshold = kth_largest(image, k)[:, None]
    above = image > threshold
    equal = (image == threshold) & visible
    room = k - above.sum(-1, keepdims=True, dtype=jnp.int32)
    crowded = jnp.any(equal.sum(-1, keepdims=True, dtype=jnp.int32) > room)
    first = jax.lax.cond(crowded, lambda: equal & (jnp.cumsum(equal, -1, dtype=jnp.int32) <= room), lambda: equal)
    return above | first


def ordered_image(scores: Float32[Array, "..."]) -> UInt32[Array, "..."]:
    """Integers in the order of the scores; -0.0 equals 0.0. No NaN."""
    bits = jax.lax.bitcast_convert_type(jnp.where(scores == 0, 0.0, scores), jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def kth_largest(image: UInt32[Array, "*B T"], k: int) -> UInt32[Array, "*B"]:
    """The largest t such that at least k of each row are >= t."""

    def narrow(step, found):
        shift = (30 - 2 * step).astype(jnp.uint32)
        quarters = [found | (jnp.uint32(part) << shift) for part in (1, 2, 3)]
        # The three counts are one pass over memory.
        enough = [(image >= quarter[..., None]).sum(-1, dtype=jnp.int32) >= k for quarter in quarters]
        return found | (sum(part.astype(jnp.uint32) for part in enough) << shift)

    return jax.lax.fori_loop(0, 16, narrow, jnp.zeros(image.shape[:-1], jnp.uint32))


class Losses(NamedTuple):
    """Means over the tokens of a batch, in nats."""

    language: Float32[Array, ""]
    """Of the next byte."""
    draft: Float32[Array, ""]
    """Of the byte after it, by the MTP layer."""
    indexers: Float32[Array, " groups"]
    """KL of each group, the MTP layer's last; empty unless asked for."""
    accepted: Float32[Array, ""]
    """Share of greedy drafts that equal the model's own greedy choice."""
    loads: dict[int, Float32[Array, " experts"]]
    """By layer: share of its tokens that each expert takes."""


def losses(
    model: Decoder, tokens: Int32[Array, "B S"], attention: Attention, phase: Int32[Array, ""] | int = 0
) -> Losses:
    """Every loss of a batch of windows, from one forward. Call it inside shard_map, like the model.

    Args:
      model: with its MTP layer.
      tokens: windows of two tokens more than the model reads, for the two targets.
    """
    loads = _observe(model)
    length = tokens.shape[1] - 2
    given, following, after = (tokens[:, first : first + length] for first in range(3))
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), given.shape)
    dtype = model.embed_tokens.dtype
    history: Any = TrainingHistory(model.config, attention, phase, dtype)
    drafting: Any = TrainingHistory(model.config, attention, phase, dtype)
    hidden = model(given, positions, history)
    logits = model.logits(hidden)
    drafts = model.logits(model.draft(following, hidden, positions + 1, drafting))
    kl = list((history.indexer_losses() | drafting.indexer_losses()).values())
    agree = jnp.argmax(drafts[:, :-1], -1) == jnp.argmax(logits[:, 1:], -1)
    return Losses(
        language=cross_entropy(logits, following),
        draft=cross_entropy(drafts, after),
        indexers=jnp.stack(kl) if kl else jnp.zeros(0),
        accepted=jnp.mean(agree.astype(jnp.float32)),
        loads=loads,
    )


def cross_entropy(logits: Float32[Array, "B S V"], targets: Int32[Array, "B S"]) -> Float32[Array, ""]:
    """Mean in nats."""
    right = jnp.take_along_axis(logits, targets[..., None], -1, mode="clip")[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - right)


def balanced(
    bias: Float32[Array, " experts"], load: Float32[Array, " experts"], rate: Float[Array, ""] | float
) -> Float32[Array, " experts"]:
    """A router's bias after DeepSeek's auxiliary-loss-free update: up for experts that take less than the mean."""
    return bias + rate * jnp.sign(jnp.mean(load) - load)


def _observe(model: Decoder) -> dict[int, Array]:
    """Detach every indexer's inputs, and let routers write their experts' loads into the result, by layer."""
    loads: dict[int, Array] = {}
    layers: list[DecoderLayer] = [*model.layers, *([model.mtp.block] if model.mtp is not None else [])]
    for number, layer in enumerate(layers):
        if layer.self_attn.indexer is not None:
            layer.self_attn.indexer = _detached(layer.self_attn.indexer)
        if isinstance(layer.mlp, Moe):
            layer.mlp.router = _recorded(layer.mlp.router, number, loads)
    return loads


def _detached(indexer: Any) -> Any:
    return lambda x, latent, angles: indexer(*jax.lax.stop_gradient((x, latent)), angles)


def _recorded(router: Any, number: int, loads: dict[int, Array]) -> Any:
    def gates(x):
        found = router(x)
        loads[number] = jnp.mean((jax.lax.stop_gradient(found) > 0).astype(jnp.float32), 0)
        return found

    return gates
