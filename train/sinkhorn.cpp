// Sinkhorn normalisation of 4x4 mixing matrices (model-text.md 5.1), forward and backward, sixteen matrices a step.
//
// A graph of 40 tiny divisions a matrix is what training spends its time on when it is written in tensor operations.
// Element (j, k) of sixteen matrices is one vector of sixteen floats. The backward pass runs the steps backwards: a
// step y = x / (sum x + heps) has dx = (dy - sum dy*y) / (sum x + heps), and x is y times the kept divisor.
#include <torch/extension.h>

#include <cmath>

namespace {

constexpr int kLanes = 16, kSize = 4, kCells = kSize * kSize, kMaxSteps = 128;
typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float))));

Lanes exponential(Lanes x) {
    Lanes r;
    for (int i = 0; i < kLanes; i++) r[i] = expf(x[i]);
    return r;
}

// Matrices past the end are read as zeros and never written.
void load(const float* p, int64_t left, Lanes* c) {
    for (int t = 0; t < kLanes; t++)
        for (int i = 0; i < kCells; i++) c[i][t] = t < left ? p[t * kCells + i] : 0.f;
}

void store(float* p, int64_t left, const Lanes* c) {
    for (int t = 0; t < kLanes && t < left; t++)
        for (int i = 0; i < kCells; i++) p[t * kCells + i] = c[i][t];
}

// Divide along one axis: `stride` steps through the four members of a group, `next` from group to group.
void divide(Lanes* c, Lanes* divisor, int stride, int next, float heps) {
    for (int g = 0; g < kSize; g++) {
        Lanes* m = c + g * next;
        const Lanes s = m[0] + m[stride] + m[2 * stride] + m[3 * stride] + heps;
        const Lanes r = 1.f / s;
        for (int i = 0; i < kSize; i++) m[i * stride] *= r;
        divisor[g] = s;
    }
}

void undivide(Lanes* c, Lanes* d, const Lanes* divisor, int stride, int next) {
    for (int g = 0; g < kSize; g++) {
        Lanes *m = c + g * next, *n = d + g * next, t = {};
        for (int i = 0; i < kSize; i++) t += n[i * stride] * m[i * stride];
        const Lanes r = 1.f / divisor[g];
        for (int i = 0; i < kSize; i++) {
            n[i * stride] = (n[i * stride] - t) * r;
            m[i * stride] *= divisor[g];
        }
    }
}

// c: logits in, doubly normalised out. soft: the softmax before heps. divisor: kSize a step.
void forward_lanes(Lanes* c, Lanes* soft, Lanes* divisor, int iters, float heps) {
    for (int j = 0; j < kSize; j++) {
        Lanes top = c[kSize * j], sum = {};
        for (int k = 1; k < kSize; k++) top = c[kSize * j + k] > top ? c[kSize * j + k] : top;
        for (int k = 0; k < kSize; k++) {
            c[kSize * j + k] = exponential(c[kSize * j + k] - top);
            sum += c[kSize * j + k];
        }
        for (int k = 0; k < kSize; k++) {
            soft[kSize * j + k] = c[kSize * j + k] / sum;
            c[kSize * j + k] = soft[kSize * j + k] + heps;
        }
    }
    divide(c, divisor, kSize, 1, heps);
    for (int i = 1, q = 1; i < iters; i++) {
        divide(c, divisor + kSize * q++, 1, kSize, heps);
        divide(c, divisor + kSize * q++, kSize, 1, heps);
    }
}

void check(const torch::Tensor& x, int64_t iters) {
    TORCH_CHECK(x.dim() == 3 && x.size(1) == kSize && x.size(2) == kSize && x.scalar_type() == torch::kFloat,
                "sinkhorn takes float32 [n, 4, 4]");
    TORCH_CHECK(iters >= 1 && 2 * iters - 1 <= kMaxSteps, "sinkhorn takes 1 to 64 iterations");
}

torch::Tensor forward(torch::Tensor x, int64_t iters, double heps) {
    check(x, iters);
    x = x.contiguous();
    auto y = torch::empty_like(x);
    Lanes c[kCells], soft[kCells], divisor[kMaxSteps * kSize];
    const int64_t n = x.size(0);
    for (int64_t i = 0; i < n; i += kLanes) {
        load(x.data_ptr<float>() + i * kCells, n - i, c);
        forward_lanes(c, soft, divisor, iters, heps);
        store(y.data_ptr<float>() + i * kCells, n - i, c);
    }
    return y;
}

torch::Tensor backward(torch::Tensor x, torch::Tensor dy, int64_t iters, double heps) {
    check(x, iters);
    x = x.contiguous();
    dy = dy.contiguous();
    auto dx = torch::empty_like(x);
    Lanes c[kCells], soft[kCells], d[kCells], divisor[kMaxSteps * kSize];
    const int64_t n = x.size(0);
    for (int64_t i = 0; i < n; i += kLanes) {
        load(x.data_ptr<float>() + i * kCells, n - i, c);
        forward_lanes(c, soft, divisor, iters, heps);
        load(dy.data_ptr<float>() + i * kCells, n - i, d);
        int q = 2 * iters - 2;
        for (int it = 1; it < iters; it++) {
            undivide(c, d, divisor + kSize * q--, kSize, 1);
            undivide(c, d, divisor + kSize * q--, 1, kSize);
        }
        undivide(c, d, divisor, kSize, 1);
        for (int j = 0; j < kSize; j++) {
            Lanes t = {};
            for (int k = 0; k < kSize; k++) t += d[kSize * j + k] * soft[kSize * j + k];
            for (int k = 0; k < kSize; k++) d[kSize * j + k] = soft[kSize * j + k] * (d[kSize * j + k] - t);
        }
        store(dx.data_ptr<float>() + i * kCells, n - i, d);
    }
    return dx;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    m.def("forward", &forward);
    m.def("backward", &backward);
}
