// Compares attention by matrix instructions with loops, bit for bit.
//
// Prints one line per check. The status is 1 if a check failed, 2 on a processor without these
// instructions.

#include "../attention/matrices.h"

#include <cmath>
#include <cstdio>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "../levels.h"

namespace {

constexpr int64_t kMostTokens = 64;
int failed = 0;

void report(const std::string& what, bool right) {
  std::printf("%s %s\n", right ? "ok" : "FAILED", what.c_str());
  failed += !right;
}

// Round to odd: the nearest float32 towards zero, with the lowest bit set if inexact. Terms have
// such similar sizes that their sums are exact in float64.
float rounded_to_odd(double exact) {
  float value = float(exact);
  if (std::fabs(double(value)) > std::fabs(exact)) value = std::nextafterf(value, 0.0f);
  if (double(value) == exact) return value;
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return float_of_bits(bits | 1);
}

// Effect of BFDOT for one pair, as in the manual.
float add_pair(float sum, const float* x, const float* y) {
  const double first = double(x[0]) * double(y[0]), second = double(x[1]) * double(y[1]);
  return rounded_to_odd(double(sum) + double(rounded_to_odd(first + second)));
}

// Rows of x times keys or values of some tokens, with attention's memory layout. Unwritten memory
// is NaN.
struct Attention {
  int64_t rows, head_size, tokens, count, pages_bytes;
  std::mt19937 random{7};
  std::vector<char> scratch, pages;
  Block block;
  Tiles tiles = {};

  Attention(int64_t rows, int64_t head_size, int64_t tokens, int inputs)
      : rows(rows), head_size(head_size), tokens(tokens), count((tokens + kTile - 1) / kTile),
        scratch(size_t(Block::bytes(8, head_size)), char(0xff)),
        block(scratch.data(), 8, rows, head_size) {
    tiles.count = count;
    tiles.bytes = head_size * kTile * 4 / inputs;
    tiles.value_distance = (count + 1) * tiles.bytes;
    tiles.ahead = 1;
    pages.assign(size_t(2 * tiles.value_distance), char(0xff));
    for (int64_t tile = 0; tile < kMostTiles + kMostAhead; ++tile) {
      // Tiles in reverse order, so that reading a wrong tile is noticed.
      const int64_t at = tile < count ? count - 1 - tile : count;
      tiles.keys[tile] = pages.data() + at * tiles.bytes;
    }
  }

  char* key_word(int64_t word, int64_t token) {
    return const_cast<char*>(tiles.keys[token / kTile]) + (word * kTile + token % kTile) * 4;
  }
  char* value_word(int64_t word, int64_t dimension) {
    const int64_t of_tile = tiles.bytes / (head_size * 4);
    return const_cast<char*>(tiles.keys[word / of_tile]) + tiles.value_distance +
           (word % of_tile * head_size + dimension) * 4;
  }
};

struct Floats16 {  // bfloat16 in memory, and float32
  std::vector<float> values;

