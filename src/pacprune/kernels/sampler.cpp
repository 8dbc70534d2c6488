// Fused sampling on CPUs: Philox4x32-10, gates, slabs and both gradients in one pass over the weights.
//
// No header of torch or Python: a compiler needs a second or two, and the library is called through ctypes. Weights are
// done CHUNK at a time in short loops over arrays that stay in the first-level cache and that compilers vectorise. Every
// operation is IEEE's, written in one order and without contraction, so that a weight's draw does not depend on where
// in a vector, a chunk or a tensor it lies, nor on the number of threads.

#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr int CHUNK = 512;
constexpr int PAD = CHUNK + 40;  // a chunk may begin and end inside a Philox block, and these are made eight at a time
constexpr int64_t TASK = 16 * CHUNK;
constexpr uint32_t GATE = 0, SLAB = 1;
constexpr float LOW = (float)1e-5, HIGH = (float)(1.0 - 1e-5);
constexpr float GAMMA = -0.1f, SPAN = 1.2f, ODDS = 2.3978953f;  // hard concrete: from -0.1 to 1.1, and log(1.1 / 0.1)

// By the numbers of law.py; what comes last is their count.
enum Mapping { SIGMOID, CLAMP, GIVEN, MAPPINGS };
enum Mode { SOFT, STRAIGHT_THROUGH, HARD, STRETCHED, NOISELESS, THRESHOLDED, MODES };

struct Law {
  int32_t mapping, mode, log_std;
  int32_t keep, group;  // of an N:M pattern; group is 0 for gates that do not share
  float coupling, beta, theta, steepness;
};

// Whether there is a branch for this law: any other would read gates that nobody wrote.
inline bool is_known(const Law &law) {
  if (law.group) return law.mode == SOFT || law.mode == NOISELESS || law.mode == HARD;
  const bool listed = 0 <= law.mapping && law.mapping < MAPPINGS && 0 <= law.mode && law.mode < MODES;
  return listed && (law.mapping != GIVEN || law.mode == HARD) && (law.mode != THRESHOLDED || law.mapping == SIGMOID);
}

// One tensor: k rows of n weights. A row's inputs lie `row` further on than the last one's, its std `std_row`.
struct Job {
  const void *mean, *gate;
  const float *std;
  const int64_t *seed, *step;
  const float *shift, *sharpness, *noise;
  const void *to_draw;
  void *out;
  void *to_gate;
  float *to_std;
  int64_t k, n, offset, row, std_row, std_column;
  int32_t seed_row, step_row, shift_row, sharpness_row, noise_row;
  int32_t mean_bf16, gate_bf16, draw_bf16;
};

template <class To, class From>
inline To bits(From x) {
  To y;
  static_assert(sizeof x == sizeof y, "");
  std::memcpy(&y, &x, sizeof y);
  return y;
}

// x held to [low, high]; NaN stays NaN.
inline float held(float x, float low, float high) { return x < low ? low : (x > high ? high : x); }

// log x for a positive normal x, within 1.5 units in the last place (Cephes' polynomial); NaN for NaN, by x - x.
inline float log_(float x) {
  int32_t i = bits<int32_t>(x), e = (i - 0x3f3504f3) >> 23;
  float f = bits<float>(i - (e << 23)) - 1.0f, z = f * f, n = (float)e + (x - x);
  float y = 7.0376836292e-2f;
  y = __builtin_fmaf(y, f, -1.1514610310e-1f);
  y = __builtin_fmaf(y, f, 1.1676998740e-1f);
  y = __builtin_fmaf(y, f, -1.2420140846e-1f);
  y = __builtin_fmaf(y, f, 1.4249322787e-1f);
  y = __builtin_fmaf(y, f, -1.6668057665e-1f);
  y = __builtin_fmaf(y, f, 2.0000714765e-1f);
  y = __builtin_fmaf(y, f, -2.4999993993e-1f);
  y = __builtin_fmaf(y, f, 3.3333331174e-1f);
  y = y * f * z;
  y = __builtin_fmaf(n, -2.12194440e-4f, y);
  y = __builtin_fmaf(z, -0.5f, y);
  return __builtin_fmaf(n, 0.693359375f, f + y);
}

