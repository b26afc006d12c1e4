#include "golden.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <new>
#include <sstream>
#include <stdexcept>
#include <utility>

namespace {

const char kMagic[] = "interposer golden 1\n";
const unsigned char kPoison = 0xff;

#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kMargin = 0;
#else
constexpr size_t kMargin = 64;
#endif

// Convert elements to the byte order of this machine.
void swap_elements(char* data, size_t element_bytes, size_t count) {
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  for (size_t i = 0; i < count; ++i) {
    char* element = data + i * element_bytes;
    for (size_t low = 0, high = element_bytes - 1; low < high; ++low, --high) {
      std::swap(element[low], element[high]);
    }
  }
#else
  (void)data, (void)element_bytes, (void)count;
#endif
}

class Reader {
 public:
  explicit Reader(const std::string& path) : path_(path) {
    std::ifstream file(path, std::ios::binary);
    bytes_.assign(std::istreambuf_iterator<char>(file), {});
    if (!file || take(sizeof kMagic - 1) != kMagic) throw std::runtime_error(path + " holds no cases");
  }

  template <class T>
  T read() {
    T value;
    read_to(reinterpret_cast<char*>(&value), sizeof value, 1);
    return value;
  }

  std::string text() { return take(read<uint32_t>()); }

  void read_to(char* to, size_t element_bytes, size_t count) {
    const size_t wanted = element_bytes * count;
    if (wanted > bytes_.size() - at_) throw std::runtime_error(path_ + " ends too early");
    if (wanted) std::memcpy(to, bytes_.data() + at_, wanted);
    at_ += wanted;
    swap_elements(to, element_bytes, count);
  }

  bool is_at_end() const { return at_ == bytes_.size(); }

 private:
  std::string take(size_t length) {
    std::string taken(length, '\0');
    read_to(&taken[0], 1, length);
    return taken;
  }

  std::string path_;
  std::vector<char> bytes_;
  size_t at_ = 0;
};

Array read_array(Reader& reader) {
  Array array;
  array.dtype = reader.text();
  const uint32_t dimensions = reader.read<uint32_t>();
  for (uint32_t i = 0; i < dimensions; ++i) array.shape.push_back(reader.read<int64_t>());
  for (uint32_t i = 0; i < dimensions; ++i) array.strides.push_back(reader.read<int64_t>());
  const size_t extent = size_t(reader.read<int64_t>()), size = bytes_of(array.dtype);
  array.memory = Memory(size, extent);
  reader.read_to(array.memory.data(), size, extent);
  return array;
}

std::vector<double> read_numbers(Reader& reader, size_t count) {
  std::vector<double> numbers(count);
  reader.read_to(reinterpret_cast<char*>(numbers.data()), sizeof(double), count);
  return numbers;
}

Case read_case(Reader& reader) {
  Case golden;
  golden.op = reader.text();
  golden.label = reader.text();
  golden.exact = reader.read<uint32_t>() != 0;
  for (uint32_t i = reader.read<uint32_t>(); i > 0; --i) {
    std::string name = reader.text();
    golden.texts[name] = reader.text();
  }
  for (uint32_t i = reader.read<uint32_t>(); i > 0; --i) {
    std::string name = reader.text();
    golden.numbers[name] = reader.read<double>();
  }
  for (uint32_t i = reader.read<uint32_t>(); i > 0; --i) {
    std::string name = reader.text();
    golden.arrays.emplace(name, read_array(reader));
  }
  for (uint32_t i = reader.read<uint32_t>(); i > 0; --i) {
    Expected expected;
    expected.dtype = reader.text();
    const size_t count = size_t(reader.read<int64_t>());
    expected.values = read_numbers(reader, count);
    expected.bounds = read_numbers(reader, count);
    golden.expected.push_back(std::move(expected));
  }
  return golden;
}

double number_of_half(uint16_t bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  double value = exponent == 31  ? (mantissa ? NAN : INFINITY)
                 : exponent == 0 ? std::ldexp(mantissa, -24)
                                 : std::ldexp(1024 + mantissa, exponent - 25);
  return std::copysign(value, bits >> 15 ? -1.0 : 1.0);
}

bool is_right(double found, double expected, double bound, bool exact) {
  if (std::isnan(expected)) return std::isnan(found);
  if (found == expected) return !exact || std::signbit(found) == std::signbit(expected);
  return std::isfinite(expected) && std::fabs(found - expected) <= bound;
}

template <class T>
T value_at(const void* data, int64_t index) {
  T value;
  std::memcpy(&value, static_cast<const char*>(data) + index * int64_t(sizeof value), sizeof value);
  return value;
}

std::map<std::string, Runner>& runners() {
  static std::map<std::string, Runner> known;
  return known;
}

}  // namespace

void Memory::Free::operator()(char* memory) const { std::free(memory); }

Memory::Memory(size_t element_bytes, size_t count) : bytes_(element_bytes * count) {
  const size_t whole = element_bytes + bytes_ + kMargin;
  owned_.reset(static_cast<char*>(std::malloc(whole)));
  if (!owned_) throw std::bad_alloc();
  std::memset(owned_.get(), kPoison, whole);
  data_ = owned_.get() + element_bytes;
}

size_t bytes_of(const std::string& dtype) {
  static const std::map<std::string, size_t> sizes = {
      {"float64", 8},       {"int64", 8},           {"float32", 4},     {"int32", 4},
      {"bfloat16", 2},      {"float16", 2},         {"int16", 2},       {"int8", 1},
      {"uint8", 1},         {"bool", 1},            {"float8_e4m3fn", 1}, {"float8_e5m2", 1},
  };
  const auto found = sizes.find(dtype);
  if (found == sizes.end()) throw std::runtime_error("dtype " + dtype + " is not known here");
  return found->second;
}