  Floats16(std::mt19937& random, int64_t size) : values(size_t(size)) {
    std::normal_distribution<float> normal;
    for (float& value : values) {
      value = float_of_bfloat16(bfloat16_of_float(std::ldexp(normal(random), int(random() % 6))));
    }
  }
  uint16_t half(int64_t index) const { return bfloat16_of_float(values[size_t(index)]); }
};

void put_half(char* to, uint16_t half) { std::memcpy(to, &half, 2); }

// Element `index` of row `row` of x; rows are `row_bytes` apart before pairing.
char* operand(char* x, int64_t rows, int64_t row, int64_t index, int64_t row_bytes) {
  if (rows == 1) return x + index * 2;
  return x + row / 2 * 2 * row_bytes + index / 4 * 16 + row % 2 * 8 + index % 4 * 2;
}

bool same(float a, float b) { return std::memcmp(&a, &b, 4) == 0; }

template <int M>
void check_floats(int64_t head_size, int64_t tokens) {
  typedef BFloat16OnPairs F;
  Attention of(M, head_size, tokens, 2);
  const int64_t D = head_size;
  const Floats16 x(of.random, M * D), keys(of.random, tokens * D), values(of.random, D * tokens);
  const Floats16 weights(of.random, M * kMostTokens), before(of.random, M * D);
  for (int64_t token = 0; token < tokens; ++token) {
    for (int64_t d = 0; d < D; ++d) {
      put_half(of.key_word(d / 2, token) + d % 2 * 2, keys.half(token * D + d));
      put_half(of.value_word(token / 2, d) + token % 2 * 2, values.half(d * tokens + token));
    }
  }
  for (int64_t row = 0; row < M; ++row) {
    for (int64_t d = 0; d < D; ++d) {
      put_half(operand(of.block.x, M, row, d, 2 * D), x.half(row * D + d));
      of.block.result[row * D + d] = before.values[size_t(row * D + d)];
    }
  }
  score_matrices<F, rows_of<F>(M)>(of.block, of.tiles, 0, of.count, 0, M);
  bool right = true;
  for (int64_t row = 0; row < M; ++row) {
    for (int64_t token = 0; token < tokens; ++token) {
      float sum = 0;
      for (int64_t d = 0; d < D; d += 2) {
        sum = add_pair(sum, &x.values[size_t(row * D + d)], &keys.values[size_t(token * D + d)]);
      }
      right &= same(sum, of.block.scores[row * kKeys + token]);
    }
  }
  char* to = reinterpret_cast<char*>(of.block.scores);
  float factors[M];
  for (int64_t row = 0; row < M; ++row) {
    factors[row] = 1.0f / float(row + 3);
    for (int64_t token = 0; token < of.count * kTile; ++token) {
      const uint16_t weight = token < tokens ? weights.half(row * kMostTokens + token) : 0;
      put_half(operand(to, M, row, token, kKeys * 4), weight);
    }
  }
  weigh_matrices<F, rows_of<F>(M)>(of.block, of.tiles, tokens, 0, M, factors);
  for (int64_t row = 0; row < M; ++row) {
    for (int64_t d = 0; d < D; ++d) {
      float sum = before.values[size_t(row * D + d)] * factors[row];
      for (int64_t token = 0; token < tokens; token += 2) {
        const float* pair = &weights.values[size_t(row * kMostTokens + token)];
        const bool is_last = token + 1 == tokens;
        const float weight[2] = {pair[0], is_last ? 0 : pair[1]};
        const float* from = &values.values[size_t(d * tokens + token)];
        const float value[2] = {from[0], is_last ? 0 : from[1]};
        sum = add_pair(sum, weight, value);
      }
      right &= same(sum, of.block.result[row * D + d]);
    }
  }
  report("bfloat16: " + std::to_string(M) + " rows of " + std::to_string(D) + ", " +
             std::to_string(tokens) + " tokens",
         right);
}

// Planes are so small that their sums are exact in float32.
struct Codes {
  std::vector<int8_t> values;

