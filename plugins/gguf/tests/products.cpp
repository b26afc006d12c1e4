// Multiplies what comes in on stdin, as text, and writes the results: so that kernels can be tried on
// processors that are only emulated, without Python.
//
// In: type of the file, type of the inputs, tokens, outputs, inputs, bytes of a row; the bytes of all
// rows; the inputs, as float32 in hexadecimal or as the bits of bfloat16. Out: the products, then the
// numbers of the rows, in hexadecimal.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <vector>

extern "C" {
int interposer_gguf_linear(int level, int format, int type, const void* x, std::ptrdiff_t x_stride,
                           std::ptrdiff_t tokens, const std::uint8_t* weight,
                           std::ptrdiff_t weight_stride, std::ptrdiff_t out_features,
                           std::ptrdiff_t in_features, const void* bias, void* result,
                           void* parallel, int threads);
void interposer_gguf_dequantize(int level, int format, const std::uint8_t* weight,
                                std::ptrdiff_t weight_stride, std::ptrdiff_t rows,
                                std::ptrdiff_t in_features, float* numbers, void* parallel,
                                int threads);
}

int main() {
  int format, type;
  long tokens, outputs, inputs, row;
  while (std::scanf("%d %d %ld %ld %ld %ld", &format, &type, &tokens, &outputs, &inputs, &row) == 6) {
    std::vector<std::uint8_t> weight(outputs * row);
    for (auto& byte : weight) {
      unsigned value;
      if (std::scanf("%u", &value) != 1) return 1;
      byte = static_cast<std::uint8_t>(value);
    }
    std::vector<float> x(tokens * inputs), result(tokens * outputs), numbers(outputs * inputs);
    std::vector<std::uint16_t> short_x(tokens * inputs), rounded(tokens * outputs);
    for (long i = 0; i < tokens * inputs; ++i) {
      unsigned bits;
      if (std::scanf(type == 0 ? "%f" : "%u", type == 0 ? (void*)&x[i] : (void*)&bits) != 1) return 1;
      if (type != 0) short_x[i] = static_cast<std::uint16_t>(bits);
    }
    const void* from = type == 0 ? static_cast<const void*>(x.data()) : short_x.data();
    void* to = type == 0 ? static_cast<void*>(result.data()) : rounded.data();
    if (interposer_gguf_linear(0, format, type, from, inputs, tokens, weight.data(), row, outputs,
                               inputs, nullptr, to, nullptr, 1) != 0) {
      return 1;
    }
    interposer_gguf_dequantize(0, format, weight.data(), row, outputs, inputs, numbers.data(),
                               nullptr, 1);
    for (long i = 0; i < tokens * outputs; ++i) {
      if (type == 0) {
        std::printf("%a ", result[i]);
      } else {
        std::printf("%u ", rounded[i]);
      }
    }
    for (float number : numbers) std::printf("%a ", number);
    std::printf("\n");
  }
}