// exp x within 1 unit in the last place, for x held to [-87, 88].
inline float exp_(float x) {
  x = held(x, -87.0f, 88.0f);
  float shifted = __builtin_fmaf(x, 1.44269504f, 12582912.0f);
  float n = shifted - 12582912.0f;
  float r = __builtin_fmaf(n, -1.428606765330187e-6f, __builtin_fmaf(n, -0.693145751953125f, x));
  float y = 1.9875691500e-4f;
  y = __builtin_fmaf(y, r, 1.3981999507e-3f);
  y = __builtin_fmaf(y, r, 8.3334519073e-3f);
  y = __builtin_fmaf(y, r, 4.1665795894e-2f);
  y = __builtin_fmaf(y, r, 1.6666665459e-1f);
  y = __builtin_fmaf(y, r, 5.0000001201e-1f);
  y = __builtin_fmaf(y, r * r, r) + 1.0f;
  return y * bits<float>((bits<int32_t>(shifted) - 0x4b400000 + 127) << 23);
}

// 1 / (1 + exp(-x)) in double for |x| <= 14: Taylor's series to r^13 on |r| <= log(2) / 2 leaves less than 2^-57.
inline double sigmoid_(double x) {
  double shifted = __builtin_fma(-x, 1.4426950408889634, 6755399441055744.0);
  double n = shifted - 6755399441055744.0;
  double r = __builtin_fma(n, -1.9082149292705877e-10, __builtin_fma(n, -0.6931471803691238, -x));
  double y = 1.0 / 6227020800.0;
  y = __builtin_fma(y, r, 1.0 / 479001600.0);
  y = __builtin_fma(y, r, 1.0 / 39916800.0);
  y = __builtin_fma(y, r, 1.0 / 3628800.0);
  y = __builtin_fma(y, r, 1.0 / 362880.0);
  y = __builtin_fma(y, r, 1.0 / 40320.0);
  y = __builtin_fma(y, r, 1.0 / 5040.0);
  y = __builtin_fma(y, r, 1.0 / 720.0);
  y = __builtin_fma(y, r, 1.0 / 120.0);
  y = __builtin_fma(y, r, 1.0 / 24.0);
  y = __builtin_fma(y, r, 1.0 / 6.0);
  y = __builtin_fma(y, r, 0.5);
  y = __builtin_fma(y, r, 1.0);
  y = __builtin_fma(y, r, 1.0);
  return 1.0 / (1.0 + y * bits<double>((bits<int64_t>(shifted) - 0x4338000000000000 + 1023) << 52));
}

// (1 - exp(-x))^(1/3) for x > 0, the difference by its series where it would have no digits left.
inline float opening_(float x) {
  float y = 1.0f / 720.0f;
  y = __builtin_fmaf(-y, x, 1.0f / 120.0f);
  y = __builtin_fmaf(-y, x, 1.0f / 24.0f);
  y = __builtin_fmaf(-y, x, 1.0f / 6.0f);
  y = __builtin_fmaf(-y, x, 0.5f);
  y = __builtin_fmaf(-y, x, 1.0f);
  y = x < 0.125f ? y * x : 1.0f - exp_(-x);
  y = exp_(log_(y < 1e-37f ? 1e-37f : y) * 0.33333334f);
  return y;
}

// sin and cos on [0, 2 pi], by reduction to [-pi / 4, pi / 4].
inline void sincos_(float a, float &sine, float &cosine) {
  float shifted = __builtin_fmaf(a, 0.636619772f, 12582912.0f);
  float n = shifted - 12582912.0f;
  int32_t quarter = bits<int32_t>(shifted);
  float r = __builtin_fmaf(n, -1.5703125f, a);
  r = __builtin_fmaf(n, -4.837512969970703e-4f, r);
  r = __builtin_fmaf(n, -7.549789948768648e-8f, r);
  float z = r * r;
  float s = __builtin_fmaf(__builtin_fmaf(-1.9515295891e-4f, z, 8.3321608736e-3f), z, -1.6666654611e-1f);
  s = __builtin_fmaf(s * z, r, r);
  float c = __builtin_fmaf(__builtin_fmaf(2.443315711809948e-5f, z, -1.388731625493765e-3f), z, 4.166664568298827e-2f);
  c = __builtin_fmaf(c, z * z, __builtin_fmaf(z, -0.5f, 1.0f));
  float first = quarter & 1 ? c : s, second = quarter & 1 ? s : c;
  sine = quarter & 2 ? -first : first;
  cosine = (quarter + 1) & 2 ? -second : second;
}

