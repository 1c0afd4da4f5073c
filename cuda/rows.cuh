/* rows.cuh - activations eight at a time, as every product reads them. */
#pragma once

/// Eight activations at element i (a multiple of 8).
DEV void load8(gptr<const bf16> p, i64 i, float (&o)[8]) { bf16x8_to_f32(gld<uint4>(p, i), o); }
DEV void load8(gptr<const float> p, i64 i, float (&o)[8]) {
    const float4 a = gld<float4>(p, i), b = gld<float4>(p, i + 4);
    o[0] = a.x, o[1] = a.y, o[2] = a.z, o[3] = a.w, o[4] = b.x, o[5] = b.y, o[6] = b.z, o[7] = b.w;
}
