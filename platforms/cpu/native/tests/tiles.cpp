// Compares AMX instructions, of the processor or emulated, with loops.
//
// Prints one line per check. The status is 1 if a check failed, 2 on a processor without AMX.

#include "../tiles.h"

#include <cmath>
#include <cstdio>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#if defined(INTERPOSER_EMULATED_TILES)
#include <csignal>
#include <sys/wait.h>
#include <unistd.h>
#endif

#include "../levels.h"

namespace {

int failed = 0;

void report(const char* what, bool right) {
  std::printf("%s %s\n", right ? "ok" : "FAILED", what);
  failed += !right;
}

// Sums [M][N], a [M][K], b [K][N] in words; rows have gaps.
struct Product {
  int M, N, K;
  static constexpr int kStride = 72;
  std::vector<unsigned char> sums, a, b;

  Product(int M, int N, int K)
      : M(M), N(N), K(K), sums(kStride * 16, 0xa5), a(kStride * 16), b(kStride * 16) {}

  template <class T>
  static T get(const std::vector<unsigned char>& bytes, int row, int index) {
    T value;
    std::memcpy(&value, bytes.data() + row * kStride + index * int(sizeof(T)), sizeof(T));
    return value;
  }
  template <class T>
  static void set(std::vector<unsigned char>& bytes, int row, int index, T value) {
    std::memcpy(bytes.data() + row * kStride + index * int(sizeof(T)), &value, sizeof(T));
  }

  TileShapes shapes() const {
    TileShapes shapes;
    const int rows[3] = {M, M, K}, words[3] = {N, K, N};
    for (int tile = 0; tile < 3; ++tile) {
      shapes.rows[tile] = uint8_t(rows[tile]);
      shapes.row_bytes[tile] = uint16_t(4 * words[tile]);
    }
    return shapes;
  }

  // Uses registers 0, 1 and 2.
  void run(const std::function<void()>& multiply) {
    TileRegisters tiles;
    tiles.shape(shapes());
    load_tile<0>(sums.data(), kStride);
    load_tile<1>(a.data(), kStride);
    load_tile<2>(b.data(), kStride);
    multiply();
    std::fill(sums.begin(), sums.end(), 0xa5);
    store_tile<0>(sums.data(), kStride);
  }