constexpr uint32_t MULTIPLY0 = 0xD2511F53u, MULTIPLY1 = 0xCD9E8D57u, WEYL0 = 0x9E3779B9u, WEYL1 = 0xBB67AE85u;

#if defined(__AVX512F__)
constexpr int WIDE = 8;
using Wide = __m512i;
inline Wide all(uint64_t x) { return _mm512_set1_epi64((int64_t)x); }
inline Wide from(uint64_t x) { return _mm512_add_epi64(all(x), _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0)); }
inline Wide multiply(Wide a, Wide b) { return _mm512_mul_epu32(a, b); }
inline Wide high(Wide a) { return _mm512_srli_epi64(a, 32); }
inline Wide exclusive(Wide a, Wide b, Wide c) { return _mm512_ternarylogic_epi64(a, b, c, 0x96); }
inline Wide joined(Wide low, Wide up) { return _mm512_mask_blend_epi32(0xAAAA, low, _mm512_slli_epi64(up, 32)); }
inline void put(Wide a, Wide b, uint32_t *to) {
  _mm512_storeu_si512(to, _mm512_permutex2var_epi64(a, _mm512_set_epi64(11, 3, 10, 2, 9, 1, 8, 0), b));
  _mm512_storeu_si512(to + 16, _mm512_permutex2var_epi64(a, _mm512_set_epi64(15, 7, 14, 6, 13, 5, 12, 4), b));
}
#elif defined(__AVX2__)
constexpr int WIDE = 4;
using Wide = __m256i;
inline Wide all(uint64_t x) { return _mm256_set1_epi64x((int64_t)x); }
inline Wide from(uint64_t x) { return _mm256_add_epi64(all(x), _mm256_set_epi64x(3, 2, 1, 0)); }
inline Wide multiply(Wide a, Wide b) { return _mm256_mul_epu32(a, b); }
inline Wide high(Wide a) { return _mm256_srli_epi64(a, 32); }
inline Wide exclusive(Wide a, Wide b, Wide c) { return _mm256_xor_si256(_mm256_xor_si256(a, b), c); }
inline Wide joined(Wide low, Wide up) { return _mm256_blend_epi32(low, _mm256_slli_epi64(up, 32), 0xAA); }
inline void put(Wide a, Wide b, uint32_t *to) {
  Wide even = _mm256_unpacklo_epi64(a, b), odd = _mm256_unpackhi_epi64(a, b);
  _mm256_storeu_si256((Wide *)to, _mm256_permute2x128_si256(even, odd, 0x20));
  _mm256_storeu_si256((Wide *)(to + 8), _mm256_permute2x128_si256(even, odd, 0x31));
}
#else
constexpr int WIDE = 1;
#endif

// The words of the Philox blocks first, first + 1, ..., four of each; writes up to WIDE - 1 blocks more.
void philox(uint64_t seed, uint32_t step, uint32_t stream, uint64_t first, int blocks, uint32_t *word) {
#if defined(__AVX512F__) || defined(__AVX2__)
  // One block per 64-bit lane: the product reads its lower half only, so that what is left in the upper does no harm.
  const Wide m0 = all(MULTIPLY0), m1 = all(MULTIPLY1);
  for (int b = 0; b < blocks; b += WIDE) {
    Wide c0 = from(first + (uint64_t)b), c1 = high(c0), c2 = all(step), c3 = all(stream);
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
      Wide p0 = multiply(c0, m0), p1 = multiply(c2, m1);
      c0 = exclusive(high(p1), c1, all(k0));
      c2 = exclusive(high(p0), c3, all(k1));
      c1 = p1;
      c3 = p0;
      k0 += WEYL0;
      k1 += WEYL1;
    }
    put(joined(c0, c1), joined(c2, c3), word + 4 * b);
  }
#else
  for (int b = 0; b < blocks; ++b) {
    uint64_t index = first + (uint64_t)b;
    uint32_t c0 = (uint32_t)index, c1 = (uint32_t)(index >> 32), c2 = step, c3 = stream;
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
      uint64_t p0 = (uint64_t)c0 * MULTIPLY0, p1 = (uint64_t)c2 * MULTIPLY1;
      c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
      c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
      c1 = (uint32_t)p1;
      c3 = (uint32_t)p0;
      k0 += WEYL0;
      k1 += WEYL1;
    }
    word[4 * b] = c0;
    word[4 * b + 1] = c1;
    word[4 * b + 2] = c2;
    word[4 * b + 3] = c3;
  }
