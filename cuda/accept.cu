/* accept.cu - which drafts of a verify pass stand, and what takes the place of the first that does not.
 *
 *   accept_shares   p = the truncated, tempered distribution of every target row, q = of every draft row.
 *   accept          row r judges draft d = drafts[r]. q = 1 at d where the drafts were not drawn (draft_logits null).
 *                   Token = d with probability min(1, p(d) / q(d)), else a draw from normalise(max(0, p - q)).
 *                   A row without a draft (r >= n_drafts, the bonus row): a draw from p, exactly as sample.cu draws.
 *                   A replacement is never d, so a draft stands exactly where token = d.
 *   accept_prefix   A = how many leading rows of `out` hold their draft; the round's new tokens are those of rows
 *                   0 .. A. The last of them and the positions after it go where the next pass looks for them.
 *
 * Layout      shares: i32 [R + n_drafts, 8], target rows, then draft rows = bits of 1/T, of the largest z, of min_p,
 *             the argmax, the cut's key, the last id at the cut, bits of 2^40 / mass, tokens kept (all -1: no
 *             distribution). out: i32 [R, 4] = token (-1: no distribution, see sample.cu, here or in the draft's row),
 *             bits of its log-probability under the untempered distribution of `raw` (null: of logits), tokens that p
 *             keeps, 0. logits, raw: f32 [R, V]. draft_logits: f32 [n_drafts, V]: the very numbers that the drafts
 *             were drawn from. drafts: i32 [n_drafts]. params: i32 [R, 8] as in sample.cu. pos: i32 [R]. round:
 *             i32 [4] = A, the token of row A (0 for -1), its position, 0. next_ids: i32 [1] = that token, or null;
 *             next_pos: i32 [n_next] = its position and those that follow, or null; may be pos.
 * Launch      accept_shares: grid R + n_drafts (R where draft_logits is null); accept: grid R; one block a row; block
 *             512, or 128 under the name *_small; the result does not depend on it. accept_prefix: one warp,
 *             n_drafts <= 31, n_next <= 32.
 * Arithmetic  truncate.cuh's sets and integer masses; p and q in f32 as exp(z - max) * (2^40 / mass), so equal rows
 *             give equal p and q. Accepted: u q < p, u uniform. Residual: argmax of log(p - q) + g. Noise as in
 *             sample.cu; u has the stream 2, the residual's g the stream 3, so neither knows how the draft was drawn.
 *             Where p and q differ by rounding only and nothing is left of p - q, the draft stands; if p has no such
 *             token (it is cut off, or masked), p's likeliest comes instead.
 * Traffic     a pass reads 4 V bytes. accept_shares: 2 passes a row, 5 more for top_k, 6 for top_p, 4 where ties are
 *             cut; writes 32 a row. accept: 2 passes of raw; where a draft falls 1 of each logits; writes 16 a row.
 * Why so      every row is judged as if those before it had stood, so that rows need not wait for one another: what a
 *             row would say depends on its position's noise alone. Sets before judgement in a launch of their own: then
 *             both rows of a judgement are cut at once. No sort; all passes hit L2.
 */
#include "common.cuh"
#include "truncate.cuh"

constexpr int kShareWords = 8;

// Probabilities of a truncated row, as accept_shares leaves them for accept.
struct Share {
    Kept kept;
    float per_weight;
    int count;
    bool usable;
    DEV float of(int v, float x) const {
        if (!kept.has(v, x)) return 0.0f;
        const float w = kept.weigh(x);
        return w < 0x1p-126f ? 0.0f : w * per_weight;  // -inf's weight is below, not zero
    }
};

DEV Share read_share(gptr<const i32> shares, i64 row) {
    const int4 a = gld<int4>(shares, row * kShareWords), b = gld<int4>(shares, row * kShareWords + 4);
    const Kept kept{__int_as_float(a.x), __int_as_float(a.y), __int_as_float(a.z), a.w, (u32)b.x, (u32)b.y};
    return {kept, __int_as_float(b.z), max(b.w, 0), b.w >= 0};
}

template <int THREADS>
DEV void shares_body(gptr<i32> shares, gptr<const float> logits, gptr<const float> draft_logits,
                     gptr<const i32> params, int rows, int vocab) {
    SMEM(RowSmem, sm);
    const bool drafts = (int)blockIdx.x >= rows;
    const i64 row = drafts ? (int)blockIdx.x - rows : (int)blockIdx.x;
    const gptr<const float> l = (drafts ? draft_logits : logits) + row * vocab;
    int argmax;
    float top;
    if (!find_top<THREADS>(l, vocab, argmax, top)) {  // uniform over the block
        if (threadIdx.x < kShareWords) shares[(i64)blockIdx.x * kShareWords + threadIdx.x] = -1;
        return;
    }
    const Kept kept = truncate_row<THREADS>(sm, l, vocab, read_settings(params, row, top), argmax, top);
    u64 mass = 0;
    u32 count = 0;
    for (int v = threadIdx.x; v < vocab; v += THREADS) {
        const float x = l[v];
        if (kept.has(v, x)) count++, mass += kept.mass(x);
    }
    count = block_sum<THREADS>(count);
    const float per_weight = kMassOne / (float)block_sum_u64<THREADS>(mass);
    if (threadIdx.x == 0) {
        const i64 at = (i64)blockIdx.x * kShareWords;
        gst(shares, at,
            make_int4(__float_as_int(kept.inv_t), __float_as_int(kept.z_top), __float_as_int(kept.min_p),
                      kept.argmax));
        gst(shares, at + 4, make_int4((i32)kept.cut, (i32)kept.last_id, __float_as_int(per_weight), (i32)count));
    }
}

