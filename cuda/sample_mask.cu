/* sample_mask.cu - tokens that a row's grammar forbids get no probability.
 *
 *   mask_logits   l' = l where the token's bit is set, else -inf.
 *
 * Layout      out, logits: f32 [R, V], may be the same. allowed: u32 [R, ceil(V / 32)]: token v is bit v % 32 of word
 *             v / 32 of its row; bits past V mean nothing.
 * Launch      grid (ceil(V / 256), R), a thread a token; blocks of 256.
 * Arithmetic  none: a kept logit keeps every bit, NaN and +inf too, so that a broken row is still refused.
 * Traffic     reads 4 V R logits and V R / 8 of bits, a word a warp; writes 4 V R.
 * Why so      -inf is what a logit may be already: sets, masses, draws and judgements of drafts need no other path. The
 *             raw logits stay for the log-probabilities.
 */
#include "common.cuh"

constexpr int kThreads = 256;

extern "C" __global__ void __launch_bounds__(kThreads)
    mask_logits(gptr<float> out, gptr<const float> logits, gptr<const u32> allowed, int words, int vocab) {
    const int v = blockIdx.x * kThreads + threadIdx.x;
    if (v >= vocab) return;
    const i64 at = (i64)blockIdx.y * vocab + v;
    const u32 word = allowed[(i64)blockIdx.y * words + (v >> 5)];
    const float l = logits[at];
    out[at] = word >> (v & 31) & 1u ? l : __uint_as_float(0xff800000u);
}
EXPORT(mask_logits)