#endif
}

// Standard normals by Box-Muller on neighbouring words.
void normals(const uint32_t *word, int pairs, float *z) {
  for (int i = 0; i < pairs; ++i) {
    float u = ((float)word[2 * i] + 1.0f) * 0x1p-32f, sine, cosine;
    float radius = __builtin_sqrtf(-2.0f * log_(u));
    sincos_((float)word[2 * i + 1] * 1.4629180792671596e-9f, sine, cosine);
    z[2 * i] = radius * cosine;
    z[2 * i + 1] = radius * sine;
  }
}

// n numbers as float32: where they lie, or widened into `room`.
const float *load(const void *from, int bf16, int64_t start, int n, float *room) {
  if (!bf16) return (const float *)from + start;
  const uint16_t *x = (const uint16_t *)from + start;
  for (int i = 0; i < n; ++i) room[i] = bits<float>((uint32_t)x[i] << 16);
  return room;
}

// Where to write n numbers as float32; `store` then rounds those that belong into a bfloat16 tensor to nearest even.
float *place(void *to, int bf16, int64_t start, float *room) { return bf16 ? room : (float *)to + start; }

void store(const float *from, int bf16, int64_t start, int n, void *to) {
  if (!bf16) return;
  uint16_t *y = (uint16_t *)to + start;
  for (int i = 0; i < n; ++i) {
    uint32_t x = bits<uint32_t>(from[i]), rounded = (x + 0x7fffu + ((x >> 16) & 1u)) >> 16;
    y[i] = (uint16_t)(from[i] != from[i] ? 0x7fc0u : rounded);
  }
}

struct Chunk {
  alignas(64) uint32_t word[PAD];
  alignas(64) float normal[PAD];
  alignas(64) float logit[CHUNK], soft[CHUNK], closed[CHUNK], hard[CHUNK], std[CHUNK], room[4][CHUNK];
  alignas(64) float depth[CHUNK];  // how far a score lies above the threshold
  const uint32_t *w;  // the words and normals of the chunk's first weight
  const float *z, *mean, *slab;
};