template <int THREADS>
DEV void accept_body(gptr<i32> out, gptr<const i32> shares, gptr<const float> logits, gptr<const float> raw,
                     gptr<const float> draft_logits, gptr<const i32> drafts, gptr<const i32> params,
                     gptr<const i32> pos, int n_drafts, int vocab) {
    const i64 row = blockIdx.x;
    const gptr<const float> l = logits + row * vocab;
    const bool drafted = row < n_drafts, from_draft = drafted && draft_logits;
    const gptr<const float> dl = from_draft ? draft_logits + row * vocab : l;
    const int draft = drafted ? (int)drafts[row] : 0;
    const Share p = read_share(shares, row), q = read_share(shares, from_draft ? gridDim.x + row : row);
    if (!p.usable || !q.usable || draft < 0 || draft >= vocab) {  // uniform over the block
        if (threadIdx.x == 0) refuse_row(out, row);
        return;
    }
    const Noise noise(params, pos, row);
    int token = draft;
    if (!drafted) {
        token = (int)draw<THREADS>(noise, row_stream(params, row), vocab, [&](int v, float& z) {
                    const float x = l[v];
                    z = x * p.kept.inv_t;
                    return p.kept.has(v, x);
                }).id;
    } else {
        const float u = uniform(noise.words(0, kUniformStream).w[0]);
        const float q_of_draft = from_draft ? q.of(draft, dl[draft]) : 1.0f;
        if (!(u * q_of_draft < p.of(draft, l[draft]))) {  // uniform
            const Best best = draw<THREADS>(noise, kResidualStream, vocab, [&](int v, float& z) {
                const float left = v == draft ? 0.0f : p.of(v, l[v]) - (from_draft ? q.of(v, dl[v]) : 0.0f);
                z = log_f(left);
                return left > 0.0f;
            });
            if (best.key)
                token = (int)best.id;
            else if (!(p.of(draft, l[draft]) > 0.0f))
                token = p.kept.argmax;
        }
    }
    const gptr<const float> r = raw ? raw + row * vocab : l;
    int argmax;
    float top;
    find_top<THREADS>(r, vocab, argmax, top);
    const float logprob = log_probability<THREADS>(r, vocab, argmax, top, token);
    if (threadIdx.x == 0) {
        out[row * 4] = token;
        out[row * 4 + 1] = (i32)__float_as_uint(logprob);
        out[row * 4 + 2] = p.count;
        out[row * 4 + 3] = 0;
    }
}

#define ACCEPT(suffix, THREADS)                                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                                   \
        accept_shares##suffix(gptr<i32> shares, gptr<const float> logits, gptr<const float> draft_logits,      \
                              gptr<const i32> params, int rows, int vocab) {                                   \
        shares_body<THREADS>(shares, logits, draft_logits, params, rows, vocab);                               \
    }                                                                                                          \
    EXPORT(accept_shares##suffix)                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                                   \
        accept##suffix(gptr<i32> out, gptr<const i32> shares, gptr<const float> logits, gptr<const float> raw, \
                       gptr<const float> draft_logits, gptr<const i32> drafts, gptr<const i32> params,         \
                       gptr<const i32> pos, int n_drafts, int vocab) {                                         \
        accept_body<THREADS>(out, shares, logits, raw, draft_logits, drafts, params, pos, n_drafts, vocab);    \
    }                                                                                                          \
    EXPORT(accept##suffix)

ACCEPT(, 512)
ACCEPT(_small, 128)

extern "C" __global__ void __launch_bounds__(32)
    accept_prefix(gptr<i32> round, gptr<i32> next_ids, gptr<i32> next_pos, gptr<const i32> out,
                  gptr<const i32> drafts, gptr<const i32> pos, int n_drafts, int n_next) {
    const int lane = threadIdx.x;
    const bool stands = lane < n_drafts && out[4 * lane] == drafts[lane];
    const int accepted = __ffs((int)~ballot(stands)) - 1;
    const int token = max((i32)out[4 * accepted], 0), at = pos[accepted] + 1;
    sync_warp();  // next_pos may be pos: read by all before it is written
    if (next_pos && lane < n_next) next_pos[lane] = at + lane;
    if (lane == 0) {
        if (next_ids) next_ids[0] = token;
        round[0] = accepted;
        round[1] = token;
        round[2] = at;
        round[3] = 0;
    }
}
EXPORT(accept_prefix)
