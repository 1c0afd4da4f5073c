/* profile.h - limits of the device that the driver plays. Every launch is held against one of these rows. */
#pragma once

namespace simt {

struct Profile {
    const char *name, *device_name;
    int major, minor, n_sm;
    unsigned smem_per_block, smem_per_sm, regs_per_block, threads_per_sm, l2_bytes;
};

constexpr unsigned kDefaultSmem = 48 << 10;  // without cuFuncSetAttribute(MAX_DYNAMIC_SHARED_SIZE_BYTES)
constexpr unsigned kMaxSmem = 227 << 10;     // the largest of the rows: what a worker's arena holds

// CUDA C++ programming guide, compute capabilities; GB10 as measured
inline const Profile kProfiles[] = {
    {"gb10", "ds4 CPU driver (GB10 profile)", 12, 1, 48, 99 << 10, 100 << 10, 65536, 1536, 24 << 20},
    {"h100", "ds4 CPU driver (H100 profile)", 9, 0, 132, 227 << 10, 228 << 10, 65536, 2048, 50 << 20},
    {"b200", "ds4 CPU driver (B200 profile)", 10, 0, 148, 227 << 10, 228 << 10, 65536, 2048, 126 << 20},
    {"rtx5090", "ds4 CPU driver (RTX 5090 profile)", 12, 0, 170, 99 << 10, 100 << 10, 65536, 1536, 96 << 20},
};

}  // namespace simt
