"""Block-sparse attention, forward: one program per query tile, an online softmax over the key blocks of its list.

Plain pointers only: what Triton's interpreter can run and every target can compile.  TRITON_INTERPRET must be set before
this module is imported.
"""

# mypy: disable-error-code=no-untyped-def

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rows(at, some, is_d, RAGGED: tl.constexpr, PADDED: tl.constexpr):  # no mask where none is needed
    if RAGGED:
        if PADDED:
            x = tl.load(at, mask=some & is_d[None, :], other=0.0)
        else:
            x = tl.load(at, mask=some, other=0.0)
    elif PADDED:
        x = tl.load(at, mask=is_d[None, :], other=0.0)
    else:
        x = tl.load(at)
    return x


@triton.jit
def forward(
    Q, K, V, Out, Lse, Index, Counts, Valid, Bias,
    stride_qb, stride_qh, stride_qs,
    stride_kb, stride_kh, stride_ks,
    stride_vb, stride_vh, stride_vs,
    stride_ob, stride_oh, stride_os,
    stride_ib, stride_ih, stride_iq,
    stride_cb, stride_ch, stride_cq,
    stride_validb, stride_biasb, stride_biash,
    q_len, groups, scale_log2,
    HEAD_DIM: tl.constexpr, D: tl.constexpr,  # D: HEAD_DIM padded to a power of two
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,  # the mask's blocks
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr,  # what one step works on; a block is one or more tiles
    RAGGED: tl.constexpr,  # a tile may hold slots that are no keys (Valid is read)
    BIAS: tl.constexpr,  # only with RAGGED
    UPCAST: tl.constexpr,  # the interpreter computes bfloat16 products wrongly
):  # fmt: skip
    LOG2E: tl.constexpr = 1.4426950408889634
    LN2: tl.constexpr = 0.6931471805599453
    TILES_Q: tl.constexpr = (BLOCK_Q + TILE_Q - 1) // TILE_Q
    TILES_K: tl.constexpr = (BLOCK_K + TILE_K - 1) // TILE_K
    tile = tl.program_id(0)
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)  # a tensor may hold more than 2**31 elements
    kv_head = (head // groups).to(tl.int64)
    block_q = tile // TILES_Q

    slots_q = (tile % TILES_Q) * TILE_Q + tl.arange(0, TILE_Q)
    rows = block_q * BLOCK_Q + slots_q
    d = tl.arange(0, D)
    is_d = d < HEAD_DIM
    # A row that is not this block's is computed and not stored: a mask kept through the loop costs registers.
    read = tl.minimum(rows, q_len - 1).to(tl.int64)
    q_at = Q + batch * stride_qb + head.to(tl.int64) * stride_qh + read[:, None] * stride_qs + d[None, :]
    if HEAD_DIM < D:
        q = tl.load(q_at, mask=is_d[None, :], other=0.0)
    else:
        q = tl.load(q_at)
    if UPCAST:
        q = q.to(tl.float32)

    cols = tl.arange(0, TILE_K)
    K += batch * stride_kb + kv_head * stride_kh
    V += batch * stride_vb + kv_head * stride_vh
    Index += batch * stride_ib + head.to(tl.int64) * stride_ih + block_q.to(tl.int64) * stride_iq
    count = tl.load(Counts + batch * stride_cb + head.to(tl.int64) * stride_ch + block_q.to(tl.int64) * stride_cq)
    if RAGGED:
        Valid += batch * stride_validb
    if BIAS:
        Bias += batch * stride_biasb + kv_head * stride_biash

    top = tl.full((TILE_Q,), -float("inf"), tl.float32)
    total = tl.zeros((TILE_Q,), tl.float32)
    acc = tl.zeros((TILE_Q, D), tl.float32)
    for step in range(0, count * TILES_K):  # one flat loop: the compiler overlaps its loads across blocks too
        block = tl.load(Index + step // TILES_K)
        slot = (step % TILES_K) * TILE_K
        start = block.to(tl.int64) * BLOCK_K + slot
        if RAGGED:
            # A slot that is no key may hold anything, or not exist; the last key is read in its place, and scored -inf.
            keys = tl.load(Valid + block) - slot
            at = tl.minimum(cols, keys - 1)
            some = keys > 0
        else:
            at = cols
            some = True
        k_at = K + start * stride_ks + (at[:, None] * stride_ks + d[None, :])
        v_at = V + start * stride_vs + (at[:, None] * stride_vs + d[None, :])
        k = _rows(k_at, some, is_d, RAGGED, HEAD_DIM < D)
        if UPCAST:
            k = k.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        if BIAS:
            scores += (tl.load(Bias + start + at, mask=some, other=0.0).to(tl.float32) * LOG2E)[None, :]
        if RAGGED:
            scores = tl.where(cols[None, :] < keys, scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        if RAGGED:  # a row without a key so far: -inf - -inf is no number
            base = tl.where(new_top == -float("inf"), 0.0, new_top)
        else:
            base = new_top
        p = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        v = _rows(v_at, some, is_d, RAGGED, HEAD_DIM < D)
        if UPCAST:
            v = v.to(tl.float32)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
        top = new_top

    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    is_row = (slots_q < BLOCK_Q) & (rows < q_len)
    rows_long = rows.to(tl.int64)
    out_at = Out + batch * stride_ob + head.to(tl.int64) * stride_oh + rows_long[:, None] * stride_os + d[None, :]
    tl.store(out_at, (acc / total[:, None]).to(Out.dtype.element_ty), mask=is_row[:, None] & is_d[None, :])
    lse = tl.where(empty, -float("inf"), (top + tl.log2(total)) * LN2)
    tl.store(Lse + (batch * tl.num_programs(1) + head) * q_len + rows, lse, mask=is_row)