  Codes(std::mt19937& random, int64_t size, int bound) : values(size_t(size)) {
    for (int8_t& value : values) value = int8_t(int(random() % uint32_t(2 * bound)) - bound);
  }
};

template <int M>
void check_codes(int64_t head_size, int64_t tokens) {
  typedef Int8OnCodes F;
  Attention of(M, head_size, tokens, 4);
  const int64_t D = head_size;
  const Codes x_high(of.random, M * D, 2), x_low(of.random, M * D, 128);
  const Codes keys(of.random, tokens * D, 128), values(of.random, tokens * D, 128);
  const Codes w_high(of.random, M * kMostTokens, 2), w_low(of.random, M * kMostTokens, 128);
  const auto byte_at = [](int64_t index) { return element_shift(4, int(index % 4)) / 8; };
  for (int64_t token = 0; token < tokens; ++token) {
    for (int64_t d = 0; d < D; ++d) {
      of.key_word(d / 4, token)[byte_at(d)] = char(keys.values[size_t(token * D + d)]);
      of.value_word(token / 4, d)[byte_at(token)] = char(values.values[size_t(token * D + d)]);
    }
  }
  // Eight bytes of both planes.
  const auto put = [&](char* row, int64_t index, int8_t high, int8_t low) {
    char* to = row + index / 8 * 16 + index % 8 / 4 * 4 + byte_at(index);
    to[0] = char(high), to[8] = char(low);
  };
  char* weights = reinterpret_cast<char*>(of.block.scores);
  for (int64_t row = 0; row < M; ++row) {
    of.block.planes[row] = of.block.weight_planes[row] = {0.25f, {0, 0}};
    for (int64_t d = 0; d < D; ++d) {
      const size_t at = size_t(row * D + d);
      put(of.block.x + row * 2 * D, d, x_high.values[at], x_low.values[at]);
      of.block.result[row * D + d] = float(row - d);
    }
  }
  const auto exact = [](int64_t high, int64_t low) { return float(256 * high + low) * 0.25f; };
  score_matrices<F, rows_of<F>(M)>(of.block, of.tiles, 0, of.count, 0, M);
  bool right = true;
  for (int64_t row = 0; row < M; ++row) {
    for (int64_t token = 0; token < tokens; ++token) {
      int64_t high = 0, low = 0;
      for (int64_t d = 0; d < D; ++d) {
        const int64_t key = keys.values[size_t(token * D + d)];
        high += x_high.values[size_t(row * D + d)] * key;
        low += x_low.values[size_t(row * D + d)] * key;
      }
      right &= same(exact(high, low), of.block.scores[row * kKeys + token]);
    }
  }
  float factors[M];
  for (int64_t row = 0; row < M; ++row) {
    factors[row] = 0.5f;
    for (int64_t token = 0; token < of.count * kTile; ++token) {
      const size_t at = size_t(row * kMostTokens + token);
      const bool is_there = token < tokens;
      put(weights + row * kKeys * 4, token, is_there ? w_high.values[at] : 0,
          is_there ? w_low.values[at] : 0);
    }
  }
  weigh_matrices<F, rows_of<F>(M)>(of.block, of.tiles, tokens, 0, M, factors);
  for (int64_t row = 0; row < M; ++row) {
    for (int64_t d = 0; d < D; ++d) {
      int64_t high = 0, low = 0;
      for (int64_t token = 0; token < tokens; ++token) {
        const int64_t value = values.values[size_t(token * D + d)];
        high += w_high.values[size_t(row * kMostTokens + token)] * value;
        low += w_low.values[size_t(row * kMostTokens + token)] * value;
      }
      const float expected = exact(high, low) + float(row - d) * 0.5f;
      right &= same(expected, of.block.result[row * D + d]);
    }
  }
  report("int8: " + std::to_string(M) + " rows of " + std::to_string(D) + ", " +
             std::to_string(tokens) + " tokens",
         right);
}

template <int... M, class Check>
void each_count(RowCounts<M...>, Check check) {
  for (const int64_t head_size : {16, 48, 128}) {
    for (const int64_t tokens : {1, 5, 16, 30, 31, 64}) {
      (check(std::integral_constant<int, M>(), head_size, tokens), ...);
    }
  }
}

}  // namespace

int main() {
  bool found = false;
  for (const int32_t* level = interposer_levels(); *level; ++level) found |= *level == kBF16I8MM;
  if (!found) {
    std::printf("this processor has no matrix instructions\n");
    return 2;
  }
  each_count(Matrices<BFloat16OnPairs>::Rows(), [](auto rows, int64_t head_size, int64_t tokens) {
    check_floats<rows>(head_size, tokens);
  });
  each_count(Matrices<Int8OnCodes>::Rows(), [](auto rows, int64_t head_size, int64_t tokens) {
    check_codes<rows>(head_size, tokens);
  });
  return failed ? 1 : 0;
}
