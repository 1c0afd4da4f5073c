/* sample_penalty.cu - penalties and biases on logits, and the counts that they read.
 *
 *   penalize       l' = l / repetition where l > 0, l * repetition otherwise, for tokens that the text has so far
 *                  (prompt or answer); then l' -= frequency * c, and presence where c > 0, c = how often the answer has
 *                  the token; then l' += bias. Row t counts pending[0 .. t - 1] as part of the answer.
 *   count_tokens   enters tokens into the counts: of the prompt, or once more in the answer.
 *
 * Layout      out, logits: f32 [R, V], may be the same. seen: u32 [V] = bit 31: in the prompt; below: c. pending:
 *             i32 [first + R - 1], or null for none; row blockIdx.y is row t = first + blockIdx.y of its pass. bias:
 *             f32 [V] or null. penalties: f32 [4] = presence, frequency, repetition, unused. ids: i32 [N, stride], the
 *             token in the first column; ids outside 0 .. V - 1 are left out. round: null: all N count; else
 *             i32 [4] of accept_prefix: rows 0 .. round[0] count, if there are as many.
 * Launch      penalize: grid (ceil(V / 256), R), a thread a token. count_tokens: grid ceil(N / 256). Blocks of 256.
 * Arithmetic  f32, in the order above; counts are integers, so the atomics' order does not matter.
 * Traffic     penalize: reads 4 V R logits, 4 V R counts and as many biases (both out of L2 after the first row),
 *             writes 4 V R. count_tokens: one sector read and written a token.
 * Why so      the penalised logits are written once, for the many passes that choose among them. The counts of a pass's
 *             later rows are never stored: a rejected draft leaves nothing to undo.
 */
#include "common.cuh"

constexpr int kThreads = 256;
constexpr u32 kInPrompt = 0x80000000u;

extern "C" __global__ void __launch_bounds__(kThreads)
    penalize(gptr<float> out, gptr<const float> logits, gptr<const u32> seen, gptr<const i32> pending,
             gptr<const float> bias, gptr<const float> penalties, int first, int vocab) {
    const int v = blockIdx.x * kThreads + threadIdx.x;
    if (v >= vocab) return;
    const i64 at = (i64)blockIdx.y * vocab + v;
    const u32 held = seen[v];
    u32 count = held & ~kInPrompt;
    if (pending)
        for (int i = 0; i < first + (int)blockIdx.y; i++) count += pending[i] == v;
    float l = logits[at];
    const float repetition = penalties[2];
    if (count || held & kInPrompt) l = l > 0.0f ? l / repetition : l * repetition;
    if (count) l = l - penalties[1] * (float)count - penalties[0];
    if (bias) l += bias[v];
    out[at] = l;
}
EXPORT(penalize)

extern "C" __global__ void __launch_bounds__(kThreads)
    count_tokens(gptr<u32> seen, gptr<const i32> ids, gptr<const i32> round, int n, int stride, int prompt,
                 int vocab) {
    const int i = blockIdx.x * kThreads + threadIdx.x;
    if (i >= n || (round && i > round[0])) return;
    const int id = ids[(i64)i * stride];
    if (id < 0 || id >= vocab) return;
    if (prompt)
        atomicOr(seen + id, kInPrompt);
    else
        atomicAdd(seen + id, 1u);
}
EXPORT(count_tokens)