// Everything before the weight itself: words, logits, gates and slab. Returns which of the gates multiplies the slab.
const float *prepare(const Job &job, const Law &law, int64_t row, int64_t at, int n, bool soft, Chunk &c) {
  const int64_t index = job.offset + at, start = row * job.row + at;
  const int lead = (int)(index & 3), blocks = (lead + n + 3) / 4;
  const uint64_t seed = (uint64_t)job.seed[row * job.seed_row];
  const uint32_t step = (uint32_t)job.step[row * job.step_row];
  const bool random = law.mode != NOISELESS && (law.mode != THRESHOLDED || job.noise);
  if (random) philox(seed, step, GATE, (uint64_t)index >> 2, blocks, c.word);
  c.w = c.word + lead;
  c.mean = load(job.mean, job.mean_bf16, start, n, c.room[0]);

  const float *gate = (const float *)job.gate + start;
  if (law.mapping == SIGMOID) {
    const float shift = job.shift ? job.shift[row * job.shift_row] : 0.0f;
    const float sharpness = job.sharpness ? job.sharpness[row * job.sharpness_row] : 1.0f;
    const float *raw = gate;
    if (law.coupling != 0.0f) {
      for (int i = 0; i < n; ++i) c.logit[i] = gate[i] + law.coupling * log_(__builtin_fabsf(c.mean[i]) + 1e-8f);
      raw = c.logit;
    }
    if (law.mode == THRESHOLDED) {
      for (int i = 0; i < n; ++i) c.depth[i] = raw[i];
      if (job.noise) {
        const float noise = job.noise[row * job.noise_row];
        for (int i = 0; i < n; ++i) {
          float u = (float)(c.w[i] >> 9) + 0.5f;
          c.depth[i] += noise * log_(u / (8388608.0f - u));
        }
      }
      for (int i = 0; i < n; ++i) c.depth[i] -= shift;
      for (int i = 0; i < n; ++i) c.logit[i] = held(sharpness * c.depth[i], -14.0f, 14.0f);
    } else {
      for (int i = 0; i < n; ++i) c.logit[i] = held(sharpness * (raw[i] - shift), -14.0f, 14.0f);
    }
  } else if (law.mapping == CLAMP && soft) {
    for (int i = 0; i < n; ++i) {
      float p = held(gate[i], LOW, HIGH);
      c.logit[i] = log_(p) - log_(1.0f - p);
    }
  }

  if (soft) {
    // u and 1 - u are multiples of 2^-24 and exact, so that one logarithm gives logit(u), and none at beta = 1/2.
    const float sharper = 1.0f / law.beta;
    if (law.mode == NOISELESS || law.mode == THRESHOLDED) {
      for (int i = 0; i < n; ++i) c.closed[i] = exp_(-c.logit[i] * sharper);
    } else if (sharper == 2.0f && law.mode != STRETCHED) {
      for (int i = 0; i < n; ++i) {
        float u = (float)(c.w[i] >> 9) + 0.5f, odds = (8388608.0f - u) / u;
        c.closed[i] = exp_(-2.0f * c.logit[i]) * (odds * odds);
      }
    } else {
      const float less = law.mode == STRETCHED ? ODDS : 0.0f;
      for (int i = 0; i < n; ++i) {
        float u = (float)(c.w[i] >> 9) + 0.5f, x = (c.logit[i] + log_(u / (8388608.0f - u))) * sharper - less;
        c.closed[i] = exp_(-x);
      }
    }
    // From the odds against the gate. 1 - soft by subtraction has no digits left where a clamped gate's slope is large.
    for (int i = 0; i < n; ++i) {
      c.soft[i] = 1.0f / (1.0f + c.closed[i]);
      c.closed[i] *= c.soft[i];
    }
    for (int i = 0; law.mode == STRETCHED && i < n; ++i) c.hard[i] = held(GAMMA + SPAN * c.soft[i], 0.0f, 1.0f);
  }
  for (int i = 0; law.mode == THRESHOLDED && i < n; ++i) {
    const float d = c.depth[i], open = opening_(law.steepness * d);
    c.hard[i] = d > 0.0f ? open : (d != d ? d : 0.0f);
  }
  if (law.mode == STRAIGHT_THROUGH || law.mode == HARD) {
    // A word opens the gate when word >= 2^32 - p 2^32; all these numbers are integers that double holds.
    if (law.mapping == SIGMOID) {
      for (int i = 0; i < n; ++i) {
        double p = __builtin_rint((double)(float)sigmoid_((double)c.logit[i]) * 0x1p32);
        c.hard[i] = (double)c.w[i] + p >= 0x1p32 ? 1.0f : 0.0f;
      }
    } else if (law.mapping == CLAMP) {
      for (int i = 0; i < n; ++i)
        c.hard[i] = (double)c.w[i] + __builtin_rint((double)held(gate[i], LOW, HIGH) * 0x1p32) >= 0x1p32 ? 1.0f : 0.0f;
    } else {
      for (int i = 0; i < n; ++i)
        c.hard[i] = (double)c.w[i] + __builtin_trunc((double)gate[i] * 0x1p32) >= 0x1p32 ? 1.0f : 0.0f;
    }
  }

  c.slab = c.mean;
  if (job.std) {
    philox(seed, step, SLAB, (uint64_t)index >> 2, blocks, c.word);
    normals(c.word, 2 * blocks, c.normal);
    c.z = c.normal + lead;
    const float *std = job.std + row * job.std_row + (job.std_column ? at : 0);
    for (int i = 0; i < n; ++i) c.std[i] = std[job.std_column ? i : 0];
    for (int i = 0; law.log_std && i < n; ++i) c.std[i] = exp_(c.std[i]);
    float *slab = c.room[1];
    for (int i = 0; i < n; ++i) slab[i] = c.mean[i] + c.std[i] * c.z[i];
    c.slab = slab;
  }
  return law.mode == SOFT || law.mode == NOISELESS ? c.soft : c.hard;
}

