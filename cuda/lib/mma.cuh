/* mma.cuh - tensor cores: ldmatrix and mma.sync m16n8k16, bf16 in, float32 sums.
 *
 * The twin adds k in rising order with fmaf; the hardware's order and truncation inside one mma are its own, so these
 * two are close but not equal bit for bit.
 */
#pragma once
#include "convert.cuh"
#include "smem.cuh"

#ifdef __CUDACC__

/// Lane l names (by `elem`) row l & 7 of matrix l >> 3; each row is eight bf16.
template <class S>
DEV void ldmatrix_x4(u32 (&r)[4], S&& s, i64 elem) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(shared_base(s) + elem))
                 : "memory");
}
template <class S>
DEV void ldmatrix_x4_trans(u32 (&r)[4], S&& s, i64 elem) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(shared_base(s) + elem))
                 : "memory");
}
DEV void mma_bf16_16816(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#else

namespace simt {
template <bool TRANS>
SIMT_INLINE void ldmatrix(u32 (&r)[4], const void* row, Loc loc) {
    Fiber* c = simt_current;
    Warp* w = c->warp;
#ifdef SIMT_WATCHED
    struct alignas(16) Row {
        u64 q[2];
    };
    (void)sload<Row>(row, loc);
#endif
    w->ptr[c->lane] = row;
    meet(0xffffffffu, "ldmatrix", loc, [](Warp* q) {
        for (int m = 0; m < 4; m++) {
            u16 tile[8][8];
            for (int i = 0; i < 8; i++) memcpy(tile[i], q->ptr[m * 8 + i], 16);
            for (int l = 0; l < 32; l++) {
                const int i = l >> 2, j = 2 * (l & 3);
                const u32 lo = TRANS ? tile[j][i] : tile[i][j], hi = TRANS ? tile[j + 1][i] : tile[i][j + 1];
                q->frag[l].a[m] = lo | hi << 16;
            }
        }
    });
    for (int i = 0; i < 4; i++) r[i] = w->frag[c->lane].a[i];
}
static __attribute__((noinline)) void mma_of(Warp* w) {
    typedef float F8 __attribute__((vector_size(32)));
    alignas(64) float a[16][16];
    alignas(64) float b[16][8], d[16][8];
    for (int l = 0; l < 32; l++) {
        const int g = l >> 2, t = 2 * (l & 3);
        const Fragment& f = w->frag[l];
        a[g][t] = bf16_lo(f.a[0]), a[g][t + 1] = bf16_hi(f.a[0]);
        a[g + 8][t] = bf16_lo(f.a[1]), a[g + 8][t + 1] = bf16_hi(f.a[1]);
        a[g][t + 8] = bf16_lo(f.a[2]), a[g][t + 9] = bf16_hi(f.a[2]);
        a[g + 8][t + 8] = bf16_lo(f.a[3]), a[g + 8][t + 9] = bf16_hi(f.a[3]);
        b[t][g] = bf16_lo(f.b[0]), b[t + 1][g] = bf16_hi(f.b[0]);
        b[t + 8][g] = bf16_lo(f.b[1]), b[t + 9][g] = bf16_hi(f.b[1]);
        d[g][t] = f.d[0], d[g][t + 1] = f.d[1], d[g + 8][t] = f.d[2], d[g + 8][t + 1] = f.d[3];
    }
    for (int i = 0; i < 16; i++) {
        F8 sum;
        memcpy(&sum, d[i], 32);
        for (int k = 0; k < 16; k++) {
            F8 column;
            memcpy(&column, b[k], 32);
#if defined(__FMA__) && defined(__AVX__)
            const float x = a[i][k];
            sum = __builtin_ia32_vfmaddps256(F8{x, x, x, x, x, x, x, x}, column, sum);
#else
            for (int j = 0; j < 8; j++) sum[j] = __builtin_fmaf(a[i][k], column[j], sum[j]);
#endif
        }
        memcpy(d[i], &sum, 32);
    }
    for (int l = 0; l < 32; l++) {
        const int g = l >> 2, t = 2 * (l & 3);
        Fragment& f = w->frag[l];
        f.d[0] = d[g][t], f.d[1] = d[g][t + 1], f.d[2] = d[g + 8][t], f.d[3] = d[g + 8][t + 1];
    }
}
}  // namespace simt

template <class S>
DEV void ldmatrix_x4(u32 (&r)[4], S&& s, i64 elem SITE) {
    simt::ldmatrix<false>(r, shared_base(s) + elem, loc);
}
template <class S>
DEV void ldmatrix_x4_trans(u32 (&r)[4], S&& s, i64 elem SITE) {
    simt::ldmatrix<true>(r, shared_base(s) + elem, loc);
}
DEV void mma_bf16_16816(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1 SITE) {
    simt::Fiber* c = simt_current;
    simt::Warp* w = c->warp;
    simt::Fragment& f = w->frag[c->lane];
    memcpy(f.a, a, sizeof f.a);
    memcpy(f.d, d, sizeof f.d);
    f.b[0] = b0, f.b[1] = b1;
    simt::meet(0xffffffffu, "mma", loc, [](simt::Warp* q) { simt::mma_of(q); });
    memcpy(d, w->frag[c->lane].d, sizeof f.d);
}

#endif
