/* topk.cu - exact selection of the best rows and of the best candidate blocks.
 *
 *   topk_rows     picks[r] = the topk best rows j < lens of scores[r], rising, then -1; a row of -inf is never picked
 *   topk_blocks   mask[r] = the n_keep best blocks of block_size rows, a block's value the maximum of its visible
 *                 rows; the block of the last visible row counts as +inf; blocks of -inf are never kept
 *                 lens = min((pos[r] + 1) / ratio, capacity). Equal values: the lowest index first.
 *
 * Layout      scores: f32 [R, capacity], read below lens only; picks: i32 [R, topk]; mask: u32 [R, words], bit b % 32
 *             of word b / 32, words >= ceil(ceil(capacity / block_size) / 32), all of them written.
 * Launch      grid R, one block a row; block 1024, or 128 under the name *_small for capacities where a thousand
 *             threads would mostly meet each other. The result does not depend on the number of threads.
 * Arithmetic  none: values become unsigned integers in the order of the floats (-0 = +0, 0 = dropped), a radix
 *             select by four digits of eight bits finds the smallest kept value and how many of it to keep, and warps
 *             over contiguous segments write what is above it, or among the first of its equals.
 * Traffic     reads 4 lens bytes a row (but for the forced block's) and writes 4 topk or 4 words; with more than 16,384
 *             rows (or blocks) it reads them once a pass: at most 4, one to count, one to write.
 * Why so      sorting half a million scores to keep 512 would write them all. What fits is kept in shared memory as
 *             integers, so that every pass but the first is local. Counting in integers is order-free, so
 *             atomics cost no determinism. Segments per warp need no barrier between their steps; a digit whose
 *             rest is wanted whole ends the search early, which is the rule once values differ.
 */
#include "common.cuh"

template <int THREADS>
struct SelectSmem {
    sarr<u32, 4 * 256> hist;  // one histogram a digit, so that none has to be cleared between barriers
    sarr<u32, THREADS / 32> above;
    sarr<u32, THREADS / 32> equal;
    sarr<u32, 4> state;  // prefix so far, still wanted, finished
};

constexpr u32 kMinusInf = 0x007fffffu;  // order(-inf)
constexpr int kHeld = 16384;            // values that shared memory holds

// floats to integers of the same order; 0: never selected
DEV u32 order(float v) {
    const u32 u = __float_as_uint(v + 0.0f);  // -0 becomes +0
    const u32 k = u & 0x80000000u ? ~u : u | 0x80000000u;
    return k <= kMinusInf ? 0u : k;
}

// Values of one row, kept in shared memory if there is room for all of them; else worked out again in every pass.
template <class Source>
struct Values {
    Source source;
    sptr<u32> held;
    bool fits;
    // The first `n` into shared memory; no barrier. All threads call.
    DEV void hold(int n) {
        fits = n <= kHeld;
        if (fits)
            for (int i = threadIdx.x; i < n; i += blockDim.x) held[i] = source(i);
    }
    DEV u32 operator()(int i) const { return fits ? (u32)held[i] : source(i); }
};

struct RowValue {
    gptr<const float> scores;
    i64 base;
    DEV u32 operator()(int i) const { return order(scores[base + i]); }
};

struct BlockValue {
    gptr<const float> scores;
    i64 base;
    int block_size, forced;
    DEV u32 operator()(int b) const {
        if (b == forced) return order(__uint_as_float(0x7f800000u));
        float best = __uint_as_float(0xff800000u);
        const i64 at = base + (i64)b * block_size;
        if (at % 4 == 0 && block_size % 4 == 0) {  // only the forced block can be short
            for (int i = 0; i < block_size; i += 4) {
                const float4 v = gld<float4>(scores, at + i);
                best = fmaxf(best, fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w)));
            }
        } else {
            for (int i = 0; i < block_size; ++i) best = fmaxf(best, scores[at + i]);
        }
        return order(best);
    }
};