void forward(const Job &job, const Law &law, int64_t row, int64_t at, int n, Chunk &c) {
  const bool hard = law.mode == HARD || law.mode == STRAIGHT_THROUGH;
  const float *gate = prepare(job, law, row, at, n, !hard && law.mode != THRESHOLDED, c), *slab = c.slab;
  const int64_t start = row * job.n + at;
  float *to = place(job.out, job.draw_bf16, start, c.room[2]);
  for (int i = 0; hard && i < n; ++i) to[i] = gate[i] > 0.0f ? slab[i] : 0.0f;
  for (int i = 0; !hard && i < n; ++i) to[i] = gate[i] * slab[i];
  store(to, job.draw_bf16, start, n, job.out);
}

void backward(const Job &job, const Law &law, int64_t row, int64_t at, int n, Chunk &c) {
  const bool extra = law.mode == STRAIGHT_THROUGH || law.mode == THRESHOLDED;
  const bool soft = extra ? job.to_gate != nullptr : law.mode != HARD;
  const float *gate = prepare(job, law, row, at, n, soft, c), *slab = c.slab;
  const int64_t start = row * job.n + at;
  const float *to_draw = load(job.to_draw, job.draw_bf16, start, n, c.room[2]);
  if (job.out) {
    float *to = place(job.out, job.mean_bf16, start, c.room[3]);
    if (law.mode == THRESHOLDED) {
      for (int i = 0; i < n; ++i) to[i] = to_draw[i] * (c.depth[i] > 0.0f ? 1.0f : law.theta);
    } else {
      for (int i = 0; i < n; ++i) to[i] = to_draw[i] * gate[i];
    }
    store(to, job.mean_bf16, start, n, job.out);
  }
  if (job.to_std) {
    float *to = job.to_std + start;
    for (int i = 0; i < n; ++i) to[i] = to_draw[i] * gate[i] * c.z[i] * (law.log_std ? c.std[i] : 1.0f);
  }
  if (!job.to_gate) return;
  float *to = (float *)job.to_gate + start;
  if (law.mode == HARD) {
    std::memset(to, 0, sizeof(float) * n);
    return;
  }
  const float sharper = 1.0f / law.beta;
  for (int i = 0; i < n; ++i) to[i] = to_draw[i] * slab[i] * c.soft[i] * c.closed[i] * sharper;
  for (int i = 0; law.mode == STRETCHED && i < n; ++i) to[i] *= gate[i] > 0.0f && gate[i] < 1.0f ? SPAN : 0.0f;
  if (law.mapping == CLAMP) {
    const float *g = (const float *)job.gate + start;
    for (int i = 0; i < n; ++i) to[i] = g[i] >= LOW && g[i] <= HIGH ? to[i] * (1.0f / (g[i] * (1.0f - g[i]))) : 0.0f;
  } else if (job.sharpness) {
    const float sharpness = job.sharpness[row * job.sharpness_row];
    for (int i = 0; i < n; ++i) to[i] = to[i] * sharpness;
  }
}

// --- Groups of `group` weights of which `keep` are kept. A chunk holds whole groups.

constexpr int GROUP_MAX = 8, SETS_MAX = 70;
constexpr double KEY = 65536.0, KEY_MAX = 8192.0;

// The sets of `keep` out of `group`, by the places that they keep.
struct Sets {
  int count = 0, keep, group;
  int8_t place[SETS_MAX][GROUP_MAX];
  explicit Sets(const Law &law) : keep(law.keep), group(law.group) {
    for (int set = 0; set < 1 << group; ++set) {
      if (__builtin_popcount((unsigned)set) != keep) continue;
      for (int i = 0, k = 0; i < group; ++i)
        if (set >> i & 1) place[count][k++] = (int8_t)i;
      ++count;
    }
  }
};

// The words of a chunk, and what gates and means are read into.
const float *group_inputs(const Job &job, int64_t row, int64_t at, int n, bool random, Chunk &c) {
  const int64_t index = job.offset + at, start = row * job.row + at;
  const int lead = (int)(index & 3), blocks = (lead + n + 3) / 4;
  if (random)
    philox((uint64_t)job.seed[row * job.seed_row], (uint32_t)job.step[row * job.step_row], GATE, (uint64_t)index >> 2,
           blocks, c.word);
  c.w = c.word + lead;
  c.mean = load(job.mean, job.mean_bf16, start, n, c.room[0]);
  return load(job.gate, job.gate_bf16, start, n, c.room[1]);
}

