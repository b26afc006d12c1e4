// Products of bytes and of bfloat16 from registers, sixteen sums each: the most that the processor
// computes. `cpu_fractions.py` compiles and times this.
#include <stdint.h>

#if defined(__AVX512VNNI__) && defined(__AVX512BF16__)
#define SUM(product, n) product " %%zmm16, %%zmm17, %%zmm" #n "\n\t"
#define EIGHT(product, a, b, c, d, e, f, g, h) \
  SUM(product, a) SUM(product, b) SUM(product, c) SUM(product, d) \
  SUM(product, e) SUM(product, f) SUM(product, g) SUM(product, h)
#define FIRST(product) EIGHT(product, 0, 1, 2, 3, 4, 5, 6, 7)
#define LAST(product) EIGHT(product, 8, 9, 10, 11, 12, 13, 14, 15)
#define CHANGED \
  "zmm0", "zmm1", "zmm2", "zmm3", "zmm4", "zmm5", "zmm6", "zmm7", "zmm8", "zmm9", "zmm10", \
      "zmm11", "zmm12", "zmm13", "zmm14", "zmm15", "zmm16", "zmm17", "zmm18", "zmm19"
#define TAKEN(body) \
  do { \
    __asm__ volatile("vpxord %%zmm16, %%zmm16, %%zmm16\n\tvmovdqa64 %%zmm16, %%zmm17" ::: CHANGED); \
    for (int64_t i = 0; i < times; ++i) __asm__ volatile(body ::: CHANGED); \
  } while (0)

// Sixteen products of 128 operations a time.
void bytes(int64_t times) { TAKEN(FIRST("vpdpbusd") LAST("vpdpbusd")); }

// Sixteen products of 64 operations a time.
void pairs(int64_t times) { TAKEN(FIRST("vdpbf16ps") LAST("vdpbf16ps")); }

// As `bytes`, in groups of 32: every eight products one sum is converted and multiplied by a scale.
void grouped_bytes(int64_t times) {
  TAKEN(FIRST("vpdpbusd") "vcvtdq2ps %%zmm0, %%zmm18\n\tvfmadd231ps %%zmm16, %%zmm18, %%zmm19\n\t"
        LAST("vpdpbusd") "vcvtdq2ps %%zmm8, %%zmm18\n\tvfmadd231ps %%zmm16, %%zmm18, %%zmm19\n\t");
}
#endif