// Finds `threshold` and `ties`: an entry is kept if it is above the threshold, or equal to it and among the first `ties` of
// those. All threads call.
template <int THREADS, class Value>
DEV void find_threshold(SelectSmem<THREADS>& sm, Value& value, int n, int keep, u32& threshold, u32& ties) {
    threshold = 0, ties = 0;
    value.hold(n);
    for (int i = threadIdx.x; i < 4 * 256; i += THREADS) sm.hist[i] = 0u;
    sync_block();
    if (n <= keep) return;  // the same for the whole block
    u32 prefix = 0, wanted = (u32)keep;
    for (int digit = 0; digit < 4; ++digit) {
        const int shift = 24 - 8 * digit;
        for (int i = threadIdx.x; i < n; i += THREADS) {
            const u32 v = value(i);
            if (v && (digit == 0 || v >> (shift + 8) == prefix))
                atomicAdd(sm.hist + (digit * 256 + (v >> shift & 255)), 1u);
        }
        sync_block();
        if (threadIdx.x < 32) {
            // lane l holds the eight bins from the top: 255 - 8 l downwards
            const int top = digit * 256 + 255 - 8 * (int)threadIdx.x;
            u32 mine = 0;
            for (int b = 0; b < 8; ++b) mine += sm.hist[top - b];
            u32 upto = mine;
            for (int d = 1; d < 32; d *= 2) {
                const u32 other = shfl_up(upto, d);
                if ((int)threadIdx.x >= d) upto += other;
            }
            u32 above = upto - mine;
            if (threadIdx.x == 31 && upto < wanted) {  // fewer than keep are not dropped (first digit only)
                sm.state[0] = 0u, sm.state[1] = 0u, sm.state[2] = 1u;
            }
            if (above < wanted && wanted <= upto) {
                for (int b = 0; b < 8; ++b) {
                    const u32 count = sm.hist[top - b];
                    if (above + count >= wanted) {
                        const u32 rest = wanted - above, p = prefix << 8 | (u32)(255 - 8 * (int)threadIdx.x - b);
                        const bool whole = count == rest;
                        sm.state[0] = whole ? p << shift : p;
                        sm.state[1] = whole ? 0xffffffffu : rest;
                        sm.state[2] = whole || digit == 3;
                        break;
                    }
                    above += count;
                }
            }
        }
        sync_block();
        prefix = sm.state[0], wanted = sm.state[1];
        if (sm.state[2]) break;
    }
    threshold = prefix, ties = wanted;
}

struct Counts {
    int above, equal;  // kept before this warp's segment: above the threshold, equal to it
};

// The segment of this warp is [begin, end), whole steps of 32. All threads call.
template <int THREADS, class Value>
DEV Counts count_before(SelectSmem<THREADS>& sm, const Value& value, int n, u32 threshold, int& begin, int& end) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int segment = (n + THREADS - 1) / THREADS * 32;
    begin = min(warp * segment, n), end = min(begin + segment, n);
    u32 above = 0, equal = 0;
    for (int i = begin; i < end; i += 32) {
        const u32 v = i + lane < end ? value(i + lane) : 0u;
        above += (u32)__popc(ballot(v > threshold));
        equal += (u32)__popc(ballot(v && v == threshold));
    }
    if (lane == 0) sm.above[warp] = above, sm.equal[warp] = equal;
    sync_block();
    Counts before{0, 0};
    for (int w = 0; w < warp; ++w) before.above += (int)sm.above[w], before.equal += (int)sm.equal[w];
    return before;
}