  // Whether only the sums were written.
  bool kept_to_itself() const {
    for (int row = 0; row < 16; ++row) {
      for (int byte = row < M ? 4 * N : 0; byte < kStride; ++byte) {
        if (sums[size_t(row * kStride + byte)] != 0xa5) return false;
      }
    }
    return true;
  }
};

std::mt19937 generator(1);

int random_size() { return int(generator() % 16) + 1; }

template <class A, class B>
void check_codes(const char* what, const std::function<void()>& multiply) {
  bool right = true;
  for (int trial = 0; trial < 200; ++trial) {
    Product product(random_size(), random_size(), random_size());
    std::vector<uint32_t> expected;
    for (unsigned char& byte : product.a) byte = (unsigned char)(generator());
    for (unsigned char& byte : product.b) byte = (unsigned char)(generator());
    for (int m = 0; m < product.M; ++m) {
      for (int n = 0; n < product.N; ++n) {
        const uint32_t before = uint32_t(generator());
        Product::set(product.sums, m, n, before);
        int64_t sum = before;
        for (int k = 0; k < 4 * product.K; ++k) {
          sum += int64_t(Product::get<A>(product.a, m, k)) *
                 Product::get<B>(product.b, k / 4, 4 * n + k % 4);
        }
        expected.push_back(uint32_t(sum));
      }
    }
    product.run(multiply);
    for (int i = 0; i < product.M * product.N; ++i) {
      right &= Product::get<uint32_t>(product.sums, i / product.N, i % product.N) ==
               expected[size_t(i)];
    }
    right &= product.kept_to_itself();
  }
  report(what, right);
}

uint16_t bfloat16_of(float value) {  // for representable numbers
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return uint16_t(bits >> 16);
}

float float_of(uint16_t half) {
  const uint32_t bits = uint32_t(half) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

void multiply_bfloat16() { multiply_bfloat16_tiles<0, 1, 2>(); }

void check_whole_numbers() {
  bool right = true;
  for (int trial = 0; trial < 200; ++trial) {
    Product product(random_size(), random_size(), random_size());
    auto whole = [] { return float(int(generator() % 257) - 128); };
    for (int row = 0; row < 16; ++row) {
      for (int i = 0; i < 32; ++i) {
        Product::set(product.a, row, i, bfloat16_of(whole()));
        Product::set(product.b, row, i, bfloat16_of(whole()));
      }
    }
    std::vector<float> expected;
    for (int m = 0; m < product.M; ++m) {
      for (int n = 0; n < product.N; ++n) {
        float sum = whole();
        Product::set(product.sums, m, n, sum);
        for (int k = 0; k < 2 * product.K; ++k) {
          sum += float_of(Product::get<uint16_t>(product.a, m, k)) *
                 float_of(Product::get<uint16_t>(product.b, k / 2, 2 * n + k % 2));
        }
        expected.push_back(sum);
      }
    }
    product.run(multiply_bfloat16);
    for (int i = 0; i < product.M * product.N; ++i) {
      right &= Product::get<float>(product.sums, i / product.N, i % product.N) ==
               expected[size_t(i)];
    }
    right &= product.kept_to_itself();
  }
  report("bfloat16: whole numbers are exact", right);
}

void check_fractions() {
  bool right = true;
  std::normal_distribution<float> normal;
  for (int trial = 0; trial < 200; ++trial) {
    Product product(16, 16, random_size());
    for (int row = 0; row < 16; ++row) {
      for (int i = 0; i < 32; ++i) {
        Product::set(product.a, row, i, bfloat16_of(normal(generator)));
        Product::set(product.b, row, i, bfloat16_of(normal(generator)));
      }
      for (int n = 0; n < 16; ++n) Product::set(product.sums, row, n, normal(generator));
    }
    const Product before = product;
    product.run(multiply_bfloat16);
    for (int m = 0; m < 16; ++m) {
      for (int n = 0; n < 16; ++n) {
        double sum = Product::get<float>(before.sums, m, n), size = std::fabs(sum);
        for (int k = 0; k < 2 * product.K; ++k) {
          const double term = double(float_of(Product::get<uint16_t>(product.a, m, k))) *
                              float_of(Product::get<uint16_t>(product.b, k / 2, 2 * n + k % 2));
          sum += term, size += std::fabs(term);
        }
        // One rounding per pair, and two to add both sums.
        const double bound = size * (product.K + 2) * 0x1p-24;
        right &= std::fabs(Product::get<float>(product.sums, m, n) - sum) <= bound;
      }
    }
  }
  report("bfloat16: fractions are as near as roundings allow", right);
}

struct Pair {
  float first, second;
};

// Sum of pairs of a times pairs of b.
float sum_of(float before, const std::vector<Pair>& a, const std::vector<Pair>& b) {
  Product product(1, 1, int(a.size()));
  Product::set(product.sums, 0, 0, before);
  for (int k = 0; k < product.K; ++k) {
    const Pair &left = a[size_t(k)], &right = b[size_t(k)];
    Product::set(product.a, 0, 2 * k, bfloat16_of(left.first));
    Product::set(product.a, 0, 2 * k + 1, bfloat16_of(left.second));
    Product::set(product.b, k, 0, bfloat16_of(right.first));
    Product::set(product.b, k, 1, bfloat16_of(right.second));
  }
  product.run(multiply_bfloat16);
  return Product::get<float>(product.sums, 0, 0);
}

void check_float_arithmetic() {
  // In a single sum, 1 would be lost next to 2^24.
  report("bfloat16: firsts and seconds have sums of their own",
         sum_of(0, {{0x1p24f, 1}, {-0x1p24f, 0}}, {{1, 1}, {1, 1}}) == 1);
  report("bfloat16: these are added before what was there",
         sum_of(0x1p24f, {{1, 1}}, {{1, 1}}) == 0x1p24f + 2);
  report("bfloat16: ties go to even",
         sum_of(0x1p24f, {{1, 0}}, {{1, 0}}) == 0x1p24f &&
             sum_of(0x1p24f + 2, {{1, 0}}, {{1, 0}}) == 0x1p24f + 4);
  report("bfloat16: subnormal inputs are zero",
         sum_of(0, {{0x1p-130f, 0}}, {{0x1p100f, 0}}) == 0 &&
             sum_of(0, {{0x1p100f, 0}}, {{0x1p-130f, 0}}) == 0);
  report("bfloat16: subnormal products and sums are zero",
         sum_of(0, {{0x1p-64f, 0}}, {{0x1p-64f, 0}}) == 0 &&
             sum_of(0x1.8p-126f, {{-0x1p-63f, 0}}, {{0x1p-63f, 0}}) == 0);
  report("bfloat16: subnormal numbers that were there are zero",
         sum_of(0x1p-130f, {{0x1p-63f, 0}}, {{0x1p-63f, 0}}) == 0x1p-126f);
  const float infinity = std::numeric_limits<float>::infinity();
  report("bfloat16: infinities stay, and are no numbers times zero",
         sum_of(0, {{infinity, 0}}, {{2, 0}}) == infinity &&
             std::isnan(sum_of(0, {{infinity, 0}}, {{0, 0}})));
}

void check_zeroes() {
  Product product(3, 5, 2);
  TileRegisters tiles;
  tiles.shape(product.shapes());
  load_tile<0>(product.sums.data(), Product::kStride);
  zero_tile<0>();
  store_tile<0>(product.sums.data(), Product::kStride);
  bool right = product.kept_to_itself();
  for (int i = 0; i < 15; ++i) right &= Product::get<int32_t>(product.sums, i / 5, i % 5) == 0;
  report("zero", right);
}

#if defined(INTERPOSER_EMULATED_TILES)
bool ends_the_program(const std::function<void()>& act) {
  const pid_t child = fork();
  if (child == 0) {
    act();
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
}

void check_undefined_instructions() {
  report("undefined: no shapes", ends_the_program([] { zero_tile<0>(); }));
  report("undefined: shapes that were released", ends_the_program([] {
    { TileRegisters tiles; tiles.shape(Product(1, 1, 1).shapes()); }
    zero_tile<0>();
  }));
  for (int tile = 0; tile < 3; ++tile) {
    report("undefined: sizes that do not fit", ends_the_program([=] {
      TileRegisters tiles;
      TileShapes shapes = Product(4, 4, 4).shapes();
      shapes.rows[tile] = 5;
      tiles.shape(shapes);
      multiply_bfloat16();
    }));
  }
  report("undefined: one tile twice", ends_the_program([] {
    TileRegisters tiles;
    tiles.shape(Product(4, 4, 4).shapes());
    multiply_bfloat16_tiles<0, 1, 1>();
  }));
}
#endif

}  // namespace

int main() {
  bool found = false;
  for (const int32_t* level = interposer_levels(); *level; ++level) found |= *level == kAMX;
  if (!found) {
    std::printf("this processor has no tiles\n");
    return 2;
  }
  check_codes<int8_t, uint8_t>("codes: signed by unsigned",
                               multiply_signed_unsigned_tiles<0, 1, 2>);
#if defined(INTERPOSER_EMULATED_TILES)
  using emulated_tiles::multiply_codes;
  check_codes<int8_t, int8_t>("codes: signed", [] { multiply_codes<int8_t, int8_t>(0, 1, 2); });
  check_codes<uint8_t, int8_t>("codes: unsigned by signed",
                               [] { multiply_codes<uint8_t, int8_t>(0, 1, 2); });
  check_codes<uint8_t, uint8_t>("codes: unsigned",
                                [] { multiply_codes<uint8_t, uint8_t>(0, 1, 2); });
  check_undefined_instructions();
#endif
  check_whole_numbers();
  check_fractions();
  check_float_arithmetic();
  check_zeroes();
  return failed ? 1 : 0;
}
