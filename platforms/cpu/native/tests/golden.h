// Golden vectors: arguments of ops, and the results of the ops' references.
//
// Files are little-endian on every machine. A string is a 32-bit length and its bytes; a count has
// 32 bits.
//
//   file    "interposer golden 1\n", count of cases, cases
//   case    op, label, whether signs of zeros count (32 bits),
//           count of texts, each a name and a string,
//           count of numbers, each a name and a float64,
//           count of arrays, each a name and an array,
//           count of results, each a dtype, the count of elements in 64 bits, the expected ones and
//           the largest allowed errors, all float64
//   array   dtype, count of dimensions, sizes and strides in 64 bits, elements from the first to
//           the last in memory in 64 bits, these elements; those between rows are all ones
//
// Texts are dtype names and string arguments, numbers are all other arguments that are no tensors.
// Arguments that are None are omitted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

// Memory aligned to one element only. The bytes after it are guarded by the address sanitizer, or
// filled with NaN.
class Memory {
 public:
  Memory() = default;
  Memory(size_t element_bytes, size_t count);

  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  struct Free {
    void operator()(char* memory) const;
  };
  std::unique_ptr<char, Free> owned_;
  char* data_ = nullptr;
  size_t bytes_ = 0;
};

size_t bytes_of(const std::string& dtype);

struct Array {
  std::string dtype;
  std::vector<int64_t> shape, strides;
  Memory memory;

  template <class T>
  const T* data() const {
    return reinterpret_cast<const T*>(memory.data());
  }
  // Product of all dimensions but the last.
  int64_t rows() const;
  int64_t columns() const { return shape.empty() ? 1 : shape.back(); }
  // Elements between rows; all dimensions but the last must be evenly spaced.
  int64_t row_stride() const;
};

struct Expected {
  std::string dtype;
  std::vector<double> values, bounds;
};

struct Case {
  std::string op, label;
  bool exact = false;
  std::map<std::string, std::string> texts;
  std::map<std::string, double> numbers;
  std::map<std::string, Array> arrays;
  std::vector<Expected> expected;

  // The argument, or null if it is None.
  const Array* find(const std::string& name) const;
  const Array& array(const std::string& name) const;
  const std::string& text(const std::string& name) const;
  double number(const std::string& name) const;
};

// Result of a kernel, in the order of the file's results.
struct Result {
  std::string dtype;
  std::vector<double> values;
  bool strayed = false;  // the kernel wrote outside its rows
};

// Output rows, in memory that is checked before, after and between the rows.
class Rows {
 public:
  Rows(const std::string& dtype, int64_t rows, int64_t columns, int64_t gap = 3);

  void* data() const { return memory_.data() + gap_ * int64_t(bytes_of(dtype_)); }
  int64_t stride() const { return columns_ + gap_; }
  Result result() const;

 private:
  std::string dtype_;
  int64_t rows_, columns_, gap_;
  Memory memory_;
};

// Element `index` of `data`, as a number.
double number_at(const void* data, const std::string& dtype, int64_t index);

// All cases of a file. Throws std::runtime_error if the file is invalid.
std::vector<Case> read_golden(const std::string& path);

// Description of the first error in `results`; empty if there is none.
std::string compare(const Case& golden, const std::vector<Result>& results);

// Calls the kernels of an op with the arguments of a case, as the Python code of this platform
// does.
typedef std::vector<Result> (*Runner)(const Case& golden);

// Registers a runner by the name of its op; create static objects only.
class Registration {
 public:
  Registration(const char* op, Runner runner);
};

// The runner of an op, or null.
Runner runner_of(const std::string& op);
