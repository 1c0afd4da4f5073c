"""Launch table of sample.cu."""

from ds4.device.kernels import Kernel

SMEM = 8 * (256 + 32 + 2) + 16 - 8 * (256 + 32 + 2) % 16

SAMPLE = Kernel(
    name="sample",
    source="sample.cu",
    grid=lambda R: (R, 1, 1),
    block=1024,
    args=("out: i32[R,4]", "logits: f32[R,V]", "params: i32[R,8]", "pos: i32[R]", "vocab: i32"),
    smem=SMEM,
    released={"R": 1, "V": 129280},
    traffic=lambda R, V: (4 * R * V * 3, 16 * R),
    in_flight=1024 * 4,
    reason="one block a row: every pass ends in a decision of the whole row; the logits stay in L2",
)
KERNELS = (SAMPLE,)