// Into c.hard: 1 where the integer of sharpness * (gate + coupling * log size) + g is among the group's largest.
void hard_groups(const Job &job, const Law &law, int64_t row, int64_t at, int n, Chunk &c) {
  const float *gate = group_inputs(job, row, at, n, true, c);
  const double sharpness = job.sharpness ? job.sharpness[row * job.sharpness_row] : 1.0;
  int64_t key[GROUP_MAX];
  for (int first = 0; first < n; first += law.group) {
    for (int i = 0; i < law.group; ++i) {
      const int at = first + i;
      double x = gate[at], u = ((double)(c.w[at] >> 9) + 0.5) * 0x1p-23;
      if (law.coupling != 0.0f) x += (double)law.coupling * __builtin_log((double)__builtin_fabsf(c.mean[at]) + 1e-8);
      x = sharpness * x - __builtin_log(-__builtin_log(u));
      x = x < -KEY_MAX ? -KEY_MAX : (x > KEY_MAX ? KEY_MAX : x);
      key[i] = (int64_t)__builtin_rint(x * KEY);
    }
    for (int i = 0; i < law.group; ++i) {
      int before = 0;
      for (int j = 0; j < law.group; ++j) before += key[j] > key[i] || (key[j] == key[i] && j < i);
      c.hard[first + i] = before < law.keep ? 1.0f : 0.0f;
    }
  }
}

// Into c.logit: x / beta of the relaxed gate.
void group_logits(const Job &job, const Law &law, int64_t row, int64_t at, int n, Chunk &c) {
  const bool random = law.mode != NOISELESS;
  const float *gate = group_inputs(job, row, at, n, random, c);
  const float sharpness = job.sharpness ? job.sharpness[row * job.sharpness_row] : 1.0f, sharper = 1.0f / law.beta;
  for (int i = 0; i < n; ++i) c.logit[i] = gate[i];
  for (int i = 0; law.coupling != 0.0f && i < n; ++i)
    c.logit[i] += law.coupling * log_(__builtin_fabsf(c.mean[i]) + 1e-8f);
  for (int i = 0; i < n; ++i) c.logit[i] *= sharpness;
  for (int i = 0; random && i < n; ++i) c.logit[i] -= log_(-log_(((float)(c.w[i] >> 9) + 0.5f) * 0x1p-23f));
  for (int i = 0; i < n; ++i) c.logit[i] *= sharper;
}

// The gates of one group, and with `worth`, what the gradient in its logits is.
void relaxed_group(const Sets &sets, const float *x, const float *worth, float *gate, float *slope) {
  float sum[SETS_MAX], worth_of[SETS_MAX], most = -__builtin_inff(), total = 0.0f, mean = 0.0f;
  for (int s = 0; s < sets.count; ++s) {
    sum[s] = 0.0f;
    for (int k = 0; k < sets.keep; ++k) sum[s] += x[sets.place[s][k]];
    most = sum[s] > most ? sum[s] : most;
  }
  for (int s = 0; s < sets.count; ++s) total += sum[s] = exp_(sum[s] - most);
  for (int i = 0; i < sets.group; ++i) gate[i] = 0.0f;
  for (int s = 0; s < sets.count; ++s) {
    sum[s] /= total;
    for (int k = 0; k < sets.keep; ++k) gate[sets.place[s][k]] += sum[s];
  }
  if (!worth) return;
  for (int s = 0; s < sets.count; ++s) {
    worth_of[s] = 0.0f;
    for (int k = 0; k < sets.keep; ++k) worth_of[s] += worth[sets.place[s][k]];
    mean += sum[s] * worth_of[s];
  }
  for (int i = 0; i < sets.group; ++i) slope[i] = 0.0f;
  for (int s = 0; s < sets.count; ++s)
    for (int k = 0; k < sets.keep; ++k) slope[sets.place[s][k]] += sum[s] * (worth_of[s] - mean);
}

void forward_groups(const Job &job, const Law &law, const Sets &sets, int64_t row, int64_t at, int n, Chunk &c) {
  const int64_t start = row * job.n + at;
  float *to = place(job.out, job.draw_bf16, start, c.room[2]);
  if (law.mode == HARD) {
    hard_groups(job, law, row, at, n, c);
    for (int i = 0; i < n; ++i) to[i] = c.hard[i] > 0.0f ? c.mean[i] : 0.0f;
  } else {
    group_logits(job, law, row, at, n, c);
    for (int i = 0; i < n; i += law.group) relaxed_group(sets, c.logit + i, nullptr, c.soft + i, nullptr);
    for (int i = 0; i < n; ++i) to[i] = c.soft[i] * c.mean[i];
  }
  store(to, job.draw_bf16, start, n, job.out);
}

