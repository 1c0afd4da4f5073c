/* sample.cu - one token a row from its logits: greedy, or temperature with top-k, top-p and min-p, then Gumbel-max.
 *
 *   sample   token = argmax over the truncated set (truncate.cuh) of l / T + g, g Gumbel noise. T = 0: argmax of l.
 *            Ties go to the lowest token id, in every set and in the result.
 *
 * Layout      out: i32 [R, 4] = token (-1: a logit is NaN or +inf, or none is finite), bits of its f32 log-probability
 *             under the untempered distribution of `raw` (null: of logits), tokens kept, 0. tokens, or null: i32 [R],
 *             the token again, 0 for -1: the id slots of the next step, which may be under way before anybody looks.
 *             logits, raw: f32 [R, V]. params: i32 [R, 8] = bits of T, top_k (0: off), bits of top_p (>= 1: off), bits
 *             of min_p (<= 0: off), seed low, seed high, noise stream, 0. pos: i32 [R].
 * Launch      grid R, one block a row; block 512, or 128 under the name *_small for vocabularies where so many
 *             threads would mostly meet each other. The result does not depend on the number of threads.
 * Arithmetic  truncate.cuh's: f32 scores, integer masses, thresholds by radix select, 8 bits a pass. Noise:
 *             Philox4x32-10, key = seed, counter = (token / 4, pos + 1, stream, 0), word token % 4: it depends on seed,
 *             stream, position and token only.
 * Traffic     reads 4 V bytes of logits a pass: 3 passes, 5 more for top_k, 6 for top_p, 4 where ties are cut, 2 of
 *             raw. Writes 16 (20).
 * Why so      no sort and no list: 129,280 logits are half a megabyte that stays in L2.
 */
#include "common.cuh"
#include "truncate.cuh"

template <int THREADS>
DEV void sample_body(gptr<i32> out, gptr<i32> tokens, gptr<const float> logits, gptr<const float> raw,
                     gptr<const i32> params, gptr<const i32> pos, int vocab) {
    SMEM(RowSmem, sm);
    const i64 row = blockIdx.x;
    const gptr<const float> l = logits + row * vocab;
    int argmax;
    float top;
    if (!find_top<THREADS>(l, vocab, argmax, top)) {  // uniform over the block
        if (threadIdx.x == 0) {
            refuse_row(out, row);
            if (tokens) tokens[row] = 0;
        }
        return;
    }
    const Settings s = read_settings(params, row, top);
    int token = argmax;
    u32 count = 1;
    if (!s.greedy) {
        const Kept kept = truncate_row<THREADS>(sm, l, vocab, s, argmax, top);
        u32 mine = 0;
        token = (int)draw<THREADS>(Noise(params, pos, row), row_stream(params, row), vocab, [&](int v, float& z) {
                    const float x = l[v];
                    z = x * kept.inv_t;
                    const bool in = kept.has(v, x);
                    mine += in;
                    return in;
                }).id;
        count = block_sum<THREADS>(mine);
    }
    const gptr<const float> r = raw ? raw + row * vocab : l;
    if (raw) find_top<THREADS>(r, vocab, argmax, top);
    const float logprob = log_probability<THREADS>(r, vocab, argmax, top, token);
    if (threadIdx.x == 0) {
        out[row * 4] = token;
        out[row * 4 + 1] = (i32)__float_as_uint(logprob);
        out[row * 4 + 2] = (i32)count;
        out[row * 4 + 3] = 0;
        if (tokens) tokens[row] = token;
    }
}

#define SAMPLE(suffix, THREADS)                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                             \
        sample##suffix(gptr<i32> out, gptr<i32> tokens, gptr<const float> logits, gptr<const float> raw, \
                       gptr<const i32> params, gptr<const i32> pos, int vocab) {                         \
        sample_body<THREADS>(out, tokens, logits, raw, params, pos, vocab);                              \
    }                                                                                                    \
    EXPORT(sample##suffix)

SAMPLE(, 512)
SAMPLE(_small, 128)