double number_at(const void* data, const std::string& dtype, int64_t index) {
  if (dtype == "float64") return value_at<double>(data, index);
  if (dtype == "float32") return value_at<float>(data, index);
  if (dtype == "float16") return number_of_half(value_at<uint16_t>(data, index));
  if (dtype == "int64") return double(value_at<int64_t>(data, index));
  if (dtype == "int32") return value_at<int32_t>(data, index);
  if (dtype == "int16") return value_at<int16_t>(data, index);
  if (dtype == "int8") return value_at<int8_t>(data, index);
  if (dtype == "uint8" || dtype == "bool") return value_at<uint8_t>(data, index);
  if (dtype == "bfloat16") {
    const uint32_t bits = uint32_t(value_at<uint16_t>(data, index)) << 16;
    return value_at<float>(&bits, 0);
  }
  // Every e5m2 number is the upper byte of a float16: sign, five exponent bits, two mantissa bits.
  if (dtype == "float8_e5m2") return number_of_half(uint16_t(value_at<uint8_t>(data, index) << 8));
  if (dtype == "float8_e4m3fn") {
    const uint8_t bits = value_at<uint8_t>(data, index);
    const int exponent = bits >> 3 & 15, mantissa = bits & 7;
    const double value = (bits & 127) == 127 ? NAN
                         : exponent == 0     ? std::ldexp(mantissa, -9)
                                             : std::ldexp(8 + mantissa, exponent - 10);
    return std::copysign(value, bits >> 7 ? -1.0 : 1.0);
  }
  throw std::runtime_error("numbers of dtype " + dtype + " are not read here");
}

int64_t Array::rows() const {
  int64_t count = 1;
  for (size_t i = 0; i + 1 < shape.size(); ++i) count *= shape[i];
  return count;
}

int64_t Array::row_stride() const {
  // A single row, or none, can have any stride: use the row length.
  for (size_t i = shape.size(); i-- > 1;) {
    if (shape[i - 1] > 1) return strides[i - 1];
  }
  return columns();
}

const Array* Case::find(const std::string& name) const {
  const auto found = arrays.find(name);
  return found == arrays.end() ? nullptr : &found->second;
}

const Array& Case::array(const std::string& name) const {
  if (const Array* found = find(name)) return *found;
  throw std::runtime_error("there is no array " + name);
}

const std::string& Case::text(const std::string& name) const {
  const auto found = texts.find(name);
  if (found == texts.end()) throw std::runtime_error("there is no text " + name);
  return found->second;
}

double Case::number(const std::string& name) const {
  const auto found = numbers.find(name);
  if (found == numbers.end()) throw std::runtime_error("there is no number " + name);
  return found->second;
}

Rows::Rows(const std::string& dtype, int64_t rows, int64_t columns, int64_t gap)
    : dtype_(dtype),
      rows_(rows),
      columns_(columns),
      gap_(gap),
      memory_(bytes_of(dtype), size_t(gap + rows * (columns + gap))) {}

Result Rows::result() const {
  Result result;
  result.dtype = dtype_;
  for (int64_t row = 0; row < rows_; ++row) {
    for (int64_t column = 0; column < columns_; ++column) {
      result.values.push_back(number_at(data(), dtype_, row * stride() + column));
    }
  }
  const int64_t size = int64_t(bytes_of(dtype_));
  for (int64_t i = 0; i < int64_t(memory_.bytes()); ++i) {
    const bool beside = i / size % stride() < gap_;
    result.strayed |= beside && static_cast<unsigned char>(memory_.data()[i]) != kPoison;
  }
  return result;
}

std::vector<Case> read_golden(const std::string& path) {
  Reader reader(path);
  std::vector<Case> cases;
  for (uint32_t i = reader.read<uint32_t>(); i > 0; --i) cases.push_back(read_case(reader));
  if (!reader.is_at_end()) throw std::runtime_error(path + " goes on behind its last case");
  return cases;
}

std::string compare(const Case& golden, const std::vector<Result>& results) {
  std::ostringstream reason;
  reason.precision(9);
  if (results.size() != golden.expected.size()) {
    reason << golden.expected.size() << " results expected, got " << results.size();
    return reason.str();
  }
  for (size_t i = 0; i < results.size(); ++i) {
    const Expected& expected = golden.expected[i];
    const Result& found = results[i];
    if (found.dtype != expected.dtype || found.values.size() != expected.values.size()) {
      reason << expected.values.size() << " of " << expected.dtype << " expected, got "
             << found.values.size() << " of " << found.dtype;
      return reason.str();
    }
    size_t wrong = 0, first = 0;
    for (size_t j = found.values.size(); j-- > 0;) {
      if (!is_right(found.values[j], expected.values[j], expected.bounds[j], golden.exact)) {
        ++wrong, first = j;
      }
    }
    if (wrong) {
      reason << wrong << " of " << found.values.size() << " of result " << i << " wrong, first at "
             << first << ": " << expected.values[first] << " expected within "
             << expected.bounds[first] << ", got " << found.values[first];
      return reason.str();
    }
    if (found.strayed) return "it wrote beside result " + std::to_string(i);
  }
  return "";
}

Registration::Registration(const char* op, Runner runner) { runners()[op] = runner; }

Runner runner_of(const std::string& op) {
  const auto found = runners().find(op);
  return found == runners().end() ? nullptr : found->second;
}