void backward_groups(const Job &job, const Law &law, const Sets &sets, int64_t row, int64_t at, int n, Chunk &c) {
  const int64_t start = row * job.n + at;
  const float *gate = c.soft;
  for (int i = 0; i < n; ++i) c.closed[i] = 0.0f;
  if (law.mode == HARD) {
    hard_groups(job, law, row, at, n, c);
    gate = c.hard;
  } else {
    group_logits(job, law, row, at, n, c);
  }
  const float *to_draw = load(job.to_draw, job.draw_bf16, start, n, c.room[2]);
  if (law.mode != HARD) {
    for (int i = 0; i < n; ++i) c.depth[i] = to_draw[i] * c.mean[i];
    for (int i = 0; i < n; i += law.group)
      relaxed_group(sets, c.logit + i, c.depth + i, c.soft + i, c.closed + i);
  }
  if (job.out) {
    float *to = place(job.out, job.mean_bf16, start, c.room[3]);
    for (int i = 0; i < n; ++i) to[i] = to_draw[i] * gate[i];
    store(to, job.mean_bf16, start, n, job.out);
  }
  if (job.to_gate) {
    const float sharpness = job.sharpness ? job.sharpness[row * job.sharpness_row] : 1.0f;
    float *to = place(job.to_gate, job.gate_bf16, start, c.room[3]);
    for (int i = 0; i < n; ++i) to[i] = c.closed[i] * (1.0f / law.beta) * sharpness;
    store(to, job.gate_bf16, start, n, job.to_gate);
  }
}

template <class Body>
void each_chunk(const Job *jobs, int64_t count, int threads, Body body) {
  std::vector<int64_t> first(count + 1, 0);  // number of the job's first task
  for (int64_t j = 0; j < count; ++j) first[j + 1] = first[j] + jobs[j].k * ((jobs[j].n + TASK - 1) / TASK);
#pragma omp parallel num_threads(threads) if (threads > 1 && first[count] > 1)
  {
    Chunk chunk;
#pragma omp for schedule(static)
    for (int64_t task = 0; task < first[count]; ++task) {
      int64_t j = 0, far = count;
      while (far - j > 1) {
        int64_t middle = (j + far) / 2;
        (first[middle] <= task ? j : far) = middle;
      }
      const Job &job = jobs[j];
      const int64_t per_row = (job.n + TASK - 1) / TASK, row = (task - first[j]) / per_row;
      const int64_t begin = (task - first[j]) % per_row * TASK, end = begin + TASK < job.n ? begin + TASK : job.n;
      for (int64_t at = begin; at < end; at += CHUNK)
        body(job, row, at, (int)(end - at < CHUNK ? end - at : CHUNK), chunk);
    }
  }
}

}  // namespace

// Both return whether the law is known; otherwise nothing is written.
extern "C" int32_t pacprune_draw(const Job *jobs, int64_t count, const Law *law, int threads) {
  if (!is_known(*law)) return 0;
  if (law->group) {
    const Sets sets(*law);
    each_chunk(jobs, count, threads, [law, &sets](const Job &j, int64_t row, int64_t at, int n, Chunk &c) {
      forward_groups(j, *law, sets, row, at, n, c);
    });
    return 1;
  }
  each_chunk(jobs, count, threads,
             [law](const Job &j, int64_t row, int64_t at, int n, Chunk &c) { forward(j, *law, row, at, n, c); });
  return 1;
}

extern "C" int32_t pacprune_gradients(const Job *jobs, int64_t count, const Law *law, int threads) {
  if (!is_known(*law)) return 0;
  if (law->group) {
    const Sets sets(*law);
    each_chunk(jobs, count, threads, [law, &sets](const Job &j, int64_t row, int64_t at, int n, Chunk &c) {
      backward_groups(j, *law, sets, row, at, n, c);
    });
    return 1;
  }
  each_chunk(jobs, count, threads,
             [law](const Job &j, int64_t row, int64_t at, int n, Chunk &c) { backward(j, *law, row, at, n, c); });
  return 1;
}