template <int THREADS>
DEV void rows_body(gptr<i32> picks, gptr<const float> scores, gptr<const i32> pos, i32 ratio, i32 capacity,
                   i32 topk) {
    SMEM(SelectSmem<THREADS>, sm);
    const int n = min(((i32)pos[blockIdx.x] + 1) / ratio, capacity);
    const int lane = threadIdx.x % 32;
    const i64 out = (i64)blockIdx.x * topk;
    SMEM_DYN(u32, held, sizeof(SelectSmem<THREADS>));
    Values<RowValue> value{{scores, (i64)blockIdx.x * capacity}, held, false};
    u32 threshold, ties;
    find_threshold<THREADS>(sm, value, n, topk, threshold, ties);
    int begin, end;
    Counts seen = count_before<THREADS>(sm, value, n, threshold, begin, end);
    for (int i = begin; i < end; i += 32) {
        const u32 v = i + lane < end ? value(i + lane) : 0u;
        const u32 earlier = (1u << lane) - 1u;
        const u32 same = ballot(v && v == threshold);
        const bool kept = v > threshold || (v && v == threshold && (u32)(seen.equal + __popc(same & earlier)) < ties);
        const u32 all = ballot(kept);
        const int at = seen.above + (int)min((u32)seen.equal, ties) + __popc(all & earlier);
        if (kept) picks[out + at] = i + lane;
        seen.above += __popc(ballot(v > threshold));
        seen.equal += __popc(same);
    }
    // the last warp's end is the number of picks; everybody can work it out from the segments' counts
    int total = 0, equal = 0;
    for (int w = 0; w < THREADS / 32; ++w) total += (int)sm.above[w], equal += (int)sm.equal[w];
    total += (int)min((u32)equal, ties);
    for (int i = total + threadIdx.x; i < topk; i += THREADS) picks[out + i] = -1;
}

template <int THREADS>
DEV void blocks_body(gptr<u32> mask, gptr<const float> scores, gptr<const i32> pos, i32 ratio, i32 capacity,
                     i32 block_size, i32 n_keep, i32 words) {
    SMEM(SelectSmem<THREADS>, sm);
    const int n_rows = min(((i32)pos[blockIdx.x] + 1) / ratio, capacity);
    const int n = (n_rows + block_size - 1) / block_size;
    const int lane = threadIdx.x % 32;
    const i64 out = (i64)blockIdx.x * words;
    SMEM_DYN(u32, held, sizeof(SelectSmem<THREADS>));
    Values<BlockValue> value{
        {scores, (i64)blockIdx.x * capacity, block_size, n_rows ? (n_rows - 1) / block_size : -1}, held, false};
    u32 threshold, ties;
    find_threshold<THREADS>(sm, value, n, n_keep, threshold, ties);
    int begin, end;
    Counts seen = count_before<THREADS>(sm, value, n, threshold, begin, end);
    for (int i = begin; i < end; i += 32) {  // begin is a multiple of 32: a step is a word
        const u32 v = i + lane < end ? value(i + lane) : 0u;
        const u32 earlier = (1u << lane) - 1u;
        const u32 same = ballot(v && v == threshold);
        const bool kept = v > threshold || (v && v == threshold && (u32)(seen.equal + __popc(same & earlier)) < ties);
        const u32 word = ballot(kept);
        if (lane == 0) mask[out + i / 32] = word;
        seen.equal += __popc(same);
    }
    for (int i = (n + 31) / 32 + threadIdx.x; i < words; i += THREADS) mask[out + i] = 0u;
}

#define SELECT(suffix, THREADS)                                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) topk_rows##suffix(                                     \
        gptr<i32> picks, gptr<const float> scores, gptr<const i32> pos, i32 ratio, i32 capacity, i32 topk) {        \
        rows_body<THREADS>(picks, scores, pos, ratio, capacity, topk);                                              \
    }                                                                                                               \
    EXPORT(topk_rows##suffix)                                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                                        \
        topk_blocks##suffix(gptr<u32> mask, gptr<const float> scores, gptr<const i32> pos, i32 ratio, i32 capacity, \
                            i32 block_size, i32 n_keep, i32 words) {                                                \
        blocks_body<THREADS>(mask, scores, pos, ratio, capacity, block_size, n_keep, words);                        \
    }                                                                                                               \
    EXPORT(topk_blocks##suffix)

SELECT(, 1024)
SELECT(_small, 128)
